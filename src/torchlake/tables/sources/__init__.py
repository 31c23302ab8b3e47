"""Where tables come from: local files, folders, URLs and frames in memory; and the version of each file.

In: a path, a glob, a URL or a frame. Out: files to open, each with a version that is checked before and after reading.
Read `files.py` first.
"""
