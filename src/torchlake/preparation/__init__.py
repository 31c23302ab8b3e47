"""Before training: rows become token Parquet, and labels become classes or numbers.

In: a table and a job. Out: prepared files that training reads, and a summary of what the data is.
Read `prepare.py` first.
"""
