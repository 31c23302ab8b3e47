"""Which library multiplies fp32 matrices on the CPU, by its class and the number of rows: torch's default or oneDNN.

torch uses MKL, which is limited to AVX2 on CPUs that are not Intel's. On AMD's CPUs with AVX-512 oneDNN was measured at
1.07 to 2.2 times its speed, and it fuses the operations after a product (the bias, GELU, the residual). With AVX2 alone
MKL is faster. The choice is a row of `processes/cpus.json` (`bench/products.py` measures it) and is not timed, so that
a retry makes the same one; a job that is continued keeps the one that it began with.

oneDNN compiles a kernel for each number of rows, in milliseconds, and keeps the last thousand, each with memory of the
size of the weights. So x gets rows of zeros up to a multiple of `STEP`: a copy of x, but a few kernels in all. For few
rows, as those of one text, the multiple is smaller, and so are the kernels.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING

from torchlake.processes import hardware

if TYPE_CHECKING:
    import torch

    from torchlake.runtimes._encoder import Apply, Linear
    from torchlake.runtimes._ragged import Multiply

FEW = 64
"The largest number of rows that is few."
FEW_STEP, STEP = 4, 32
"Products are compiled for multiples of this number of rows: few, and many."

_kept: ContextVar[Mapping[str, str] | None] = ContextVar("the libraries that a job began with", default=None)


@contextmanager
def keeping(products: Mapping[str, str] | None) -> Iterator[None]:
    """Let models that are loaded in the block use these libraries; None: those of this CPU's class."""
    token = _kept.set(products)
    try:
        yield
    finally:
        _kept.reset(token)


def use_onednn() -> bool:
    """Return whether oneDNN is chosen for few or many rows, and this torch has it and another library."""
    import torch

    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and "onednn" in _chosen().values()
    )


def libraries() -> tuple[str, str]:
    """Return the libraries of few and of many rows."""
    return (_chosen()["few"], _chosen()["many"]) if use_onednn() else ("torch", "torch")


def _library_by_rows() -> Callable[[int], str]:
    """Return what tells the library of a number of rows, as it is chosen now."""
    few, many = libraries()
    return lambda rows: few if rows <= FEW else many


def _chosen() -> Mapping[str, str]:
    return _kept.get() or hardware.cpu_class().products


def product(
    x: "torch.Tensor",
    weight: "torch.Tensor",
    bias: "torch.Tensor | None",
    *,
    activation: str = "none",
    residual: "torch.Tensor | None" = None,
) -> "torch.Tensor":
    """Return activation(x weight^T + bias) [+ residual] by oneDNN; x (..., I), weight (O, I).

    `activation`: none, relu, gelu; none with a residual.
    """
    import torch

    rows, multiply = padded_rows(x), torch.ops.mkldnn._linear_pointwise
    result: torch.Tensor
    if residual is None:
        result = multiply(rows, weight, bias, activation, [], "none")
    else:
        result = multiply.binary(rows, padded_rows(residual), weight, bias, "add")
    return result[: x[..., 0].numel()].view(*x.shape[:-1], result.shape[-1])


def padded_rows(x: "torch.Tensor") -> "torch.Tensor":
    """Return x (..., I) as rows (R, I), with rows of zeros up to a multiple of `FEW_STEP` or `STEP`."""
    import torch

    rows = x.reshape(-1, x.shape[-1])
    missing = -len(rows) % (FEW_STEP if len(rows) <= FEW else STEP)
    return torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows


def padding() -> "Apply":
    """Return what adds the rows to x (R, I) that each layer of `linear` would add, with the libraries chosen now."""
    library = _library_by_rows()
    return lambda x: padded_rows(x) if library(len(x)) == "onednn" else x


def linear(layer: "Linear", activation: str = "none") -> "Multiply":
    """Return a layer on the CPU for `_ragged.make_forward`."""
    by = {"torch": by_torch, "onednn": by_onednn}
    few, many = (by[library](layer, activation) for library in libraries())
    return lambda x, residual: (few if len(x) <= FEW else many)(x, residual)


def by_onednn(layer: "Linear", activation: str = "none") -> "Multiply":
    """Return a layer by oneDNN; its weight may be packed."""
    return lambda x, residual: product(x, layer.weight, layer.bias, activation=activation, residual=residual)


def by_torch(layer: "Linear", activation: str = "none") -> "Multiply":
    """Return a layer by torch, on any device."""
    import torch

    functions = torch.nn.functional
    activate = {"none": None, "gelu": functions.gelu, "relu": functions.relu}[activation]

    def multiply(x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        result = functions.linear(x, layer.weight, layer.bias)
        if activate is not None:
            result = activate(result)
        return result if residual is None else result.add_(residual)

    return multiply


def choose_in(model: "torch.nn.Module") -> None:
    """Let the linear layers of a model on the CPU use the chosen libraries."""
    import torch

    if not use_onednn():
        return
    library = _library_by_rows()

    def multiply(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        if library(x[..., 0].numel()) == "onednn":
            return product(x, layer.weight, layer.bias)
        return torch.nn.functional.linear(x, layer.weight, layer.bias)

    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.forward = partial(multiply, module)  # type: ignore[method-assign]
