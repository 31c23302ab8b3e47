"""Checking a finished output: every row of the input once, and nothing else.

In: an output of any kind, with its commit records. Out: counts and problems, a sentence each.
Read `verify.py` first.
"""
