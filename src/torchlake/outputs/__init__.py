"""Write outputs exactly once: parts, staging, the writer's lease and commit.

In: finished chunks. Out: an output whose commit record names every part.
Read `begin.py` and `transaction.py` first, then `target.py` and `targets/folder.py`. `grouping.py` joins parts into the
files of a table, per partition if it has any.

targets/   one file for each kind of output
staging/   the state of a write in progress, and the rename that publishes a local folder
"""
