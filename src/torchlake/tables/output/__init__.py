"""Writing an output exactly once: parts, staging, the writer's lease and commit.

In: finished chunks. Out: an output folder whose commit record names every part.
Read `commit.py` first.
"""
