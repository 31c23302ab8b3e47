"""Tensors of a model that DeepSpeed shards: whole ones to read, and this rank's part to write."""

from typing import Any, cast

import torch
from torch import nn


def untied(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of the model by name; tied weights only under their first name."""
    state: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    first = {id(each): name for name, each in reversed(state.items())}
    return {name: each for name, each in state.items() if first[id(each)] == name}


def whole_shape(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's whole shape, on the meta device."""
    return torch.empty(getattr(tensor, "ds_shape", tensor.shape), device="meta")


def whole_frozen(parameter: nn.Parameter) -> torch.Tensor:
    """Return a frozen parameter, whole, in fp32."""
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
        whole: torch.Tensor = parameter.detach().to(torch.float32, copy=True)
    return whole


def put_part(parameter: nn.Parameter, value: torch.Tensor, field: str | None = None) -> None:
    """Write this rank's part of `value` into the fp32 copy of a parameter, or into one of its moments."""
    from deepspeed import utils

    if not hasattr(parameter, "ds_id"):
        if field is None:
            utils.safe_set_full_fp32_param(parameter, value)
        else:
            utils.safe_set_full_optimizer_state(parameter, value, field)
        return
    # The local functions, because the others ignore the padding of the last rank's part.
    held = cast(Any, parameter).ds_tensor.numel()
    local = torch.zeros(held, dtype=torch.float32)
    part = value.flatten()[held * torch.distributed.get_rank() :][:held]
    local[: len(part)] = part
    if field is None:
        utils.safe_set_local_fp32_param(parameter, local)
    else:
        utils.safe_set_local_optimizer_state(parameter, local, field)
