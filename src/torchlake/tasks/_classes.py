"""Rows with a label: one class, several classes or a number. The loss, the metrics and the prediction columns.

The label column decides which of them, once, when a job starts (`_label_column.py`).
"""

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from torchlake.config.task_spec import TaskSpec
from torchlake.loss import UNWEIGHTED, Objective, focal_loss
from torchlake.metrics import validation_metrics
from torchlake.tables.arrays import from_numpy
from torchlake.tasks._labels import label_array, label_type

if TYPE_CHECKING:
    import torch

DEFAULT_METRIC = {"single_label": "macro_f1", "multi_label": "micro_f1", "regression": "rmse"}
THRESHOLD = 0.5


def loss_sum(
    logits: "torch.Tensor", targets: "torch.Tensor", spec: TaskSpec, objective: Objective = UNWEIGHTED
) -> "torch.Tensor":
    """Return the summed loss in fp32: (binary) cross entropy, or the squared error in the target's standard deviations.

    `logits` (B, C); `targets` (B,) int64, (B, C) float32, or (B,) float32. Class weights multiply the loss of a row of
    that class or, for multi label, of a positive class.
    """
    from torch.nn import functional

    logits = logits.float()
    weights = None if objective.class_weights is None else logits.new_tensor(objective.class_weights)
    if objective.focal_gamma:
        return focal_loss(logits, targets if spec.problem == "single_label" else targets.float(), objective)
    if spec.problem == "single_label":
        return functional.cross_entropy(
            logits, targets, weights, label_smoothing=objective.label_smoothing, reduction="sum"
        )
    targets = targets.float()
    if spec.problem == "multi_label":
        return functional.binary_cross_entropy_with_logits(logits, targets, pos_weight=weights, reduction="sum")
    if spec.mean is not None and spec.deviation is not None:
        targets = (targets - spec.mean) / spec.deviation
    return functional.mse_loss(logits.squeeze(-1), targets, reduction="sum")


def divisor(targets: np.ndarray, spec: TaskSpec, objective: Objective = UNWEIGHTED) -> float:
    """Return the divisor of the summed loss for targets (B,) or (B, C).

    As in PyTorch: the rows, or the sum of their class weights; rows times classes for multi label.
    """
    if spec.problem == "single_label" and objective.class_weights is not None:
        return float(np.asarray(objective.class_weights)[targets].sum())
    return targets.size


def probabilities(logits: np.ndarray, spec: TaskSpec) -> np.ndarray:
    """Apply softmax or sigmoid, or scale to the unit of the labels; (B, C) float32 in and out."""
    if spec.problem == "regression":
        if spec.mean is None or spec.deviation is None:
            return logits
        return np.asarray(logits.astype(np.float64) * spec.deviation + spec.mean, dtype=np.float32)
    if spec.problem == "multi_label":
        # exp of a non-positive number cannot overflow.
        small = np.exp(-np.abs(logits))
        return np.asarray(np.where(logits >= 0, 1 / (1 + small), small / (1 + small)), dtype=np.float32)
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True), dtype=np.float32)


def output_schema(spec: TaskSpec, all_probabilities: bool = False) -> pa.Schema:
    """Return `label` in the classes' type (a list for multi label) and `score`; for regression only `prediction`."""
    if spec.problem == "regression":
        return pa.schema([pa.field("prediction", pa.float32())])
    kind = label_type(spec)
    label = pa.field("label", pa.list_(kind) if spec.problem == "multi_label" else kind)
    names = probability_names(spec) if all_probabilities else []
    return pa.schema([label, pa.field("score", pa.float32()), *(pa.field(name, pa.float32()) for name in names)])


def output_columns(probabilities: np.ndarray, spec: TaskSpec, all_probabilities: bool) -> pa.Table:
    """Return the prediction columns. `score` is the probability of the most probable class."""
    schema = output_schema(spec, all_probabilities)
    if spec.problem == "regression":
        return pa.table([from_numpy(probabilities[:, 0])], schema=schema)
    classes = label_array(spec)
    if spec.problem == "single_label":
        label = classes.take(from_numpy(probabilities.argmax(axis=1)))
    else:
        row, column = np.nonzero(probabilities >= THRESHOLD)
        offsets = np.searchsorted(row, np.arange(len(probabilities) + 1)).astype(np.int32)
        label = pa.ListArray.from_arrays(from_numpy(offsets), classes.take(from_numpy(column)))
    columns = [label, from_numpy(probabilities.max(axis=1))]
    if all_probabilities:
        columns += [from_numpy(column) for column in probabilities.T]
    return pa.table(columns, schema=schema)


def probability_names(spec: TaskSpec) -> list[str]:
    """Return the names of the C columns that hold `probabilities` if all are requested.

    Of classes that differ in case only, the second gets the suffix _2.
    """
    if spec.problem == "regression":
        return ["prediction"]
    names: dict[str, str] = {}  # by the name without case: Spark and Hive ignore case in names
    for label in spec.labels:
        name = own = f"prob_{str(label).lower() if isinstance(label, bool) else label}"
        number = 1
        while name.casefold() in names:
            number += 1
            name = f"{own}_{number}"
        names[name.casefold()] = name
    return list(names.values())


def metric_names(spec: TaskSpec) -> list[str]:
    """Return the names of the validation metrics, found by computing them on two rows."""
    classes = max(1, len(spec.labels))
    targets = {
        "single_label": np.array([0, 1]),
        "multi_label": np.eye(2, classes, dtype=np.float32),
        "regression": np.array([0.0, 1.0], dtype=np.float32),
    }
    return list(validation_metrics(np.eye(2, classes, dtype=np.float32), targets[spec.problem], spec.problem))
