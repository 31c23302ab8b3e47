"""The state of a write in progress: staging folders, stored plans, and input that is stored until the job ends.

In: an output. Out: its staging folder or objects, held by one writer.
Read `folders.py` first.
"""
