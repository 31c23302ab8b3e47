"""The sections of an evaluation's page that have pictures, matrices or lists of rows.

In: sections of eval.json. Out: what `page.html` draws: forms, each with its content.
Read `probabilities.py` first.
"""
