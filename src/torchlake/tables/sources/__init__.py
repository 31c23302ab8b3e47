"""Where tables come from: one file for each kind of source. `_interface.py` describes what a source provides.

In: a path, a glob, a URL or a frame. Out: the files that hold the rows, in order, and what was read.
Read `_interface.py` first, then `files.py`. `_partitions.py` reads columns from the names of folders (`year=2024`).
"""
