"""What decides an optimizer step besides the rows: AdamW's groups, the learning rate, the seed of the dropout.

All of it is a function of the job and the step's number. So a checkpoint need not hold a scheduler or a generator, and
a resumed run cannot differ from one that was never interrupted.
"""

import math

import numpy as np
import torch
from torch import nn

from torchlake.config import TrainConfig


def make_optimizer(module: nn.Module, train: TrainConfig) -> tuple[torch.optim.AdamW, list[str]]:
    """AdamW over the parameters that learn, and their names in the order of its groups.

    Only matrices decay: pulling biases and the scales of norms towards zero changes what a layer can say, not how
    smooth it is. The fused kernel reads each tensor once.
    """
    learning = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    matrices = [(name, parameter) for name, parameter in learning if parameter.ndim >= 2]
    others = [(name, parameter) for name, parameter in learning if parameter.ndim < 2]
    groups = [
        {"params": [parameter for _, parameter in matrices], "weight_decay": train.weight_decay},
        {"params": [parameter for _, parameter in others], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=train.learning_rate, fused=True)
    return optimizer, [name for name, _ in [*matrices, *others]]


def learning_rate(step: int, total: int, train: TrainConfig) -> float:
    """The learning rate of step `step`, counted from 0, of `total`: it rises over the warm-up, then falls to about 0.

    No step is wasted on a rate of 0: the first takes 1/warm-up of the peak, the last what is one step short of 0.
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
    """The seed of torch's generators for one step on one rank: ranks drop other units, and a resumed step the same."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0] >> 1)


def uses_bf16(precision: str, device: torch.device) -> bool:
    """Whether the forward pass runs in bf16: when asked for, or ("auto") on a GPU that computes it natively."""
    if precision == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return precision == "bf16"
