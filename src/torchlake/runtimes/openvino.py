"""OpenVINO on CPUs in fp32: the model is exported once to OpenVINO's two files in the model folder (`_openvino.py`).

It is about as fast as PyTorch; `openvino_int8` is faster.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from torchlake.config.task_spec import TaskSpec
from torchlake.runtimes import Forward, _exports, _onnx_export, _openvino, check_here

TOLERANCE = 1e-5
CALIBRATED = False
tasks: tuple[str, ...] | None = ("text_classification", "feature_extraction")
never: dict[str, str] = {"text_generation": "it has no key-value cache"}
TOKEN_TYPES = False
refusal = partial(_exports.refusal, extra="openvino", libraries=("openvino", "onnx", "onnxruntime"))


def prepare(folder: Path, spec: TaskSpec, batches: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Export the model into its folder. Raises UsageError if that fails, StorageError, and the errors of
    `models.load_model`."""
    with (
        _exports.making(
            folder, "openvino", rows=0, versions=_exports.versions("openvino", "onnx"), task=spec.task
        ) as place,
        TemporaryDirectory(dir=place) as scratch,
    ):
        _openvino.write(_onnx_export.graph(folder, spec, Path(scratch)), place)


def load(folder: Path, spec: TaskSpec, *, device: str) -> Forward:
    """Load the export. Raises UsageError on a GPU, and without an export of these weights."""
    check_here("openvino", folder, device)
    return _openvino.forward(
        _exports.export_folder(folder, "openvino", calibrated=CALIBRATED, task=spec.task), precision="f32"
    )
