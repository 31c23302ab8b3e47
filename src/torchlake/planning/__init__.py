"""`plan`: memory, time and cost of a training job, before it starts.

In: a job. Out: what each strategy needs on each rank, and whether it fits.
Read `plan.py` first; `costs.py` has the formulas, `terms.py` what they are about.
"""
