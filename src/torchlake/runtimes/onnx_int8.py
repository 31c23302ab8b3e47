"""ONNX Runtime on CPUs with 8-bit linear layers, calibrated on the user's rows (`_calibration.py`).

Weights are signed and activations unsigned, which VNNI multiplies exactly. x86 CPUs without it add two products in 16
bits, which overflow, so this runtime refuses them. Nothing is compiled per shape.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from torchlake.config.task_spec import TaskSpec
from torchlake.runtimes import Forward, _calibration, _exports, _onnx_export, _onnx_int8, check_here

TOLERANCE = 0.06
CALIBRATED = True
tasks: tuple[str, ...] | None = ("text_classification", "feature_extraction")
never: dict[str, str] = {"text_generation": "it has no key-value cache"}
TOKEN_TYPES = False
refusal = partial(_exports.refusal, extra="onnx", libraries=("onnx", "onnxruntime"), quantized=True)


def prepare(folder: Path, spec: TaskSpec, batches: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Export the model, calibrated on `batches`, into its folder.

    Raises UsageError without rows or if the export fails, StorageError, and the errors of `models.load_model`.
    """
    rows, versions = _calibration.num_rows(batches), _exports.versions("onnx", "onnxruntime")
    with _exports.making(folder, "onnx_int8", rows=rows, versions=versions, task=spec.task) as place:
        _onnx_int8.write(folder, spec, batches, place)


def load(folder: Path, spec: TaskSpec, *, device: str) -> Forward:
    """Load the export. Raises UsageError if it cannot run here, and without an export of these weights."""
    check_here("onnx_int8", folder, device, refusal(folder))
    export = _exports.export_folder(folder, "onnx_int8", calibrated=CALIBRATED, task=spec.task)
    return _onnx_export.forward(export / _onnx_export.GRAPH)
