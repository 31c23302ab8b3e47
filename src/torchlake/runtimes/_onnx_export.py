"""A classifier as an ONNX graph: `input_ids` and `attention_mask`, (B, L) int64, to `logits`, (B, C) float32.

torch has two exporters. The one that traces is taken: of a six-layer MiniLM it makes a graph in 3 s, the one over
torch.export in 17 s, and ONNX Runtime runs the traced graph some 4 % faster. A trace may bake the example's shape into
the graph, or one side of a branch, so what comes out is held against the model on rows of other shapes, every time.
"""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torchlake import plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.errors import UsageError
from torchlake.models import exports
from torchlake.models.load import load_model
from torchlake.runtimes import Forward, _encoder, _encoder_module, _exported

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

GRAPH = "model.onnx"
OPSET = 18
INPUTS = ("input_ids", "attention_mask")
SHAPES = ((1, 1), (3, 1), (1, 9), (4, 6))
AGREEMENT = 1e-3
"In the logits: far above rounding, far below what a wrong graph gives."


def write(folder: Path, spec: TaskSpec, path: Path) -> None:
    """Export the model of `folder` to `path` and hold it against the model.

    Raises UsageError when it cannot be exported, or when the graph gives other answers.
    """
    import torch

    model = load_model(folder, spec, auto_class=plugins.load("tasks", spec.task).AUTO_CLASS)
    example = tuple(torch.from_numpy(array) for array in _rows(model, (2, 7)))
    axes = {0: "batch", 1: "length"}
    try:
        # What the tracer warns of, shapes and branches that become constants, is what _check looks for.
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                _module(folder, spec, model),
                example,
                str(path),
                dynamo=False,
                opset_version=OPSET,
                input_names=list(INPUTS),
                output_names=["logits"],
                dynamic_axes={**dict.fromkeys(INPUTS, axes), "logits": {0: "batch"}},
            )
        _check(model, forward(path))
    except UsageError as error:
        raise UsageError(f"{folder}: {error}") from None
    except Exception as error:
        words = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300] if str(error).strip() else ''}"
        raise UsageError(
            f"{folder}: the architecture {model.config.model_type!r} cannot be exported to ONNX ({words}). Take "
            "another runtime; 'eager' runs every model."
        ) from error


def graph(folder: Path, spec: TaskSpec, scratch: Path) -> Path:
    """The model's fp32 graph: the one that the runtime `onnx` keeps or, without one, a new one in `scratch`."""
    kept = exports.current(folder, "onnx")
    if kept is not None:
        return kept / GRAPH
    write(folder, spec, scratch / GRAPH)
    return scratch / GRAPH


def session(path: Path, *, device: str = "cpu") -> Any:
    """An ONNX Runtime session. Raises UsageError for a GPU that the installed ONNX Runtime does not run on."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = _exported.threads()
    options.inter_op_num_threads = 1
    # Threads that wait spin by default, and take the cores from the other processes of the job.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    provider = "CPUExecutionProvider" if device == "cpu" else "CUDAExecutionProvider"
    if provider not in onnxruntime.get_available_providers():
        raise UsageError(
            "The installed ONNX Runtime does not run on GPUs (pip install onnxruntime-gpu, in the place of "
            "onnxruntime). On a GPU 'varlen' and 'compiled' are at hand."
        )
    return onnxruntime.InferenceSession(str(path), options, providers=[provider])


def forward(path: Path, *, device: str = "cpu") -> Forward:
    """The graph as a Forward, executed by ONNX Runtime."""
    runner = session(path, device=device)

    def run(input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        logits: np.ndarray = runner.run(["logits"], {"input_ids": input_ids, "attention_mask": attention_mask})[0]
        return logits

    return run


def _module(folder: Path, spec: TaskSpec, model: "PreTrainedModel") -> "torch.nn.Module":
    """What is exported: of the encoders that are known by their tensors only what the classifier reads."""
    import torch

    if _encoder.refusal(folder) is None:
        return _encoder_module.make_module(_encoder.read(folder, spec))

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
            return self.model(input_ids=input_ids, attention_mask=attention_mask).logits

    # The exporter gives a module back the mode it came in, and a new module is in training mode.
    return Logits().train(False)


def _check(model: "PreTrainedModel", exported: Forward) -> None:
    """Raise UsageError unless the graph agrees with the model on rows of other shapes than the example's."""
    import torch

    for shape in SHAPES:
        ids, mask = _rows(model, shape)
        # Each row alone: there are models whose answers padding changes, and a graph is given padded rows.
        with torch.inference_mode():
            rows = [
                model(input_ids=torch.from_numpy(row[kept == 1])[None]).logits
                for row, kept in zip(ids, mask, strict=True)
            ]
        expected = torch.cat(rows).numpy()
        difference = float(np.abs(exported(ids, mask) - expected).max())
        if not difference <= AGREEMENT * max(1.0, float(np.abs(expected).max())):
            raise UsageError(
                f"its ONNX graph gives other answers than the model: logits differ by {difference:.3g} for a batch of "
                f"{shape[0]} x {shape[1]} tokens. Take another runtime; 'eager' runs every model."
            )


def _rows(model: "PreTrainedModel", shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Ids that are no padding, and their mask; the second of several rows is half padding."""
    pad_id = model.config.pad_token_id or 0
    ids = np.random.default_rng(shape[1]).integers(0, model.config.vocab_size, shape)
    ids[ids == pad_id] = (pad_id + 1) % model.config.vocab_size
    mask = np.ones_like(ids)
    mask[1:2, (shape[1] + 1) // 2 :] = 0
    ids[mask == 0] = pad_id
    return ids, mask
