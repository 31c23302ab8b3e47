"""ONNX Runtime on CPUs with linear layers in 8 bits, calibrated on the user's rows (`_onnx_int8.py`).

Weights are signed and activations unsigned, which VNNI multiplies exactly; CPUs of x86 without it add two products in
16 bits, which overflow, so there it is refused. Shapes cost nothing: no shape is compiled.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from torchlake import exports
from torchlake.errors import UsageError
from torchlake.runtimes import Forward, _cpu, _exported, _onnx_export, _onnx_int8
from torchlake.task_spec import TaskSpec

TOLERANCE = 0.06
CALIBRATED = True
never: dict[str, str] = {"text_generation": "it has no key-value cache"}


def refusal(folder: Path) -> str | None:
    """Why the model of `folder` cannot run here; None when it can."""
    if _overflows():
        return "this CPU has no product of 8-bit integers (VNNI), and ONNX Runtime's overflows: take 'openvino_int8'"
    return _exported.refusal(folder, extra="onnx", libraries=("onnx", "onnxruntime"))


def prepare(folder: Path, spec: TaskSpec, batches: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Export the model of `folder`, calibrated on `batches`, into it. Raises UsageError without rows or when it cannot
    be exported, StorageError, and as `models.load_model` does.
    """
    rows, versions = _onnx_int8.rows(batches), _exported.versions("onnx", "onnxruntime")
    with exports.making(folder, "onnx_int8", rows=rows, versions=versions) as place:
        _onnx_int8.write(folder, spec, batches, place)


def load(folder: Path, spec: TaskSpec, *, device: str) -> Forward:
    """The calibrated model. Raises UsageError on a GPU, without VNNI, and when there is no export of these weights."""
    _exported.only_on_cpus("onnx_int8", device)
    if _overflows():
        raise UsageError(f"The runtime 'onnx_int8' cannot run {folder}: {refusal(folder)}")
    export = _exported.found(folder, "onnx_int8", calibrated=CALIBRATED)
    return _onnx_export.forward(export / _onnx_export.GRAPH)


def _overflows() -> bool:
    """Whether this is a CPU of x86 that says it has no VNNI."""
    return "avx2" in _cpu.words() and not {"avx512_vnni", "avx_vnni"} & _cpu.words()
