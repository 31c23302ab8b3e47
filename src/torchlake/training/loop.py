"""The training loop: what one rank does from start to the model folder.

    rows and model -> [validate | save | step] ... -> the best model's folder

Rows, learning rate and dropout are functions of the step's number. So a checkpoint is the weights, the optimizer's
tensors and a few numbers, and training continues from it on any number of ranks. `saving.py` writes it.

The loss of a step is the sum over all targets of all ranks divided by their number, which every rank knows from the
plan. It is never a mean of means, so the assignment of rows to ranks and micro-batches changes no result.

Beside the gradients, ranks reduce one vector per step: the loss, and flags (stop requested, checkpoint overdue, shard
written). So all ranks stop, save and fail at the same step. Each reads it when it has launched the next step
(`step.py`), and before a validation, a checkpoint and the end: a checkpoint never lacks the outcome of a step.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchlake import atomic_io, distributed, plugins
from torchlake.checkpoints import async_writer
from torchlake.checkpoints.async_writer import CheckpointWriter
from torchlake.checkpoints.store import STATE, Draft
from torchlake.config.types import Every
from torchlake.errors import Interrupted
from torchlake.loss import find_objective
from torchlake.optim import schedule
from torchlake.optim.precision import arithmetic
from torchlake.progress import progress as progress_bar
from torchlake.runs import metrics_log
from torchlake.training import saving
from torchlake.training.model.setup import make_train_state
from torchlake.training.model.writing import Prompts, choose_prompts
from torchlake.training.rows import (
    RankSettings,
    Rows,
    load_rows,
    pack_rows,
    planned_batches,
    steps_per_epoch,
    total_steps,
)
from torchlake.training.state import TrainProgress, TrainState
from torchlake.training.step import LaunchedStep, largest_batch, read_step, train_step, try_largest
from torchlake.training.validation import validate_model

log = logging.getLogger(__name__)

TRIED_ON = {"cuda"}
"Devices on which the largest micro-batch is tried first; main memory is rarely short, and CPUs are slow."

Show = Callable[[int, metrics_log.Line], None]
"A function that advances by a number of steps, and shows the metrics line of the step or validation."


def run_rank(settings: RankSettings, stop_requested: Callable[[], bool]) -> dict[str, Any] | None:
    """Train as the rank that the environment variables define; rank 0 writes the run folder.

    Return rank 0's summary: the run's steps, the last or best metrics. Raises Interrupted once `stop_requested` on
    any rank, after a checkpoint; Diverged after three steps in a row without a finite gradient; StorageError if a
    checkpoint cannot be written.
    """
    train, strategy = settings.job.train, plugins.load("strategies", settings.strategy)
    joining = {
        "alone": strategy.MAX_RANKS != 1,
        "main_memory": strategy.reduces_in_main_memory(train),
        "model_ranks": strategy.model_ranks(train),
    }
    with (
        distributed.process_group(train.collective_timeout, **joining) as group,
        arithmetic(train, group.device),
    ):
        summary, write_model = _run(group, settings, stop_requested)
    if group.rank != 0:
        return None
    log.info("writing the model folder")
    with saving.fenced(settings):
        write_model(Path(settings.run) / "model")
    return summary


def _run(
    group: distributed.Group, settings: RankSettings, stop_requested: Callable[[], bool]
) -> tuple[dict[str, Any], Callable[[Path], None]]:
    """Train; return the summary and a function that writes the model folder. Neither refers to the process group."""
    training, held_out = load_rows(settings, group)
    validation = None if held_out is None else pack_rows(held_out, settings.spec)
    train = settings.job.train
    prompts = None if held_out is None else choose_prompts(settings.job, settings.spec, held_out)
    total = total_steps(train, steps_per_epoch(training, train, settings.spec))
    schedule.check(total, train)
    state, progress = make_train_state(settings, group, training)
    if group.rank == 0:
        _log_new_length(settings, progress, total)
    targets = training.table.targets
    known = targets if isinstance(targets, np.ndarray) else None
    state.objective = find_objective(train, settings.spec, known, training.numbers)
    if group.device.type in TRIED_ON:
        try_largest(state, largest_batch(training, state, settings), train)
    with async_writer.checkpoint_writer(group, partial(saving.fenced, settings)) as writer:
        train_loop(settings, state, progress, training, (validation, prompts), stop_requested, writer)
        writer.finish()
    metrics = progress.best["metrics"] if progress.best else {saving.LOSS: progress.loss}
    card = {
        **({} if settings.job.model.base is None else {"base": settings.job.model.base}),
        "data": str(settings.job.data.train),
        "metrics": metrics,
        "steps": progress.step,
        "seconds": round(progress.seconds, 1),
    }
    write_model = saving.model_exporter(settings, state, progress, card) if group.rank == 0 else lambda folder: None
    stopped_by = "patience" if train.patience is not None and progress.stale >= train.patience else "steps"
    return {"total_steps": progress.step, "metrics": metrics, "stopped_by": stopped_by}, write_model


def _log_new_length(settings: RankSettings, progress: TrainProgress, total: int) -> None:
    """Log the change of the learning rate if the run had fewer steps when the checkpoint was written."""
    stored = {} if settings.checkpoint is None else atomic_io.read_json(Path(settings.checkpoint) / STATE)
    before, step, train = stored.get("total_steps", total), progress.step, settings.job.train
    if before != total and step < total:
        last, following = schedule.learning_rate(step - 1, before, train), schedule.learning_rate(step, total, train)
        log.info(
            "the run now has %d steps instead of %d: train.schedule=%s covers all of them, so the learning rate "
            "goes from %.3g in step %d to %.3g in step %d",
            *(total, before, train.schedule, last, step, following, step + 1),
        )


def train_loop(
    settings: RankSettings,
    state: TrainState,
    progress: TrainProgress,
    training: Rows,
    validating: tuple[Rows | None, Prompts | None],
    stop_requested: Callable[[], bool],
    writer: CheckpointWriter,
) -> None:
    """Train from `progress`, which is updated in place, to the last step; the last checkpoint may still be writing.

    `validating` has the validation rows, and the prompts that the model answers at each validation.
    """
    (validation, prompts), train, group = validating, settings.job.train, state.group
    per_epoch = steps_per_epoch(training, train, settings.spec)
    total = total_steps(train, per_epoch)
    batches = planned_batches(training, train, range(progress.step, total), settings.spec)
    upcoming = deque(islice(batches, 1))
    saved_step = -1 if settings.checkpoint is None else progress.step
    began, stop = time.monotonic() - progress.seconds, distributed.any_rank(group, stop_requested(), "starting")
    with (
        saving.metrics_writer(settings, group, progress) as write_line,
        _training_bar(group.rank, progress, total, settings.metric) as show,
    ):
        votes = _Votes(state, progress, train.checkpoint_every.seconds, stop_requested, writer, stop=stop)
        read_at_once = state.precision.dtype is torch.float16  # its scale depends on the outcome of the step before

        def read() -> None:
            line = votes.read()
            if line is not None:
                write_line(line)
                show(1, line)
                progress.check(line["step"], partial(saving.checkpoints, settings))

        while True:
            step = progress.step
            at_end = step == total
            validate_now = progress.validated < step and (at_end or _is_due(train.validate_every, step, per_epoch))
            due = step > 0 and (step % per_epoch == 0 or _is_due(train.checkpoint_every, step, per_epoch))
            # Equal on all ranks: a rank that validated, saved or stopped alone would leave the others hanging.
            if validate_now or due or votes.overdue or votes.stop or at_end or read_at_once:
                read()
            not_validated = False
            if validation is not None and validate_now:
                outcome = None
                if not votes.stop:  # else it could take longer than a cluster's grace period
                    outcome = validate_model(settings, state, progress, (validation, prompts), stop_requested, writer)
                if outcome is None:
                    votes.stop = not_validated = True
                else:
                    write_line(_validation_line(step, outcome))
                    show(0, outcome)
            progress.seconds = time.monotonic() - began
            out_of_patience = train.patience is not None and progress.stale >= train.patience
            finished = (at_end or out_of_patience) and not not_validated
            # Everything has been read by now, so the checkpoint has the outcome of its own last step.
            if step != saved_step and (due or votes.overdue or votes.stop or finished):
                saving.save(settings, state, progress, per_epoch, writer)
                saved_step = step
                votes.saved()
            if finished:
                break
            if votes.stop:
                # The process may be killed as soon as it reports the stop: the checkpoint has to be visible before.
                writer.finish()
                at = f"after step {step:,} of {total:,}; saved"
                raise Interrupted(f"stopped {at if step else 'before the first step; nothing was trained'}")
            launched = train_step(state, *upcoming.popleft(), progress, train, total, votes.flags)
            upcoming.extend(islice(batches, 1))
            state.collate_ahead([rows for _, rows in upcoming])
            oldest = writer.oldest()  # the one its flags are about: reading the step before may commit it
            read()
            votes.pending = (launched, oldest)


def _validation_line(step: int, outcome: dict[str, float]) -> dict[str, Any]:
    """Return the line of metrics.jsonl for a validation."""
    return {"step": step, **{metrics_log.VALIDATION + key: value for key, value in outcome.items()}}


@dataclass
class _Votes:
    """The flags that the ranks reduce at each step, and the step that is not read yet."""

    state: TrainState
    progress: TrainProgress
    save_every_s: float | None
    stop_requested: Callable[[], bool]
    writer: CheckpointWriter
    stop: bool
    overdue: bool = False
    "A checkpoint is overdue by rank 0's clock."
    saved_at: float = field(default_factory=time.monotonic)
    pending: tuple[LaunchedStep, Draft | None] | None = None
    "A launched step, and the checkpoint whose shard this rank reported as written in it, if any."

    def flags(self) -> list[bool]:
        """Return what this rank reports in a step: stop requested, checkpoint overdue, shard written."""
        # Between gradients and the update of the weights, which a checkpoint may still be copying.
        self.writer.hold_updates()
        every_s = self.save_every_s
        late = self.state.group.rank == 0 and every_s is not None and time.monotonic() - self.saved_at >= every_s
        return [self.stop_requested(), late, self.writer.shard_written()]

    def read(self) -> metrics_log.Line | None:
        """Wait for the pending step, act on what was reported in it, and return its metrics line. None if no step is
        pending."""
        if self.pending is None:
            return None
        (launched, oldest), self.pending = self.pending, None
        line, votes = read_step(launched, self.progress, self.state.group, self.state.speed)
        # One rank's request is enough: SIGTERM may reach a single machine, and every rank reads the same sums. A stop
        # remains set, because the rank that asked for it does not ask twice; `overdue` is asked again with each step.
        self.stop, self.overdue = self.stop or votes[0] > 0, votes[1] > 0
        # Only when every rank has reported this shard: a checkpoint that is visible earlier could lack a shard after a
        # crash. `oldest` is the checkpoint at the launch of that step. The oldest one now may be a later one, whose
        # shards are not complete.
        if votes[2] == self.state.group.world_size:
            self.writer.commit(oldest)
        return line

    def saved(self) -> None:
        """Note that a checkpoint has begun; no step is pending."""
        self.saved_at, self.overdue = time.monotonic(), False


def _is_due(every: Every, step: int, per_epoch: int) -> bool:
    """Return whether an interval counted in steps or epochs ends with `step`."""
    if every.steps is not None:
        return step % every.steps == 0
    return every.epochs is not None and step % (every.epochs * per_epoch) == 0


@contextmanager
def _training_bar(rank: int, progress: TrainProgress, total: int, metric: str) -> Iterator[Show]:
    """Yield a function that shows `progress` (updated in place) up to step `total`; `metric` chooses the best model."""
    if rank != 0:
        yield lambda steps, outcome: None
        return
    validated = speed = ""
    # Lines of a log also appear while no step ends: `ahead` is asked in a thread.
    with progress_bar("train", total, "steps", done=progress.step, ahead=lambda: 0) as advance:

        def show(steps: int, outcome: metrics_log.Line) -> None:
            nonlocal validated, speed
            if "tokens_per_s" in outcome:
                share = f", {outcome['mfu']:.0%} of the matrix rate" if "mfu" in outcome else ""
                speed = f"{outcome['tokens_per_s']:,.0f} tokens/s{share}"
            else:
                name = "validation loss" if metric == saving.LOSS else metric
                validated = f"{name} {_short(outcome[metric])}"
            loss = "" if progress.loss is None else f"loss {_short(progress.loss)}"
            best = "" if progress.best is None else f"best at step {progress.best['step']:,}"
            advance(steps, [note for note in (loss, validated, best, speed) if note])

        yield show


def _short(value: float) -> str:
    """Return a number in about six characters."""
    return f"{value:.3f}" if value == 0 or 1e-3 <= abs(value) < 1e3 else f"{value:.1e}"
