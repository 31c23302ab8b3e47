"""A job as frozen pydantic models; job file, keyword sections and overrides are merged into it.

    job.yaml  <  keyword sections  <  --set a.b=c        later ones win, key by key

The origin of every value is kept, so that an error names its line, argument or override. Unknown keys are refused with
the nearest known key. Environment variables are not read. Relative paths in a job file are relative to the current
directory, not to the file.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from torchlake.config.messages import expected, sentence
from torchlake.config.sections.data import DataConfig
from torchlake.config.sections.engine import EngineConfig
from torchlake.config.sections.model import ModelConfig
from torchlake.config.sections.track import TrackConfig
from torchlake.config.sections.train import TrainConfig
from torchlake.config.types import STRICT
from torchlake.config.yaml import Location, read_text, read_yaml, shape
from torchlake.display import Shown, shown
from torchlake.errors import ConfigError, UsageError
from torchlake.redaction import redacted


@shown
class Job(BaseModel):
    """A training job: everything that determines its result, where it runs, and where it logs."""

    model_config = STRICT

    data: DataConfig
    """The training and validation tables, and their columns."""
    model: ModelConfig
    """The model to fine-tune, and its task."""
    train: TrainConfig = TrainConfig()
    """The settings of the training run."""
    engine: EngineConfig = EngineConfig()
    """Where the job runs."""
    track: TrackConfig = TrackConfig()
    """Where parameters and metrics are logged besides metrics.jsonl."""

    @property
    def task(self) -> str:
        """The task that is trained: of text generation with pairs of answers, preference; else model.task."""
        pairs = self.model.task == "text_generation" and self.data.chosen is not None
        return "preference" if pairs else self.model.task

    def _shown(self) -> Shown:
        given = flat(redacted(self.model_dump(mode="json", exclude_unset=True)))
        return f"{self.model.task}, {len(given)} settings", [[("setting", "value"), *given.items()]]


class _EngineAlone(BaseModel):
    """The section `engine` without a job."""

    model_config = STRICT

    engine: EngineConfig = EngineConfig()


SECTIONS: dict[str, type[BaseModel]] = {
    "data": DataConfig,
    "model": ModelConfig,
    "train": TrainConfig,
    "engine": EngineConfig,
    "track": TrackConfig,
}
Model = TypeVar("Model", bound=BaseModel)


def load_job(path: str | Path | Job | None, overrides: Sequence[str] = (), **sections: Any) -> Job:
    """Return the job in `path` (None: no file), updated by `sections` (data={...} or a DataConfig), then `overrides`.

    `path` may also be a Job. Raises ConfigError with every error, its file and line; UnsafeError for a YAML tag that
    would create an object.
    """
    if isinstance(path, Job):
        # Leave out the defaults, which another setting may replace.
        merged: dict[str, Any] = path.model_dump(mode="json", exclude_unset=True)
        for name, section in sections.items():
            plain = section.model_dump(mode="json", exclude_unset=True) if isinstance(section, BaseModel) else section
            merged[name] = {**merged.get(name, {}), **plain} if isinstance(plain, Mapping) else plain
        return load_job(None, overrides, **merged)
    values: dict[str, Any] = {}
    origins: dict[Location, str] = {}
    if path is not None:
        values, lines = read_yaml(read_text(job_file(path)), str(path))
        if values is None:
            raise ConfigError(f"{path}: is empty; a job file has the sections {', '.join(SECTIONS)}")
        if not isinstance(values, dict):
            raise ConfigError(
                f"{path}:1: a job file is a mapping of sections ({', '.join(SECTIONS)}), not a {shape(values)}"
            )
        # A section whose keys are all commented out is null in YAML; its defaults apply.
        values = {key: value for key, value in values.items() if value is not None or key not in SECTIONS}
        origins = {location: f"{path}:{line}" for location, line in lines.items()}
    for name, section in sections.items():
        plain = section.model_dump(mode="json", exclude_unset=True) if isinstance(section, BaseModel) else section
        _set_value(values, origins, (name,), plain, f"argument {name}")
    for override in overrides:
        keys, value = _parse_override(override)
        _set_value(values, origins, keys, value, f"--set {override}")
    return _validated(Job, values, origins, path)


def job_file(path: str | Path) -> Path:
    """Return the path of a job file. Raises UsageError for what is not a string or a path."""
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"job: {expected('the path of a job file, or a Job', path)}")
    return Path(path)


def load_engine(overrides: Sequence[str]) -> EngineConfig:
    """Return the engine section from overrides ("engine.processes=2") without a job.

    Raises ConfigError as `load_job` does, and for other sections.
    """
    values: dict[str, Any] = {}
    origins: dict[Location, str] = {}
    for override in overrides:
        keys, value = _parse_override(override)
        if keys[0] != "engine":
            raise ConfigError(f"--set {override}: without a job only the section engine can be set")
        _set_value(values, origins, keys, value, f"--set {override}")
    return _validated(_EngineAlone, values, origins, None).engine


def with_values(job: Job, values: Mapping[str, Any], origins: Mapping[str, str]) -> Job:
    """Return `job` with other values by dotted name ("train.epochs"). Raises ConfigError as `load_job` does.

    `origins` are the places that the values came from, by name, for error messages.
    """
    plain: dict[str, Any] = job.model_dump(mode="json", exclude_unset=True)
    places: dict[Location, str] = {}
    for name, value in values.items():
        _set_value(plain, places, tuple(name.split(".")), value, origins[name])
    return _validated(Job, plain, places, None)


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one mapping of dotted names: {"train": {"epochs": 4}} as {"train.epochs": 4}."""
    if not isinstance(value, Mapping):
        return {prefix: value}
    return {
        name: leaf
        for key, item in value.items()
        for name, leaf in flat(item, f"{prefix}.{key}" if prefix else str(key)).items()
    }


def job_to_yaml(job: Job) -> str:
    """Return the job as YAML text that `load_job` reads back to an equal job."""
    value = job.model_dump(mode="json")
    text = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
    # Escape these line breaks, which PyYAML writes as they are and reads back as spaces.
    return yaml.safe_dump(value, sort_keys=False) if re.search("[\x85\u2028\u2029\ufeff]", text) else text


def _validated(
    model: type[Model], values: Mapping[str, Any], origins: Mapping[Location, str], path: str | Path | None
) -> Model:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problems = [sentence(problem, origins, path, SECTIONS) for problem in error.errors(include_url=False)]
        raise ConfigError("\n".join(dict.fromkeys(problems))) from None


def _parse_override(override: str) -> tuple[tuple[str, ...], Any]:
    dotted, equals, text = override.partition("=")
    keys = tuple(dotted.strip().split("."))
    if not equals or not all(keys):
        raise ConfigError(f"--set {override}: write it as section.key=value, such as train.epochs=5")
    value, _ = read_yaml(text, f"--set {override}")
    return keys, value


def _set_value(
    values: dict[str, Any], origins: dict[Location, str], keys: tuple[str, ...], value: Any, origin: str
) -> None:
    """Set `value` at `keys`; a mapping for a whole section is merged key by key."""
    if isinstance(value, Mapping) and len(keys) == 1:
        values.setdefault(keys[0], {})
        origins.setdefault(keys, origin)
        for key, item in value.items():
            _set_value(values, origins, (keys[0], str(key)), item, origin)
        return
    for key in keys[:-1]:
        inner = values.get(key)
        values[key] = values = dict(inner) if isinstance(inner, dict) else {}
    values[keys[-1]] = value
    for location in [location for location in origins if location[: len(keys)] == keys]:
        del origins[location]
    origins[keys] = origin
