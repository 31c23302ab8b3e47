"""The stock model through torch.compile: kernels fused by TorchInductor, for any architecture that it can trace.

One graph serves all shapes: rows and lengths are dynamic, both at least 2 (the compiler specializes 0 and 1), and
lengths are rounded up to a multiple of 8 for its vector code. So a process compiles only once.
Cost: 30 to 60 s per process before the first row, less with a warm compiler cache. Needs a C++ compiler on CPUs, Triton
on GPUs.
"""

import shutil
import warnings
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from torchlake import atomic_io, plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.errors import UsageError
from torchlake.runtimes import Forward

TOLERANCE = 1e-5
tasks: tuple[str, ...] | None = ("text_classification", "feature_extraction")
never: dict[str, str] = {"text_generation": "it has no key-value cache"}
TOKEN_TYPES = True

MULTIPLE = 8
"Lengths are rounded up to a multiple of it."


def refusal(folder: Path) -> str | None:
    """Return why the model cannot be compiled here, or None."""
    if atomic_io.read_json(folder / "config.json").get("is_encoder_decoder"):
        return "the compiler cannot follow how an encoder-decoder finds the end token that its answer is read at"
    if find_spec("triton") is None and not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        return "torch.compile needs a C++ compiler (g++ or clang++), and there is none on the PATH"
    return None


def load(folder: Path, spec: TaskSpec, *, device: str) -> Forward:
    """Load the model, to be compiled by its first batch.

    Raises UsageError if padding changes the model's results, and as `models.load_model`.
    """
    import torch

    from torchlake.models import probes

    task = plugins.load("tasks", spec.task)
    model, processor = task.load_model(folder, spec), task.load_processor(folder, spec, scoring=False)
    torch.nn.Module.to(model, device)
    made = probes.features(task, processor, spec)
    if made is not None and probes.padding_matters(model, task, made, processor, spec):
        raise UsageError(
            f"{folder}: padding changes what a model of type {model.config.model_type!r} answers, and the runtime "
            "'compiled' pads rows. Take 'eager', which computes rows of one length together."
        )
    pad_id = model.config.pad_token_id or 0
    longest = spec.max_length

    def outputs_of(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        outputs: torch.Tensor = task.outputs(model(**inputs))
        return outputs

    compiled = torch.compile(outputs_of, fullgraph=True, dynamic=True)

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
        with torch.inference_mode(), warnings.catch_warnings():
            # torch's compiler imports deprecated parts of torch.
            warnings.filterwarnings("ignore", message=".*torch.jit.script", category=DeprecationWarning)
            outputs: np.ndarray = compiled(inputs)[:rows].float().cpu().numpy()
        return outputs

    return forward
