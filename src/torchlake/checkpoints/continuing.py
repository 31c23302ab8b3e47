"""Which changes of a job may continue its run: those without effect on the result, and more steps but not fewer.

A run that has ended because it no longer improved is not continued.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torchlake.config.sections.train import TrainConfig

LENGTHS = ("train.epochs", "train.max_steps")
"Settings of a run that may grow while it continues; null is the largest value."
MAY_CHANGE = (
    "engine",
    "train.strategy",
    "train.activation_checkpointing",
    "train.ddp.bucket_mib",
    "train.fsdp.reshard",
    "train.fsdp.shard_ranks",
    "train.fsdp.tensor_parallel",
    "train.fsdp.cpu_offload",
    "train.deepspeed.stage",
    "train.deepspeed.offload_optimizer",
    "train.deepspeed.offload_parameters",
    "train.checkpoint_every",
    "train.checkpoint_in_background",
    "train.keep_checkpoints",
    "train.max_restarts",
    "train.collective_timeout",
    "train.micro_batch_tokens",
    "track",
)
"Settings that do not affect the result, each with those below it."


def may_change(name: str) -> bool:
    """Return whether a run may continue with another value of a setting."""
    return any(f"{name}.".startswith(f"{free}.") for free in MAY_CHANGE)


def refused_changes(differing: Sequence[str], before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the lines about settings that differ, without those of LENGTHS that have grown.

    A run may be continued for more epochs, but not for fewer: its newest checkpoint could already be beyond the end.
    """
    pairs = {name: (before.get(name), now.get(name)) for name in LENGTHS}
    grown = {name for name, (one, other) in pairs.items() if other is None or (one is not None and other > one)}
    return [line for line in differing if line.split(":")[0].strip() not in grown]


def why_ended(run: str, result: Mapping[str, Any], train: TrainConfig) -> str | None:
    """Return why a run with this result would not continue although its job is longer now; None if it would."""
    if result.get("stopped_by") == "patience":
        return (
            f"{run}: the run stopped because its validations no longer improved (train.patience={train.patience}), so "
            "more train.epochs or train.max_steps would not continue it. Train again in another run folder (--run "
            "FOLDER)."
        )
    if train.max_steps is not None and result.get("steps", 0) >= train.max_steps:
        return f"{run}: has reached train.max_steps={train.max_steps}. Raise it as well, or set it to null."
    return None
