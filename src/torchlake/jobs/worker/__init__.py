"""What a worker does with its chunks: read ahead, isolate rows that fail, and record which rows kill it.

In: chunks. Out: the outputs of their rows, or an error for a row.
Read `read_ahead.py` first, then `isolation.py` and `poison_rows.py`; `shared_batches.py` is for rows of several chunks.
`task_progress.py` counts rows in between.
"""
