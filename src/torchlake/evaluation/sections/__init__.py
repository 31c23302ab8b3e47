"""The sections of an evaluation's page.

In: scored rows with their labels. Out: rows.parquet, and the sections as plain values for eval.json.
Read `rows.py` first, then `facts.py`; `label_hints.py` finds labels that are probably wrong.
"""
