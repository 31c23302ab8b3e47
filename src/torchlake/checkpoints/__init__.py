"""Checkpoints that are complete or invisible, on a disk or in an object store, in safetensors and JSON.

In: a model's and an optimizer's tensors on each rank. Out: the same tensors on any number of ranks, later.
Read `format.py` first; `store.py` says what a place for checkpoints must offer.
"""
