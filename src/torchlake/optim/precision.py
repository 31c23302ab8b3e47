"""The arithmetic of a step: its precision, torch's switches, 16-bit copies of the weights, the seed of the dropout."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.utils.deterministic
from torch import nn

from torchlake.config.sections.train import TrainConfig
from torchlake.processes import hardware


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The arithmetic of the forward and backward pass. Trained weights, gradients and moments are always fp32."""

    dtype: torch.dtype | None
    "The 16-bit dtype; None: fp32."
    weights: bool = False
    "Layers compute with copies of the weights in `dtype`; else autocast converts the operands of each operation."

    @property
    def autocast(self) -> bool:
        """Whether torch's autocast is on."""
        return self.dtype is not None and not self.weights


def step_seed(seed: int, step: int, rank: int) -> int:
    """Return the seed of torch's generators for one step on one rank: different on each rank, the same after a
    resume."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0] >> 1)


@contextmanager
def arithmetic(train: TrainConfig, device: torch.device) -> Iterator[None]:
    """Set torch's switches of this process for a training, and restore them.

    On GPUs products of fp32 matrices use TF32, with 10 bits of mantissa as in fp16, unless precision is fp32. With
    `train.deterministic` torch uses deterministic kernels, and raises RuntimeError where it has none; cuBLAS reads
    CUBLAS_WORKSPACE_CONFIG, which `restarts.train_rank` sets before CUDA starts.
    """
    strict = train.precision == "fp32"
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    deterministic = torch.are_deterministic_algorithms_enabled()
    switches: Any = torch.utils.deterministic
    filled = switches.fill_uninitialized_memory
    if device.type == "cuda":
        torch.set_float32_matmul_precision("highest" if strict else "high")
        torch.backends.cudnn.allow_tf32 = not strict
    if train.deterministic:
        torch.use_deterministic_algorithms(True)
        switches.fill_uninitialized_memory = False  # it would write every new tensor
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions
        torch.use_deterministic_algorithms(deterministic)
        switches.fill_uninitialized_memory = filled


def find_precision(name: str, device: torch.device) -> Precision:
    """Return the precision of a job; "auto" is bf16_weights on GPUs, bf16 on CPUs with its arithmetic, else fp32."""
    if name == "auto":
        if device.type == "cuda":
            name = "bf16_weights" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
        else:
            name = "bf16" if device.type == "cpu" and hardware.supports_bf16() else "fp32"
    dtypes = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "bf16_weights": torch.bfloat16, "fp16": torch.float16}
    return Precision(dtype=dtypes[name], weights=name == "bf16_weights")


class ComputeWeights(nn.Module):
    """`model` with 16-bit copies of its fp32 parameters, made in each forward pass; tied parameters share one.

        fp32 weights -> copies -> forward, backward -> 16-bit gradients of the copies -> fp32 gradients of the weights

    The copies are part of autograd's graph. So the model's parameters stay the fp32 ones, for the optimizer, DDP's
    buckets and checkpoints, and gradients of several micro-batches add up in fp32, as FSDP does it. The copies replace
    the parameters until the end of the backward pass, because activation checkpointing runs layers again in it, or of a
    forward pass without gradients. Buffers stay as they are: rotary frequencies need fp32.

    Cost: 2 bytes per parameter between forward and backward pass, and 6 bytes per parameter read and written in each
    micro-batch. In return no operation converts its operands, and activations, residual sums and norms have 16 bits.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self._dtype = dtype
        places: dict[nn.Parameter, list[tuple[dict[str, Any], str]]] = {}
        for module in model.modules():
            held: dict[str, Any] = module._parameters
            for name, parameter in held.items():
                if parameter is not None and parameter.dtype is torch.float32:
                    places.setdefault(parameter, []).append((held, name))
        self._places = places

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns."""
        self._place()
        try:
            output = self.model(*args, **kwargs)
        except BaseException:
            self.restore()
            raise
        if not torch.is_grad_enabled():
            self.restore()
        return output

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Keep the copies in place for several passes without gradients."""
        self._place()
        try:
            yield
        finally:
            self.restore()

    def _place(self) -> None:
        for parameter, places in self._places.items():
            copy = parameter.to(self._dtype)
            for held, name in places:
                held[name] = copy

    def restore(self) -> None:
        """Put the fp32 parameters back."""
        for parameter, places in self._places.items():
            for held, name in places:
                held[name] = parameter
