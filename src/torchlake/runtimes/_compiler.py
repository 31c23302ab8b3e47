"""Common parts of the runtimes that compile a model: refusals, and padding so that one graph serves all shapes.

Rows and lengths are dynamic, both at least 2 (the compiler specializes 0 and 1), and lengths are rounded up to a
multiple of 8 for its vector code. So a process compiles only once.
"""

import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torchlake import atomic_io, plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.errors import UsageError
from torchlake.runtimes import Forward, first_reason

if TYPE_CHECKING:
    import torch

MULTIPLE = 8
"Lengths are rounded up to a multiple of this."

Compute = Callable[[dict[str, "torch.Tensor"]], "torch.Tensor"]


def refusal(folder: Path) -> str | None:
    """Return why the model cannot be compiled here, or None."""
    return first_reason(model=untraceable(folder), library=without_compiler())


def untraceable(folder: Path) -> str | None:
    """Return why the model cannot be compiled anywhere, or None."""
    config = atomic_io.read_json(folder / "config.json")
    classifies = any("ForSequenceClassification" in name for name in config.get("architectures") or ())
    if config.get("is_encoder_decoder") and classifies:
        return "the compiler cannot trace how an encoder-decoder finds the end token whose state it reads"
    return None


def without_compiler() -> str | None:
    """Return which compiler is missing, or None."""
    if find_spec("triton") is None and not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        return "torch.compile needs a C++ compiler (g++ or clang++), and there is none on the PATH"
    return None


def load_with_rows(folder: Path, spec: TaskSpec, *, name: str) -> tuple[Any, dict[str, np.ndarray]]:
    """Return the model in fp32 in main memory, and a batch of two rows to try it with.

    `name` is the runtime's. Raises UsageError if padding changes the model's results, and the errors of
    `models.load_model`.
    """
    from torchlake.models import probes

    task = plugins.load("tasks", spec.task)
    model, processor = task.load_model(folder, spec), task.load_processor(folder, spec, scoring=False)
    rows = probes.features(task, processor, spec)
    assert rows is not None  # the tasks of these runtimes read texts
    if probes.padding_matters(model, task, rows, processor, spec):
        raise UsageError(
            f"{folder}: padding changes what a model of type {model.config.model_type!r} returns, but the runtime "
            f"{name!r} pads rows. Use 'eager', which computes rows of one length together."
        )
    return model, task.checked_batch(rows.arrays, np.arange(len(rows)), processor, spec)


def outputs_of(model: Any, task: Any) -> Compute:
    """Return the function from a batch of tensors to the task's outputs."""
    import torch

    def compute(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        outputs: torch.Tensor = task.outputs(model(**inputs))
        return outputs

    # A new function for each model: torch allows eight compilations per code object, and keeps all their models.
    compute.__code__ = compute.__code__.replace()
    return compute


def compile_outputs(model: Any, task: Any, **options: Any) -> Compute:
    """Return `outputs_of` the model as one compiled graph; `options` are those of torch.compile."""
    import torch

    # It advises to compute fp32 in TF32, which the tolerance of the runtimes in fp32 does not allow.
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)
    compiled: Compute = torch.compile(outputs_of(model, task), fullgraph=True, dynamic=True, **options)
    return compiled


def make_forward(compute: Compute, model: Any, spec: TaskSpec, *, device: str) -> Forward:
    """Return the forward pass that pads each batch to a shape of the graph, and drops the added rows."""
    import torch

    pad_id = model.config.pad_token_id or 0
    longest = spec.max_length

    def forward(**batch: np.ndarray) -> np.ndarray:
        rows, length = batch["input_ids"].shape
        rounded = min(-(-length // MULTIPLE) * MULTIPLE, max(length, longest))
        extra = ((0, max(2 - rows, 0)), (0, max(rounded, 2) - length))
        padded = {
            name: np.pad(array, extra, constant_values=pad_id if name == "input_ids" else 0)
            for name, array in batch.items()
        }
        padded["attention_mask"][rows:, 0] = 1  # the softmax of a row of only padding is NaN
        inputs = {name: torch.from_numpy(array).to(device) for name, array in padded.items()}
        with torch.inference_mode(), without_warnings():
            outputs: np.ndarray = compute(inputs)[:rows].float().cpu().numpy()
        return outputs

    return forward


@contextmanager
def without_warnings() -> Iterator[None]:
    """Ignore the warnings about deprecated parts of torch that its compiler imports."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.script", category=DeprecationWarning)
        yield
