"""What the configuration files of a model folder say, and which of their keys are known.

In: a model folder. Out: how it makes vectors or scores of pairs; DataError for a key that is not known.
Read `known_keys.py` first.
"""
