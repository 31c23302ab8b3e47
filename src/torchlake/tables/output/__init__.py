"""How an output is written exactly once: parts, staging, the lease of the one writer, commit and `verify`.

In: finished chunks. Out: an output folder whose commit record names every part.
Read `commit.py` first.
"""
