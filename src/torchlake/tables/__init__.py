"""Rows in storage: opening tables, splitting them into chunks, reading rows, and writing an output exactly once.

In: a path, a URL or a frame. Out: chunks of Arrow rows, and at the end an output folder with its commit record.
Read `table.py` first, then `plan.py`, `chunks.py` (splitting) and `reading.py` (a chunk's rows).

sources/       kinds of tables that are read: files, Delta, Iceberg, frames, streams
sinks/         kinds of outputs
selection/     conditions on rows, and what statistics say about them
storage/       files and objects by path or URL, and their versions
formats/       Parquet, Arrow, CSV, JSON lines
output/        parts, staging, lease, commit
verification/  checks of a finished output
"""
