"""Frozen layers in 4 or 8 bits, by bitsandbytes (QLoRA, Dettmers et al. 2023).

    nf4      4 bits: blocks of 64 share a scale, and blocks of 256 scales share another (double quantization)
    int8     8 bits: each output's weights share a scale

A layer keeps its packed weights and unpacks a copy in the type of its input, again in the backward pass; the input
has the type of `train.precision`. Packed weights and scales are plain parameters and buffers: they are moved,
broadcast and sharded like those of other layers. Weights are quantized in main memory, so that they are the same on
every machine. Not quantized: embeddings, norms, heads, and everything beside the model's list of layers.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from torchlake.errors import ConfigError, need_library
from torchlake.optim.depth import layers

BLOCK, BLOCK_OF_SCALES, CODES = 64, 256, 256


class QuantizedLinear(nn.Linear):
    """A linear layer whose frozen weights have 4 or 8 bits; `weight` is their packed form (N, 1), or (O, I)."""

    scales: torch.Tensor
    scales_of_scales: torch.Tensor
    codes: torch.Tensor
    offset: torch.Tensor

    def __init__(self, kind: str, outputs: int, inputs: int, bias: nn.Parameter | None) -> None:
        super().__init__(inputs, outputs, bias=False, device="meta")
        self.kind = kind
        self.bias = bias  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        product: torch.Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.values_of, None if self.bias is None else self.bias.to(x.dtype)
        )
        return product

    @property
    def W_q(self) -> torch.Tensor:
        """The packed weights, by the name with which peft finds that `dequantize` makes the others (for DoRA)."""
        return self.weight

    def dequantize(self) -> torch.Tensor:
        """Return the weights (O, I) in fp32."""
        return self.values_of(self.weight, torch.float32)

    def values_of(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights (O, I) that `packed` stands for."""
        numbers = self.out_features * self.in_features  # `store_as` may have added some
        if self.kind == "int8":
            whole = packed.view(torch.int8).reshape(-1)[:numbers].reshape(self.out_features, self.in_features)
            return (whole.float() * (self.scales[:, None] / 127.0)).to(dtype)
        bits = _library()
        nested = bits.QuantState(
            absmax=self.scales_of_scales, code=self.codes, blocksize=BLOCK_OF_SCALES, dtype=torch.float32
        )
        # The library's fast kernels for CPUs (0.50) are wrong where a block continues in the next row. A flat shape has
        # other kernels.
        shape = [self.out_features, self.in_features] if self.in_features % BLOCK == 0 else [numbers]
        state = bits.QuantState(
            absmax=self.scales,
            shape=torch.Size(shape),
            blocksize=BLOCK,
            quant_type=self.kind,
            dtype=dtype,
            offset=self.offset,
            state2=nested,
        )
        values: torch.Tensor = bits.dequantize_4bit(packed.view(torch.uint8).reshape(-1, 1)[: -(-numbers // 2)], state)
        return values.reshape(self.out_features, self.in_features)

    def keep(self, packed: torch.Tensor, **scales: torch.Tensor) -> None:
        """Take packed weights and their scales."""
        self.weight = nn.Parameter(packed, requires_grad=False)
        for name, tensor in scales.items():
            self.register_buffer(name, tensor)


class _Product(torch.autograd.Function):
    """x (..., I) times the packed weights, plus the bias; only x gets a gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, packed: torch.Tensor, values_of: Callable[..., torch.Tensor], bias: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(packed)
        ctx.values_of = values_of
        return functional.linear(x, values_of(packed, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (packed,) = ctx.saved_tensors
        return grads[0] @ ctx.values_of(packed, grads[0].dtype), None, None, None


def quantize(model: nn.Module, kind: str) -> None:
    """Replace the linear layers inside the model's layers by quantized ones, one after the other; on the meta device
    they have no values.

    Raises MissingExtra without bitsandbytes, ConfigError for a model without such layers.
    """
    need_library("bitsandbytes", "8bit", f"model.quantize={kind}")
    for parent, name, linear in _linear_layers(model):
        setattr(parent, name, _quantized(linear, kind))


def round_weights(model: nn.Module, kind: str) -> None:
    """Give the same layers the weights that their quantized form stands for, in the type that they have."""
    need_library("bitsandbytes", "8bit", f"model.quantize={kind}")
    for _, _, linear in _linear_layers(model):
        rounded = _quantized(linear, kind).dequantize()
        linear.weight.data = _as_stored(linear, rounded).to(linear.weight.dtype)


def store_as(model: nn.Module, dtype: torch.dtype) -> None:
    """Let packed weights be seen as numbers of `dtype`, which have the same bits.

    FSDP converts the parameters that it gathers to the type of the computation; of that type already, they stay as
    they are (bitsandbytes calls it bnb_4bit_quant_storage).
    """
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            packed, size = module.weight.data.view(torch.uint8).reshape(-1), dtype.itemsize
            padded = functional.pad(packed, (0, -len(packed) % size))
            module.weight = nn.Parameter(padded.view(dtype).reshape(-1, 1), requires_grad=False)


def _linear_layers(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Return the linear layers inside the model's layers: parent, name in it, and layer."""
    from transformers.pytorch_utils import Conv1D

    inside = [part for layer in layers(model) for part in layer.modules()]
    found = [
        (parent, name, cast(Any, child))
        for parent in dict.fromkeys(inside)
        for name, child in parent.named_children()
        if type(child) in (nn.Linear, Conv1D)
    ]
    if not found:
        raise ConfigError(
            f"model.quantize: {type(model).__name__} has no linear layers in a list of layers. Remove it."
        )
    return found


def _as_stored(linear: Any, weight: torch.Tensor) -> torch.Tensor:
    """Transpose the weights of GPT-2's linear layer from and to (O, I)."""
    return weight if isinstance(linear, nn.Linear) else weight.T.contiguous()


def _quantized(linear: Any, kind: str) -> QuantizedLinear:
    weight = _as_stored(linear, linear.weight.data)
    outputs, inputs = weight.shape
    made = QuantizedLinear(kind, outputs, inputs, linear.bias)
    if weight.is_meta:
        _keep_shapes(made, weight.numel())
        return made
    bits = _library()
    if kind == "int8":
        packed, scales, _ = bits.int8_vectorwise_quant(weight.half())
        made.keep(packed, scales=scales.float())
        return made
    packed, state = bits.quantize_4bit(weight, blocksize=BLOCK, compress_statistics=True, quant_type=kind)
    nested = state.state2
    made.keep(packed, scales=state.absmax, scales_of_scales=nested.absmax, codes=nested.code, offset=state.offset)
    return made


def _library() -> Any:
    from bitsandbytes import functional

    return functional


def _keep_shapes(made: QuantizedLinear, numbers: int) -> None:
    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    if made.kind == "int8":
        made.keep(empty(made.out_features, made.in_features, dtype=torch.int8), scales=empty(made.out_features))
        return
    blocks = -(-numbers // BLOCK)
    made.keep(
        empty(-(-numbers // 2), 1, dtype=torch.uint8),
        scales=empty(blocks, dtype=torch.uint8),
        scales_of_scales=empty(-(-blocks // BLOCK_OF_SCALES)),
        codes=empty(CODES),
        offset=empty(),
    )
