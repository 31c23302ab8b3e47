"""One rank, the model as it is."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

MIN_RANKS = 1
MAX_RANKS: int | None = 1
never: dict[str, str] = {}


def wrap(model: nn.Module, *, device: torch.device) -> nn.Module:
    """The model itself."""
    return model


def no_sync(module: nn.Module) -> AbstractContextManager[None]:
    """Nothing is shared, so nothing is held back."""
    return nullcontext()


def clip_norm(module: nn.Module, max_norm: float) -> float:
    """Scale the gradients to a norm of at most `max_norm`; returns their norm before."""
    return float(torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm))


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    """The model's tensors by name, not copied."""
    return module.state_dict()
