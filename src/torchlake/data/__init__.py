"""The order of training rows, and their batches of padded or packed tokens.

In: token Parquet. Out: padded or packed arrays for every step and rank, in an order that depends on the seed alone.
Read `order.py` first, then `batching.py`.
"""
