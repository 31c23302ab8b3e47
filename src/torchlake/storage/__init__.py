"""Files and objects by path or URL: reading and writing them, versions that detect a change, one writer at a time.

In: a local path or a URL. Out: bytes, a version that is checked before and after reading, a lease, an error in words.
Read `folders.py` first (writing), then `versions.py` (reading) and `lease.py`; `urls.py` has the protocols that URLs
may have.
"""
