"""Predictions of classes or a number: probabilities from logits, and the columns of the scored table."""

from collections.abc import Callable, Mapping

import numpy as np
import pyarrow as pa

from torchlake.config.task_spec import TaskSpec
from torchlake.labels.encoding import label_array, label_type
from torchlake.tables.arrays import from_numpy

THRESHOLD = 0.5
"With several labels (multi_label), those with at least this probability are predicted; metrics count the same ones."


def _sigmoid(x: np.ndarray) -> np.ndarray:
    # exp of a non-positive number cannot overflow.
    small = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, 1, small) / (1 + small))


FUNCTIONS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "Sigmoid": _sigmoid,
    "Tanh": np.tanh,
    "ReLU": lambda x: np.maximum(x, 0),
    "SiLU": lambda x: x * _sigmoid(x),
    "Softplus": lambda x: np.logaddexp(x, 0),
    "LogSigmoid": lambda x: -np.logaddexp(-x, 0),
}
"The functions named in `config.task_spec.ACTIVATIONS`."


def probabilities(logits: np.ndarray, spec: TaskSpec) -> np.ndarray:
    """Apply softmax or sigmoid, or scale to the unit of the labels; (B, C) float32 in and out.

    A cross-encoder's own activation replaces these.
    """
    if spec.activation is not None:
        return np.asarray(FUNCTIONS[spec.activation](logits), dtype=np.float32)
    if spec.problem == "regression":
        if spec.mean is None or spec.deviation is None:
            return logits
        return np.asarray(logits.astype(np.float64) * spec.deviation + spec.mean, dtype=np.float32)
    if spec.problem == "multi_label":
        return _sigmoid(logits).astype(np.float32)
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

    Of classes that differ in case or blanks only, the second gets the suffix _2.
    """
    if spec.problem == "regression":
        return ["prediction"]
    names: dict[str, str] = {}  # by the name without case and blanks: Spark and Hive ignore case in names
    for label in spec.labels:
        name = own = f"prob_{str(label).lower() if isinstance(label, bool) else label}"
        number = 1
        while (plain := "".join(name.split()).casefold()) in names:
            number += 1
            name = f"{own}_{number}"
        names[plain] = name
    return list(names.values())
