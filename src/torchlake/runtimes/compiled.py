"""The stock model through torch.compile: kernels fused by TorchInductor, for any architecture that it can trace.

Cost: 30 to 60 s per process before the first row, less with a warm compiler cache. Needs a C++ compiler on CPUs, Triton
on GPUs.
"""

from pathlib import Path

from torchlake import plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.runtimes import Forward, _compiler

TOLERANCE = 1e-5
tasks: tuple[str, ...] | None = ("text_classification", "feature_extraction")
never: dict[str, str] = {"text_generation": "it has no key-value cache"}
TOKEN_TYPES = True

refusal = _compiler.refusal


def load(folder: Path, spec: TaskSpec, *, device: str) -> Forward:
    """Load the model; its first batch compiles it.

    Raises UsageError if padding changes the model's results, and the errors of `models.load_model`.
    """
    import torch

    model, _ = _compiler.load_with_rows(folder, spec, name="compiled")
    torch.nn.Module.to(model, device)
    compute = _compiler.compile_outputs(model, plugins.load("tasks", spec.task))
    return _compiler.make_forward(compute, model, spec, device=device)
