"""bf16: `varlen` on x86 CPUs that multiply it (AVX512-BF16, AMX), and models that write, on those and on GPUs.

    x (T, I) bf16 -> product summed in fp32, fused with bias, GELU or the residual -> bf16

Texts are written as by `eager`, with weights and cache of half the size. Where two tokens are nearly as likely,
the answer may differ, and depend on the rows beside it: sums are rounded otherwise in other batches.

Encoders use PyTorch's oneDNN product, without calibration and export. Probabilities differ from fp32's in the third
decimal, as on a GPU. Each process copies the weights into the layout of the product: half the size of the fp32 model.
Attention's kernels, one for each number and length of rows, take up to 1 GB in a process that scores rows of many
lengths.
"""

from pathlib import Path
from typing import Any

from torchlake.config.task_spec import TaskSpec
from torchlake.errors import UsageError
from torchlake.models.generation import GenerationOptions
from torchlake.models.spec import WRITERS
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
tasks: tuple[str, ...] | None = (*_packed.TASKS, *WRITERS)
never: dict[str, str] = {}
TOKEN_TYPES = True

TOKENS = 512
"The batch size for which the weight layout is optimized."


def refusal(folder: Path) -> str | None:
    """Return why the model cannot run here, or None."""
    return first_reason(model=_packed.refusal(folder), machine=hardware.bf16_refusal())


def writer_refusal(folder: Path) -> str | None:
    """Return why nothing can be written here, or None: every model is computed, and a GPU multiplies bf16, too."""
    reason = hardware.bf16_refusal()
    return None if reason and hardware.gpus() else reason


def load(folder: Path, spec: TaskSpec, *, device: str) -> Forward:
    """Load the model. Raises the errors of `models.load_model`, and UsageError if it cannot run here."""
    import torch

    if spec.task in WRITERS:
        return eager.forward_of(_load_writer(folder, spec, device), folder, spec, device)
    lacks = not hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    reason = refusal(folder) or ("this torch was built without oneDNN: use 'varlen'" if lacks else None)
    check_here("bf16", folder, device, reason)
    if _packed.is_one(folder, spec):
        return _packed.make_forward(folder, spec, linear=_linear, dtype=torch.bfloat16)
    encoder = _encoder.read(folder, spec).to("cpu", torch.bfloat16)
    feed_forward = _ragged.fused(encoder, _linear)
    return _ragged.make_forward(encoder, linear=_linear, feed_forward=feed_forward, pad=_products.padded_rows)


def _linear(layer: _encoder.Linear, activation: str = "none") -> _ragged.Multiply:
    import torch

    packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight, TOKENS)
    return _products.by_onednn(_encoder.Linear(packed, layer.bias), activation)


def open_writer(folder: Path, spec: TaskSpec, *, device: str, options: GenerationOptions) -> Writer:
    """Load the model for text generation."""
    return eager.writer_of(_load_writer(folder, spec, device), folder, options)


def load_log_probs(folder: Path, spec: TaskSpec, *, device: str) -> LogProbs:
    """Load the model for the log-probabilities of answers."""
    return eager.log_probs_of(_load_writer(folder, spec, device), folder, device)


def _load_writer(folder: Path, spec: TaskSpec, device: str) -> Any:
    import torch

    if device == "cpu" and (reason := hardware.bf16_refusal()):
        raise UsageError(f"The runtime 'bf16' cannot run {folder}: {reason}")
    return eager.load_model(folder, spec, device, torch.bfloat16)
