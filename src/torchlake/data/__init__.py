"""Which rows a training step sees, and how they become rectangles of tokens.

In: token Parquet. Out: for every step and rank, padded or packed arrays, in an order that depends on the seed alone.
Read `order.py` first, then `batching.py`.
"""
