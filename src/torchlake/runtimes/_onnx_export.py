"""Export a model as an ONNX graph: `input_ids` and `attention_mask`, (B, L) int64, to its outputs, float32.

A classifier's are `logits`, (B, C), those of an embedding model `embedding`, (B, D).

This uses torch's tracing exporter: for a six-layer MiniLM it takes 3 s, the torch.export one 17 s, and ONNX Runtime
runs the traced graph some 4 % faster. Because a trace may bake in the example's shape or one side of a branch, every
export is compared with the model on rows of other shapes.
"""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torchlake import atomic_io, plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.errors import UsageError, pip_install
from torchlake.models.spec import EMBEDS
from torchlake.processes import hardware
from torchlake.runtimes import Forward, _encoder, _encoder_module, _exports

if TYPE_CHECKING:
    import torch

GRAPH = "model.onnx"
OPSET = 18
INPUTS = ("input_ids", "attention_mask")
SHAPES = ((1, 1), (3, 1), (1, 9), (4, 6))
OUTPUTS = {EMBEDS: "embedding"}
"The name of the output, by task; else logits."
AGREEMENT = 1e-3
"The tolerance of outputs, as a share of the largest: far above rounding, far below the error of a wrong graph."
SMALL = 0.1
"The smallest value that counts as the largest output: the size of the numbers of a vector of length 1."


def write(folder: Path, spec: TaskSpec, path: Path) -> None:
    """Export the model to `path` and compare it with the model. Raises UsageError if either fails."""
    import torch

    task = plugins.load("tasks", spec.task)
    model, output = task.load_model(folder, spec), OUTPUTS.get(spec.task, "logits")
    example = tuple(torch.from_numpy(array) for array in _rows(model, (2, 7)))
    axes = {0: "batch", 1: "length"}
    try:
        # The tracer warns of shapes and branches that become constants; _check tests for these.
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                _module(folder, spec, task, model),
                example,
                str(path),
                dynamo=False,
                opset_version=OPSET,
                input_names=list(INPUTS),
                output_names=[output],
                dynamic_axes={**dict.fromkeys(INPUTS, axes), output: {0: "batch"}},
            )
        _check(task, model, forward(path))
    except UsageError as error:
        raise UsageError(f"{folder}: {error}") from None
    except Exception as error:
        if atomic_io.error_number(error) is not None:
            raise atomic_io.storage_error(error, path) from error
        words = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300] if str(error).strip() else ''}"
        raise UsageError(
            f"{folder}: the architecture {model.config.model_type!r} cannot be exported to ONNX ({words}). Use "
            "another runtime; 'eager' runs every model."
        ) from error


def graph(folder: Path, spec: TaskSpec, scratch: Path) -> Path:
    """Return the model's fp32 graph: the stored export of the runtime `onnx`, or a new one in `scratch`."""
    kept = _exports.current(folder, "onnx", spec.task)
    if kept is not None:
        return kept / GRAPH
    write(folder, spec, scratch / GRAPH)
    return scratch / GRAPH


def session(path: Path, *, device: str = "cpu") -> Any:
    """Return an ONNX Runtime session. Raises UsageError if the installed ONNX Runtime does not support the device."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = hardware.threads()
    options.inter_op_num_threads = 1
    # By default waiting threads spin, which takes cores from the job's other processes.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    provider = "CPUExecutionProvider" if device == "cpu" else "CUDAExecutionProvider"
    if provider not in onnxruntime.get_available_providers():
        raise UsageError(
            f"The installed ONNX Runtime does not run on GPUs ({pip_install('onnxruntime-gpu')}, in place of "
            "onnxruntime). On a GPU, 'varlen' and 'compiled' also work."
        )
    return onnxruntime.InferenceSession(str(path), options, providers=[provider])


def forward(path: Path, *, device: str = "cpu") -> Forward:
    """Return the graph as a Forward, executed by ONNX Runtime."""
    runner = session(path, device=device)

    def run(input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        outputs: np.ndarray = runner.run(None, {"input_ids": input_ids, "attention_mask": attention_mask})[0]
        return outputs

    return run


def _module(folder: Path, spec: TaskSpec, task: Any, model: "torch.nn.Module") -> "torch.nn.Module":
    """Return the module to export: of known encoders, only the parts that are read."""
    import torch

    if _encoder.refusal(folder) is None:
        return _encoder_module.make_module(_encoder.read(folder, spec))

    class Outputs(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
            return task.outputs(self.model(input_ids=input_ids, attention_mask=attention_mask))

    # The exporter restores a module's mode, and a new module is in training mode.
    return Outputs().train(False)


def _check(task: Any, model: "torch.nn.Module", exported: Forward) -> None:
    """Raise UsageError unless the graph agrees with the model on rows whose shapes differ from the example's."""
    import torch

    for shape in SHAPES:
        ids, mask = _rows(model, shape)
        # The model gets each row alone, because padding changes the results of some models.
        with torch.inference_mode():
            alone = [torch.from_numpy(row[kept == 1])[None] for row, kept in zip(ids, mask, strict=True)]
            rows = [task.outputs(model(input_ids=row, attention_mask=torch.ones_like(row))) for row in alone]
        expected = torch.cat(rows).numpy()
        difference = float(np.abs(exported(ids, mask) - expected).max())
        if not difference <= AGREEMENT * max(SMALL, float(np.abs(expected).max())):
            raise UsageError(
                f"the outputs of its ONNX graph and of the model differ by {difference:.3g} for a batch of "
                f"{shape[0]} x {shape[1]} tokens. Use another runtime; 'eager' runs every model."
            )


def _rows(model: Any, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return random ids without padding, and their mask; the second half of the second row is padding."""
    pad_id = model.config.pad_token_id or 0
    ids = np.random.default_rng(shape[1]).integers(0, model.config.vocab_size, shape)
    ids[ids == pad_id] = (pad_id + 1) % model.config.vocab_size
    mask = np.ones_like(ids)
    mask[1:2, (shape[1] + 1) // 2 :] = 0
    ids[mask == 0] = pad_id
    return ids, mask
