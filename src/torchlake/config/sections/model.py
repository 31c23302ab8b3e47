"""The section `model` of a job: the model to fine-tune, and its task."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, ValidationInfo, field_validator

from torchlake.config.sections.strategies import LoraOptions
from torchlake.config.types import STRICT, Int, Name, TaskName


def _freeze_kind(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "<patterns>"
    return "<layers>" if isinstance(value, int | float) else "<word>"


Freeze = Annotated[
    Annotated[Literal["embeddings", "body"], Tag("<word>")]
    | Annotated[Int, Field(ge=1), Tag("<layers>")]
    | Annotated[tuple[Name, ...], Field(min_length=1), Tag("<patterns>")],
    Discriminator(_freeze_kind),
]


class ModelConfig(BaseModel):
    """The model to fine-tune, and its task."""

    model_config = STRICT

    base: Name | None
    """Model folder, or a name on the Hugging Face Hub; `name@revision` for a branch, tag or commit. null: none, for
    your own task whose module needs none."""
    task: TaskName = "text_classification"
    """What the model predicts; a file in torchlake/tasks."""
    task_options: dict[Name, Any] = {}
    """Options of the task, by their names; the how-to page of each task lists them."""
    max_length: Int | None = Field(default=None, ge=2)
    """Maximum tokens of a row, including special tokens; for text generation, tokens of a block. null: the model's
    maximum, at most 512."""
    attention: Literal["auto", "sdpa", "flash", "flex", "eager"] = "auto"
    """Implementation of attention in training; auto: the default of transformers. flash needs a GPU, flash-attn and 16
    bits; flex needs a GPU."""
    lora: LoraOptions | None = None
    """Train low-rank adapters instead of all weights; null: train all weights."""
    quantize: Literal["nf4", "int8"] | None = None
    """Keep the frozen weights of the layers in 4 bits (nf4, QLoRA, Dettmers et al. 2023) or 8 bits (int8), by
    bitsandbytes; needs lora. null: as they are; on GPUs in bf16."""
    freeze: Freeze | None = None
    """What is not trained: embeddings; a number: the first layers and the embeddings; body: all but the head; or a list
    of names or patterns of modules and parameters ("bert.encoder.layer.0", "*.bias"); null: nothing."""

    @field_validator("quantize")
    @classmethod
    def _adapters_learn(cls, quantize: str | None, given: ValidationInfo) -> str | None:
        lora = given.data.get("lora")
        if quantize is not None and lora is None and "lora" in given.data:
            raise ValueError("quantized weights cannot be trained: model.quantize needs model.lora; write lora: {}")
        if quantize is not None and lora is not None and lora.init == "pissa":
            raise ValueError("model.lora.init=pissa changes the weights of the base, which quantize keeps in few bits")
        return quantize

    @field_validator("freeze")
    @classmethod
    def _lora_freezes_by_itself(cls, freeze: Any, given: ValidationInfo) -> Any:
        if freeze is not None and given.data.get("lora") is not None:
            raise ValueError("model.lora already freezes everything except adapters and head; leave this out")
        return freeze
