"""Which library multiplies fp32 matrices: torch's choice, or oneDNN where that is known to be faster.

torch takes MKL for matrices in fp32, which keeps to AVX2 on CPUs of other makers than Intel. On AMD's CPUs with AVX-512
oneDNN was measured at 1.07 to 2.2 times its rate, and it can add what follows a product (the bias, GELU, the residual)
while the result is still in the cache. The choice depends on the CPU's vendor and is not timed, so that a
retry chooses the same.
"""

from functools import cache
from typing import TYPE_CHECKING

from torchlake.processes import hardware

if TYPE_CHECKING:
    import torch

    from torchlake.runtimes._encoder import Linear
    from torchlake.runtimes._ragged import Multiply


@cache
def use_onednn() -> bool:
    """Whether fp32 products in main memory should be oneDNN's."""
    import torch

    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and "AuthenticAMD" in hardware.cpu_flags()
    )


def product(
    x: "torch.Tensor", weight: "torch.Tensor", bias: "torch.Tensor | None", *, activation: str = "none"
) -> "torch.Tensor":
    """activation(x weight^T + bias) by oneDNN; x (..., I), weight (O, I); `activation` none, relu or gelu (exact)."""
    import torch

    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], "none")
    return result


def product_and_sum(
    x: "torch.Tensor", weight: "torch.Tensor", bias: "torch.Tensor", residual: "torch.Tensor"
) -> "torch.Tensor":
    """residual + x weight^T + bias by oneDNN."""
    import torch

    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, weight, bias, "add")
    return result


def linear(layer: "Linear", activation: str = "none") -> "Multiply":
    """A layer by oneDNN, as `_ragged.make_forward` asks for it; its weight may be packed for oneDNN."""

    def multiply(x: "torch.Tensor", residual: "torch.Tensor | None") -> "torch.Tensor":
        if residual is None:
            return product(x, layer.weight, layer.bias, activation=activation)
        return product_and_sum(x, layer.weight, layer.bias, residual)

    return multiply
