"""`evaluate`: how good a model is on a labeled table, with confidence intervals.

In: a model folder and a labeled table. Out: metrics with intervals, as a frozen value.
Read `evaluate.py` first; the formulas are in `torchlake/metrics.py`.
"""
