"""Dynamic int8 on CPUs: PyTorch's oneDNN product of 8-bit integers, a scale for each token and each output channel.

    x (T, I) fp32 -> 8 bits and a scale per token -> integer product with weights of 8 bits -> fp32

Weights are rounded once when loading, symmetrically, each output channel with its own scale. Activations are rounded as
they come: a scale per token, not per batch as in `torch.ao.quantization.quantize_dynamic`, so a row's answer depends on
nothing but the row, and large values in one row cost the others no precision (Yao et al. 2022, ZeroQuant). What GELU
gives is never below -0.17: moved up by as much it fills all eight bits instead of half of them. Embeddings, norms,
softmax, GELU, residuals and the classifier stay in fp32.

Rows are laid end to end as in `varlen`. Needs no calibration. On x86 it needs VNNI (since about 2019).
"""

from pathlib import Path

from torchlake.config.task_spec import TaskSpec
from torchlake.errors import UsageError
from torchlake.processes import hardware
from torchlake.runtimes import Forward, _encoder, _ragged

TOLERANCE = 0.05
never: dict[str, str] = {"text_generation": "it has no key-value cache"}

LOWEST = {"gelu": 0.17, "relu": 0.0}
"How far below zero an activation's values go, at most."
SMALLEST_SCALE = 1e-30
"Of a token that is all zeros."


def refusal(folder: Path) -> str | None:
    """Why the model of `folder` cannot run here; None when it can."""
    return hardware.int8_refusal() or _encoder.refusal(folder)


def load(folder: Path, spec: TaskSpec, *, device: str) -> Forward:
    """The encoder of `folder` with its layers in int8. Raises as `models.load_model` does, UsageError on a GPU."""
    import torch

    if device != "cpu":
        raise UsageError("The runtime 'int8' runs on CPUs only; on a GPU take 'varlen'.")
    if reason := hardware.int8_refusal():
        raise UsageError(f"The runtime 'int8' cannot run {folder}: {reason}")
    if not hasattr(torch.ops.onednn, "qlinear_pointwise"):
        raise UsageError(
            "The runtime 'int8' needs a torch that was built with oneDNN; this one was not. Take 'varlen'."
        )
    encoder = _encoder.read(folder, spec)
    activation = encoder.activation
    activate = torch.nn.functional.gelu if activation == "gelu" else torch.relu_

    def feed_forward(layer: _encoder.Layer) -> _encoder.Apply:
        up, down = _linear(layer.up), _linear(layer.down, shift=LOWEST[activation])
        return lambda x: down(activate(up(x, None)), x)

    return _ragged.make_forward(encoder, linear=_linear, feed_forward=feed_forward)


def _linear(layer: _encoder.Linear, *, shift: float | None = None) -> _ragged.Multiply:
    """`layer` in int8. With `shift`, x is at least -shift, and is used up."""
    import torch

    weight_scale = layer.weight.abs().amax(1).div_(127).clamp_(min=SMALLEST_SCALE)
    weight = (layer.weight / weight_scale[:, None]).round_().to(torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(weight, None)
    no_zero_points = torch.zeros(len(weight), dtype=torch.int64)
    bias, zero_point = layer.bias, 128
    if shift is not None:
        bias, zero_point = bias - shift * weight_scale * weight.sum(1), 0

    def multiply(x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        if shift is None:
            scale = torch.maximum(x.amax(1, keepdim=True), x.amin(1, keepdim=True).neg_()).div_(127)
        else:
            scale = x.add_(shift).amax(1, keepdim=True).div_(255)
        scale.clamp_(min=SMALLEST_SCALE)
        # Going through 16 bits is several times faster than the direct way, which torch does number by number.
        rounded = (x * scale.reciprocal()).add_(zero_point + 0.5).to(torch.int16).to(torch.uint8)
        # Scales of 1 leave the token's own to the next line, where it meets the bias.
        product: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            rounded, 1.0, zero_point, packed, weight_scale, no_zero_points, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return torch.addcmul(bias if residual is None else residual + bias, product, scale, out=product)

    return multiply
