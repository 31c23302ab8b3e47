"""Write outputs exactly once: parts, staging, the writer's lease and commit.

In: finished chunks. Out: an output whose commit record names every part.
Read `begin.py` and `transaction.py` first, then `target.py` and `targets/folder.py`.

targets/   one file for each kind of output
staging/   the state of a write in progress, and the rename that publishes a local folder
"""
