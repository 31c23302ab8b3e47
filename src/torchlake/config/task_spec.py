"""The task of a model, stored as task.json beside its weights."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from torchlake.errors import DataError

Problem = Literal["single_label", "multi_label", "regression", "next_token", "next_answer_token"]
Label = str | int | bool

TASK_FILE = "task.json"
GENERATIVE: tuple[Problem, ...] = ("next_token", "next_answer_token")
"Problems without a label: the loss is over every token, or over those of the assistant's turns."
PROBLEMS: tuple[Problem, ...] = ("single_label", "multi_label", "regression", *GENERATIVE)
WITHOUT_CLASSES = ("regression", *GENERATIVE)
OPTIONAL_FIELDS = ("mean", "deviation")
"Fields that may be absent from task.json."


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """The task of a model; stored as task.json beside its weights."""

    task: str
    "A file in torchlake/tasks."
    problem: Problem
    labels: tuple[Label, ...]
    "The classes in the order of the model's outputs, in the data's type; empty for regression and text generation."
    text: str
    "Column of the input."
    label: str | None
    "Column of the target; None for text generation."
    max_length: int
    "Maximum tokens of a row, including special tokens; for tasks that pack rows, tokens of a block."
    mean: float | None = None
    "Mean of a regression's targets; None: the model's outputs are the predictions."
    deviation: float | None = None
    "Standard deviation of the targets, above 0: prediction = output * deviation + mean."

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that training reads: the text, and the label if there is one."""
        return (self.text,) if self.label is None else (self.text, self.label)


@dataclass(frozen=True, kw_only=True)
class LabelColumn:
    """What the label column of a training table holds."""

    problem: Problem
    labels: tuple[Label, ...]
    "The classes, sorted; empty for regression."
    counts: tuple[int, ...]
    "Rows of each class."
    rows: int
    "Rows with a label."
    mean: float | None = None
    "Of a regression's targets."
    deviation: float | None = None
    note: str | None = None
    "For a column that could be read in two ways: how it was read, and the setting for the other way."


def label_name(label: Label) -> str:
    """A class as written in config.json and job files."""
    return str(label).lower() if isinstance(label, bool) else str(label)


def spec_to_json(spec: TaskSpec) -> dict[str, Any]:
    """The content of task.json; `mean` and `deviation` only if they are set, as in earlier versions."""
    return {name: value for name, value in asdict(spec).items() if value is not None or name not in OPTIONAL_FIELDS}


def spec_from_json(file: Path, value: Any) -> TaskSpec:
    """The `TaskSpec` in the content of a task.json. Raises DataError for a wrong value; `file` is for the message."""
    types = {"task": str, "problem": str, "labels": list, "text": str, "label": str, "max_length": int}
    if not isinstance(value, dict) or value.keys() - set(OPTIONAL_FIELDS) != types.keys():
        raise DataError(
            f"{file}: a task has exactly the keys {', '.join(types)}, and of a regression also "
            f"{' and '.join(OPTIONAL_FIELDS)}"
        )
    unlabeled = value["problem"] in GENERATIVE
    for key, kind in types.items():
        if key == "label" and unlabeled and value[key] is None:
            continue
        if not isinstance(value[key], kind) or isinstance(value[key], bool):
            raise DataError(f"{file}: {key} is {value[key]!r}; {kind.__name__} is expected")
    labels = value["labels"]
    if value["problem"] not in PROBLEMS:
        raise DataError(f"{file}: problem is {value['problem']!r}; it is one of {', '.join(PROBLEMS)}")
    if len({type(label) for label in labels}) > 1 or not all(isinstance(label, str | int) for label in labels):
        raise DataError(f"{file}: labels are all strings, all integers or all booleans")
    if len(set(labels)) != len(labels) or (value["problem"] in WITHOUT_CLASSES) != (not labels):
        raise DataError(f"{file}: labels are distinct, and empty for {', '.join(WITHOUT_CLASSES)} only")
    if unlabeled != (value["label"] is None):
        raise DataError(f"{file}: label is null for {', '.join(GENERATIVE)} only")
    _check_scale(file, value)
    return TaskSpec(**{**value, "labels": tuple(labels)})


def _check_scale(file: Path, value: dict[str, Any]) -> None:
    """Raise DataError for an invalid `mean` or `deviation`."""
    scale = [value.get(name) for name in OPTIONAL_FIELDS]
    if scale == [None, None]:
        return
    numbers = [
        one for one in scale if isinstance(one, int | float) and not isinstance(one, bool) and math.isfinite(one)
    ]
    if value["problem"] != "regression" or len(numbers) < 2 or numbers[1] <= 0:
        raise DataError(
            f"{file}: {' and '.join(OPTIONAL_FIELDS)} are two numbers, the second above 0, and of a regression only"
        )
