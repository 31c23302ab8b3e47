"""What a training run writes: its checkpoints, its best model, and at the end the model folder.

All writes are fenced by the run folder's lease: a launcher that was suspended for longer may have been replaced, and
must not write beside its successor. Rank 0 alone builds the model folder from stored checkpoints, in main memory, so no
rank gathers a sharded model on its GPU.
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

import numpy as np
import torch

from torchlake import atomic_io, plugins
from torchlake.checkpoints import format, location, retention
from torchlake.checkpoints.async_writer import CheckpointWriter
from torchlake.checkpoints.location import CheckpointStore
from torchlake.distributed import Group
from torchlake.errors import LeaseLost, TaskError, UsageError
from torchlake.evaluation import held_out
from torchlake.metrics import lower_is_better
from torchlake.models.adapters import quantized
from torchlake.models.adapters.base import write_base
from torchlake.models.adapters.merging import merged
from torchlake.models.folders import ADAPTER, base_folder
from torchlake.optim import averages
from torchlake.runs import folder as run_folder
from torchlake.runs import metrics_log
from torchlake.storage import lease
from torchlake.training.model import lora
from torchlake.training.model.traits import stores_all
from torchlake.training.rows import RankSettings, total_steps
from torchlake.training.state import TrainProgress, TrainState

log = logging.getLogger(__name__)

LOSS = "loss"


def save(
    settings: RankSettings, state: TrainState, progress: TrainProgress, per_epoch: int, writer: CheckpointWriter
) -> None:
    """Start a checkpoint of the current state. Raises StorageError and LeaseLost, possibly of an earlier checkpoint."""
    if state.group.rank == 0:
        with fenced(settings):
            metrics_log.sync(Path(settings.run) / metrics_log.METRICS)
    epoch, batch = divmod(progress.step, per_epoch)
    writer.begin(
        format.step_draft(checkpoints(settings), progress.step, **_writer_fields(settings, state)),
        {format.MODEL: state.model_shard(), format.OPTIMIZER: state.optimizer_shard()},
        background=settings.job.train.checkpoint_in_background,
        keep=settings.job.train.keep_checkpoints or retention.KEPT_WHILE_TRAINING,
        state={
            "step": progress.step,
            "epoch": epoch,
            "batch": batch,
            "best": progress.best,
            "world_size": state.group.world_size,
            "total_steps": total_steps(settings.job.train, per_epoch),
            "position": asdict(progress),
        },
    )


def save_if_best(
    settings: RankSettings,
    state: TrainState,
    progress: TrainProgress,
    outcome: metrics_log.Line,
    writer: CheckpointWriter,
) -> None:
    """Record a validation in `progress`; if it is the best so far, save the model."""
    if settings.metric not in outcome:
        raise TaskError(
            f"the task {state.task.name!r}: a validation has {', '.join(outcome)}, but not {settings.metric!r}, by "
            "which the best model is chosen. Return it from metrics, or set train.metric"
        )
    value = outcome[settings.metric]
    sign = -1 if lower_is_better(settings.metric, state.task.directions) else 1
    before = progress.best
    progress.validated = progress.step
    if not math.isfinite(value) or (before is not None and sign * value <= sign * before["metrics"][settings.metric]):
        progress.stale += 1
        return
    progress.stale, progress.best = 0, {"step": progress.step, "metrics": outcome}
    draft = format.best_draft(checkpoints(settings), progress.step, **_writer_fields(settings, state))
    background = settings.job.train.checkpoint_in_background
    writer.begin(draft, {format.MODEL: state.model_shard()}, background=background, metrics=outcome)


@contextmanager
def metrics_writer(
    settings: RankSettings, group: Group, progress: TrainProgress
) -> Iterator[Callable[[metrics_log.Line], None]]:
    """Yield a function that appends a line to metrics.jsonl, truncated to `progress` first; a no-op on other ranks."""
    if group.rank != 0:
        yield lambda line: None
        return
    path = Path(settings.run) / metrics_log.METRICS
    metrics_log.truncate_metrics(path, progress.step, progress.validated)
    with metrics_log.metrics_file(path) as file:

        def write(line: metrics_log.Line) -> None:
            metrics_log.write_line(file, line)
            if settings.on_step is not None:
                _call(settings.on_step, line, Path(settings.run))

        yield write


def _call(on_step: metrics_log.OnStep, line: metrics_log.Line, run: Path) -> None:
    """Call the user's function; if it returns True, ask all ranks to stop, by the file `stop`."""
    try:
        stop = on_step(dict(line))
    except Exception as error:
        raise UsageError(f"on_step raised {type(error).__name__} at step {line['step']:,}: {error}") from error
    if stop is not None and not isinstance(stop, bool):
        raise UsageError(f"on_step returned {stop!r}; it returns True to stop the run, else None or False.")
    if stop:
        (run / run_folder.STOP).touch()


def store_answers(settings: RankSettings, outcome: metrics_log.Line, numbers: np.ndarray, answers: np.ndarray) -> None:
    """Store the answers of the best validation, for the page of its rows, if they are one number or one per class."""
    if not held_out.has_page(settings.spec) or answers.ndim != 2:
        return
    with fenced(settings):
        held_out.store(Path(settings.run), outcome, numbers, answers)


def model_exporter(
    settings: RankSettings, state: TrainState, progress: TrainProgress, card: dict[str, Any]
) -> Callable[[Path], None]:
    """Return a function that writes the best model (without validation, the last) as a model folder; it needs no other
    rank.

    Raises DataError if a stored file is damaged.
    """
    store = checkpoints(settings)
    if progress.best is None:
        stored = format.step_path(store, progress.step, format.MODEL if settings.job.train.ema is None else "")
    else:
        stored = format.best_path(store, progress.best["step"])
        log.info("the best model is the one of step %d", progress.best["step"])
    tensors = format.load_model(stored, state.stored)
    if progress.best is None and settings.job.train.ema is not None:
        tensors |= format.load_field(stored, averages.AVERAGE, state.names)
    store.delete_fetched()
    write = partial(
        state.task.save_model, config=state.config, processor=state.processor, spec=settings.spec, card=card
    )
    if stores_all(settings.job):
        return partial(write, model_or_state=tensors)

    def write_beside_frozen(folder: Path) -> None:
        whole = dict(_initial_model(settings).state_dict())
        for name, tensor in tensors.items():
            whole[name].copy_(tensor)
        write(folder, model_or_state=whole)

    return write_beside_frozen if settings.job.model.lora is None else partial(_write_adapter, settings, tensors, write)


def _write_adapter(
    settings: RankSettings, tensors: dict[str, torch.Tensor], write: Callable[..., None], folder: Path
) -> None:
    """Write the model folder of a training with adapters: with them merged into the base, or alone."""
    model, job = _initial_model(settings), settings.job
    assert job.model.lora is not None, "only LoRA trains adapters"
    with TemporaryDirectory(dir=folder.parent, prefix=".adapter.", suffix=".tmp") as scratch:
        adapter, auto_class = Path(scratch) / ADAPTER, plugins.load("tasks", settings.spec.task).auto_class
        base = lora.write_adapter(job, model, tensors, adapter, auto_class)
        if not job.model.lora.merge:
            assert base is not None, "checked before the training"
            write_base(adapter, base)
            write(folder, model_or_state={}, adapter=adapter)
            return
        if job.model.quantize is not None:
            quantized.round_weights(model, job.model.quantize)
        write(folder, model_or_state=dict(merged(model, adapter).state_dict()), beside=adapter)


def _initial_model(settings: RankSettings) -> Any:
    """Return the model that the run began with, including randomly initialized heads."""
    with torch.random.fork_rng([]):
        torch.manual_seed(settings.job.train.seed)
        task = plugins.load("tasks", settings.spec.task)
        return task.base_model(base_folder(settings.job.model.base), settings.spec)


@contextmanager
def fenced(settings: RankSettings) -> Iterator[None]:
    """Hold the run folder's lock while writing to it. Raises LeaseLost if another trainer has taken it over."""
    folder, token = settings.lease
    with lease.locked(Path(folder)):
        if atomic_io.read_json(Path(folder) / "lease.json")["token"] != token:
            raise LeaseLost(f"{settings.run}: another process has taken this run over")
        yield


def checkpoints(settings: RankSettings) -> CheckpointStore:
    """Return the store of the run's checkpoints."""
    return location.find_store(settings.job.train.checkpoint_folder, Path(settings.run))


def _writer_fields(settings: RankSettings, state: TrainState) -> dict[str, Any]:
    return {"attempt": settings.attempt, "rank": state.group.rank, "world_size": state.group.world_size}
