"""OpenVINO on CPUs with linear layers in 8 bits, calibrated on the user's rows (`_calibration.py`, `_openvino.py`).

The 8-bit graph is the one of `onnx_int8`; OpenVINO merges more of what stands between two products. What is not in 8
bits is in bf16 where the CPU multiplies it, else in fp32. Attention is laid out for the length of the rows too.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from torchlake.config.task_spec import TaskSpec
from torchlake.models import exports
from torchlake.processes import hardware
from torchlake.runtimes import Forward, _calibration, _exported, _onnx_int8, _openvino

TOLERANCE = 0.06
CALIBRATED = True
never: dict[str, str] = {"text_generation": "it has no key-value cache"}
refusal = partial(_exported.refusal, extra="openvino", libraries=("openvino", "onnx", "onnxruntime"))


def prepare(folder: Path, spec: TaskSpec, batches: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Export the model of `folder`, calibrated on `batches`, into it. Raises UsageError without rows or when it cannot
    be exported, StorageError, and as `models.load_model` does.
    """
    rows, versions = _calibration.num_rows(batches), _exported.versions("openvino", "onnx", "onnxruntime")
    with (
        exports.making(folder, "openvino_int8", rows=rows, versions=versions) as place,
        TemporaryDirectory(dir=place) as scratch,
    ):
        graph = _onnx_int8.graph(folder, spec, batches, Path(scratch))
        short = _calibration.mean_row_length(batches) <= _openvino.SHORT[_precision()]
        _openvino.write(graph, place, attention_in_parts=short)


def load(folder: Path, spec: TaskSpec, *, device: str) -> Forward:
    """The calibrated model. Raises UsageError on a GPU, and when there is no export of these weights."""
    _exported.check_cpu("openvino_int8", device)
    export = _exported.export_folder(folder, "openvino_int8", calibrated=CALIBRATED)
    return _openvino.forward(export, precision=_precision())


def _precision() -> str:
    return "bf16" if hardware.supports_bf16() else "f32"
