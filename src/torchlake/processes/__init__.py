"""Child processes: started, watched and ended as a group, and what crosses between them and their parent.

In: functions and rows from an engine. Out: results, or the first failure with its traceback; no orphan processes.
Read `children.py` first (the parent's side), then `child.py`; `chunk_process.py` runs chunks, `ranks.py` a group of
ranks. What crosses is in `serialization.py`.
"""
