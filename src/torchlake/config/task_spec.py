"""The task of a model, stored as task.json beside its weights."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from torchlake.errors import DataError

Problem = str
"What is predicted: one of `PROBLEMS`, or another task's own name for it."
Label = str | int | bool
Columns = str | tuple[str, ...]
"One column, or several."

TASK_FILE = "task.json"
GENERATIVE: tuple[Problem, ...] = ("next_token", "next_answer_token", "preference")
"""Problems without a label: the loss is over every token, over the tokens of the assistant's turns, or over pairs of
answers."""
PROBLEMS: tuple[Problem, ...] = ("single_label", "multi_label", "regression", *GENERATIVE)
WITHOUT_CLASSES = ("regression", *GENERATIVE)
CLOSED = ("text_classification", "text_generation")
"Tasks without their own problems."
SCALE = ("mean", "deviation")
ACTIVATIONS = ("Sigmoid", "Tanh", "ReLU", "SiLU", "Softplus", "LogSigmoid")
"Functions after the outputs of a cross-encoder, by their names in torch.nn."
TEXTS = ("separator", "template", "label_separator", "prompt")
OPTIONAL_FIELDS = (
    *(*SCALE, *TEXTS),
    *("text_pair", "inputs", "dimensions", "activation", "options", "rows", "preference"),
)
"Fields that may be absent from task.json."
SEPARATOR = " "
"The default string between the texts of several columns."


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """How a language model's rows become tokens."""

    pack: str | None = None
    "`whole`: rows do not see each other. `stream`, or None: they follow one another in blocks."
    too_long: str | None = None
    "What happens to a row longer than a block; None: the default of what the column holds."
    last: bool = False
    "Whether only the last answer of a conversation is learned."
    system: str | None = None
    "A system text before every conversation."
    messages: Mapping[str, Any] | None = None
    "The table's names of the parts of a message; None: the usual ones."
    chat: bool = False
    "Whether a table's texts are conversations as JSON; found in each table, and not stored."


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """The task of a model; stored as task.json beside its weights."""

    task: str
    "A file in torchlake/tasks, or the name of another task."
    problem: Problem
    labels: tuple[Label, ...]
    "The classes in the order of the model's outputs, in the data's type; empty for regression and text generation."
    text: Columns
    "Column of the input text, or several that are joined; empty for a task without text."
    label: str | None
    "Column of the target; None for text generation."
    max_length: int
    "Maximum tokens of a row, including special tokens; for tasks that pack rows, tokens of a block."
    mean: float | None = None
    "Mean of a regression's targets; None: the model's outputs are the predictions."
    deviation: float | None = None
    "Standard deviation of the targets, above 0: prediction = output * deviation + mean."
    separator: str | None = None
    "The string between the texts of several columns; None: a space."
    template: str | None = None
    'A template for the text of several columns, such as "{title}: {body}"; None: joined by the separator.'
    text_pair: Columns | None = None
    "Column of the second text of a pair; None: a row has one text."
    label_separator: str | None = None
    "What separates several labels in a string; None: a string is one label."
    inputs: Mapping[str, Columns] = field(default_factory=dict)
    "Columns of the task's other inputs, by the input's name."
    dimensions: int | None = None
    "Numbers in an embedding; None for other tasks."
    activation: str | None = None
    "The function that makes predictions of outputs, one of `ACTIVATIONS`; None: the usual one of the problem."
    prompt: str | None = None
    "A string that is put before the first text of a pair."
    options: Mapping[str, Any] = field(default_factory=dict)
    "The task's own options (`model.task_options`), all of them with their values."
    preference: Mapping[str, Any] = field(default_factory=dict)
    "Of a model that learned from pairs of answers: `train.preference`; of a model folder also their columns."
    rows: RowOptions = RowOptions()
    "How a language model's rows become tokens."

    @property
    def whole(self) -> bool:
        """Whether rows are packed whole and do not see each other."""
        return self.rows.pack == "whole" or self.problem == "next_answer_token"

    @property
    def input_columns(self) -> tuple[str, ...]:
        """The columns that the model's inputs come from, each once."""
        named = [self.text, *([] if self.text_pair is None else [self.text_pair]), *self.inputs.values()]
        return tuple(dict.fromkeys(column for each in named for column in as_columns(each)))

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that training reads: those of the inputs, and the label if there is one."""
        return self.input_columns if self.label is None else tuple(dict.fromkeys((*self.input_columns, self.label)))


@dataclass(frozen=True, kw_only=True)
class LabelColumn:
    """What the label column of a training table contains."""

    problem: Problem
    labels: tuple[Label, ...]
    "The classes, sorted; empty for regression."
    counts: tuple[int, ...]
    "Number of rows of each class."
    rows: int
    "Number of rows with a label."
    mean: float | None = None
    "Mean and deviation of a regression's targets."
    deviation: float | None = None
    note: str | None = None
    "For a column that could be read in two ways: how it was read, and the setting for the other way."


def as_columns(named: Columns) -> tuple[str, ...]:
    """Return the columns as a tuple; () for the empty name."""
    return named if isinstance(named, tuple) else (named,) if named else ()


def label_name(label: Label) -> str:
    """Return a class as written in config.json and job files."""
    return str(label).lower() if isinstance(label, bool) else str(label)


def spec_to_json(spec: TaskSpec) -> dict[str, Any]:
    """Return the content of task.json; optional fields only if they are set, as in earlier versions."""
    values = {**asdict(spec), "inputs": dict(spec.inputs), "options": dict(spec.options)}
    values["preference"] = dict(spec.preference)
    own = {name: value for name, value in values["rows"].items() if value not in (None, False)}
    values["rows"] = {name: value for name, value in own.items() if name != "chat"}
    return {name: value for name, value in values.items() if name not in OPTIONAL_FIELDS or value not in (None, {})}


def spec_from_json(file: Path, value: Any) -> TaskSpec:
    """Return the `TaskSpec` in the content of the task.json `file`. Raises DataError for an invalid value."""
    types = {"task": str, "problem": str, "labels": list, "text": str, "label": str, "max_length": int}
    if not isinstance(value, dict) or value.keys() - set(OPTIONAL_FIELDS) != types.keys():
        raise DataError(
            f"{file}: a task must have the keys {', '.join(types)}, and may have {', '.join(OPTIONAL_FIELDS)}"
        )
    known = value["problem"] in PROBLEMS
    if not known and value["task"] in CLOSED:
        raise DataError(f"{file}: problem: expected one of {', '.join(PROBLEMS)}, got {value['problem']!r}")
    unlabeled = value["problem"] in GENERATIVE
    value = {**value, "text": _columns(value["text"])}
    for key, kind in types.items():
        if key == "label" and (unlabeled or not known) and value[key] is None:
            continue
        if key == "text" and isinstance(value[key], tuple):
            continue
        if not isinstance(value[key], kind) or isinstance(value[key], bool):
            raise DataError(f"{file}: {key}: expected {kind.__name__}, got {value[key]!r}")
    labels = value["labels"]
    if len({type(label) for label in labels}) > 1 or not all(isinstance(label, str | int) for label in labels):
        raise DataError(f"{file}: labels must be all strings, all integers or all booleans")
    if len(set(labels)) != len(labels) or (known and (value["problem"] in WITHOUT_CLASSES) != (not labels)):
        raise DataError(f"{file}: labels must be distinct, and empty only for {', '.join(WITHOUT_CLASSES)}")
    if known and unlabeled != (value["label"] is None):
        raise DataError(f"{file}: label must be null for {', '.join(GENERATIVE)}, and only for them")
    _check_scale(file, value)
    return TaskSpec(**{**value, "labels": tuple(labels), **_input_fields(file, value)})


def _columns(value: Any) -> Any:
    """Return a list of names as a tuple; anything else unchanged."""
    names = isinstance(value, list) and len(value) > 0 and all(isinstance(name, str) and name for name in value)
    return tuple(value) if names else value


def _input_fields(file: Path, value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that define how inputs are made from columns. Raises DataError for an invalid one."""
    found: dict[str, Any] = {name: value[name] for name in TEXTS if value.get(name) is not None}
    wrong = next((name for name, each in found.items() if not isinstance(each, str)), None)
    pair, inputs = _columns(value.get("text_pair")), value.get("inputs", {})
    if isinstance(inputs, dict):
        inputs = {name: _columns(each) for name, each in inputs.items()}
    if not (pair is None or (isinstance(pair, str | tuple) and pair)):
        wrong = "text_pair"
    elif not (isinstance(inputs, dict) and all(isinstance(each, str | tuple) and each for each in inputs.values())):
        wrong = "inputs"
    dimensions = value.get("dimensions")
    if dimensions is not None and (type(dimensions) is not int or dimensions < 1):
        raise DataError(f"{file}: dimensions: expected a number of 1 or more, got {dimensions!r}")
    if value.get("activation") not in (None, *ACTIVATIONS):
        raise DataError(f"{file}: activation: expected one of {', '.join(ACTIVATIONS)}, got {value['activation']!r}")
    if wrong is not None:
        raise DataError(f"{file}: {wrong}: expected names of columns, got {value[wrong]!r}")
    options = value.get("options", {})
    if not isinstance(options, dict):
        raise DataError(f"{file}: options: expected the task's options by name, got {options!r}")
    preference = value.get("preference", {})
    if not isinstance(preference, dict):
        raise DataError(f"{file}: preference: expected the settings of the loss by name, got {preference!r}")
    found |= {"options": options, "preference": preference}
    rows = {"text_pair": pair, "rows": _row_options(file, value.get("rows", {}))}
    return {**found, **rows, "inputs": inputs, "dimensions": dimensions}


def _row_options(file: Path, value: Any) -> RowOptions:
    kinds = {"pack": str, "too_long": str, "last": bool, "system": str, "messages": dict}
    if not isinstance(value, dict) or not all(isinstance(each, kinds.get(name, ())) for name, each in value.items()):
        raise DataError(f"{file}: rows: expected some of {', '.join(kinds)}, got {value!r}")
    assert kinds.keys() | {"chat"} == {one.name for one in fields(RowOptions)}
    return RowOptions(**value)


def _check_scale(file: Path, value: dict[str, Any]) -> None:
    """Raise DataError for an invalid `mean` or `deviation`."""
    scale = [value.get(name) for name in SCALE]
    if scale == [None, None]:
        return
    numbers = [
        one for one in scale if isinstance(one, int | float) and not isinstance(one, bool) and math.isfinite(one)
    ]
    if value["problem"] != "regression" or len(numbers) < 2 or numbers[1] <= 0:
        raise DataError(
            f"{file}: {' and '.join(SCALE)} must be two numbers, the second above 0, and only a regression has them"
        )
