"""File formats: Parquet, Arrow, CSV and JSON lines; their schemas, where they can be cut, how bad records are isolated.

In: a file of a table. Out: its schema, its pieces, Arrow batches.
Read `layout.py` first.
"""
