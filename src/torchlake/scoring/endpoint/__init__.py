"""`predict` by an endpoint: rows become requests of the runtime `http`, and their answers columns with what they cost.

In: a table, an `Endpoint`, limits. Out: a chunk job like that of a model folder, with a journal of answers.
Read `job.py` first.
"""
