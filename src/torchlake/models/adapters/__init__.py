"""Adapters: low-rank changes of a base model, alone in a folder; and bases in 4 or 8 bits.

In: a model folder that holds an adapter, or a loaded model. Out: the base with the adapter merged into it, new folders.
Read `base.py` first.
"""
