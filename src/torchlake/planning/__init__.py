"""`plan`: memory, time and cost of a job, before it starts.

In: a training job, or a model that writes. Out: what each strategy needs on each rank, and whether it fits; the tokens,
hours and cost of written texts, also by an endpoint (`spending.py`).
Read `plan.py` first; `strategies.py` decides whether each strategy fits, `costs.py` has the formulas, `terms.py` what
they are about.
"""
