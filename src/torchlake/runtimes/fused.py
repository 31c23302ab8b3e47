"""Images on CPUs: a convolution, the BatchNorm and the activation after it in one kernel of oneDNN, in fp32.

    convolution -> BatchNorm -> ReLU     a convolution whose weights hold the norm, packed once, and ReLU on its result
    ... += residual -> ReLU              in place

A forward pass finds them: modules of which one gets the very tensor that the other returned. The fused model has to
give the outputs of the model as it was, for images of noise. If they differ (something else reads the tensor between
two modules), nothing is fused.
"""

import logging
import math
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlake import plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.errors import UsageError
from torchlake.models.folders import weight_files
from torchlake.runtimes import Forward, eager

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

TOLERANCE = 1e-5
tasks: tuple[str, ...] | None = ("image_classification",)
never: dict[str, str] = {}
TOKEN_TYPES = False
ACTIVATIONS = {
    **{name: (name.lower(), [], "") for name in ("ReLU", "Sigmoid", "Tanh", "Hardswish")},
    **dict.fromkeys(("SiLU", "SiLUActivation"), ("swish", [], "")),
    "ReLU6": ("hardtanh", [0.0, 6.0], ""),
}
"oneDNN's name of each class of activations, and its parameters."
TRIED = 2
"The images of noise."


def refusal(folder: Path) -> str | None:
    """Return why nothing can be fused: the weights have no BatchNorm."""
    from safetensors import SafetensorError, safe_open

    for file in weight_files(folder):
        try:
            with safe_open(file, framework="numpy") as opened:
                if any(name.endswith("running_mean") for name in opened.keys()):  # noqa: SIM118  it has no iterator
                    return None
        except (SafetensorError, OSError):  # loading the model explains it
            return None
    return "the model has no BatchNorm to fold into convolutions: use 'eager'"


def load(folder: Path, spec: TaskSpec, *, device: str) -> Forward:
    """Load the model. Raises UsageError on a GPU, and the errors of `models.load_model`."""
    if device != "cpu":
        raise UsageError("The runtime 'fused' runs on CPUs only; on a GPU use 'eager'.")
    import torch

    model = eager.load_model(folder, spec, device)
    if torch.backends.mkldnn.is_available():
        shape = plugins.load("tasks", spec.task).example(folder, spec).shape
        noise = torch.randn(TRIED, *shape[1:], generator=torch.Generator().manual_seed(0))
        try:
            difference = fuse(model, noise)
        except (RuntimeError, TypeError, AttributeError):  # a layout that oneDNN refuses, or a layer of another kind
            difference = math.inf
        if not difference <= TOLERANCE:
            log.warning("%s: fused convolutions change outputs by %.2g of the largest: unused", folder, difference)
            model = eager.load_model(folder, spec, device)
    return eager.forward_of(model, folder, spec, device)


def fuse(model: Any, images: "torch.Tensor") -> float:
    """Fuse a model's convolutions in place; return how much the outputs of images changed, relative to the largest."""
    import torch

    with torch.no_grad():  # inference mode does not count the changes of a tensor
        chains = _chains(model, images[:1])
    with torch.inference_mode():
        expected = model(pixel_values=images).logits
        for chain in chains:
            _replace(chain)
        return float((model(pixel_values=images).logits - expected).abs().max() / expected.abs().max())


@dataclass(kw_only=True)
class _Chain:
    """A convolution and the modules that follow it directly."""

    convolution: Any
    size: list[int]
    "Of its input."
    norm: Any = None
    activation: Any = None
    relu: Any = None
    "A ReLU of the result after something was added to it in place."


def _chains(model: Any, image: "torch.Tensor") -> list[_Chain]:
    """Return the chains of convolutions that are called once, without the modules that are called more often."""
    import torch

    convolution, norm = torch.nn.Conv2d, torch.nn.BatchNorm2d
    found: list[_Chain] = []
    ends: dict[int, tuple[torch.Tensor, int, _Chain]] = {}  # holds the tensors, else another could get the id of one
    calls: Counter[Any] = Counter()

    def follow(module: Any, given: tuple[Any, ...], output: Any) -> None:
        calls[module] += 1
        x, kind = given[0] if given else None, type(module)
        before = ends.get(id(x))
        if isinstance(module, convolution) and kind.forward is convolution.forward:
            if module.padding_mode != "zeros" or x is None or _padding(module) is None:
                return
            chain = _Chain(convolution=module, size=list(x.shape))
            found.append(chain)
        elif before is None or x is None or (chain := before[2]).relu is not None:
            return
        elif x._version != before[1]:
            chain.relu = module if kind is torch.nn.ReLU else None
            return
        elif chain.activation is not None:
            return
        elif kind.__name__ in ACTIVATIONS:
            chain.activation = module
        elif chain.norm is None and getattr(kind, "forward", None) is norm.forward and module.running_mean is not None:
            chain.norm = module
        else:
            return
        ends[id(output)] = (output, output._version, chain)

    hooks = [each.register_forward_hook(follow) for each in model.modules() if not list(each.children())]
    try:
        model(pixel_values=image)
    finally:
        for hook in hooks:
            hook.remove()
    for chain in found:
        chain.relu = chain.relu if calls[chain.relu] == 1 else None
        chain.activation = chain.activation if calls[chain.activation] == 1 else None
        if chain.norm is not None and calls[chain.norm] > 1:
            chain.norm = chain.activation = None
    return [chain for chain in found if calls[chain.convolution] == 1]


def _replace(chain: _Chain) -> None:
    """Let the convolution of a chain compute all of it, and the others return what they get."""
    import torch

    layer, norm = chain.convolution, chain.norm
    weight, bias = layer.weight.double(), 0.0 if layer.bias is None else layer.bias.double()
    if norm is not None:
        factor = torch.rsqrt(norm.running_var.double() + norm.eps)
        factor = factor if norm.weight is None else factor * norm.weight.double()
        weight, bias = weight * factor[:, None, None, None], (bias - norm.running_mean.double()) * factor
        bias = bias if norm.bias is None else bias + norm.bias.double()
        norm.forward = _same
    where = (_padding(layer), layer.stride, layer.dilation, layer.groups)
    pack: Any = torch._C._nn.mkldnn_reorder_conv2d_weight  # whose stub lacks the size
    packed = pack(weight.float().to_mkldnn(), *where, chain.size)
    after: tuple[str, list[float], str] = ("none", [], "")
    if chain.activation is not None:
        after = ACTIVATIONS[type(chain.activation).__name__]
        chain.activation.forward = _same
    if chain.relu is not None:
        chain.relu.inplace = True
    shift = bias.float() if isinstance(bias, torch.Tensor) else None
    layer.weight = torch.nn.Parameter(layer.weight.new_empty(0), requires_grad=False)  # frees the memory
    layer.forward = partial(_convolve, (packed, shift, *where, *after))


def _padding(layer: Any) -> tuple[int, ...] | None:
    """Return the zeros before each side of the image; None if more follow than precede."""
    if not isinstance(layer.padding, str):
        return tuple(layer.padding)
    same = int(layer.padding == "same")
    both = [same * wide * (size - 1) for wide, size in zip(layer.dilation, layer.kernel_size, strict=True)]
    return None if any(zeros % 2 for zeros in both) else tuple(zeros // 2 for zeros in both)


def _convolve(arguments: tuple[Any, ...], x: "torch.Tensor") -> "torch.Tensor":
    import torch

    result: torch.Tensor = torch.ops.mkldnn._convolution_pointwise(x, *arguments)
    return result


def _same(x: "torch.Tensor") -> "torch.Tensor":
    return x
