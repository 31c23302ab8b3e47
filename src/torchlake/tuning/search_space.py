"""The search space of a tuning: which settings of a job to search, and over which values.

    train.learning_rate: {low: 1.0e-5, high: 5.0e-4, log: true}
    train.batch_size: {choices: [32, 64, 128]}

Keys are a job's dotted names. Both ends of every range and every choice are validated as a job, so that a bad value is
reported with its line before anything is trained. Cost: milliseconds.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError, model_validator

from torchlake import plugins
from torchlake.config.job import Job, flat, with_values
from torchlake.config.messages import sentence
from torchlake.config.sections.data import Fold, Fraction
from torchlake.config.types import STRICT, Float
from torchlake.config.yaml import Location, quote, read_text, read_yaml, shape
from torchlake.errors import ConfigError

# Trials with other values of these could not be compared, or would not differ.
FIXED = (
    *("data.validation", "data.label", "data.learn", "data.problem", "data.where", "data.too_long"),
    *("model.task", "train.metric", "train.validate_writing", "engine", "track"),
)
SPLIT = ("data.train", "data.deduplicate", "data.limit", "data.sample", "train.seed")
"Settings that choose the validation rows, too, if these are a part of the training table."
OF_METRIC: Mapping[str, tuple[str, ...]] = {
    "loss": (
        *("train.class_weights", "train.focal_gamma", "train.label_smoothing", "train.preference"),
        "model.task_options.max_target_tokens",
    ),
    "perplexity": ("model.task_options.max_target_tokens",),
    "reward_margin": ("train.preference",),
}
"Settings that a metric is computed with."
EXAMPLE = "{low: 1.0e-5, high: 5.0e-4, log: true} or {choices: [32, 64]}"


@dataclass(frozen=True, slots=True)
class Range:
    """Every number from `low` to `high`; integers if both are int. `log`: sampled on a logarithmic scale."""

    low: float
    high: float
    log: bool


Space = Mapping[str, Range | tuple[Any, ...]]
"The range or the choices of each setting, by dotted name."


class Searched(BaseModel):
    """One entry of a search space."""

    model_config = STRICT

    low: Float | None = None
    """Smallest value of a range."""
    high: Float | None = None
    """Largest value of a range."""
    log: bool = False
    """Whether the range is searched on a logarithmic scale."""
    choices: tuple[Any, ...] | None = Field(default=None, min_length=1)
    """The values to choose from."""

    @model_validator(mode="after")
    def _range_or_choices(self) -> "Searched":
        if self.choices is not None:
            if self.low is not None or self.high is not None or self.log:
                raise ValueError("either a range (low, high, log) or choices, not both")
            if not all(isinstance(choice, str | int | float | None) for choice in self.choices):
                raise ValueError("a choice must be a single value: a number, a string, true, false or null")
            if len(set(self.choices)) < len(self.choices):
                raise ValueError("the choices contain a value twice")
        elif self.low is None or self.high is None:
            raise ValueError(f"set low and high, or choices: {EXAMPLE}")
        elif self.low >= self.high:
            raise ValueError(f"low must be less than high, but they are {self.low:g} and {self.high:g}")
        elif self.log and self.low <= 0:
            raise ValueError(f"low must be above 0 in a logarithmic range, not {self.low:g}")
        return self


def read_space(space: str | Path | Mapping[str, Any], job: Job) -> Space:
    """Return the space in a file, or in an equivalent mapping, for trials of `job`.

    Raises ConfigError naming every mistake with its file and line, UnsafeError for a YAML tag that would build an
    object.
    """
    lines: dict[Location, int] = {}
    if not isinstance(space, str | os.PathLike):
        name, entries = "space", dict(space) if isinstance(space, Mapping) else space
    else:
        name = str(space)
        if not Path(space).exists():
            raise ConfigError(f"{name}: no such space file")
        entries, lines = read_yaml(read_text(Path(space)), name)
    if not isinstance(entries, dict) or not entries:
        given = "empty" if not entries else f"a {shape(entries)}"
        raise ConfigError(
            f"{name}:1: a search space is a mapping of settings to ranges or choices (train.batch_size: {EXAMPLE}), "
            f"not {given}"
        )
    origins = {location: f"{name}:{line}" for location, line in lines.items()}
    found: dict[str, Range | tuple[Any, ...]] = {}
    problems: list[str] = []
    for key, entry in entries.items():
        try:
            found[key] = _entry(job, key, entry, origins, name)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return found


def _metric_with(job: Job, key: str) -> str | None:
    """Return the metric by which trials are compared, if it is computed with a setting."""
    defaults = [*plugins.load("tasks", job.task).default_metric.values()] or ["loss"]
    metrics = [job.train.metric] if job.train.metric else defaults
    return next((metric for metric in metrics if key.startswith(OF_METRIC.get(metric, ()))), None)


def _entry(job: Job, key: str, entry: Any, origins: Mapping[Location, str], name: str) -> Range | tuple[Any, ...]:
    where = origins.get((key,), name)
    if any(key == fixed or key.startswith(f"{fixed}.") for fixed in FIXED):
        raise ConfigError(f"{where}: {key}: cannot be searched: trials could not be compared, or would not differ")
    if key in SPLIT and isinstance(job.data.validation, Fraction | Fold):
        raise ConfigError(
            f"{where}: {key}: cannot be searched: it chooses the validation rows, too, and trials on other rows could "
            "not be compared. Name a table of these rows (data.validation)"
        )
    if metric := _metric_with(job, key):
        raise ConfigError(
            f"{where}: {key}: cannot be searched by the metric {metric}, which is computed with it: trials could not "
            "be compared. Name another one (train.metric)"
        )
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where}: {key}: expected {EXAMPLE}, got {quote(entry)}")
    try:
        searched = Searched.model_validate(dict(entry))
    except ValidationError as error:
        found = error.errors(include_url=False)
        located = [{**problem, "loc": (key, *problem["loc"])} for problem in found]
        raise ConfigError(
            "\n".join(sentence(problem, {(key,): where, **origins}, name, {key: Searched}) for problem in located)
        ) from None
    if searched.choices is not None:
        for index, choice in enumerate(searched.choices):
            with_values(job, {key: choice}, {key: origins.get((key, "choices", index), where)})
        return searched.choices
    low, high = (
        flat(with_values(job, {key: value}, {key: origins.get((key, end), where)}).model_dump(mode="json"))[key]
        for end, value in (("low", searched.low), ("high", searched.high))
    )
    if not all(isinstance(end, int | float) for end in (low, high)):
        raise ConfigError(f"{where}: {key}: the setting is not a number. Use {{choices: [...]}}")
    return Range(low, high, searched.log)
