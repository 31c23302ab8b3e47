"""bf16: `varlen` on x86 CPUs that multiply it (AVX512-BF16, AMX), and models that write, on those and on GPUs.

    x (T, I) bf16 -> product summed in fp32, fused with bias, GELU or the residual -> bf16

Texts are written as by `eager`, with weights and cache of half the size; where two tokens are nearly as likely, the
text may differ. Encoders use PyTorch's oneDNN product.
It needs no calibration and no export. Probabilities differ from fp32's in the third decimal, as on a GPU. Each process
copies the weights into the layout of the product: half the size of the fp32 model. Attention's kernels, one for each
number and length of rows, take up to 1 GB in a process that scores rows of many lengths.
"""

from pathlib import Path
from typing import Any

from torchlake import atomic_io, plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.errors import UsageError
from torchlake.models.generation import GenerationOptions
from torchlake.processes import hardware
from torchlake.runtimes import (
    Forward,
    LogProbs,
    Writer,
    _encoder,
    _packed,
    _products,
    _ragged,
    check_here,
    eager,
    first_reason,
)

TOLERANCE = 0.02
tasks: tuple[str, ...] | None = (*_packed.TASKS, "text_generation", "text2text_generation")
never: dict[str, str] = {}
TOKEN_TYPES = True

TOKENS = 512
"The batch size for which the weight layout is optimized."


def refusal(folder: Path) -> str | None:
    """Return why the model cannot run here, or None."""
    if not _writes(folder):
        return first_reason(model=_packed.refusal(folder), machine=hardware.bf16_refusal())
    return None if hardware.gpus() else hardware.bf16_refusal()


def _writes(folder: Path) -> bool:
    heads = atomic_io.read_json(folder / "config.json").get("architectures") or []
    return any(head.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")) for head in heads)


def load(folder: Path, spec: TaskSpec, *, device: str) -> Forward:
    """Load the encoder. Raises the errors of `models.load_model`, and UsageError if it cannot run here."""
    import torch

    lacks = not hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    reason = refusal(folder) or ("this torch was built without oneDNN: use 'varlen'" if lacks else None)
    check_here("bf16", folder, device, reason)
    if _packed.is_one(folder, spec):
        return _packed.make_forward(folder, spec, linear=_linear, dtype=torch.bfloat16)
    encoder = _encoder.read(folder, spec).to("cpu", torch.bfloat16)
    return _ragged.make_forward(encoder, linear=_linear, feed_forward=_ragged.fused(encoder, _linear))


def _linear(layer: _encoder.Linear, activation: str = "none") -> _ragged.Multiply:
    import torch

    packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight, TOKENS)
    return _products.by_onednn(_encoder.Linear(packed, layer.bias), activation)


def open_writer(folder: Path, spec: TaskSpec, *, device: str, options: GenerationOptions) -> Writer:
    """Load the model for text generation."""
    return eager.writer_of(_load_model(folder, spec, device), folder, options)


def load_log_probs(folder: Path, spec: TaskSpec, *, device: str) -> LogProbs:
    """Load the model for the log-probabilities of answers."""
    return eager.log_probs_of(_load_model(folder, spec, device), folder, device)


def _load_model(folder: Path, spec: TaskSpec, device: str) -> Any:
    import torch

    if device == "cpu" and (reason := hardware.bf16_refusal()):
        raise UsageError(f"The runtime 'bf16' cannot run {folder}: {reason}")
    model = plugins.load("tasks", spec.task).load_model(folder, spec)
    return torch.nn.Module.to(model, device, torch.bfloat16)
