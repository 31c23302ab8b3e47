"""Weights that rank 0 alone has loaded, on their way to the other ranks, one tensor at a time.

    rank 0        model in main memory -> values, and the model on the meta device -> sharded -> values scattered
    other ranks                           the model on the meta device             -> sharded -> rows received

So a group of N ranks holds one model and its shards, not N models, and every value comes from one rank: randomly
initialized heads and adapters, and buffers that are in no file (rotary frequencies), are equal everywhere. Rank 0 of
the whole group loads, not one rank of each machine: the other machines then read no weights from a storage that may be
slow, and the network carries each number once per copy that the strategy keeps.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from torchlake.checkpoints.shards import as_part, local_part
from torchlake.distributed import Group

Places = list[tuple[dict[str, Any], str]]
"Where modules hold a tensor: tied weights have several places."


def take(model: nn.Module, group: Group) -> list[torch.Tensor]:
    """Move the model to the meta device; return its tensors on rank 0, and nothing on the others."""
    values = []
    for tensor, places in _held(model):
        if group.rank == 0:
            values.append(tensor.detach())
        _put(places, tensor.detach().to("meta"), tensor)
    return values


def scatter(model: nn.Module, values: list[torch.Tensor], group: Group, *, in_main_memory: bool = False) -> None:
    """Fill a sharded model: each rank gets its rows of sharded parameters, and buffers whole. Empty `values`.

    `in_main_memory`: shards stay there, although the group's device is a GPU.
    """
    values.reverse()
    for tensor, places in _held(model):
        value = values.pop() if group.rank == 0 else torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        if isinstance(tensor, DTensor) and group.model_ranks > 1:
            # Not every mesh without the dimension of tensor parallelism has rank 0, so each rank gets the whole.
            split = as_part(local_part(sent(value, group), tensor), tensor)
            _put(places, split.cpu() if in_main_memory else split, tensor)
        elif isinstance(tensor, DTensor):
            if value.is_meta:  # distribute_tensor wants its shape; on a CPU nothing writes to it
                value = torch.empty_like(value, device=group.device)
            sharded = distribute_tensor(value, tensor.device_mesh, tensor.placements)
            _put(places, sharded.cpu() if in_main_memory else sharded, tensor)
        else:
            _put(places, sent(value, group), tensor)


def broadcast(model: nn.Module, group: Group) -> None:
    """Move the model to the group's device, with rank 0's values; on the other ranks it may be on the meta device."""
    for tensor, places in _held(model):
        _put(places, sent(tensor.detach(), group), tensor)


def reserve(model: nn.Module, group: Group) -> None:
    """Send buffers, and give empty parameters main memory, which takes none until something writes to it."""
    for tensor, places in _held(model):
        if not isinstance(tensor, nn.Parameter):
            _put(places, sent(tensor, group), tensor)
        elif tensor.is_meta:
            _put(places, torch.empty(tensor.shape, dtype=tensor.dtype), tensor)


def sent(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Return rank 0's `tensor` on the device of every rank; on the others `tensor` has its shape."""
    if tensor.is_meta:
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=group.device)
    else:
        whole = tensor.to(group.device).contiguous()
    if group.world_size > 1:
        dist.broadcast(whole, 0)
    return whole


def _held(model: nn.Module) -> list[tuple[torch.Tensor, Places]]:
    """Return the parameters and buffers, each once, in the order of the modules, which is the same on all ranks."""
    found: dict[int, tuple[torch.Tensor, Places]] = {}
    for module in model.modules():
        for held in (cast(dict[str, Any], module._parameters), cast(dict[str, Any], module._buffers)):
            for name, tensor in held.items():
                if tensor is not None:
                    found.setdefault(id(tensor), (tensor, []))[1].append((held, name))
    return list(found.values())


def _put(places: Places, tensor: torch.Tensor, before: torch.Tensor) -> None:
    """Put a tensor in the places of another one, as a parameter if the other one was a parameter."""
    new = nn.Parameter(tensor, before.requires_grad) if isinstance(before, nn.Parameter) else tensor
    for held, name in places:
        held[name] = new
