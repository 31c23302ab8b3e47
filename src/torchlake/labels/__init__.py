"""The label column: read, understood as classes or a number, encoded as targets, and predicted again.

In: an Arrow column of any type. Out: a `LabelColumn` (the classes, or a mean and a deviation), targets, and prediction
columns.
Read `classes_or_numbers.py` first, then `values.py` (a cell, which may hold several labels), `encoding.py` and
`predictions.py` (the 0.5 threshold of several labels).
"""
