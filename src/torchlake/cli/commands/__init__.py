"""The commands: the declaration of each, and its work, which calls the Python function of the same name.

In: the arguments of a command and the options that were given. Out: an `Outcome`, which `cli/main.py` prints.
Read `scoring.py` first. Libraries that are slow to load are imported inside the functions, so --help takes a tenth of a
second.
"""
