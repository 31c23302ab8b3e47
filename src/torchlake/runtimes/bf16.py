"""`varlen` in bf16 on x86 CPUs that multiply it (AVX512-BF16, AMX), by PyTorch's oneDNN product.

    x (T, I) bf16 -> product summed in fp32, fused with bias, GELU or the residual -> bf16

It needs no calibration and no export. Probabilities differ from fp32's in the third decimal, as on a GPU. Each process
copies the weights into the layout of the product: half the size of the fp32 model. Attention's kernels, one for each
number and length of rows, take up to 1 GB in a process that scores rows of many lengths.
"""

from pathlib import Path

from torchlake.config.task_spec import TaskSpec
from torchlake.processes import hardware
from torchlake.runtimes import Forward, _encoder, _packed, _products, _ragged, check_here, first_reason

TOLERANCE = 0.02
tasks: tuple[str, ...] | None = _packed.TASKS
never: dict[str, str] = {"text_generation": "it has no key-value cache"}
TOKEN_TYPES = True

TOKENS = 512
"The batch size for which the weight layout is optimized."


def refusal(folder: Path) -> str | None:
    """Return why the model cannot run here, or None."""
    return first_reason(model=_packed.refusal(folder), machine=hardware.bf16_refusal())


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
