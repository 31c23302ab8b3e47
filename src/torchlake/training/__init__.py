"""`train`: a table and a base model in, a model folder out.

In: a job. Out: a run folder with checkpoints, metrics and the trained model.
Read `run.py` first (the driver of one run), then `loop.py` (what each rank runs).
"""
