"""`tune`: search the settings of a job for the best validation metric, by training repeatedly.

In: a job and a search space. Out: a study and the best job.
Read `tune.py` first; `study.py` decides which trial stops early.
"""
