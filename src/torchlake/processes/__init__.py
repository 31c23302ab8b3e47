"""Child processes that are started, watched and ended as a group, and the data that they exchange with their parent.

In: functions and rows from an engine. Out: results, or the first failure with its traceback; no orphan processes.
Read `children.py` first (the parent's side), then `child.py`; `chunk_process.py` runs chunks, `ranks.py` a group of
ranks. `hardware.py` has the GPUs that a process may use, `environment.py` its variables and threads,
`serialization.py` the exchanged data; `watchdog.py` ends orphans.
"""
