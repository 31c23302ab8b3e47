"""Optimizers over groups of parameters: which ones decay, and at which share of the learning rate.

    adamw        Loshchilov and Hutter 2019; two moments per parameter
    adamw_8bit   the same by bitsandbytes, moments in 8 bits by blocks of 256 (Dettmers et al. 2022)
    sgd          one momentum, or none
    adafactor    a row and a column of second moments per matrix (Shazeer and Stern 2018), as in torch
    lion         one moment, steps of the learning rate's size (Chen et al. 2023), by lion-pytorch

torch's fused kernels of adamw and sgd read on the device whether a step is applied; the others make the host wait for
that.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from torchlake.config.sections.train import TrainConfig
from torchlake.errors import need_library

if TYPE_CHECKING:
    import torch
    from torch import nn

SCALE = "lr_scale"
"The key of a parameter group for its share of the learning rate."
BETAS = {"adamw": (0.9, 0.999), "adamw_8bit": (0.9, 0.999), "lion": (0.9, 0.99)}
"The authors' betas of each optimizer that has them, used unless train.betas is set."
MOMENTUM = 0.9
LIBRARIES = {"lion": ("lion_pytorch", "lion"), "adamw_8bit": ("bitsandbytes", "8bit")}
"For each optimizer that torch lacks, its module and the extra of torchlake that installs it."


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters with the same settings."""

    names: tuple[str, ...]
    weight_decay: float
    scale: float
    "The parameters' share of the learning rate."


def check_installed(train: TrainConfig) -> None:
    """Raise MissingExtra with the pip command when the optimizer's library is not installed."""
    library, extra = LIBRARIES.get(train.optimizer, ("torch", ""))
    need_library(library, extra, f"train.optimizer={train.optimizer}")


def moment_bytes(train: TrainConfig) -> float:
    """Return the bytes per trained parameter of the moments (but for adafactor) and of the average of the weights."""
    moments = {"adamw": 8.0, "adamw_8bit": 2.0, "sgd": 4.0, "adafactor": 0.0, "lion": 4.0}[train.optimizer]
    return (0.0 if train.momentum == 0 else moments) + (0.0 if train.ema is None else 4.0)


def parameter_groups(
    module: "nn.Module", train: TrainConfig, scales: Mapping[str, float] | None = None
) -> list[ParameterGroup]:
    """Return the trained parameters in groups: matrices, then the others, each by its share of the learning rate.

    Only matrices decay: decaying biases and the scales of norms would change what a layer computes, not how smooth it
    is. `scales`: shares by name, 1 for the others.
    """
    found: dict[tuple[bool, float], list[str]] = {}
    learning = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
    for matrices in (True, False):
        for name, parameter in learning:
            if (parameter.ndim >= 2) is matrices:
                found.setdefault((matrices, (scales or {}).get(name, 1.0)), []).append(name)
    return [
        ParameterGroup(names=tuple(names), weight_decay=train.weight_decay if matrices else 0.0, scale=scale)
        for (matrices, scale), names in found.items()
    ]


def trainable_names(module: "nn.Module", train: TrainConfig, scales: Mapping[str, float] | None = None) -> list[str]:
    """Return the names of the trained parameters in the order of the optimizer's groups."""
    return [name for group in parameter_groups(module, train, scales) for name in group.names]


def make_optimizer(
    module: "nn.Module", train: TrainConfig, scales: Mapping[str, float] | None = None
) -> "torch.optim.Optimizer":
    """Return the job's optimizer over the trained parameters, in the order of `trainable_names`."""
    import torch
    from torch.distributed.tensor import DTensor

    parameters = dict(module.named_parameters())
    groups: list[dict[str, Any]] = [
        {
            "params": [parameters[name] for name in group.names],
            "weight_decay": group.weight_decay,
            "lr": train.learning_rate * group.scale,
            SCALE: group.scale,
        }
        for group in parameter_groups(module, train, scales)
    ]
    rate, betas = train.learning_rate, train.betas or BETAS.get(train.optimizer, (0.0, 0.0))
    if train.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=rate, betas=betas, fused=True)
    if train.optimizer == "sgd":
        momentum = MOMENTUM if train.momentum is None else train.momentum
        sharded = any(isinstance(each, DTensor) for each in parameters.values())  # torch has no fused kernel for those
        return torch.optim.SGD(groups, lr=rate, momentum=momentum, fused=not sharded)
    if train.optimizer == "adafactor":
        return torch.optim.Adafactor(groups, lr=rate)
    check_installed(train)
    if train.optimizer == "lion":
        import lion_pytorch

        return cast("torch.optim.Optimizer", lion_pytorch.Lion(groups, lr=rate, betas=betas))
    import bitsandbytes.optim

    library: Any = bitsandbytes.optim
    return cast("torch.optim.Optimizer", library.AdamW8bit(groups, lr=rate, betas=betas))


def set_learning_rate(optimizer: "torch.optim.Optimizer", rate: float) -> None:
    """Set the learning rate of the next step: each group takes its share."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group[SCALE]


def start_at_zero(optimizer: "torch.optim.Optimizer") -> None:
    """Give SGD its moments before the first step. Those that torch makes are not set if that step is not applied."""
    import torch

    if isinstance(optimizer, torch.optim.SGD) and not optimizer.state:
        for group in optimizer.param_groups:
            for parameter in group["params"] if group["momentum"] else ():
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def skips_on_device(optimizer: "torch.optim.Optimizer") -> bool:
    """Return whether the optimizer's kernel reads `found_inf`, so that the host need not wait to know if a step is
    applied."""
    return bool(optimizer.defaults.get("fused"))
