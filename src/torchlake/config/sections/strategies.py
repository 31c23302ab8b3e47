"""Options of the strategies, and of LoRA."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field, model_validator

from torchlake.config.types import CHECKED_INT, STRICT, Bool, Float, Int, Name


class DdpOptions(BaseModel):
    """Options of `strategy: ddp`."""

    model_config = STRICT

    bucket_mib: Float = Field(default=25.0, gt=0)
    """MiB of gradients sent at once: smaller buckets start earlier, larger ones have less overhead."""
    compress: Literal["none", "fp16", "bf16"] = "none"
    """Precision in which gradients are sent: unchanged, or 16 bits; bf16 needs GPUs."""


class FsdpOptions(BaseModel):
    """Options of `strategy: fsdp`."""

    model_config = STRICT

    reshard: Bool = True
    """Free gathered weights after a layer's forward pass (ZeRO-3); false: keep them for the backward pass (ZeRO-2)."""
    shard_ranks: Int | None = Field(default=None, ge=2)
    """Number of adjacent ranks that share one copy of the model, such as those of one machine; null: all ranks."""
    tensor_parallel: Int = Field(default=1, ge=1)
    """Number of adjacent ranks that share every layer and compute the same rows; the model needs a plan for it in
    transformers. 1: each rank computes whole layers."""
    cpu_offload: Bool = False
    """Keep weights, gradients and moments in main memory; needs GPUs."""


class DeepSpeedOptions(BaseModel):
    """Options of `strategy: deepspeed`."""

    model_config = STRICT

    stage: Annotated[Literal[1, 2, 3], CHECKED_INT] = 2
    """What is sharded: 1 the optimizer's moments, 2 also gradients, 3 also weights."""
    offload_optimizer: Bool = False
    """Keep the moments in main memory and step there; needs GPUs."""
    offload_parameters: Bool = False
    """Keep the weights in main memory; needs GPUs and stage 3."""
    config: Name | None = None
    """A DeepSpeed JSON file, which must not contradict the job. null: none."""

    @model_validator(mode="after")
    def _fits_the_stage(self) -> "DeepSpeedOptions":
        if self.offload_parameters and self.stage != 3:
            raise ValueError("offload_parameters needs stage 3; in lower stages every rank computes with whole weights")
        return self


class LoraOptions(BaseModel):
    """Low-rank adaptation (Hu et al. 2021): W x + alpha / rank B A x, where only A and B are trained."""

    model_config = STRICT

    rank: Int = Field(default=16, ge=1)
    """Rows of A, columns of B."""
    alpha: Int = Field(default=32, ge=1)
    """Numerator of the scale alpha / rank."""
    dropout: Float = Field(default=0.0, ge=0, lt=1)
    """Dropout of x before A, in training."""
    targets: tuple[Name, ...] | None = Field(default=None, min_length=1)
    """Last parts of the names of the linear layers to adapt ("query"); null: all but the head."""
    rslora: Bool = False
    """Scale by alpha / sqrt(rank), so that a larger rank learns more (rsLoRA, Kalajdzievski 2023)."""
    dora: Bool = False
    """Learn the length of each output's weights apart from their direction (DoRA, Liu et al. 2024); slower."""
    init: Literal["default", "gaussian", "pissa"] = "default"
    """First values. default: A uniform, B zero; gaussian: A normal with deviation 1 / rank, B zero; pissa: the largest
    singular values and vectors of the weights, which are taken out of the frozen part (PiSSA, Meng et al. 2024)."""
    learning_rate_ratio: Float = Field(default=1.0, gt=0)
    """The learning rate of B, in learning rates of A, such as 16 (LoRA+, Hayou et al. 2024)."""
    also_train: tuple[Name, ...] | None = Field(default=None, min_length=1)
    """Modules that are trained whole: embed_tokens (the word embeddings), lm_head (a language model's head), or the
    last parts of other modules' names; null: none but a new head."""
    merge: Bool = True
    """Write the whole model, with the adapter merged into it; false: the adapter alone, with the name, revision and
    hash of its base, as peft and vLLM load it."""
