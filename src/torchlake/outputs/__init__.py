"""Write outputs exactly once: parts, staging, the writer's lease and commit.

In: finished chunks. Out: an output whose commit record names every part.
Read `commit.py` first (a local folder), then `write.py` (every other target) and `target.py`.

targets/   one file for each kind of output
staging/   the state of a write in progress
"""
