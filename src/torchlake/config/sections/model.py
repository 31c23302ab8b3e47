"""The section `model` of a job: the model to fine-tune, and its task."""

from typing import Literal

from pydantic import BaseModel, Field

from torchlake.config.sections.strategies import LoraOptions
from torchlake.config.types import STRICT, Int, Name, TaskName


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
