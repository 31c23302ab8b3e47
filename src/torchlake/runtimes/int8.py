"""Dynamic int8 on CPUs by PyTorch's oneDNN product, with a scale per token and per output channel.

    x (T, I) fp32 -> 8 bits and a scale per token -> integer product with 8-bit weights -> fp32

Weights are rounded symmetrically on loading. Activations have a scale per token, not per batch as in
`torch.ao.quantization.quantize_dynamic`, so a row's result depends on the row only, and large values in one row do not
reduce the precision of others (Yao et al. 2022, ZeroQuant). GELU's output is never below -0.17: shifted by that, it
uses all 8 bits instead of half of them. Embeddings, norms, softmax, GELU, residuals and the classifier stay in fp32.

Rows are concatenated as in `varlen`. It needs no calibration; on x86 it needs VNNI (since about 2019).
"""

from pathlib import Path

from torchlake.config.task_spec import TaskSpec
from torchlake.errors import UsageError
from torchlake.processes import hardware
from torchlake.runtimes import Forward, _encoder, _packed, _products, _ragged, check_here, first_reason

TOLERANCE = 0.05
tasks: tuple[str, ...] | None = _packed.TASKS
never: dict[str, str] = {"text_generation": "it has no key-value cache"}
TOKEN_TYPES = True

LOWEST = {"gelu": 0.17, "relu": 0.0}
"The negated minimum of each activation."
SMALLEST_SCALE = 1e-30
"The smallest scale, for a token of zeros."


def refusal(folder: Path) -> str | None:
    """Return why the model cannot run here, or None."""
    return first_reason(model=_packed.refusal(folder), machine=hardware.int8_refusal())


def load(folder: Path, spec: TaskSpec, *, device: str) -> Forward:
    """Load the encoder with int8 layers.

    Raises the errors of `models.load_model`, and UsageError if it cannot run here.
    """
    import torch

    check_here("int8", folder, device, refusal(folder))
    if not hasattr(torch.ops.onednn, "qlinear_pointwise"):
        raise UsageError("The runtime 'int8' needs a torch that was built with oneDNN; this one was not. Use 'varlen'.")
    if _packed.is_one(folder, spec):
        return _packed.make_forward(folder, spec, linear=_linear)
    encoder = _encoder.read(folder, spec)
    activation = encoder.activation
    activate = torch.nn.functional.gelu if activation == "gelu" else torch.relu_

    def feed_forward(layer: _encoder.Layer) -> _encoder.Apply:
        up, down = _linear(layer.up), _linear(layer.down, shift=LOWEST[activation])
        return lambda x: down(activate(up(x, None)), x)

    return _ragged.make_forward(encoder, linear=_linear, feed_forward=feed_forward, pad=_products.padded_rows)


def _linear(layer: _encoder.Linear, *, shift: float | None = None) -> _ragged.Multiply:
    """Return `layer` in int8. With `shift`, x is at least -shift and is overwritten."""
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
        # Converting by way of int16 is several times faster.
        rounded = (x * scale.reciprocal()).add_(zero_point + 0.5).to(torch.int16).to(torch.uint8)
        # With scales of 1 the token's own scale is applied below, together with the bias.
        product: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            _products.padded_rows(rounded),
            1.0,
            zero_point,
            packed,
            weight_scale,
            no_zero_points,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )[: len(x)]
        return torch.addcmul(bias if residual is None else residual + bias, product, scale, out=product)

    return multiply
