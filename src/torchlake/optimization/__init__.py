"""`optimize`: choose the fastest runtime whose answers agree with the stock model's.

In: a model folder and a sample of the user's rows. Out: measurements of each runtime, and the choice, stored in the
model folder. Read `optimize.py` first.
"""
