"""Chunk jobs: a table in, an output with a row for each of its rows out, exactly once, whatever makes the rows.

In: a table; options of input and output; a worker for the engine's processes. Out: an output table with its commit
record. Read `job.py` first (the driver's part), then `read_ahead.py` and `isolation.py` (the part of each worker).
`map.py` is the job for any function; `scoring/predict.py` and `preparation/prepare.py` are jobs for models.
"""
