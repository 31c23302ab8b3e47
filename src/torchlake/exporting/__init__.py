"""Exporting: a model folder in the layout of another tool.

In: a model folder. Out: a folder that ONNX Runtime, OpenVINO or sentence-transformers loads, or a model in MLflow whose
predictions are those of `predict`. Read `export.py` first; `graphs.py` and `sentence_transformers.py` write the
layouts, `mlflow_model.py` is the flavor for MLflow.
"""
