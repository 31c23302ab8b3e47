"""ONNX Runtime on CPUs with linear layers in 8 bits, calibrated on the user's rows (`_calibration.py`).

Weights are signed and activations unsigned, which VNNI multiplies exactly; CPUs of x86 without it add two products in
16 bits, which overflow, so there it is refused. Shapes cost nothing: no shape is compiled.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from torchlake.config.task_spec import TaskSpec
from torchlake.errors import UsageError
from torchlake.models import exports
from torchlake.processes import hardware
from torchlake.runtimes import Forward, _calibration, _exported, _onnx_export, _onnx_int8

TOLERANCE = 0.06
CALIBRATED = True
never: dict[str, str] = {"text_generation": "it has no key-value cache"}


def refusal(folder: Path) -> str | None:
    """Why the model of `folder` cannot run here; None when it can."""
    return hardware.int8_refusal() or _exported.refusal(folder, extra="onnx", libraries=("onnx", "onnxruntime"))


def prepare(folder: Path, spec: TaskSpec, batches: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Export the model of `folder`, calibrated on `batches`, into it. Raises UsageError without rows or when it cannot
    be exported, StorageError, and as `models.load_model` does.
    """
    rows, versions = _calibration.num_rows(batches), _exported.versions("onnx", "onnxruntime")
    with exports.making(folder, "onnx_int8", rows=rows, versions=versions) as place:
        _onnx_int8.write(folder, spec, batches, place)


def load(folder: Path, spec: TaskSpec, *, device: str) -> Forward:
    """The calibrated model. Raises UsageError on a GPU, without VNNI, and when there is no export of these weights."""
    _exported.check_cpu("onnx_int8", device)
    if reason := hardware.int8_refusal():
        raise UsageError(f"The runtime 'onnx_int8' cannot run {folder}: {reason}")
    export = _exported.export_folder(folder, "onnx_int8", calibrated=CALIBRATED)
    return _onnx_export.forward(export / _onnx_export.GRAPH)
