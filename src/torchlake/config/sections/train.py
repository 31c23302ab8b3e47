"""The section `train` of a job: the settings of a training run."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from torchlake.config.messages import expected
from torchlake.config.sections.preference import PreferenceOptions
from torchlake.config.sections.strategies import DdpOptions, DeepSpeedOptions, FsdpOptions
from torchlake.config.task_spec import label_name
from torchlake.config.types import STRICT, Bool, Every, Float, Int, Interval, Name, Seconds, StrategyName

COOLDOWN = 0.1
"The share of the steps over which wsd falls, unless train.cooldown is set."


def _weights_kind(value: Any) -> str:
    return "<weights>" if isinstance(value, Mapping) else "<word>"


def _checkpointing_kind(value: Any) -> str:
    return "<word>" if isinstance(value, str) else "<switch>"


def _label_names(value: Any) -> Any:
    """Return the labels as strings, because YAML reads some as numbers or booleans."""
    return {label_name(label): weight for label, weight in value.items()} if isinstance(value, Mapping) else value


Weights = Annotated[dict[str, Annotated[Float, Field(gt=0)]], Field(min_length=1), BeforeValidator(_label_names)]
ClassWeights = Annotated[
    Annotated[Literal["balanced"], Tag("<word>")] | Annotated[Weights, Tag("<weights>")], Discriminator(_weights_kind)
]
Checkpointing = Annotated[
    Annotated[Bool, Tag("<switch>")] | Annotated[Literal["selective"], Tag("<word>")],
    Discriminator(_checkpointing_kind),
]


def _two_numbers(value: Any) -> Any:
    if value is not None and not (isinstance(value, list | tuple) and len(value) == 2):
        raise ValueError(expected("two numbers, such as [0.9, 0.95]", value))
    return value


Beta = Annotated[Float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[Beta, Beta], BeforeValidator(_two_numbers)]


class WritingConfig(BaseModel):
    """What the model writes at each validation, and how it is measured."""

    model_config = STRICT

    rows: Int = Field(default=64, ge=1)
    """Validation rows whose prompts the model answers, spread evenly over the table; the same at each validation."""
    max_new_tokens: Int = Field(default=64, ge=1)
    """Maximum tokens of an answer."""
    metric: Literal["exact_match", "token_f1", "chrf", "rouge_l", "json_valid"] = "exact_match"
    """exact_match: equal to the row's own answer; token_f1: words in common; chrf: n-grams of characters in common, 0
    to 100; json_valid: the answer is JSON."""


class TrainConfig(BaseModel):
    """The settings of a training run."""

    model_config = STRICT

    epochs: Int = Field(default=4, ge=1)
    """Passes over the training rows."""
    batch_size: Int = Field(default=64, ge=1)
    """Rows of one optimizer step, over all ranks; for text generation, blocks of `model.max_length` tokens."""
    learning_rate: Float = Field(default=1e-4, gt=0)
    """The learning rate at the peak of the schedule."""
    optimizer: Literal["adamw", "adamw_8bit", "sgd", "adafactor", "lion"] = "adamw"
    """What updates the weights: torch's optimizers, lion of lion-pytorch, adamw with 8-bit moments of bitsandbytes."""
    betas: Betas | None = None
    """Decay rates of the moments of adamw and lion, such as [0.9, 0.95]; null: [0.9, 0.999], of lion [0.9, 0.99]."""
    momentum: Float | None = Field(default=None, ge=0, lt=1)
    """Momentum of sgd; null: 0.9."""
    weight_decay: Float = Field(default=0.01, ge=0)
    """Weight decay, on matrices only, not on biases and norms; for sgd it is added to the gradient."""
    layer_decay: Float | None = Field(default=None, gt=0, le=1)
    """Factor of the learning rate from each layer to the one before it, such as 0.9: the head has learning_rate, the
    embeddings the least; null: the same rate everywhere."""
    schedule: Literal["linear", "cosine", "constant", "wsd"] = "linear"
    """How the learning rate falls after the warm-up; wsd: at the end only, over the cooldown."""
    min_learning_rate: Float = Field(default=0.0, ge=0)
    """What the learning rate falls to."""
    warmup: Float | None = Field(default=0.1, ge=0, lt=1)
    """Share of all steps over which the learning rate rises from 0; null: see warmup_steps."""
    warmup_steps: Int | None = Field(default=None, ge=1, validate_default=True)
    """The same as a number of steps, in place of warmup."""
    cooldown: Float | None = Field(default=None, gt=0, le=1, validate_default=True)
    """Share of all steps, the last ones, over which the learning rate of wsd falls; null: 0.1."""
    class_weights: ClassWeights | None = None
    """Weights of classes in the loss: balanced, or {label: weight} with 1 for other classes; null: none."""
    label_smoothing: Float = Field(default=0.0, ge=0, lt=1)
    """Share of each target that is spread evenly over all classes."""
    focal_gamma: Float = Field(default=0.0, ge=0)
    """Focal loss: each target's loss is multiplied by (1 - its probability) to this power, such as 2; 0: not."""
    preference: PreferenceOptions | None = None
    """The loss of pairs of answers (data.chosen, data.rejected); null: dpo with its defaults."""
    neftune: Float | None = Field(default=None, gt=0)
    """Noise on the word embeddings in training, for language models, such as 5 (NEFTune); null: none."""
    ema: Float | None = Field(default=None, gt=0, lt=1)
    """Decay of a moving average of the weights, such as 0.999, for validations and the saved model; null: none."""
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
    batch_norm: Literal["shared", "local"] = "shared"
    """Rows by which BatchNorm of model.task_options.batch_norm=batch normalizes. shared: those of all ranks, so that
    losses do not depend on their number; local: those of each rank alone, so that no layer waits for other ranks."""
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
    keep_checkpoints: Int | None = Field(default=None, ge=1)
    """Number of checkpoints to keep. null: two while the run trains, and the last one when it has finished."""
    validate_every: Interval = Field(default="epoch", validate_default=True)
    """Interval between validations: "epoch" or "200steps"."""
    validate_writing: WritingConfig | None = None
    """Let the model write answers at each validation, greedily, for text_generation with answers and
    text2text_generation; the texts are in the report. null: validations have the loss alone."""
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

    @model_validator(mode="before")
    @classmethod
    def _steps_replace_the_share(cls, values: Any) -> Any:
        # warmup_steps replaces the default of warmup, but not a value that the user gave.
        if isinstance(values, Mapping) and values.get("warmup_steps") is not None and "warmup" not in values:
            return {**values, "warmup": None}
        return values

    @field_validator("betas")
    @classmethod
    def _optimizer_has_betas(cls, betas: Any, given: ValidationInfo) -> Any:
        optimizer = given.data.get("optimizer")
        if betas is not None and optimizer in ("sgd", "adafactor"):
            raise ValueError(f"optimizer {optimizer} has no betas; leave them out")
        return betas

    @field_validator("momentum")
    @classmethod
    def _optimizer_has_momentum(cls, momentum: float | None, given: ValidationInfo) -> float | None:
        optimizer = given.data.get("optimizer", "sgd")
        if momentum is not None and optimizer != "sgd":
            raise ValueError(f"is a setting of optimizer sgd, but the optimizer is {optimizer}; leave it out")
        return momentum

    @field_validator("min_learning_rate")
    @classmethod
    def _rate_falls(cls, lowest: float, given: ValidationInfo) -> float:
        if lowest and given.data.get("schedule") == "constant":
            raise ValueError("schedule constant stays at learning_rate; leave this out")
        if lowest > given.data.get("learning_rate", lowest):
            raise ValueError(f"{lowest} is above learning_rate, {given.data['learning_rate']}")
        return lowest

    @field_validator("warmup_steps")
    @classmethod
    def _one_warmup(cls, steps: int | None, given: ValidationInfo) -> int | None:
        share = given.data.get("warmup", 0.0 if steps is None else None)
        if steps is None and share is None:
            raise ValueError("warmup and warmup_steps are both null; write warmup: 0 for none")
        if steps is not None and share is not None:
            raise ValueError(f"warmup ({share}) is set too; leave one of them out, or set it to null")
        return steps

    @field_validator("focal_gamma")
    @classmethod
    def _hard_targets(cls, gamma: float, given: ValidationInfo) -> float:
        if gamma and given.data.get("label_smoothing"):
            raise ValueError("label_smoothing is set too; leave one of them out")
        return gamma

    @field_validator("cooldown")
    @classmethod
    def _schedule_has_a_cooldown(cls, cooldown: float | None, given: ValidationInfo) -> float | None:
        schedule, warmup = given.data.get("schedule"), given.data.get("warmup") or 0.0
        if cooldown is not None and schedule not in (None, "wsd"):
            raise ValueError(f"is a setting of schedule wsd, but the schedule is {schedule}; leave it out")
        falling = COOLDOWN if cooldown is None else cooldown
        if schedule == "wsd" and warmup + falling > 1:
            raise ValueError(f"warmup ({warmup}) and cooldown ({falling}) are more than all steps; lower one of them")
        return cooldown

    @field_validator("validate_every")
    @classmethod
    def _no_clock(cls, every: Every) -> Every:
        # Validations by the clock would be at different steps in each run, and select different models.
        if every.seconds is not None:
            raise ValueError(f'{every} is a time; write "epoch" or "200steps"')
        return every
