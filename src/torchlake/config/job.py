"""A job as frozen pydantic models, and how job file, keyword sections and overrides are merged.

    job.yaml  <  keyword sections  <  --set a.b=c        later ones win, key by key

The origin of every value is kept, so that an error names its line, argument or override. Unknown keys are refused with
the nearest known key. Environment variables are not read. Relative paths in a job file are relative to the current
directory, not to the file.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from torchlake.config.engine_options import EngineConfig
from torchlake.config.messages import sentence
from torchlake.config.strategy_options import DdpOptions, DeepSpeedOptions, FsdpOptions, LoraOptions
from torchlake.config.task_spec import as_columns, label_name
from torchlake.config.types import STRICT, Bool, Every, Float, Int, Interval, Name, Seconds, StrategyName, TaskName
from torchlake.config.yaml import Location, read_text, read_yaml, shape
from torchlake.errors import ConfigError
from torchlake.tables.selection.grammar import parse


def _kind(value: Any) -> str:
    if isinstance(value, Mapping | Fraction):
        return "<fraction>"
    return "<paths>" if isinstance(value, list | tuple) else "<path>"


def _columns_kind(value: Any) -> str:
    return "<columns>" if isinstance(value, list | tuple) else "<column>"


def _weights_kind(value: Any) -> str:
    return "<weights>" if isinstance(value, Mapping) else "<word>"


def _checkpointing_kind(value: Any) -> str:
    return "<word>" if isinstance(value, str) else "<switch>"


def _label_names(value: Any) -> Any:
    """Labels as strings; YAML reads some as numbers or booleans."""
    return {label_name(label): weight for label, weight in value.items()} if isinstance(value, Mapping) else value


Weights = Annotated[dict[str, Annotated[Float, Field(gt=0)]], Field(min_length=1), BeforeValidator(_label_names)]
ClassWeights = Annotated[
    Annotated[Literal["balanced"], Tag("<word>")] | Annotated[Weights, Tag("<weights>")], Discriminator(_weights_kind)
]
Checkpointing = Annotated[
    Annotated[Bool, Tag("<switch>")] | Annotated[Literal["selective"], Tag("<word>")],
    Discriminator(_checkpointing_kind),
]
OneColumn = Annotated[Name, Tag("<column>")]
ManyColumns = Annotated[tuple[Name, ...], Field(min_length=1), Tag("<columns>")]
OnePath = Annotated[Name, Tag("<path>")]
ManyPaths = Annotated[tuple[Name, ...], Field(min_length=1), Tag("<paths>")]
Columns = Annotated[OneColumn | ManyColumns, Discriminator(_columns_kind)]


class Fraction(BaseModel):
    """A share of the training rows, selected by the seed."""

    model_config = STRICT

    fraction: Float = Field(gt=0, lt=1)
    """Share of the rows, above 0 and below 1."""


class CsvConfig(BaseModel):
    """How CSV files are written."""

    model_config = STRICT

    delimiter: Name | None = Field(default=None, max_length=1)
    """Character between fields; null: a tab in .tsv files, else a comma."""
    quote: Name = Field(default='"', max_length=1)
    """Character around a field; doubled within one."""
    encoding: Name = "utf-8"
    """Encoding of the text, such as latin-1, cp1252 or utf-16."""


class DataConfig(BaseModel):
    """The training and validation tables, and their columns."""

    model_config = STRICT

    train: Annotated[OnePath | ManyPaths, Discriminator(_kind)]
    """Training table: a file, folder, glob or URL, or a list of them."""
    validation: Annotated[OnePath | ManyPaths | Annotated[Fraction, Tag("<fraction>")], Discriminator(_kind)] | None = (
        Fraction(fraction=0.1)
    )
    """Validation table, or {fraction: f} of the training rows; null: none."""
    text: Columns = "text"
    """Column of the input, or a list of columns whose texts are joined."""
    separator: str | None = None
    """Between the texts of several columns, those that are null or blank left out; null: a space."""
    template: Name | None = None
    """The text of several columns, such as "{title}: {body}", nothing for a null; null: joined by the separator."""
    text_pair: Columns | None = None
    """Column of the second text of a pair, or a list of columns; null: a row has one text."""
    inputs: dict[Name, Columns] = {}
    """Columns of the task's other inputs, by the input's name; without one, the column of that name."""
    label: Name = "label"
    """Column of the target: strings or integers, lists of strings, or floats; text generation has none."""
    problem: Literal["single_label", "multi_label", "regression"] | None = None
    """One class per row, several (lists of strings), or a number; null: inferred from the label column."""
    learn: Literal["all", "assistant"] = "all"
    """Tokens of conversations in the loss: all, or those of the assistant's turns as marked by the chat template."""
    key: Name | None = None
    """Column that identifies a row, unique and without nulls; null: file and row number."""
    csv: CsvConfig = CsvConfig()
    """How the tables are written, if they are CSV files."""
    where: Name | None = None
    """Rows of both tables to read, such as stars >= 3 and lang = 'en'; null: all."""
    sample: Float | None = Field(default=None, gt=0, le=1)
    """Share of the training table's rows, selected by train.seed; null: all."""
    limit: Int | None = Field(default=None, ge=1)
    """Maximum number of rows of the training table, in its order; null: all."""
    bad_rows: Literal["error", "drop"] = "error"
    """A row that is null, cannot be decoded, or has a label that is NaN or not a class of the model: stop the job, or
    drop the row and count it."""

    @field_validator("where")
    @classmethod
    def _where_can_be_parsed(cls, where: str | None) -> str | None:
        if where is not None:
            parse(where)
        return where

    @field_validator("template")
    @classmethod
    def _template_has_the_columns(cls, template: str | None, given: ValidationInfo) -> str | None:
        if template is not None:
            if given.data.get("separator") is not None:
                raise ValueError("separator and template cannot be combined; leave one of them out")
            _check_template(template, as_columns(given.data.get("text", "")))
        return template

    @field_validator("label")
    @classmethod
    def _columns_differ(cls, label: str, given: ValidationInfo) -> str:
        for name in ("text", "text_pair"):
            if label in as_columns(given.data.get(name) or ""):
                raise ValueError(f"{name} and label both name the column {label!r}; they must differ")
        return label


def _check_template(template: str, columns: tuple[str, ...]) -> None:
    """Raise ValueError unless the template has each of the columns as {column}, and nothing else in braces."""
    try:
        fields = [(name, kind, how) for _, name, how, kind in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(f"{template!r} is no template: {error}; write a brace itself as {{{{ or }}}}") from None
    names = {name for name, _, _ in fields}
    if any(kind or how for _, kind, how in fields) or names != set(columns) or len(columns) < 2:
        raise ValueError(
            f"{template!r} has {', '.join(map(repr, sorted(names))) or 'no column'} in braces; it needs each of the "
            f"columns in text, which is a list of two or more"
        )


class ModelConfig(BaseModel):
    """The model to fine-tune, and its task."""

    model_config = STRICT

    base: Name
    """Model folder, or a name on the Hugging Face Hub; `name@revision` for a branch, tag or commit."""
    task: TaskName = "text_classification"
    """What the model predicts; a file in torchlake/tasks."""
    max_length: Int | None = Field(default=None, ge=2)
    """Maximum tokens of a row, including special tokens; for text generation, tokens of a block. null: the model's
    maximum, at most 512."""
    attention: Literal["auto", "sdpa", "flash", "flex", "eager"] = "auto"
    """Implementation of attention in training; auto: the default of transformers. flash needs a GPU, flash-attn and 16
    bits; flex needs a GPU."""
    lora: LoraOptions | None = None
    """Train low-rank adapters instead of all weights; null: train all weights."""


class TrainConfig(BaseModel):
    """The settings of a training run."""

    model_config = STRICT

    epochs: Int = Field(default=4, ge=1)
    """Passes over the training rows."""
    batch_size: Int = Field(default=64, ge=1)
    """Rows of one optimizer step, over all ranks; for text generation, blocks of `model.max_length` tokens."""
    learning_rate: Float = Field(default=1e-4, gt=0)
    """AdamW's learning rate at the peak of the schedule."""
    weight_decay: Float = Field(default=0.01, ge=0)
    """AdamW's weight decay, on matrices only, not on biases and norms."""
    warmup: Float = Field(default=0.1, ge=0, lt=1)
    """Share of all steps over which the learning rate rises from 0."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """How the learning rate falls after the warm-up."""
    class_weights: ClassWeights | None = None
    """Weights of classes in the loss: balanced, or {label: weight} with 1 for other classes; null: none."""
    label_smoothing: Float = Field(default=0.0, ge=0, lt=1)
    """Share of each target that is spread evenly over all classes."""
    clip_norm: Float | None = Field(default=1.0, gt=0)
    """Maximum norm of the global gradient; null: no clipping."""
    micro_batch_tokens: Int = Field(default=16384, ge=1)
    """Maximum tokens, including padding, that a rank processes at once; limits memory, does not change results."""
    precision: Literal["auto", "fp32", "tf32", "bf16_weights", "bf16", "fp16"] = "auto"
    """Arithmetic of the forward and backward pass. bf16_weights: weights and activations in bf16; bf16, fp16: only
    matrix products in 16 bits (autocast); tf32: products of GPUs in TF32; fp32: never. Trained weights stay fp32. auto:
    bf16_weights on GPUs, bf16 on CPUs, if they have it, else fp32."""
    deterministic: Bool = False
    """Use only kernels that give the same bits in every run on the same machine; slower on GPUs."""
    activation_checkpointing: Checkpointing = False
    """Recompute each layer's activations in the backward pass instead of keeping them: a third slower, far less memory.
    selective: keep the outputs of matrix products and attention and recompute the rest, which is little work."""
    compile: Bool = False
    """Compile the model's layers with torch.compile: takes a minute at the start, faster steps on GPUs."""
    strategy: StrategyName = "auto"
    """How ranks share the model: a file in torchlake/strategies; auto: single for 1 rank, else ddp."""
    ddp: DdpOptions = DdpOptions()
    """Options of the strategy ddp."""
    fsdp: FsdpOptions = FsdpOptions()
    """Options of the strategy fsdp."""
    deepspeed: DeepSpeedOptions = DeepSpeedOptions()
    """Options of the strategy deepspeed."""
    seed: Int = Field(default=0, ge=0, lt=2**63)
    """Seed of initial weights, dropout and the order of rows."""
    checkpoint_every: Interval = Field(default="10min", validate_default=True)
    """Interval between checkpoints: "10min", "200steps" or "epoch"."""
    checkpoint_in_background: Bool = True
    """Continue training while a checkpoint is written; needs main memory for a copy of it."""
    checkpoint_folder: Name | None = None
    """Where checkpoints are kept: a folder or URL such as s3://bucket/reviews, one per run; null: the run folder."""
    keep_checkpoints: Int = Field(default=2, ge=1)
    """Number of checkpoints to keep."""
    validate_every: Interval = Field(default="epoch", validate_default=True)
    """Interval between validations: "epoch" or "200steps"."""
    metric: Name | None = None
    """Validation metric that selects the best model; null: the default of the task."""
    patience: Int | None = Field(default=None, ge=1)
    """Validations without improvement before training stops; null: never."""
    max_restarts: Int = Field(default=2, ge=0)
    """Number of restarts after a rank has failed."""
    collective_timeout: Seconds = 600.0
    """Seconds ("10min") that a rank waits for others before the run counts as hung."""
    max_steps: Int | None = Field(default=None, ge=1)
    """Optimizer steps after which training stops; null: those of all epochs."""

    @field_validator("validate_every")
    @classmethod
    def _no_clock(cls, every: Every) -> Every:
        # Validations by the clock would fall on different steps in each run and select different models.
        if every.seconds is not None:
            raise ValueError(f'{every} is a time; write "epoch" or "200steps"')
        return every


class TrackConfig(BaseModel):
    """Where parameters and metrics are logged besides metrics.jsonl."""

    model_config = STRICT

    mlflow: Name | None = None
    """MLflow store, sqlite:///FILE or a folder; null: no MLflow."""
    tensorboard: Bool = False
    """Write event files to tensorboard/ in the run folder."""


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
    """The job in `path` (None: no file), updated by `sections` (data={...} or a DataConfig), then by `overrides`.

    `path` may also be a Job. Raises ConfigError with every error, its file and line; UnsafeError for a YAML tag that
    would create an object.
    """
    if isinstance(path, Job):
        merged: dict[str, Any] = {name: section.model_dump(mode="json") for name, section in path}
        for name, section in sections.items():
            plain = section if isinstance(section, Mapping) else section.model_dump(mode="json", exclude_unset=True)
            merged[name] = {**merged.get(name, {}), **plain}
        return load_job(None, overrides, **merged)
    values: dict[str, Any] = {}
    origins: dict[Location, str] = {}
    if path is not None:
        values, lines = read_yaml(read_text(Path(path)), str(path))
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


def load_engine(overrides: Sequence[str]) -> EngineConfig:
    """The engine section from overrides ("engine.processes=2") without a job.

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
    """`job` with other values by dotted name ("train.epochs"). Raises ConfigError as `load_job` does.

    origins: for error messages, where the value of each name came from.
    """
    plain: dict[str, Any] = job.model_dump(mode="json")
    places: dict[Location, str] = {}
    for name, value in values.items():
        _set_value(plain, places, tuple(name.split(".")), value, origins[name])
    return _validated(Job, plain, places, None)


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one mapping of dotted names: {"train": {"epochs": 4}} as {"train.epochs": 4}."""
    if not isinstance(value, Mapping):
        return {prefix: value}
    return {
        name: leaf
        for key, item in value.items()
        for name, leaf in flat(item, f"{prefix}.{key}" if prefix else str(key)).items()
    }


def job_to_yaml(job: Job) -> str:
    """The job as YAML text that `load_job` reads back to an equal job."""
    value = job.model_dump(mode="json")
    text = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
    # PyYAML writes these line breaks unescaped and reads them back as spaces.
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
