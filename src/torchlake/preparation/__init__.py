"""Before training: rows become token Parquet, and labels become classes or numbers.

In: a table and a job. Out: prepared files that training reads, and a summary of the data.
Read `prepare.py` first; for `init`, `guessed_columns.py` guesses the text and the label, and `first_job.py` writes the
job.
"""
