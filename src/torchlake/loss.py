"""Class weights, label smoothing and the focal factor of the training loss.

    balanced    one class per row: rows / (classes x rows of the class), so that every class has the same total weight
                several: rows without the class / rows with it, so that both have the same total weight
    by label    the weights that the job gives, 1 for the others

They are PyTorch's `weight` of cross entropy and `pos_weight` of binary cross entropy.

The focal loss (Lin et al. 2017) multiplies the loss of each target by (1 - p)^gamma, where p is the probability that
the model gives to it, so that targets the model already predicts well count little. The divisor stays that of the
unweighted loss.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from torchlake.config.task_spec import TaskSpec, label_name
from torchlake.errors import ConfigError

if TYPE_CHECKING:  # the job's model imports pydantic, and scoring imports this module
    import torch

    from torchlake.config.sections.train import TrainConfig

EPSILON = 2.0**-24
"The distance between 1 and the next lower number in fp32."
SMALL_BYTES = 2**26
"""Bytes of fp32 logits above which a language model computes its loss itself, with logits at its targets only."""
CHUNK_BYTES = 2**30
"""Bytes of the fp32 logits that this loss holds at once.

Every chunk adds to the whole gradient of the head's weight, so few large ones are faster than many small ones."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The settings of the loss."""

    class_weights: tuple[float, ...] | None = None
    "One weight for each class, in the order of the model's outputs; None: all are 1."
    label_smoothing: float = 0.0
    "Share of the target that is spread equally over all classes."
    focal_gamma: float = 0.0
    "Exponent of the focal factor; 0: no factor."


UNWEIGHTED = Objective()


def check_objective(train: "TrainConfig", spec: TaskSpec) -> None:
    """Raise ConfigError for loss settings that the problem does not support, and for weights of unknown labels."""
    weights = train.class_weights
    for name, given in (("focal_gamma", train.focal_gamma), ("class_weights", weights is not None)):
        if given and spec.problem not in ("single_label", "multi_label"):
            raise ConfigError(
                f"train.{name}: the problem is {spec.problem}; only classes of whole rows (single_label, multi_label) "
                "have this setting. Leave it out."
            )
    if train.label_smoothing and spec.problem != "single_label":
        raise ConfigError(
            f"train.label_smoothing: the problem is {spec.problem}; only one label per row (single_label) can be "
            "smoothed. Leave it out."
        )
    if isinstance(weights, Mapping):
        names = [label_name(label) for label in spec.labels]
        unknown = [label for label in weights if label not in names]
        if unknown:
            more = " ..." if len(names) > 20 else ""
            raise ConfigError(
                f"train.class_weights: there is no class {unknown[0]!r}; the classes are {', '.join(names[:20])}{more}"
            )


def find_objective(train: "TrainConfig", spec: TaskSpec, targets: np.ndarray | None, rows: np.ndarray) -> Objective:
    """Return the objective for the `rows` (R,) of a table with `targets`, (N,) class numbers or (N, C) of 0 and 1."""
    weights = train.class_weights
    if weights is None or targets is None:
        return Objective(label_smoothing=train.label_smoothing, focal_gamma=train.focal_gamma)
    if isinstance(weights, Mapping):
        found = [weights.get(label_name(label), 1.0) for label in spec.labels]
    else:
        found = _balanced(targets[rows], len(spec.labels)).tolist()
    return Objective(class_weights=tuple(found), label_smoothing=train.label_smoothing, focal_gamma=train.focal_gamma)


def focal_loss(logits: "torch.Tensor", targets: "torch.Tensor", objective: Objective) -> "torch.Tensor":
    """Return the summed focal loss, a scalar, of `logits` (B, C) in fp32.

    `targets` are (B,) int64 class numbers, or (B, C) of 0 and 1. Powers of 1 - p below 1 have an infinite gradient at
    p = 1, so p is kept one rounding error away from 1.
    """
    from torch.nn import functional

    weights = None if objective.class_weights is None else logits.new_tensor(objective.class_weights)
    if targets.ndim == 1:
        weighted = functional.cross_entropy(logits, targets, weights, reduction="none")
        probable = logits.softmax(dim=-1).gather(-1, targets[:, None]).squeeze(-1)
    else:
        weighted = functional.binary_cross_entropy_with_logits(logits, targets, pos_weight=weights, reduction="none")
        probable = (logits * (2 * targets - 1)).sigmoid()
    return ((1 - probable).clamp(min=EPSILON) ** objective.focal_gamma * weighted).sum()


def _balanced(targets: np.ndarray, classes: int) -> np.ndarray:
    """Return (C,) weights; the weight is 1 for a class that no row or every row has."""
    if targets.ndim == 2:
        having = targets.sum(axis=0, dtype=np.float64)
        share, whole = having, len(targets) - having
    else:
        share = np.bincount(targets, minlength=classes).astype(np.float64)
        whole = np.full(classes, len(targets) / np.count_nonzero(share))
    fine = (share > 0) & (whole > 0)
    return np.where(fine, whole / np.where(fine, share, 1.0), 1.0)
