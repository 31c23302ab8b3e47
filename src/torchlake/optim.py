"""The optimizer step apart from the rows: AdamW's groups, the learning rate, the seed of the dropout.

All of it is a function of the job and the step's number. So a checkpoint needs no scheduler or generator state, and a
resumed run equals an uninterrupted one.
"""

import math

import numpy as np
import torch
from torch import nn

from torchlake.config.job import TrainConfig
from torchlake.processes import hardware


def make_optimizer(module: nn.Module, train: TrainConfig) -> torch.optim.AdamW:
    """AdamW over the trained parameters, in the order of `trainable_names`.

    Only matrices decay: decaying biases and the scales of norms would change what a layer computes, not how smooth it
    is. The fused kernel reads each tensor once.
    """
    parameters = dict(module.named_parameters())
    learning = [parameters[name] for name in trainable_names(module)]
    groups = [
        {"params": [each for each in learning if each.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [each for each in learning if each.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=train.learning_rate, fused=True)


def trainable_names(module: nn.Module) -> list[str]:
    """The names of the trained parameters in the order of the optimizer's groups: matrices, then the others."""
    learning = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
    matrices, others = ([name for name, each in learning if (each.ndim >= 2) is first] for first in (True, False))
    return [*matrices, *others]


def learning_rate(step: int, total: int, train: TrainConfig) -> float:
    """The learning rate of step `step`, counted from 0, of `total`: it rises over the warm-up, then falls to about 0.

    No step has a rate of 0: the first takes 1/warm-up of the peak, the last one step's share of it.
    """
    warmup = round(train.warmup * total)
    if step < warmup:
        return train.learning_rate * (step + 1) / warmup
    done = (step - warmup) / (total - warmup)
    if train.schedule == "linear":
        return train.learning_rate * (1 - done)
    if train.schedule == "cosine":
        return train.learning_rate * (1 + math.cos(math.pi * done)) / 2
    return train.learning_rate


def step_seed(seed: int, step: int, rank: int) -> int:
    """The seed of torch's generators for one step on one rank: different on each rank, the same after a resume."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0] >> 1)


def autocast_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """The autocast dtype; None: fp32. "auto": bf16 if the device has bf16 arithmetic."""
    if precision == "auto":
        if device.type == "cuda":
            has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            has_bf16 = device.type == "cpu" and hardware.supports_bf16()
        return torch.bfloat16 if has_bf16 else None
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
