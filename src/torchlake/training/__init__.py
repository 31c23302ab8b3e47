"""`train`: a table and a base model in, a model folder out.

In: a job. Out: a run folder with checkpoints, metrics and the trained model.
Read `run.py` first (the driver of one run), then `loop.py` (what each rank runs, and when it stops). `restarts.py`
takes signals, starts lost ranks again, and continues on more of them; `state.py` halves the micro-batch and ends a run
that has diverged. The GPU of a rank, and ranks that no longer answer, are in `torchlake/distributed.py`.
"""
