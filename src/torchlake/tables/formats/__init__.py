"""File formats (Parquet, Arrow, CSV, JSON lines): schemas, where files can be split, isolation of bad records.

In: a file of a table. Out: its schema, its split candidates, Arrow batches.
Read `layout.py` first; `lines.py` has CSV and JSON lines, and their bad records.
"""
