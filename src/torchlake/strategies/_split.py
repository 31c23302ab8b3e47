"""What strategies store of torch's own tensors, and functions of `fsdp` for layers that are split over ranks: their
tensors are on a separate mesh.

    mesh ("shard", "tensor")    weights of split layers, by rows or columns over "tensor", then by rows over "shard"
    mesh ("shard",)             all other weights, equal on the ranks of "tensor"
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from torchlake.checkpoints import format, shards
from torchlake.checkpoints.shards import Pieces, Tensors
from torchlake.distributed import Group
from torchlake.optim.depth import layers
from torchlake.strategies import _native

TENSOR = "tensor"
"The dimension of the mesh over which layers are split."


def split_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split the layers of a loaded model over a mesh of one dimension, in place, for training.

    Embeddings and the head stay whole: the loss in chunks reads the head's weight, and strategies shard both.
    """
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plan: Mapping[str, str] = cast(Any, model).tp_plan
    inside = {id(module) for layer in layers(model) for module in layer.modules()}
    styles: dict[str, str] = {}
    for name, module in model.named_modules():
        if id(module) not in inside:
            continue
        rule = re.sub(r"\d+", "*", name)
        own = {name: plan.get(rule)}
        own |= {
            f"{name}.{key}": plan.get(f"{rule}.{key}", plan.get(rule))
            for key, _ in module.named_parameters(recurse=False)
        }
        styles |= {key: style for key, style in own.items() if style is not None}
    apply_tensor_parallelism(model, mesh, styles)


def clip_norm(module: nn.Module, max_norm: float, scale: float) -> torch.Tensor:
    """Clip as `_native` does, also gradients on different meshes.

    Each rank sums the squares of its parts, divided by the number of ranks that have the same part, and one all_reduce
    adds them up.
    """
    grads = [cast(DTensor, each.grad) for each in module.parameters() if each.grad is not None]
    if not any(TENSOR in (each.device_mesh.mesh_dim_names or ()) for each in grads):
        return _native.clip_norm(module, max_norm, scale)
    parts = [each.to_local() for each in grads]
    if scale != 1:
        torch._foreach_mul_(parts, 1 / scale)
    norms = torch.stack(torch._foreach_norm(parts))
    copies = torch.tensor([_copies(each) for each in grads], dtype=norms.dtype, device=norms.device)
    total = (norms.square() / copies).sum()
    dist.all_reduce(total)
    norm = total.sqrt()
    torch._foreach_mul_(parts, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def model_shard(model: nn.Module, wanted: Collection[str], group: Group) -> Pieces:
    """Return this rank's rows of sharded tensors, and an equal part of the replicated ones, not copied; tensors that
    are not split by rows alone are gathered, and stored whole."""
    tensors = format.untied(model.state_dict())
    return _stored({name: tensor for name, tensor in tensors.items() if name in wanted}, group)


def optimizer_shard(model: nn.Module, optimizer: torch.optim.Optimizer, names: Sequence[str], group: Group) -> Pieces:
    """Return the same for the optimizer's tensors."""
    return _stored(format.optimizer_tensors(optimizer, names), group)


def _stored(tensors: Tensors, group: Group) -> Pieces:
    """Return what this rank stores of tensors that have the same names on all ranks."""
    split = {name: cast(DTensor, tensor) for name, tensor in tensors.items() if not shards.in_rows(tensor)}
    # Ranks that compute the same rows have the same parts of tensors that are not split.
    rows = {
        name: tensor
        for name, tensor in tensors.items()
        if name not in split and (group.counts or not isinstance(tensor, DTensor))
    }
    like = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in split.items()}
    whole = _native.gathered_shard(like, lambda name: _gathered(split[name]), group)
    return shards.local_shard(rows, rank=group.rank, world_size=group.world_size) | whole


def _gathered(tensor: DTensor) -> torch.Tensor:
    """Return a whole tensor, gathered over one dimension of the mesh after another, the last split first."""
    placements = list(tensor.placements)
    for dimension in range(len(placements)):
        placements[dimension] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def _copies(tensor: DTensor) -> int:
    """Return how many ranks have the same part of a tensor."""
    mesh = tensor.device_mesh
    repeated = [mesh.size(place) for place, each in enumerate(tensor.placements) if each.is_replicate()]
    return math.prod(repeated) * dist.get_world_size() // mesh.size()
