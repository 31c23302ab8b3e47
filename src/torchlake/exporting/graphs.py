"""A classifier as a graph for ONNX Runtime or OpenVINO, beside its configuration and tokenizer."""

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from torchlake.atomic_io import MANIFEST
from torchlake.config.task_spec import TASK_FILE, TaskSpec
from torchlake.errors import MissingExtra, UsageError
from torchlake.models.folders import ADAPTER, ADAPTER_CONFIG, BASE_RECORD, INDEX, TOKENIZER_FILES
from torchlake.models.load import load_weights
from torchlake.models.spec import load_spec, uses_token_types
from torchlake.models.write import save_weights
from torchlake.runtimes import _exports, _onnx_export, _openvino

ONNX = ("onnx", "onnxruntime")
OPENVINO = "openvino_model"
"The name under which Optimum looks for the graph."


def write_onnx(model: Path, folder: Path) -> None:
    """Write `model.onnx` with the configuration and the tokenizer. Raises UsageError."""
    spec = _classifier(model, "onnx", ONNX)
    _onnx_export.write(model, spec, folder / _onnx_export.GRAPH)
    copy_beside(model, folder)


def write_openvino(model: Path, folder: Path) -> None:
    """Write `openvino_model.xml` and `.bin` with the configuration and the tokenizer. Raises UsageError."""
    spec = _classifier(model, "openvino", (*ONNX, "openvino"))
    with tempfile.TemporaryDirectory() as scratch:
        _openvino.write(_onnx_export.graph(model, spec, Path(scratch)), folder)
    for name in (_openvino.GRAPH, _openvino.WEIGHTS):
        os.rename(folder / name, (folder / OPENVINO).with_suffix(Path(name).suffix))
    copy_beside(model, folder)


def write_whole(model: Path, folder: Path) -> None:
    """Write the weights, an adapter merged into them, and copy everything else but exports of runtimes."""
    left = (MANIFEST, INDEX, ADAPTER_CONFIG, BASE_RECORD)
    for path in sorted(model.rglob("*")):
        inner = path.relative_to(model)
        weights = path.parent == model and (path.suffix == ".safetensors" or path.name in left)
        if path.is_file() and not weights and inner.parts[0] not in (_exports.FOLDER, ADAPTER):
            (folder / inner).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / inner)
    save_weights(folder, load_weights(model))


WRITERS: Mapping[str, Callable[[Path, Path], None]] = {
    "onnx": write_onnx,
    "openvino": write_openvino,
    "transformers": write_whole,
}


def copy_beside(model: Path, folder: Path) -> None:
    """Copy the configuration, the task and the tokenizer's files."""
    for pattern in ("config.json", TASK_FILE, *TOKENIZER_FILES):
        for path in model.glob(pattern):
            shutil.copyfile(path, folder / path.name)


def _classifier(model: Path, format: str, libraries: tuple[str, ...]) -> TaskSpec:
    """Return the model's task. Raises UsageError if it is not a classifier, or if something is missing."""
    spec = load_spec(model)
    if uses_token_types(model, pairs=spec.text_pair is not None):
        raise UsageError(
            f"{model}: the model separates the texts of a pair by token types, and a graph in the format {format} has "
            "no input. Score pairs with torchlake predict, or train an encoder without token types, such as RoBERTa."
        )
    if spec.task != "text_classification":
        raise UsageError(
            f"{model}: the model's task is {spec.task}; the format {format} supports text_classification only."
        )
    refusal = _exports.refusal(model, extra=format, libraries=libraries)
    if refusal is not None:
        raise (MissingExtra if "not installed" in refusal else UsageError)(f"{model}: {refusal}.")
    return spec
