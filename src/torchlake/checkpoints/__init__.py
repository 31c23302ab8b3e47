"""Checkpoints that are complete or invisible, on a disk or in an object store, in safetensors and JSON.

In: a model's and an optimizer's tensors on each rank. Out: the same tensors, on any number of ranks.
Read `format.py` first (write, read), then `retention.py` (which are kept); `continuing.py` says which changes of a job
may continue its run, `location.py` whose checkpoints a store holds. `store.py` is the store in a folder, with the
methods that every store has, such as setting a damaged checkpoint aside.
"""
