"""Checking a finished output: it has every row of the input once, and nothing else.

In: an output of any kind, with its commit records. Out: counts, and problems in one sentence each.
Read `verify.py` first.
"""
