"""The state of a write in progress: staging folders, stored plans, parts that are kept, input stored until the end.

In: an output. Out: its staging folder or objects, held by one writer.
Read `folders.py` first.
"""
