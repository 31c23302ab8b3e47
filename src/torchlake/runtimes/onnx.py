"""ONNX Runtime in fp32: the model is exported once to an ONNX graph in the model folder (`_onnx_export.py`).

On CPUs it is about as fast as PyTorch; it is for users who have it in production, and for GPUs with its CUDA provider.
`onnx_int8` is faster.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from torchlake.config.task_spec import TaskSpec
from torchlake.runtimes import Forward, _exports, _onnx_export

TOLERANCE = 1e-5
CALIBRATED = False
tasks: tuple[str, ...] | None = ("text_classification", "feature_extraction")
never: dict[str, str] = {"text_generation": "it has no key-value cache"}
TOKEN_TYPES = False
refusal = partial(_exports.refusal, extra="onnx", libraries=("onnx", "onnxruntime"))


def prepare(folder: Path, spec: TaskSpec, batches: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Export the model into its folder. Raises UsageError if that fails, StorageError, and the errors of
    `models.load_model`."""
    with _exports.making(
        folder, "onnx", rows=0, versions=_exports.versions("onnx", "onnxruntime"), task=spec.task
    ) as place:
        _onnx_export.write(folder, spec, place / _onnx_export.GRAPH)


def load(folder: Path, spec: TaskSpec, *, device: str) -> Forward:
    """Load the export on `device`. Raises UsageError if there is no export of these weights, or no such device."""
    export = _exports.export_folder(folder, "onnx", calibrated=CALIBRATED, task=spec.task)
    return _onnx_export.forward(export / _onnx_export.GRAPH, device=device)
