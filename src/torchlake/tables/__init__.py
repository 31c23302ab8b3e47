"""Rows in storage: what a table is, how it is cut into chunks and read, and how an output is written exactly once.

In: a path, a URL or a frame. Out: chunks of Arrow rows, and at the end an output folder with its commit record.
Read `table.py` first, then `chunks.py` (the plan) and `reading.py` (a chunk's rows, bad ones isolated).

sources/   files, URLs and frames, and which version of them is read
formats/   Parquet, Arrow, CSV, JSON lines
output/    parts, staging, lease, commit, verify
"""
