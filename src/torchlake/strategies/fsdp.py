"""Every rank holds a part of each weight, gradient and moment; a layer is whole only while it computes.

`fully_shard` (FSDP2; Zhao et al. 2023, after ZeRO of Rajbhandari et al. 2020) over the word embeddings, each
transformer layer, a language model's head, and the rest. A unit is gathered while the one before it computes. With
`train.fsdp.reshard`, its weights are freed after its forward pass and gathered again for its backward pass (ZeRO-3):
1.5 times the communication of `ddp`, for the least memory. Without, they stay (ZeRO-2). With `train.fsdp.shard_ranks`,
neighboring ranks share one copy, and copies average their gradients (hybrid sharding), so gathering stays inside a
machine.

With `train.fsdp.tensor_parallel`, neighboring ranks compute the same rows together, each a part of the heads and of the
feed-forward width of every layer (`_split.py`). A part is then sharded over the groups of such ranks. So a
layer is whole nowhere. Cost: two all_reduces of the hidden states per layer and direction, which no computation hides;
checkpoints gather these weights one by one.

In bf16_weights, bf16 and fp16, weights are gathered in 16 bits, which halves the communication; gradients are summed in
fp32, and the trained weights stay in fp32.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from torchlake.config.sections.train import TrainConfig
from torchlake.distributed import Group
from torchlake.errors import UsageError
from torchlake.optim.depth import layers
from torchlake.optim.precision import find_precision
from torchlake.strategies import _native, _split, _weights

MAX_RANKS: int | None = None
never: dict[str, str] = {}
backward, clip_norm = _native.backward, _split.clip_norm
step, discard_gradients, restore = _native.step, _native.discard_gradients, _native.restore
model_shard, optimizer_shard = _split.model_shard, _split.optimizer_shard


def refusal(train: TrainConfig) -> str | None:
    """Return why it cannot run here: only weights on GPUs can be offloaded, and some optimizers need whole tensors."""
    if train.optimizer in ("adamw_8bit", "adafactor"):
        library = "bitsandbytes" if train.optimizer == "adamw_8bit" else "torch's Adafactor"
        return f"train.optimizer={train.optimizer}: {library} cannot step on sharded tensors. Use adamw, lion or sgd"
    if train.fsdp.cpu_offload and not torch.cuda.is_available():
        return "train.fsdp.cpu_offload moves weights from a GPU to main memory, and there is no GPU here"
    return None


def model_ranks(train: TrainConfig) -> int:
    """Return the ranks of tensor parallelism."""
    return train.fsdp.tensor_parallel


def reduces_in_main_memory(train: TrainConfig) -> bool:
    """Return whether gradients are offloaded, and then clipped in main memory."""
    return train.fsdp.cpu_offload


def receives(train: TrainConfig, group: Group) -> bool:
    """Return True: each rank keeps a part of what rank 0 loads."""
    return True


def wrap(
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    *,
    group: Group,
    train: TrainConfig,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model with its parameters sharded unit by unit: at most two units and the rest are whole on the
    device."""
    mesh = _mesh(group, train.fsdp.shard_ranks)
    dtype = find_precision(train.precision, group.device).dtype
    precision = MixedPrecisionPolicy() if dtype is None else MixedPrecisionPolicy(dtype, torch.float32)
    offload = CPUOffloadPolicy() if train.fsdp.cpu_offload else OffloadPolicy()
    # Before sharding, which replaces the parameters; sharding the loaded model would need it whole on each GPU.
    values = _weights.take(model, group)
    # Layers are split first: `fully_shard` then shards the parts, over the mesh without the "tensor" dimension.
    if group.model_ranks > 1:
        _split.split_layers(model, mesh[_split.TENSOR])
        mesh = mesh[tuple(name for name in mesh.mesh_dim_names or () if name != _split.TENSOR)]
    units = _units(model, reshard=train.fsdp.reshard)
    # The backward pass begins with the rest: freeing it after the forward pass would gather it twice in a row.
    for modules, reshard in [*units, ([model], False)]:
        fully_shard(modules, mesh=mesh, reshard_after_forward=reshard, mp_policy=precision, offload_policy=offload)
    # Without this the host requests a layer only when the one before has been launched, and the gather is not hidden.
    for here, following in pairwise([model, *(modules[0] for modules, _ in units)]):
        cast(FSDPModule, here).set_modules_to_forward_prefetch([cast(FSDPModule, following)])
    # The optimizer follows the weights: its groups and fused kernels depend on the sharded parameters.
    _weights.scatter(model, values, group, in_main_memory=train.fsdp.cpu_offload)
    return model, make_optimizer(model)


def _units(model: nn.Module, *, reshard: bool) -> list[tuple[list[nn.Module], bool]]:
    """Return the modules to gather together, in the order of the forward pass, and whether to free them after it.

    A head is not freed: the backward pass begins with it. Embeddings and a head with the same weights are one unit.
    They stay in the rest if other modules have their weights too (encoder-decoders), which a unit must gather for all
    of them.
    """
    inside = [([layer], reshard) for layer in layers(model)]
    embedding, head = _end(model, "input"), _end(model, "output")
    ends: list[nn.Module] = [each for each in (embedding, head) if isinstance(each, nn.Embedding | nn.Linear)]
    weights = {id(parameter) for each in ends for parameter in each.parameters()}
    holders = [each for each in model.modules() if any(id(p) in weights for p in each.parameters(recurse=False))]
    # A weight in two units would be freed by one while the other computes with it.
    if not inside or not ends or {id(each) for each in holders} != {id(each) for each in ends}:
        return inside
    if len(ends) == 2 and not {id(p) for p in ends[0].parameters()}.isdisjoint(id(p) for p in ends[1].parameters()):
        return [(ends, False), *inside]
    first = [([embedding], reshard)] if embedding in ends else []
    last = [([head], False)] if head in ends else []
    return [*first, *inside, *last]


def _end(model: nn.Module, which: str) -> nn.Module | None:
    """Return the model's embeddings of its "input" or "output" tokens, if it has any: a model for images may have
    none."""
    try:
        found: nn.Module | None = getattr(model, f"get_{which}_embeddings", lambda: None)()
        return found
    except NotImplementedError:
        return None


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Accumulate whole gradients on each rank without reducing them: faster, but needs memory for a whole gradient."""
    assert isinstance(module, FSDPModule), "wrap() was not called"
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


def _mesh(group: Group, shard_ranks: int | None) -> DeviceMesh:
    """Return the dimensions "replicate" and "tensor" only for hybrid sharding and tensor parallelism; the latter's
    ranks are neighbors.
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
        shape[_split.TENSOR] = group.model_ranks
    return init_device_mesh(group.device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
