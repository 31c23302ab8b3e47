"""`train` and `launch`: a table and a base model in, a model folder out; or the user's own code as N ranks.

In: a job. Out: a run folder with checkpoints, metrics and the trained model.
Read `train.py` first (the driver), then `loop.py` (what each rank runs).
"""
