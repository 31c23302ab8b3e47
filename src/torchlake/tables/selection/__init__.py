"""Conditions on the rows of a table: their text, their value for each row, and for ranges of rows.

In: "stars >= 3 and lang = 'en'" and a table's columns. Out: a boolean per row, or what a file's statistics rule out.
Read `conditions.py` first, then `grammar.py` (parsing), `binding.py` (types), `rows.py` and `bounds.py` (evaluation).
"""
