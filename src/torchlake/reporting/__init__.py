"""Reports on a run or a machine: `report`, `doctor`, MLflow and TensorBoard.

In: a run folder, or this installation. Out: an HTML page, JSON, metrics in a tracking store, a diagnosis.
Read `report.py` first.
"""
