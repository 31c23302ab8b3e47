"""Files and objects by path or URL: opening them, allowed protocols, versions that detect a change, reading many.

In: a local path or an fsspec URL. Out: its bytes, and a version that is checked before and after reading.
Read `versions.py` first.
"""
