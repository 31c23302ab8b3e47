"""Scoring: a table and a model in, the same rows with predictions out, each exactly once.

In: a table, a frame or texts; a model folder; options. Out: an output table with its commit record, a frame or answers.
Read `predict.py` first (the driver's part), then `workers/` and `scorer.py` (the part of each worker); `in_process.py`
scores texts without another process, `frames.py` a DataFrame or Dataset.
"""
