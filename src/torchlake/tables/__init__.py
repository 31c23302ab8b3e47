"""Rows in storage: what a table is, how it is cut into chunks and read, and how an output is written exactly once.

table.py      names files, checks their schemas           files.py    local paths and fsspec URLs
formats.py    what each format's footer or header says    lines.py    CSV and JSON lines, record by record
chunks.py     the plan: fixed ranges of rows              reading.py  a chunk's rows, bad ones isolated
commit.py     exactly once: staging, one rename           lease.py    one writer at a time, zombies refused
parts.py      one chunk's Parquet file                    committed.py  what a finished output says of itself
keys.py       unique keys in constant memory              frames.py   pyarrow, pandas and polars frames
extensions.py Arrow extension types that would run code   values.py   JSON values and their Arrow types
"""
