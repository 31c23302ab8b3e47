"""The types of a job's sections as mappings, as Python callers pass them; written by tools/arguments.py.

A type checker and an editor know from these the keys of `train(data={...}, train={...})`. The models in
`config/sections/` check the values and describe each field: change these and run `make reference`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from torchlake.config.sections.data import CsvConfig, DataConfig, MessagesConfig
from torchlake.config.sections.model import ModelConfig
from torchlake.config.sections.preference import PreferenceOptions
from torchlake.config.sections.strategies import DdpOptions, DeepSpeedOptions, FsdpOptions, LoraOptions
from torchlake.config.sections.track import TrackConfig
from torchlake.config.sections.train import TrainConfig, WritingConfig
from torchlake.tables.sources.streams import Input


class FractionSection(TypedDict):
    fraction: float


class FoldSection(TypedDict):
    folds: int
    fold: int


class MessagesSection(TypedDict, total=False):
    role: str
    content: str
    roles: Mapping[str, str]


class CsvSection(TypedDict, total=False):
    delimiter: str | None
    quote: str
    encoding: str


class DataSection(TypedDict, total=False):
    train: Input
    validation: Input | FractionSection | FoldSection | None
    chosen: str | None
    text: str | Sequence[str] | None
    separator: str | None
    template: str | None
    text_pair: str | Sequence[str] | None
    inputs: Mapping[str, str | Sequence[str]]
    label: str
    problem: Literal["single_label", "multi_label", "regression"] | None
    completion: str | None
    messages: MessagesConfig | MessagesSection | None
    system: str | None
    learn: Literal["all", "assistant", "last"] | None
    pack: Literal["stream", "whole"] | None
    too_long: Literal["cut_start", "cut_end", "drop", "error"] | None
    rejected: str | None
    key: str | None
    csv: CsvConfig | CsvSection
    where: str | None
    sample: float | None
    limit: int | None
    label_separator: str | None
    deduplicate: bool
    bad_rows: Literal["error", "drop"]


class LoraSection(TypedDict, total=False):
    rank: int
    alpha: int
    dropout: float
    targets: Sequence[str] | None
    rslora: bool
    dora: bool
    init: Literal["default", "gaussian", "pissa"]
    learning_rate_ratio: float
    also_train: Sequence[str] | None
    merge: bool


class ModelSection(TypedDict, total=False):
    base: str | Path | None
    task: str
    task_options: Mapping[str, Any]
    max_length: int | None
    attention: Literal["auto", "sdpa", "flash", "flex", "eager"]
    lora: LoraOptions | LoraSection | None
    quantize: Literal["nf4", "int8"] | None
    freeze: Literal["embeddings", "body"] | int | Sequence[str] | None


class PreferenceSection(TypedDict, total=False):
    loss: Literal["dpo", "ipo", "orpo"]
    beta: float
    label_smoothing: float
    sft_weight: float
    reference: str | None


class DdpSection(TypedDict, total=False):
    bucket_mib: float
    compress: Literal["none", "fp16", "bf16"]


class FsdpSection(TypedDict, total=False):
    reshard: bool
    shard_ranks: int | None
    tensor_parallel: int
    cpu_offload: bool


class DeepSpeedSection(TypedDict, total=False):
    stage: Literal[1, 2, 3]
    offload_optimizer: bool
    offload_parameters: bool
    config: str | Path | None


class WritingSection(TypedDict, total=False):
    rows: int
    max_new_tokens: int
    metric: Literal["exact_match", "token_f1", "chrf", "rouge_l", "json_valid"]


class TrainSection(TypedDict, total=False):
    epochs: int
    batch_size: int
    learning_rate: float
    optimizer: Literal["adamw", "adamw_8bit", "sgd", "adafactor", "lion"]
    betas: Sequence[float] | None
    momentum: float | None
    weight_decay: float
    layer_decay: float | None
    schedule: Literal["linear", "cosine", "constant", "wsd"]
    min_learning_rate: float
    warmup: float | None
    warmup_steps: int | None
    cooldown: float | None
    class_weights: Literal["balanced"] | Mapping[Any, float] | None
    label_smoothing: float
    focal_gamma: float
    preference: PreferenceOptions | PreferenceSection | None
    neftune: float | None
    ema: float | None
    clip_norm: float | None
    micro_batch_tokens: int
    precision: Literal["auto", "fp32", "tf32", "bf16_weights", "bf16", "fp16"]
    deterministic: bool
    activation_checkpointing: bool | Literal["selective"]
    compile: bool
    batch_norm: Literal["shared", "local"]
    strategy: str
    ddp: DdpOptions | DdpSection
    fsdp: FsdpOptions | FsdpSection
    deepspeed: DeepSpeedOptions | DeepSpeedSection
    seed: int
    checkpoint_every: str
    checkpoint_in_background: bool
    checkpoint_folder: str | Path | None
    keep_checkpoints: int | None
    validate_every: str
    validate_writing: WritingConfig | WritingSection | None
    metric: str | None
    patience: int | None
    max_restarts: int
    collective_timeout: float | str
    max_steps: int | None


class TrackSection(TypedDict, total=False):
    mlflow: str | Path | None
    wandb: str | None
    tensorboard: bool


class Sections(TypedDict, total=False):
    """The sections of a job that `train` and `plan` accept as arguments; `engine` is a separate argument."""

    data: DataConfig | DataSection
    model: ModelConfig | ModelSection
    train: TrainConfig | TrainSection
    track: TrackConfig | TrackSection
