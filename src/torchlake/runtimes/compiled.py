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
from torchlake.models.load import load_model, load_tokenizer
from torchlake.runtimes import Forward

TOLERANCE = 1e-5
never: dict[str, str] = {"text_generation": "it has no key-value cache"}

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
    model, tokenizer = load_model(folder, spec, auto_class=task.AUTO_CLASS), load_tokenizer(folder)
    torch.nn.Module.to(model, device)
    if probes.padding_matters(model, probes.rows(task, tokenizer, spec), tokenizer.pad_token_id):
        raise UsageError(
            f"{folder}: padding changes what a model of type {model.config.model_type!r} answers, and the runtime "
            "'compiled' pads rows. Take 'eager', which computes rows of one length together."
        )
    pad_id = model.config.pad_token_id or 0
    longest = spec.max_length

    def logits_of(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits

    compiled = torch.compile(logits_of, fullgraph=True, dynamic=True)

    def forward(input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        rows, length = input_ids.shape
        rounded = min(-(-length // MULTIPLE) * MULTIPLE, max(length, longest))
        extra = ((0, max(2 - rows, 0)), (0, max(rounded, 2) - length))
        ids = torch.from_numpy(np.pad(input_ids, extra, constant_values=pad_id)).to(device)
        mask = torch.from_numpy(np.pad(attention_mask, extra)).to(device)
        mask[rows:, 0] = 1  # the softmax of a row of only padding is NaN
        with torch.inference_mode(), warnings.catch_warnings():
            # torch's compiler imports deprecated parts of torch.
            warnings.filterwarnings("ignore", message=".*torch.jit.script", category=DeprecationWarning)
            logits: np.ndarray = compiled(ids, mask)[:rows].float().cpu().numpy()
        return logits

    return forward
