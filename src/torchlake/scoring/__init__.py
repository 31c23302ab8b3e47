"""`predict`: a table and a model in, the same rows with predictions out, each exactly once.

In: a table or a frame, a model folder, options. Out: an output table with its commit record.
Read `predict.py` first (the driver's half), then `worker.py` and `scorer.py` (what each worker does).
"""
