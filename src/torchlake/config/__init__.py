"""A user's settings: jobs, options of engines and strategies, and the task that a model is trained for.

In: job files, keyword arguments, `--set` overrides. Out: frozen, checked values that every other package reads.
Read `job.py` first; `sections/` has the fields, `types.py` their types, such as durations (`10min`), `messages.py`
rewrites pydantic's errors, and `model_files/` reads the files of a model's configuration.
"""
