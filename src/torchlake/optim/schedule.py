"""The learning rate of a step: a function of the step's number and the number of all steps.

    rate                 linear, cosine              constant               wsd
    peak        /\\                                 /--------              /------\\
               /   \\                              /                      /        \\
    minimum   /      `----                        /                      /          `

It rises over the warm-up to `train.learning_rate`, then falls to `train.min_learning_rate`; wsd (warm-up, stable,
decay; Hu et al. 2024) stays at the peak and falls over the last `train.cooldown` of the steps.
"""

import math

from torchlake.config.sections.train import COOLDOWN, TrainConfig
from torchlake.errors import ConfigError


def learning_rate(step: int, total: int, train: TrainConfig) -> float:
    """Return the learning rate of step `step`, counted from 0, of `total`.

    No step has a rate of 0: the first has 1/warm-up of the peak, the last is one step's share above the minimum.
    """
    peak, lowest = train.learning_rate, train.min_learning_rate
    warmup, falling = phases(total, train)
    if step < warmup:
        return peak * (step + 1) / warmup
    begin = total - falling
    if step < begin or not falling:
        return peak
    done = (step - begin) / falling
    if train.schedule == "cosine":
        return lowest + (peak - lowest) * (1 + math.cos(math.pi * done)) / 2
    return lowest + (peak - lowest) * (1 - done)


def phases(total: int, train: TrainConfig) -> tuple[int, int]:
    """Return the number of steps over which the rate rises, and of those at the end over which it falls."""
    warmup = round((train.warmup or 0.0) * total) if train.warmup_steps is None else train.warmup_steps
    if train.schedule == "constant":
        return warmup, 0
    if train.schedule == "wsd":
        return warmup, round((COOLDOWN if train.cooldown is None else train.cooldown) * total)
    return warmup, total - warmup


def check(total: int, train: TrainConfig) -> None:
    """Raise ConfigError if the learning rate of a run of `total` steps does not rise to its peak, or falls before
    that."""
    warmup, falling = phases(total, train)
    if train.warmup_steps is None:
        return
    if warmup >= total:
        raise ConfigError(
            f"train.warmup_steps={warmup}: the run has {total:,} steps, so the learning rate would never reach its "
            "peak. Lower it, or train longer."
        )
    if warmup + falling > total:
        raise ConfigError(
            f"train.warmup_steps={warmup}: the run has {total:,} steps, and the last {falling:,} of them "
            "(train.cooldown) would begin before the warm-up ends. Lower one of the two settings, or train longer."
        )
