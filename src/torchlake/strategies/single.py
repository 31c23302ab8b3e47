"""One rank, the model as it is."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from torchlake.config.sections.train import TrainConfig
from torchlake.distributed import Group
from torchlake.strategies import _native, _split

MAX_RANKS: int | None = 1
never: dict[str, str] = {}
refusal, reduces_in_main_memory = _native.refusal, _native.reduces_in_main_memory
model_ranks = _native.model_ranks
receives = _native.receives
backward, clip_norm = _native.backward, _native.clip_norm
step, discard_gradients, restore = _native.step, _native.discard_gradients, _native.restore
model_shard, optimizer_shard = _split.model_shard, _split.optimizer_shard


def wrap(
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    *,
    group: Group,
    train: TrainConfig,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model itself, with precision bf16_weights inside a module that computes with 16-bit copies."""
    nn.Module.to(model, group.device)
    return _native.with_compute_weights(model, group=group, train=train), make_optimizer(model)


def no_sync(module: nn.Module) -> AbstractContextManager[None]:
    """Return a context that does nothing."""
    return nullcontext()
