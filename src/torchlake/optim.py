"""What decides an optimizer step besides the rows: AdamW's groups, the learning rate, the seed of the dropout.

All of it is a function of the job and the step's number. So a checkpoint need not hold a scheduler or a generator, and
a resumed run cannot differ from one that was never interrupted.
"""

import math

import numpy as np
import torch
from torch import nn

from torchlake.config.job import TrainConfig
from torchlake.processes import hardware


def make_optimizer(module: nn.Module, train: TrainConfig) -> torch.optim.AdamW:
    """AdamW over the parameters that learn, in the order of `names`.

    Only matrices decay: pulling biases and the scales of norms towards zero changes what a layer can say, not how
    smooth it is. The fused kernel reads each tensor once.
    """
    parameters = dict(module.named_parameters())
    learning = [parameters[name] for name in trainable_names(module)]
    groups = [
        {"params": [each for each in learning if each.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [each for each in learning if each.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=train.learning_rate, fused=True)


def trainable_names(module: nn.Module) -> list[str]:
    """The names of the parameters that learn, as the optimizer's groups have them: matrices, then the others."""
    learning = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
    matrices, others = ([name for name, each in learning if (each.ndim >= 2) is first] for first in (True, False))
    return [*matrices, *others]


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


def autocast_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """What the forward pass computes in beside fp32; None: fp32 alone. "auto": bf16 where the device multiplies it."""
    if precision == "auto":
        if device.type == "cuda":
            has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            has_bf16 = device.type == "cpu" and hardware.multiplies_bf16()
        return torch.bfloat16 if has_bf16 else None
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
