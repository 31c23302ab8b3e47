"""The run folder: everything about one training run, and how other programs follow it.

In: a job and the metrics that ranks report. Out: `job.yaml`, `metrics.jsonl`, `logs/`, and the result of a finished
run. Read `folder.py` first; which changes of a job may continue its run is in `checkpoints/continuing.py`.
"""
