"""An exponential moving average of the weights (train.ema; Polyak and Juditsky 1992), beside the optimizer's moments.

    average = d average + (1 - d) weights      after each step that is applied; d = min(train.ema, (1 + n) / (10 + n))

n is the number of the step, so the average forgets the first weights also in a short run (as in TensorFlow). It begins
with the weights after the first step. It is a field of the optimizer's state, in fp32 and sharded like the moments:
checkpoints store it with them, and it continues on any number of ranks. Validations compute with the average, and it is
the model that a run leaves behind. Cost: 4 bytes per trained parameter, and one more pass over the weights per step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from torchlake.optim.optimizers import skips_on_device

AVERAGE = "average"
"The field of the optimizer's state."


@torch.no_grad()
def update(optimizer: torch.optim.Optimizer, ema: float, step: int, applied: torch.Tensor) -> None:
    """Update the averages after step `step`, counted from 1; not at all unless `applied`, () bool on the device."""
    if not skips_on_device(optimizer) and not applied.item():
        return  # the optimizer has no state yet: the first step was skipped
    rate = 1 - min(ema, (1 + step) / (10 + step))
    for parameter in _trained(optimizer):
        state, weight = optimizer.state[parameter], _local(parameter)
        if AVERAGE not in state:
            state[AVERAGE] = torch.clone(parameter).detach()
            continue
        share = applied.to(weight.device, weight.dtype) * rate
        _local(state[AVERAGE]).lerp_(weight, share)


@contextmanager
def exchanged(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Compute with the averages inside; the weights are kept in their place. One tensor at a time is held twice."""
    _exchange(module, optimizer)
    try:
        yield
    finally:
        _exchange(module, optimizer)


@torch.no_grad()
def _exchange(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in _trained(optimizer):
        state = optimizer.state[parameter]
        if AVERAGE in state:
            weight, average = _local(parameter), _local(state[AVERAGE])
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.reshard()  # gathered copies still have the other values


def _trained(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [cast(torch.Tensor, each) for group in optimizer.param_groups for each in group["params"]]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
