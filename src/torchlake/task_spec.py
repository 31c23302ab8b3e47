"""What a model is asked, stored as task.json beside its weights."""

from dataclasses import dataclass
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

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that training reads: the text, and the label where there is one."""
        return (self.text,) if self.label is None else (self.text, self.label)


def spec_from_json(file: Path, value: Any) -> TaskSpec:
    """The `TaskSpec` in the value of a task.json. Raises DataError naming what is wrong in `file`."""
    types = {"task": str, "problem": str, "labels": list, "text": str, "label": str, "max_length": int}
    if not isinstance(value, dict) or value.keys() != types.keys():
        raise DataError(f"{file}: a task has exactly the keys {', '.join(types)}")
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
    return TaskSpec(**{**value, "labels": tuple(labels)})
