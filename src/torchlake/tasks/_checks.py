"""The checked forms of a task's methods: a mistake in a task is an error that names the task and the method."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from torchlake.config.task_spec import TaskSpec
from torchlake.data.features import Array
from torchlake.errors import TaskError, TorchlakeError
from torchlake.loss import Objective

if TYPE_CHECKING:
    import torch


def checked_options(task: Any, given: Mapping[str, Any], error: type[TorchlakeError]) -> dict[str, Any]:
    """Return all options, with the given values. Raises `error` for an option that the task does not have."""
    known = ", ".join(task.options) or "none"
    for name, value in given.items():
        if name not in task.options:
            raise error(f"task_options: {task.name} has no option {name!r}; it has: {known}")
        default = task.options[name]
        if not _is_like(value, default):
            strings = "a list of strings is expected (in YAML, yes and no need quotes)"
            wanted = strings if isinstance(default, list) else f"a value like {default!r} is expected"
            raise error(f"task_options: {name} is {value!r}, but {wanted}")
    lists = {name: list(value) for name, value in given.items() if isinstance(value, tuple)}
    options = {**task.options, **given, **lists}
    try:
        task.check_options(options)
    except ValueError as wrong:
        raise error(f"task_options: {wrong}") from None
    return options


def checked_batch(
    task: Any, arrays: Mapping[str, Array], rows: np.ndarray, processor: Any, spec: TaskSpec, *, seed: int | None = None
) -> dict[str, np.ndarray]:
    """Return `collate` of the rows. Raises TaskError if it loses or adds a row."""
    batch: dict[str, np.ndarray] = task.collate(arrays, rows, processor, spec, seed=seed)
    for name, array in batch.items():
        if array.ndim == 0 or len(array) != len(rows):
            raise TaskError(
                f"the task {task.name!r}: collate returned {name!r} of shape {array.shape} for {len(rows)} rows; "
                "its first dimension must be the rows"
            )
    return batch


def checked_outputs(task: Any, answer: Any, rows: int) -> "torch.Tensor":
    """Return `outputs` of the model's answer for `rows` rows. Raises TaskError for another number of rows."""
    try:
        outputs: torch.Tensor = task.outputs(answer)
    except AttributeError:
        raise TaskError(
            f"the task {task.name!r}: the model returned a {type(answer).__name__}; the method outputs must turn "
            "it into a tensor"
        ) from None
    if outputs.ndim == 0 or len(outputs) != rows:
        raise TaskError(
            f"the task {task.name!r}: the model's outputs have the shape {tuple(outputs.shape)} for {rows} rows; "
            "their first dimension must be the rows"
        )
    return outputs


def checked_loss(
    task: Any, outputs: "torch.Tensor", targets: "torch.Tensor | None", spec: TaskSpec, objective: Objective
) -> "torch.Tensor":
    """Return `loss_sum`. Raises TaskError unless it is one number that depends on the outputs."""
    loss: torch.Tensor = task.loss_sum(outputs, targets, spec, objective)
    shape = getattr(loss, "shape", None)
    if shape is None or len(shape):
        what = f"a {type(loss).__name__}" if shape is None else f"a tensor of shape {tuple(shape)}"
        raise TaskError(f"the task {task.name!r}: loss_sum returned {what}; it must return the sum over the rows, ()")
    if outputs.requires_grad and not loss.requires_grad:
        raise TaskError(
            f"the task {task.name!r}: the loss does not depend on the model's outputs. Check whether a tensor is "
            "detached"
        )
    return loss


def checked_metrics(task: Any, answers: np.ndarray, targets: np.ndarray | None, spec: TaskSpec) -> dict[str, float]:
    """Return `metrics` as plain floats. Raises TaskError for what is not a dict of numbers."""
    found = task.metrics(answers, targets, spec)
    try:
        return {str(name): float(value) for name, value in found.items()}
    except (AttributeError, TypeError, ValueError):
        raise TaskError(
            f"the task {task.name!r}: metrics returned {found!r}; it must return {{name: number}}, one number for "
            "each metric"
        ) from None


def _is_like(value: Any, default: Any) -> bool:
    """Return whether an option's value is of the type of its default; a whole number is a number, too."""
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    if isinstance(default, list):
        return isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)
    return isinstance(value, type(default)) or (isinstance(default, float) and isinstance(value, int))
