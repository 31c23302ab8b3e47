"""Which library multiplies fp32 matrices: torch's default, or oneDNN where that is known to be faster.

torch uses MKL, which is limited to AVX2 on CPUs that are not Intel's. On AMD's CPUs with AVX-512 oneDNN was measured at
1.07 to 2.2 times its speed, and it fuses the operations after a product (the bias, GELU, the residual). With AVX2 alone
MKL is at least as fast. The choice depends on the CPU and is not timed, so that a retry makes the same one.

oneDNN compiles a kernel for each number of rows, in milliseconds, and keeps the last thousand, each with memory of the
size of the weights. So x gets rows of zeros up to a multiple of `STEP`: a copy of x, but a few kernels in all.
"""

from functools import cache
from typing import TYPE_CHECKING

from torchlake.processes import hardware

if TYPE_CHECKING:
    import torch

    from torchlake.runtimes._encoder import Linear
    from torchlake.runtimes._ragged import Multiply

STEP = 32
"Products are compiled for multiples of this number of rows."


@cache
def use_onednn() -> bool:
    """Return whether fp32 products on the CPU should use oneDNN."""
    import torch

    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hardware.prefers_onednn()
    )


def product(
    x: "torch.Tensor", weight: "torch.Tensor", bias: "torch.Tensor | None", *, activation: str = "none"
) -> "torch.Tensor":
    """Return activation(x weight^T + bias) by oneDNN; x (..., I), weight (O, I); `activation`: none, relu, gelu."""
    import torch

    rows = padded_rows(x)
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, activation, [], "none")
    return result[: x[..., 0].numel()].view(*x.shape[:-1], result.shape[-1])


def product_and_sum(
    x: "torch.Tensor", weight: "torch.Tensor", bias: "torch.Tensor", residual: "torch.Tensor"
) -> "torch.Tensor":
    """Return residual + x weight^T + bias by oneDNN."""
    import torch

    both = padded_rows(x), padded_rows(residual)
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(*both, weight, bias, "add")
    return result[: x[..., 0].numel()].view(*x.shape[:-1], result.shape[-1])


def padded_rows(x: "torch.Tensor") -> "torch.Tensor":
    """Return x (..., I) as rows (R, I), with rows of zeros up to a multiple of `STEP`."""
    import torch

    rows = x.reshape(-1, x.shape[-1])
    missing = -len(rows) % STEP
    return torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows


def linear(layer: "Linear", activation: str = "none") -> "Multiply":
    """Return a layer by oneDNN for `_ragged.make_forward`; its weight may be packed for oneDNN."""

    def multiply(x: "torch.Tensor", residual: "torch.Tensor | None") -> "torch.Tensor":
        if residual is None:
            return product(x, layer.weight, layer.bias, activation=activation)
        return product_and_sum(x, layer.weight, layer.bias, residual)

    return multiply
