"""Every rank holds the whole model; gradients are averaged while the backward pass still runs.

Costs the model, its gradients and its optimizer state on every rank, and one all_reduce of the gradients a step.
"""

import inspect
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

MIN_RANKS = 2
MAX_RANKS: int | None = None
never: dict[str, str] = {}


def wrap(model: nn.Module, *, device: torch.device) -> nn.Module:
    """The model under DistributedDataParallel; needs a process group.

    Every rank has loaded the same weights, and buffers hold no statistics in the models of this package, so the latter
    are not sent at each forward pass. Gradients live in the buckets that are sent, which saves a copy of them.
    """
    # torch 2.13 gave the option this name, and warns of the older one.
    known = inspect.signature(DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {buffers: False, "gradient_as_bucket_view": True}
    return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None, **options)


def no_sync(module: nn.Module) -> AbstractContextManager[None]:
    """Gradients add up on each rank and are not sent."""
    return cast(AbstractContextManager[None], _ddp(module).no_sync())


def clip_norm(module: nn.Module, max_norm: float) -> float:
    """Scale the gradients, equal on all ranks after the backward pass, to at most `max_norm`; their norm before."""
    return float(torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm))


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    """The model's tensors by name, equal on all ranks, not copied."""
    return cast(nn.Module, _ddp(module).module).state_dict()


def _ddp(module: nn.Module) -> DistributedDataParallel:
    assert isinstance(module, DistributedDataParallel), "wrap() was not called"
    return module
