"""The model that a rank trains: loaded or empty, tested on a few rows, adapted, and set up to compute.

In: a base model's folder. Out: a model of transformers, ready for a strategy, and its `Traits`.
Read `base.py` first (one rank loads), then `traits.py` (what that rank finds out for all).
"""
