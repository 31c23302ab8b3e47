"""Launch the user's own torch code as ranks, on any engine.

In: a function, its name, or a script. Out: rank 0's value.
Read `launch.py` first; `scripts.py` is what one rank of a script runs, and `groups.py` keeps its end from hanging.
"""
