"""What people see of a run or a machine afterwards: `report`, `doctor`, MLflow and TensorBoard.

In: a run folder, or this installation. Out: an HTML page, JSON, tracked metrics, a diagnosis.
Read `report.py` first.
"""
