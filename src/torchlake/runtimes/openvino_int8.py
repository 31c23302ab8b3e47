"""OpenVINO on CPUs with 8-bit linear layers, calibrated on the user's rows (`_calibration.py`, `_openvino.py`).

It uses the 8-bit graph of `onnx_int8`; OpenVINO fuses more of it. Everything else is in bf16 if the CPU multiplies it,
otherwise in fp32. The layout of attention also depends on the length of the rows. On x86 CPUs without VNNI its products
overflow as those of `onnx_int8` do, and it is refused.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from torchlake.config.task_spec import TaskSpec
from torchlake.processes import hardware
from torchlake.runtimes import Forward, _calibration, _exports, _onnx_int8, _openvino, check_here

TOLERANCE = 0.06
CALIBRATED = True
tasks: tuple[str, ...] | None = ("text_classification", "feature_extraction")
never: dict[str, str] = {"text_generation": "it has no key-value cache"}
TOKEN_TYPES = False
refusal = partial(_exports.refusal, extra="openvino", libraries=("openvino", "onnx", "onnxruntime"), quantized=True)


def prepare(folder: Path, spec: TaskSpec, batches: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Export the model, calibrated on `batches`, into its folder.

    Raises UsageError without rows or if the export fails, StorageError, and the errors of `models.load_model`.
    """
    rows, versions = _calibration.num_rows(batches), _exports.versions("openvino", "onnx", "onnxruntime")
    with (
        _exports.making(folder, "openvino_int8", rows=rows, versions=versions, task=spec.task) as place,
        TemporaryDirectory(dir=place) as scratch,
    ):
        graph = _onnx_int8.graph(folder, spec, batches, Path(scratch))
        short = _calibration.mean_row_length(batches) <= _openvino.SHORT[_precision()]
        _openvino.write(graph, place, attention_in_parts=short)


def load(folder: Path, spec: TaskSpec, *, device: str) -> Forward:
    """Load the export. Raises UsageError if it cannot run here, and without an export of these weights."""
    check_here("openvino_int8", folder, device, refusal(folder))
    export = _exports.export_folder(folder, "openvino_int8", calibrated=CALIBRATED, task=spec.task)
    return _openvino.forward(export, precision=_precision())


def _precision() -> str:
    return "bf16" if hardware.supports_bf16() else "f32"
