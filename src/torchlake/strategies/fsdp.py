"""Every rank holds a part of each weight, gradient and moment; a layer is whole only while it computes.

`fully_shard` (FSDP2; Zhao et al. 2023, after ZeRO of Rajbhandari et al. 2020) over each transformer layer, then over
the rest. With `train.fsdp.reshard`, a layer's weights are freed after its forward pass and gathered again for its
backward pass (ZeRO-3): 1.5 times the communication of `ddp`, for the least memory. Without, they stay (ZeRO-2). With
`train.fsdp.shard_ranks`, neighboring ranks share one copy, and copies average their gradients (hybrid sharding), so
gathering stays inside a machine.

With `train.fsdp.tensor_parallel`, neighboring ranks compute the same rows together, each a part of the heads and of the
feed-forward width of every layer (`models/parallel.py`). A part is then sharded over the groups of such ranks. So a
layer is whole nowhere. Cost: two all_reduces of the hidden states per layer and direction, which no computation hides;
checkpoints gather these weights one by one.

In bf16_weights, bf16 and fp16, weights are gathered in 16 bits, which halves the communication; gradients are summed in
fp32, and the trained weights stay in fp32.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate

from torchlake import optim
from torchlake.checkpoints import format, shards
from torchlake.checkpoints.shards import Pieces, Tensors
from torchlake.config.job import TrainConfig
from torchlake.distributed import Group
from torchlake.errors import UsageError
from torchlake.models.load import layers
from torchlake.models.parallel import split_layers
from torchlake.strategies import _native

MAX_RANKS: int | None = None
never: dict[str, str] = {}
backward, step = _native.backward, _native.step
discard_gradients, restore = _native.discard_gradients, _native.restore
TENSOR = "tensor"
"The dimension of the mesh over which layers are split."


def refusal(train: TrainConfig) -> str | None:
    """Why it cannot run here: only weights on GPUs can be offloaded."""
    if train.fsdp.cpu_offload and not torch.cuda.is_available():
        return "train.fsdp.cpu_offload moves weights from a GPU to main memory, and there is no GPU here"
    return None


def model_ranks(train: TrainConfig) -> int:
    """Those of tensor parallelism."""
    return train.fsdp.tensor_parallel


def reduces_in_main_memory(train: TrainConfig) -> bool:
    """Offloaded gradients are clipped there."""
    return train.fsdp.cpu_offload


def wrap(
    model: nn.Module, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer], *, group: Group, train: TrainConfig
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model with its parameters sharded layer by layer: at most one layer is whole on the device."""
    mesh = _mesh(group, train.fsdp.shard_ranks)
    if group.model_ranks > 1:
        split_layers(model, mesh[TENSOR])
        mesh = mesh[tuple(name for name in mesh.mesh_dim_names or () if name != TENSOR)]
    dtype = optim.find_precision(train.precision, group.device).dtype
    precision = MixedPrecisionPolicy() if dtype is None else MixedPrecisionPolicy(dtype, torch.float32)
    offload = CPUOffloadPolicy() if train.fsdp.cpu_offload else OffloadPolicy()
    for part in (*layers(model), model):
        fully_shard(
            part, mesh=mesh, reshard_after_forward=train.fsdp.reshard, mp_policy=precision, offload_policy=offload
        )
    return model, make_optimizer(model)


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Gradients accumulate whole on each rank and are not reduced: faster, but needs memory for a whole gradient."""
    assert isinstance(module, FSDPModule), "wrap() was not called"
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


def clip_norm(module: nn.Module, max_norm: float, scale: float) -> torch.Tensor:
    """As in `_native`, also for gradients on different meshes.

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
    """As in `_native`; tensors that are not split by rows alone are gathered, and stored whole."""
    tensors = format.untied(model.state_dict())
    return _stored({name: tensor for name, tensor in tensors.items() if name in wanted}, group)


def optimizer_shard(model: nn.Module, optimizer: torch.optim.Optimizer, names: Sequence[str], group: Group) -> Pieces:
    """The same for the optimizer's tensors."""
    return _stored(format.optimizer_tensors(optimizer, names), group)


def _stored(tensors: Tensors, group: Group) -> Pieces:
    """What this rank stores of tensors that have the same names on all ranks."""
    split = {name: cast(DTensor, tensor) for name, tensor in tensors.items() if not shards.in_rows(tensor)}
    # Ranks that compute the same rows have the same parts of what is not split.
    rows = {
        name: tensor
        for name, tensor in tensors.items()
        if name not in split and (group.counts or not isinstance(tensor, DTensor))
    }
    like = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in split.items()}
    whole = _native.gathered_shard(like, lambda name: _gathered(split[name]), group)
    return shards.local_shard(rows, rank=group.rank, world_size=group.world_size) | whole


def _gathered(tensor: DTensor) -> torch.Tensor:
    """A whole tensor, gathered over one dimension of the mesh after the other, as it was split last."""
    placements = list(tensor.placements)
    for dimension in range(len(placements)):
        placements[dimension] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def _copies(tensor: DTensor) -> int:
    """How many ranks have the same part of a tensor."""
    mesh = tensor.device_mesh
    repeated = [mesh.size(place) for place, each in enumerate(tensor.placements) if each.is_replicate()]
    return math.prod(repeated) * dist.get_world_size() // mesh.size()


def _mesh(group: Group, shard_ranks: int | None) -> DeviceMesh:
    """The dimensions "replicate" and "tensor" only for hybrid sharding and tensor parallelism; the latter's ranks are
    neighbors.
    """
    ranks, shape = group.data_ranks, {"shard": group.data_ranks}
    if shard_ranks is not None and shard_ranks != ranks:
        if ranks % shard_ranks:
            raise UsageError(
                f"train.fsdp.shard_ranks={shard_ranks}: {ranks} ranks cannot be split into groups of that size. "
                "Choose a divisor."
            )
        shape = {"replicate": ranks // shard_ranks, "shard": shard_ranks}
    if group.model_ranks > 1:
        shape[TENSOR] = group.model_ranks
    return init_device_mesh(group.device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
