"""Which rows of a table are wanted: the text of a condition, its meaning for rows, and for ranges of values.

In: "stars >= 3 and lang = 'en'" and a table's columns. Out: a boolean per row, or what a file's statistics rule out.
Read `conditions.py` first, then `grammar.py` (parsing), `binding.py` (types), `rows.py` and `bounds.py` (evaluation).
"""
