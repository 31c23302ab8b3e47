"""Rows in storage: what a table is, how it is cut into chunks and read, and how an output is written exactly once.

table.py       names files, checks their schemas          files.py     local paths and fsspec URLs
formats.py     what footers and headers say               lines.py     CSV and JSON lines, record by record
chunks.py      the plan: fixed ranges of rows             reading.py   a chunk's rows, bad ones isolated
commit.py      exactly once                               jobs.py      same job or another, what may be kept
staging.py     the folders and renames of a write         lease.py     one writer at a time, zombies refused
parts.py       one chunk's Parquet file                   committed.py what a finished output says of itself
keys.py        unique keys in constant memory             frames.py    pyarrow, pandas and polars frames
extensions.py  types that would run code are refused      values.py    JSON values and their Arrow types
"""
