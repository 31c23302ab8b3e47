"""Rows in storage: opening tables, splitting them into chunks, and reading rows.

In: a path, a URL or a frame. Out: chunks of Arrow rows.
Read `table.py` first, then `plan.py`, `chunks.py` (splitting), `selecting.py` (which rows) and `reading.py` (a chunk's
rows). `failures.py` counts failed rows, and ends a job that has too many.

sources/       kinds of tables that are read: files, Delta, Iceberg, frames, streams
selection/     conditions on rows, and what statistics say about them
formats/       Parquet, Arrow, CSV, JSON lines
verification/  checks of a finished output
"""
