"""The section `train.preference` of a job: how a model learns which of two answers is better."""

from typing import Literal

from pydantic import BaseModel, Field, ValidationInfo, field_validator

from torchlake.config.types import STRICT, Float, Name


class PreferenceOptions(BaseModel):
    """The loss of pairs of answers, `data.chosen` and `data.rejected`."""

    model_config = STRICT

    loss: Literal["dpo", "ipo", "orpo"] = "dpo"
    """dpo (Rafailov et al. 2023), ipo (Azar et al. 2023) by the average of each answer's tokens, or orpo (Hong et al.
    2024), which needs no reference."""
    beta: Float = Field(default=0.1, gt=0)
    """How near the model stays to the reference: in dpo the factor of the rewards, in ipo the strength of the
    regularization; in orpo the weight of the odds ratio."""
    label_smoothing: Float = Field(default=0.0, ge=0, lt=0.5)
    """For dpo, the share of pairs whose answers may be the wrong way round."""
    sft_weight: Float = Field(default=0.0, ge=0)
    """For dpo and ipo, the weight of the cross entropy of the chosen answers, which is added to the loss."""
    reference: Name | None = None
    """For dpo and ipo, the model that the rewards are relative to: a folder, or a name on the Hub. null: the base."""

    @field_validator("label_smoothing", "sft_weight", "reference")
    @classmethod
    def _is_of_the_loss(cls, value: float | str | None, given: ValidationInfo) -> float | str | None:
        loss = given.data.get("loss")
        if value and (loss == "orpo" or (loss == "ipo" and given.field_name == "label_smoothing")):
            raise ValueError(f"loss {loss} has no {given.field_name}; leave it out")
        return value
