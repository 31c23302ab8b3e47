"""The options of `predict`: checked, completed from the model folder and the table, and turned into a job.

In: keyword arguments, a model folder, the schema of a table. Out: `ScoringSettings`, which travel to the workers, and
the fingerprint. Read `settings.py` first.
"""
