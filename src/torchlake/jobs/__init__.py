"""Chunk jobs: read a table, and write an output with exactly one row for each of its rows, by any function or model.

In: a table; options of input and output; a worker for the engine's processes. Out: an output table with its commit
record. Read `job.py` first (the driver's part), then `worker/` (the part of each worker).
`map.py` is the job for any function; `scoring/predict.py` and `preparation/prepare.py` are jobs for models.
"""
