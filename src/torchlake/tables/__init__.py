"""Rows in storage: opening tables, splitting them into chunks, reading rows, and writing an output exactly once.

In: a path, a URL or a frame. Out: chunks of Arrow rows, and at the end an output folder with its commit record.
Read `table.py` first, then `chunks.py` (the plan) and `reading.py` (a chunk's rows).

sources/   files, URLs and frames, and their versions
formats/   Parquet, Arrow, CSV, JSON lines
output/    parts, staging, lease, commit, verify
"""
