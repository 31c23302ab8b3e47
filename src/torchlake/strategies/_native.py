"""Functions of the strategies whose gradients and moments are torch's own tensors, whole or sharded (DTensors)."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torchlake.checkpoints import format, shards
from torchlake.checkpoints.shards import Piece, Pieces, Shards, Tensors
from torchlake.config.sections.train import TrainConfig
from torchlake.distributed import Group
from torchlake.optim.optimizers import skips_on_device, start_at_zero
from torchlake.optim.precision import ComputeWeights, find_precision


def refusal(train: TrainConfig) -> str | None:
    """Return None: nothing prevents it."""
    return None


def reduces_in_main_memory(train: TrainConfig) -> bool:
    """Return False: all tensors of a collective are on the group's device."""
    return False


def model_ranks(train: TrainConfig) -> int:
    """Return 1: every rank computes whole layers."""
    return 1


def receives(train: TrainConfig, group: Group) -> bool:
    """Return False: every rank loads the weights."""
    return False


def with_compute_weights(model: nn.Module, *, group: Group, train: TrainConfig) -> nn.Module:
    """Return the model, computing with 16-bit copies of its weights if the precision is that of the weights."""
    precision = find_precision(train.precision, group.device)
    if precision.dtype is None or not precision.weights:
        return model
    return ComputeWeights(model, precision.dtype)


def backward(module: nn.Module, loss: torch.Tensor) -> None:
    """Add the gradients of `loss`."""
    computed = module.module if isinstance(module, DistributedDataParallel) else module
    try:
        loss.backward()
    finally:
        if isinstance(computed, ComputeWeights):
            computed.restore()


def clip_norm(module: nn.Module, max_norm: float, scale: float) -> torch.Tensor:
    """Divide the gradients by `scale`, then clip them to `max_norm`; return their norm before clipping.

    The norm () is that of the whole gradient on every rank, so all ranks take a step or none does. It stays on the
    device.
    """
    if scale != 1:
        torch._foreach_mul_([each.grad for each in module.parameters() if each.grad is not None], 1 / scale)
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def step(module: nn.Module, optimizer: torch.optim.Optimizer, finite: torch.Tensor) -> None:
    """Take one optimizer step if `finite`; clear the gradients.

    The kernels of torch's fused optimizers read the flag, so the host does not wait for it: unless it is set, weights,
    moments and step counts stay as they are. Other optimizers and weights in main memory (`fsdp.cpu_offload`) wait.
    """
    if not skips_on_device(optimizer):
        if finite.item():
            optimizer.step()
        optimizer.zero_grad()
        return
    start_at_zero(optimizer)
    device = optimizer.param_groups[0]["params"][0].device
    cast(Any, optimizer).found_inf = finite.logical_not().to(device, torch.float32)
    optimizer.step()
    optimizer.zero_grad()


def discard_gradients(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Clear the gradients."""
    optimizer.zero_grad()


def gathered_shard(like: Tensors, gather: Callable[[str], torch.Tensor], group: Group) -> Pieces:
    """Return what this rank stores of tensors that are stored whole; `like` describes them, on the meta device.

    All ranks gather all of them, in the same order, and each keeps its part in main memory.
    """
    mine = shards.local_shard(like, rank=group.rank, world_size=group.world_size)
    pieces = {}
    for name in like:
        tensor = gather(name)
        if name in mine:
            pieces[name] = Piece(tensor.detach().to("cpu", copy=True), 0, tuple(tensor.shape))
    return pieces


def restore(optimizer: torch.optim.Optimizer, names: Sequence[str], stored: Shards) -> None:
    """Load the moments, this rank's rows of them."""
    format.restore_optimizer(optimizer, names, stored)
