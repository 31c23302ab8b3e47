"""Files and objects by path or URL: opening them, allowed protocols, and versions that detect a change.

In: a local path or an fsspec URL. Out: its bytes, and a version that is checked before and after reading.
Read `versions.py` first.
"""
