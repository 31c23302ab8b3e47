"""The section `track` of a job: where its metrics are logged."""

from pydantic import BaseModel

from torchlake.config.types import STRICT, Bool, Name


class TrackConfig(BaseModel):
    """Where parameters and metrics are logged besides metrics.jsonl."""

    model_config = STRICT

    mlflow: Name | None = None
    """MLflow store, sqlite:///FILE or a folder; null: no MLflow."""
    wandb: Name | None = None
    """Project of Weights & Biases, or ENTITY/PROJECT; WANDB_MODE=offline keeps the run in its folder. null: none."""
    tensorboard: Bool = False
    """Write event files to tensorboard/ in the run folder."""
