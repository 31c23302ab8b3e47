"""Settings of a user: jobs, options of engines and strategies, and the task that a model is trained for.

In: job files, keyword arguments, `--set` overrides. Out: frozen, checked values that every other package reads.
Read `job.py` first; `types.py` has the types of its fields, `messages.py` rewrites pydantic's errors.
"""
