"""What a training run stores: its checkpoints, its best model, and at the end the model folder.

Each of it goes through the run folder's lease: a run whose launcher slept longer than that may be taken for dead, and
must not write beside its successor. The model folder is made from what is stored, by rank 0 alone, in main memory: no
rank gathers a model that is shared out on its GPU.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torchlake import atomic_io, plugins
from torchlake.checkpoints import format, location
from torchlake.checkpoints.async_writer import CheckpointWriter
from torchlake.checkpoints.store import Place
from torchlake.errors import LeaseLost
from torchlake.metrics import lower_is_better
from torchlake.models.load import base_model, save_model_folder
from torchlake.runs import metrics_log
from torchlake.tables.output import lease
from torchlake.training import lora
from torchlake.training.rows import RankSettings
from torchlake.training.state import Learner, Position

log = logging.getLogger(__name__)

LOSS = "loss"


def save(
    settings: RankSettings, learner: Learner, position: Position, per_epoch: int, writer: CheckpointWriter
) -> None:
    """Begin a checkpoint of this very moment. Raises StorageError, LeaseLost of an earlier one."""
    if learner.group.rank == 0:
        with fenced(settings):
            metrics_log.sync(Path(settings.run) / metrics_log.METRICS)
    epoch, batch = divmod(position.step, per_epoch)
    writer.begin(
        format.at_step(checkpoints(settings), position.step, **_who(settings, learner)),
        {format.MODEL: learner.model_share(), format.OPTIMIZER: learner.optimizer_share()},
        background=settings.job.train.checkpoint_in_background,
        keep=settings.job.train.keep_checkpoints,
        state={
            "step": position.step,
            "epoch": epoch,
            "batch": batch,
            "best": position.best,
            "world_size": learner.group.world_size,
            "position": asdict(position),
        },
    )


def keep_if_best(
    settings: RankSettings, learner: Learner, position: Position, outcome: metrics_log.Line, writer: CheckpointWriter
) -> None:
    """Note a validation in `position`; where it beats all before it, keep the model."""
    value = outcome[settings.metric]
    sign = -1 if lower_is_better(settings.metric, learner.task.DIRECTIONS) else 1
    before = position.best
    position.validated = position.step
    if not math.isfinite(value) or (before is not None and sign * value <= sign * before["metrics"][settings.metric]):
        position.stale += 1
        return
    position.stale, position.best = 0, {"step": position.step, "metrics": outcome}
    draft = format.best_at_step(checkpoints(settings), position.step, **_who(settings, learner))
    background = settings.job.train.checkpoint_in_background
    writer.begin(draft, {format.MODEL: learner.model_share()}, background=background, metrics=outcome)


def exporter(
    settings: RankSettings, learner: Learner, position: Position, card: dict[str, Any]
) -> Callable[[Path], None]:
    """A function that writes the best model, from what is stored of it, as a model folder; it needs no other rank.

    Where there was no validation the best model is the last. Raises DataError when what is stored is damaged.
    """
    place = checkpoints(settings)
    if position.best is None:
        stored = format.step_path(place, position.step)
    else:
        stored = format.best_path(place, position.best["step"])
        log.info("the best model is that of step %d", position.best["step"])
    tensors = format.load_model(stored, learner.stored)
    place.forget()
    options = settings.job.model.lora
    write = partial(save_model_folder, config=learner.config, tokenizer=learner.tokenizer, spec=settings.spec)
    if options is None:
        return partial(write, model_or_state=tensors, card=card)

    def write_merged(place: Path) -> None:
        base = base_model(settings.job.model.base, settings.spec, plugins.load("tasks", settings.spec.task).AUTO_CLASS)
        with TemporaryDirectory(dir=place.parent, prefix=".adapter.", suffix=".tmp") as scratch:
            merged = lora.merged(base, options, tensors, Path(scratch) / lora.ADAPTER)
            write(place, model_or_state=merged, card=card, beside=Path(scratch) / lora.ADAPTER)

    return write_merged


@contextmanager
def fenced(settings: RankSettings) -> Iterator[None]:
    """Hold the run folder's lock while writing into it. Raises LeaseLost when another trainer has taken it over."""
    folder, token = settings.lease
    with lease.locked(Path(folder)):
        if atomic_io.read_json(Path(folder) / "lease.json")["token"] != token:
            raise LeaseLost(f"{settings.run}: another process has taken this run over and goes on with it")
        yield


def checkpoints(settings: RankSettings) -> Place:
    """Where the run's checkpoints are."""
    return location.find(settings.job.train.checkpoint_folder, Path(settings.run))


def _who(settings: RankSettings, learner: Learner) -> dict[str, Any]:
    return {
        "attempt": settings.attempt,
        "rank": learner.group.rank,
        "world_size": learner.group.world_size,
    }
