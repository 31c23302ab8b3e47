"""Where tables come from: local files, folders, URLs, frames in memory, and which version of them is read.

In: a path, a glob, a URL or a frame. Out: files that open alike, each with a version that is checked around reading.
Read `files.py` first.
"""
