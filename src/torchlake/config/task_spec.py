"""What a model is asked, stored as task.json beside its weights."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from torchlake.errors import DataError

Problem = Literal["single_label", "multi_label", "regression", "next_token", "next_answer_token"]
Label = str | int | bool

TASK_FILE = "task.json"
WRITING: tuple[Problem, ...] = ("next_token", "next_answer_token")
"The problems without a label: every token is learned, or those of the assistant's turns in a conversation."
PROBLEMS: tuple[Problem, ...] = ("single_label", "multi_label", "regression", *WRITING)
WITHOUT_CLASSES = ("regression", *WRITING)
OPTIONAL = ("mean", "deviation")
"Fields that task.json may lack."


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """What a model is asked; stored as task.json beside its weights."""

    task: str
    "A file in torchlake/tasks."
    problem: Problem
    labels: tuple[Label, ...]
    "The classes in the order of the model's outputs, in the type that the data gave them; empty for numbers, texts."
    text: str
    "Column of the input."
    label: str | None
    "Column of the target; None where the text itself is what is learned."
    max_length: int
    "Tokens a row is cut to, special tokens counted; of a task that packs, tokens of a block."
    mean: float | None = None
    "Of the numbers that a regression learned, with `deviation`; None: its outputs are the numbers themselves."
    deviation: float | None = None
    "Their standard deviation, above 0: a model's output times it, plus `mean`, is the prediction."

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that training reads: the text, and the label where there is one."""
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
    "Of the numbers of a regression."
    deviation: float | None = None
    note: str | None = None
    "How a column that could be read in two ways was read, and the setting for the other; None: there was one way."


def label_name(label: Label) -> str:
    """A class as config.json and job files write it."""
    return str(label).lower() if isinstance(label, bool) else str(label)


def spec_to_json(spec: TaskSpec) -> dict[str, Any]:
    """The plain values of task.json: without `mean` and `deviation` where there are none, as versions before had it."""
    return {name: value for name, value in asdict(spec).items() if value is not None or name not in OPTIONAL}


def spec_from_json(file: Path, value: Any) -> TaskSpec:
    """The `TaskSpec` in the value of a task.json. Raises DataError naming what is wrong in `file`."""
    types = {"task": str, "problem": str, "labels": list, "text": str, "label": str, "max_length": int}
    if not isinstance(value, dict) or value.keys() - set(OPTIONAL) != types.keys():
        raise DataError(
            f"{file}: a task has exactly the keys {', '.join(types)}, and of a regression also {' and '.join(OPTIONAL)}"
        )
    unlabelled = value["problem"] in WRITING
    for key, kind in types.items():
        if key == "label" and unlabelled and value[key] is None:
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
    if unlabelled != (value["label"] is None):
        raise DataError(f"{file}: label is null for {', '.join(WRITING)} only")
    _check_scale(file, value)
    return TaskSpec(**{**value, "labels": tuple(labels)})


def _check_scale(file: Path, value: dict[str, Any]) -> None:
    """Raise DataError for a `mean` or `deviation` that no regression can have."""
    scale = [value.get(name) for name in OPTIONAL]
    if scale == [None, None]:
        return
    numbers = [
        one for one in scale if isinstance(one, int | float) and not isinstance(one, bool) and math.isfinite(one)
    ]
    if value["problem"] != "regression" or len(numbers) < 2 or numbers[1] <= 0:
        raise DataError(
            f"{file}: {' and '.join(OPTIONAL)} are two numbers, the second above 0, and of a regression only"
        )
