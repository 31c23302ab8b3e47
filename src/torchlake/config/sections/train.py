"""The section `train` of a job: the settings of a training run."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag, field_validator

from torchlake.config.sections.strategies import DdpOptions, DeepSpeedOptions, FsdpOptions
from torchlake.config.task_spec import label_name
from torchlake.config.types import STRICT, Bool, Every, Float, Int, Interval, Name, Seconds, StrategyName


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
