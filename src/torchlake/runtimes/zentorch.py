"""The stock model in bf16, compiled by AMD's zentorch: any architecture that can be traced, on x86 CPUs with bf16.

zentorch (https://github.com/amd/ZenDNN-pytorch-plugin) rearranges weights and stores them under their addresses in
memory. Where weights are freed, or exist for one call only as under autocast, others may get their addresses, and
zentorch then multiplies by the old ones without a warning. If the store is emptied while a model is in use, this model
computes something else, also without a warning. So this runtime empties the store only when this process has no such
model, keeps all weights until then, never uses autocast, and compares the compiled model with the unchanged one before
it returns any result.
Cost: 15 to 40 s per process before the first row. A process that loads one model after another while an older one is in
use, such as a server that reloads, keeps the weights of each (2 bytes per parameter).
"""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np

from torchlake import plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.errors import UsageError, pip_install
from torchlake.models.spec import EMBEDS
from torchlake.processes import hardware
from torchlake.runtimes import Forward, _compiler, check_here, first_reason

if TYPE_CHECKING:
    import torch

TOLERANCE = 0.02
tasks: tuple[str, ...] | None = ("text_classification", "feature_extraction")
never: dict[str, str] = {"text_generation": "it has no key-value cache"}
TOKEN_TYPES = True

AGREEMENT = 0.05
"The tolerance of outputs, relative to the largest: several times bf16's error, a small part of other weights' error."
OTHERS = "Use 'bf16', 'varlen' or 'compiled'."
SMALLEST = {EMBEDS: 0.1}
"The smallest value that counts as the largest output, by task; else 1. A vector of length 1 has numbers of about 0.1."
_in_use: "WeakSet[torch.nn.Module]" = WeakSet()
"This process's models of this runtime."
_stored: "list[torch.Tensor]" = []
"Their weights, and those of models that are freed, since zentorch's store was emptied."


def refusal(folder: Path) -> str | None:
    """Return why the model cannot run here, or None."""
    return first_reason(
        model=_compiler.untraceable(folder),
        machine=hardware.bf16_refusal(),
        library=_missing() or _compiler.without_compiler(),
    )


def _missing() -> str | None:
    release = ".".join(version("torch").split(".")[:2])
    install = pip_install(f"zentorch=={release}.*")
    try:
        found = ".".join(version("zentorch").split(".")[:2])
    except PackageNotFoundError:
        return f"the library 'zentorch' is not installed: {install}"
    if found != release:
        return f"zentorch {found} is made for torch {found}, but this is {release}: {install}"
    return None


def load(folder: Path, spec: TaskSpec, *, device: str) -> Forward:
    """Load and compile the model.

    Raises UsageError on a GPU, if its outputs are not those of the unchanged model, or if padding changes them; and the
    errors of
    `models.load_model`.
    """
    check_here("zentorch", folder, device, refusal(folder))
    import torch

    with _compiler.without_warnings():
        import zentorch  # noqa: F401  it registers the backend of torch.compile
    task = plugins.load("tasks", spec.task)
    model, batch = _compiler.load_with_rows(folder, spec, name="zentorch")
    eager = _compiler.make_forward(_compiler.outputs_of(model, task), model, spec, device="cpu")
    expected = eager(**batch)
    (model.encoder if spec.task == EMBEDS else model).to(torch.bfloat16)
    _keep_stored(model)
    forward = _compiler.make_forward(_compile(model, task), model, spec, device="cpu")
    try:
        outputs = forward(**batch)
    except Exception as error:
        raise UsageError(
            f"{folder}: zentorch cannot compile this model ({type(error).__name__}: {str(error)[:300]}). {OTHERS}"
        ) from error
    largest = max(SMALLEST.get(spec.task, 1.0), float(np.abs(expected).max()))
    difference = float(np.abs(outputs - expected).max()) / largest
    if not difference <= AGREEMENT:
        raise UsageError(
            f"{folder}: compiled by zentorch, the model's outputs differ by {difference:.1%} from those of the "
            f"unchanged one. {OTHERS}"
        )
    return forward


def _keep_stored(model: "torch.nn.Module") -> None:
    """Keep the weights as long as zentorch's store may have them, and empty the store if no other model uses it."""
    import torch

    if not _in_use:
        torch.ops.zentorch.zentorch_clear_weight_cache()
        _stored.clear()
    _in_use.add(model)
    _stored.extend(each.data for each in model.parameters())


def _compile(model: Any, task: Any) -> _compiler.Compute:
    """Compile, and keep zentorch out of TorchInductor's settings, which other models of this process share."""
    import torch._inductor.config

    compiled = _compiler.compile_outputs(model, task, backend="zentorch")

    def compute(inputs: "dict[str, torch.Tensor]") -> "torch.Tensor":
        with torch._inductor.config.patch(joint_custom_post_pass=None):
            return compiled(inputs)

    return compute
