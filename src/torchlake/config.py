"""A job as frozen pydantic models, and the reading of a job file that names every mistake by line.

    job.yaml  <  keyword sections  <  --set a.b=c        later ones win, key by key

A job file is data. It is read through YAML's node tree, so that each value keeps its line, a duplicate key is an error,
no tag builds an object, and size, depth and alias expansion are bounded before anything is built. Unknown keys are
refused with the nearest known one. No environment variable is read into a job. Relative paths in a job file are
relative to the current directory, as on the command line, not to the file.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainSerializer,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from torchlake.errors import ConfigError, UnsafeError

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_NODES = 10_000
YAML_TAG = "tag:yaml.org,2002:"
SECONDS = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}

Location = tuple[str | int, ...]


@dataclass(frozen=True, kw_only=True)
class Every:
    """How often something happens; exactly one field is set. Written "30s", "10min", "1h", "200steps" or "epoch"."""

    seconds: float | None = None
    steps: int | None = None
    epochs: int | None = None

    def __str__(self) -> str:
        if self.steps is not None:
            return f"{self.steps}steps"
        return "epoch" if self.seconds is None else f"{self.seconds:g}s"


def parse_every(value: Any) -> Every:
    """ "200steps", "10min" or "epoch" as an Every. Raises ValueError with the forms that are allowed."""
    if isinstance(value, Every):
        return value
    text = str(value).strip().lower()
    if text == "epoch":
        return Every(epochs=1)
    steps = re.fullmatch(r"(\d{1,12})\s*steps?", text)
    if steps and int(steps[1]) > 0:
        return Every(steps=int(steps[1]))
    try:
        return Every(seconds=parse_seconds(text if isinstance(value, str) else None))
    except ValueError:
        raise ValueError(f'{value!r} is no interval; write "30s", "10min", "1h", "200steps" or "epoch"') from None


def parse_seconds(value: Any) -> float:
    """ "30s", "10min", "1h" or a number of seconds, as seconds > 0. Raises ValueError with the forms allowed."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf"):
        return float(value)
    match = (
        re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)\s*(s|sec|min|h)", value.strip().lower())
        if isinstance(value, str)
        else None
    )
    if match is None or float(match[1]) <= 0:
        raise ValueError(f'{value!r} is no length of time; write "30s", "10min" or "1h"')
    return float(match[1]) * SECONDS[match[2]]


def _number(value: Any) -> Any:
    # YAML reads `yes` as true, and Python counts true as 1: nobody means that by a number.
    if isinstance(value, bool):
        raise ValueError(f"a number is expected, given {str(value).lower()}")
    return value


def _path(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _kind(value: Any) -> str:
    if isinstance(value, Mapping | Fraction):
        return "<fraction>"
    return "<paths>" if isinstance(value, list | tuple) else "<path>"


Int = Annotated[int, BeforeValidator(_number)]
Float = Annotated[float, BeforeValidator(_number)]
Seconds = Annotated[float, BeforeValidator(parse_seconds)]
Interval = Annotated[Every, BeforeValidator(parse_every), PlainSerializer(str)]
Name = Annotated[str, BeforeValidator(_path), Field(min_length=1)]
OnePath = Annotated[Name, Tag("<path>")]
ManyPaths = Annotated[tuple[Name, ...], Field(min_length=1), Tag("<paths>")]
STRICT = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, arbitrary_types_allowed=True)


class Fraction(BaseModel):
    """A share of the training rows, chosen by the seed."""

    model_config = STRICT

    fraction: Float = Field(gt=0, lt=1)
    """Share of the rows, above 0 and below 1."""


class DataConfig(BaseModel):
    """Where the rows are, and which columns say what."""

    model_config = STRICT

    train: Annotated[OnePath | ManyPaths, Discriminator(_kind)]
    """Table to learn from: a file, folder, glob or URL, or a list of them."""
    validation: Annotated[OnePath | ManyPaths | Annotated[Fraction, Tag("<fraction>")], Discriminator(_kind)] | None = (
        Fraction(fraction=0.1)
    )
    """Table to validate on, or {fraction: f} of the training rows; null for none."""
    text: Name = "text"
    """Column of the input."""
    label: Name = "label"
    """Column of the target: strings or integers, lists of strings, or floats."""
    key: Name | None = None
    """Column that identifies a row, unique and never null; null: file and row number."""
    bad_rows: Literal["error", "drop"] = "error"
    """What a null or undecodable row does: stop the job, or be left out and counted."""

    @field_validator("label")
    @classmethod
    def _columns_differ(cls, label: str, given: ValidationInfo) -> str:
        if label == given.data.get("text"):
            raise ValueError(f"text and label both name the column {label!r}; they must differ")
        return label


class ModelConfig(BaseModel):
    """What is fine-tuned, for which task."""

    model_config = STRICT

    base: Name
    """Model folder, or a name on the Hugging Face hub."""
    task: Name = "text_classification"
    """What the model is asked; a file in torchlake/tasks."""
    max_length: Int | None = Field(default=None, ge=2)
    """Tokens a row is cut to, special tokens counted; null: what the model can take, at most 512."""


class TrainConfig(BaseModel):
    """The recipe of one training run."""

    model_config = STRICT

    epochs: Int = Field(default=3, ge=1)
    """Passes over the training rows."""
    batch_size: Int = Field(default=32, ge=1)
    """Rows of one optimizer step, over all ranks."""
    learning_rate: Float = Field(default=5e-5, gt=0)
    """AdamW's step size at the peak of the schedule."""
    weight_decay: Float = Field(default=0.01, ge=0)
    """AdamW's decay, on matrices only: biases and norms are spared."""
    warmup: Float = Field(default=0.1, ge=0, lt=1)
    """Share of all steps over which the learning rate rises from 0."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """How the learning rate falls after the warm-up."""
    clip_norm: Float | None = Field(default=1.0, gt=0)
    """Largest norm of the gradient over all ranks; null: not clipped."""
    micro_batch_tokens: Int = Field(default=16384, ge=1)
    """Tokens, padding counted, that one rank holds at once; bounds memory, changes no result."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Arithmetic of the forward pass; auto: bf16 where the hardware has it."""
    strategy: Name = "auto"
    """How ranks share the model, a file in torchlake/strategies; auto: single for 1 rank, else ddp."""
    seed: Int = Field(default=0, ge=0, lt=2**63)
    """Decides initial weights, dropout and the order of rows."""
    checkpoint_every: Interval = Every(seconds=600.0)
    """Interval between checkpoints: "10min", "200steps" or "epoch"."""
    keep_checkpoints: Int = Field(default=2, ge=1)
    """Checkpoints kept, the newest ones."""
    validate_every: Interval = Every(epochs=1)
    """Interval between validations: "epoch" or "200steps"."""
    metric: Name | None = None
    """Validation metric that picks the best model; null: the task's own."""
    patience: Int | None = Field(default=None, ge=1)
    """Validations without improvement before training stops; null: never."""
    max_restarts: Int = Field(default=2, ge=0)
    """Times the ranks are started again after one of them failed."""
    collective_timeout: Seconds = 600.0
    """Seconds ("10min") that a rank waits for the others before the run counts as hung."""
    max_steps: Int | None = Field(default=None, ge=1)
    """Optimizer steps after which training stops; null: as many as the epochs hold."""

    @field_validator("validate_every")
    @classmethod
    def _no_clock(cls, every: Every) -> Every:
        # A validation by the clock would fall on other steps each time, and with it the best model.
        if every.seconds is not None:
            raise ValueError(f'{every} is a time; write "epoch" or "200steps"')
        return every


class EngineConfig(BaseModel):
    """Where the job runs."""

    model_config = STRICT

    name: Name = "local"
    """A file in torchlake/engines."""
    processes: Int | None = Field(default=None, ge=1)
    """Processes started; null: the engine's choice for scoring, 1 for training."""


class Job(BaseModel):
    """One training job: everything that decides its result, and where it runs."""

    model_config = STRICT

    data: DataConfig
    model: ModelConfig
    train: TrainConfig = TrainConfig()
    engine: EngineConfig = EngineConfig()


SECTIONS: dict[str, type[BaseModel]] = {
    "data": DataConfig,
    "model": ModelConfig,
    "train": TrainConfig,
    "engine": EngineConfig,
}


def load_job(path: str | Path | None, overrides: Sequence[str] = (), **sections: Any) -> Job:
    """The job in `path` (None: no file), with `sections` (data={...} or a DataConfig), then `overrides`, laid over it.

    Raises ConfigError listing every mistake with its file and line, UnsafeError for a tag that would build an object.
    """
    values: dict[str, Any] = {}
    origins: dict[Location, str] = {}
    if path is not None:
        values, lines = read_yaml(_read_text(Path(path)), str(path))
        if values is None:
            raise ConfigError(f"{path}: is empty; a job file has the sections {', '.join(SECTIONS)}")
        if not isinstance(values, dict):
            raise ConfigError(
                f"{path}:1: a job file is a mapping of sections ({', '.join(SECTIONS)}), not a {_shape(values)}"
            )
        # A section whose keys are all commented out reads as null; it means the defaults.
        values = {key: value for key, value in values.items() if value is not None or key not in SECTIONS}
        origins = {location: f"{path}:{line}" for location, line in lines.items()}
    for name, section in sections.items():
        plain = section.model_dump(mode="json", exclude_unset=True) if isinstance(section, BaseModel) else section
        _lay_over(values, origins, (name,), plain, f"argument {name}")
    for override in overrides:
        keys, value = _parse_override(override)
        _lay_over(values, origins, keys, value, f"--set {override}")
    try:
        return Job.model_validate(values)
    except ValidationError as error:
        problems = [_sentence(problem, origins, path) for problem in error.errors(include_url=False)]
        raise ConfigError("\n".join(dict.fromkeys(problems))) from None


def job_to_yaml(job: Job) -> str:
    """The job as YAML text that `load_job` reads back to an equal job."""
    value = job.model_dump(mode="json")
    text = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
    # PyYAML writes these line breaks unescaped, and reads them back as blanks.
    return yaml.safe_dump(value, sort_keys=False) if re.search("[\x85\u2028\u2029\ufeff]", text) else text


def read_yaml(text: str, name: str) -> tuple[Any, dict[Location, int]]:
    """The plain value in a YAML text, and the line (from 1) of every value in it.

    Raises ConfigError for text that is not YAML, is too big, too deep or has a key twice; UnsafeError for a tag.
    """
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{name}: larger than {MAX_BYTES:,} bytes; a job file is not")
    try:
        # Events come from a parser with a stack of its own; the composer recurses, so depth is bounded before it runs.
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                line = event.start_mark.line + 1 if event.start_mark else 1
                raise ConfigError(f"{name}:{line}: nested deeper than {MAX_DEPTH} levels")
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        raise ConfigError(f"{where}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {str(error).splitlines()[0]}") from None
    lines: dict[Location, int] = {}
    return (None if root is None else _plain(loader, root, (), name, lines)), lines


def _plain(loader: yaml.SafeLoader, node: yaml.Node, at: Location, name: str, lines: dict[Location, int]) -> Any:
    """The plain value of a node; `lines` collects a line per location and thereby counts what aliases expand to."""
    where = f"{name}:{node.start_mark.line + 1}"
    lines.setdefault(at, node.start_mark.line + 1)
    if len(lines) > MAX_NODES or len(at) > MAX_DEPTH:
        raise ConfigError(f"{where}: more than {MAX_NODES:,} values or {MAX_DEPTH} levels once aliases are expanded")
    kind = node.tag.removeprefix(YAML_TAG)
    if isinstance(node, yaml.MappingNode) and kind == "map":
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{name}:{line}: a key is a word, not a {_shape(key_node.value)}")
            _refuse_tag(key_node, f"{name}:{line}")
            key = key_node.value
            if key in mapping:
                raise ConfigError(
                    f"{name}:{line}: {_dotted((*at, key))}: given twice, first in line {lines[(*at, key)]}"
                )
            lines[(*at, key)] = line
            mapping[key] = _plain(loader, value_node, (*at, key), name, lines)
        return mapping
    if isinstance(node, yaml.SequenceNode) and kind == "seq":
        return [_plain(loader, item, (*at, index), name, lines) for index, item in enumerate(node.value)]
    _refuse_tag(node, where)
    if kind in ("timestamp", "merge", "value"):
        return node.value
    try:
        return loader.construct_object(node)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError):
        raise ConfigError(f"{where}: {_dotted(at)}: {_quote(node.value)} is no {kind}") from None


def _refuse_tag(node: yaml.Node, where: str) -> None:
    scalars = ("null", "bool", "int", "float", "str", "timestamp", "merge", "value")
    if not isinstance(node, yaml.ScalarNode) or node.tag.removeprefix(YAML_TAG) not in scalars:
        shown = node.tag.replace(YAML_TAG, "!!")
        raise UnsafeError(f"{where}: the tag {_quote(shown)} is refused: a job file is data and builds no objects")


def _read_text(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
        return content.decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such job file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start:,}); save it as UTF-8") from None


def _parse_override(override: str) -> tuple[tuple[str, ...], Any]:
    dotted, equals, text = override.partition("=")
    keys = tuple(dotted.strip().split("."))
    if not equals or not all(keys):
        raise ConfigError(f"--set {override}: write it as section.key=value, such as train.epochs=5")
    value, _ = read_yaml(text, f"--set {override}")
    return keys, value


def _lay_over(
    values: dict[str, Any], origins: dict[Location, str], keys: tuple[str, ...], value: Any, origin: str
) -> None:
    """Put `value` at `keys`; a mapping for a whole section is laid over what is there key by key."""
    if isinstance(value, Mapping) and len(keys) == 1:
        values.setdefault(keys[0], {})
        origins.setdefault(keys, origin)
        for key, item in value.items():
            _lay_over(values, origins, (keys[0], str(key)), item, origin)
        return
    for key in keys[:-1]:
        inner = values.get(key)
        values[key] = values = dict(inner) if isinstance(inner, dict) else {}
    values[keys[-1]] = value
    for location in [location for location in origins if location[: len(keys)] == keys]:
        del origins[location]
    origins[keys] = origin


def _sentence(problem: Any, origins: dict[Location, str], path: str | Path | None) -> str:
    """One mistake as pydantic found it, in plain words: where, what was given, what is allowed."""
    location = tuple(part for part in problem["loc"] if not str(part).startswith("<"))
    known = [location[:length] for length in range(len(location), 0, -1) if location[:length] in origins]
    origin = origins[known[0]] if known else str(path) if path is not None else "job"
    return f"{origin}: {_dotted(location)}: {_complaint(problem, location)}"


def _complaint(problem: Any, location: Location) -> str:
    kind, given, context = problem["type"], problem["input"], problem.get("ctx", {})
    shown = _quote(given)
    bounds = {"greater_than": "gt", "greater_than_equal": "ge", "less_than": "lt", "less_than_equal": "le"}
    words = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most"}
    if kind == "extra_forbidden":
        return f"unknown key{_nearest(location)}"
    if kind == "missing":
        return "missing; it has no default"
    if kind in bounds:
        bound = bounds[kind]
        return f"must be {words[bound]} {context[bound]}, given {shown}"
    if kind == "literal_error":
        close = get_close_matches(str(given), re.findall(r"'([^']*)'", context["expected"]), n=1)
        return f"must be {context['expected']}, given {shown}{f'; did you mean {close[0]}?' if close else ''}"
    if kind.startswith("int_"):
        return f"a whole number is expected, given {shown}"
    if kind.startswith(("float_", "finite_")):
        return f"a number is expected, given {shown}"
    if kind in ("string_type", "string_too_short"):
        return f"a text is expected, given {shown}{' (put it in quotes)' if isinstance(given, int | float) else ''}"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"a mapping of keys is expected, given {shown}"
    if kind == "too_short":
        return "the list is empty; name at least one"
    if kind == "value_error":
        return str(context["error"])
    return f"{problem['msg']}, given {shown}"


def _nearest(location: Location) -> str:
    """A hint for an unknown key: the nearest key of its section, else the section that has such a key."""
    key = str(location[-1])
    section = SECTIONS.get(str(location[0])) if len(location) == 2 else None
    fields = list(section.model_fields) if section else list(SECTIONS) if len(location) == 1 else ["fraction"]
    if close := get_close_matches(key, fields, n=1):
        return f"; did you mean {close[0]}?"
    everywhere = {field: f"{name}.{field}" for name, model in SECTIONS.items() for field in model.model_fields}
    if close := get_close_matches(key, everywhere, n=1, cutoff=0.8):
        return f"; did you mean {everywhere[close[0]]}?"
    return f"; known are {', '.join(fields)}"


def _dotted(location: Location) -> str:
    return ".".join(str(part) for part in location) or "(top)"


def _quote(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _shape(value: Any) -> str:
    return "list" if isinstance(value, list | tuple) else "mapping" if isinstance(value, dict) else "single value"
