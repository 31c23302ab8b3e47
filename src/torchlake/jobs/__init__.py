"""Table jobs: read a table, and write an output with exactly one row for each of its rows, by any function or model.

In: a table; options of input and output; the work of a command. Out: an output table with its commit record.
Read `table_job.py` first (the driver's part), then `worker/` (the part of each worker). `work.py` is what a command has
to say: `map.py` for any function, `scoring/predict.py`, `scoring/rank.py` and `preparation/prepare.py` for models.
"""
