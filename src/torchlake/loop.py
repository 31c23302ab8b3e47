"""The training loop: what one rank does from its first line to the model folder.

    rows and model -> [validate | save | step] ... -> the best model's folder

Everything that varies is decided by the step's number: which rows, which learning rate, which dropout. So a checkpoint
is weights, the optimizer's tensors and a few numbers, and it continues on any number of ranks.

The loss of a step is the sum over all targets of all ranks divided by their number, which every rank knows beforehand
from the plan. It is never a mean of means, so how rows fall to ranks and micro-batches changes no result.

Beside the gradients ranks exchange one vector a step: the loss, whether one was told to stop, whether a checkpoint is
overdue. So all of them stop, save and give up at the same step. Price: one wait for the device per step.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchlake import checkpoint, distributed, durable, models, recipe, record
from torchlake.config import Every, TrainConfig
from torchlake.data import batching
from torchlake.errors import Diverged, Interrupted, LeaseLost
from torchlake.failpoints import failpoint
from torchlake.learner import (
    Batch,
    Learner,
    Position,
    RankSettings,
    Rows,
    load_rows,
    make_learner,
    planned,
    steps_per_epoch,
)
from torchlake.progress import progress
from torchlake.tables import lease

log = logging.getLogger(__name__)

NON_FINITE_IN_A_ROW = 3
LOSS = "loss"
METRICS = "metrics.jsonl"

Tell = Callable[[record.Line], None]


def run_rank(settings: RankSettings, told_to_stop: Callable[[], bool]) -> dict[str, Any] | None:
    """Train as one rank of the launch whose variables are in the environment; rank 0 writes the run folder.

    Returns rank 0's summary: the run's steps, the last or best metrics. Raises Interrupted once `told_to_stop` on
    any rank, after a checkpoint; Diverged after three steps in a row without a finite gradient; StorageError when a
    checkpoint cannot be written.
    """
    with distributed.joined(settings.job.train.collective_timeout) as group:
        summary, write_model = _run_in(group, settings, told_to_stop)
    if group.rank != 0:
        return None
    log.info("writing the model folder")
    with _fenced(settings):
        write_model(Path(settings.run) / "model")
    return summary


def _run_in(
    group: distributed.Group, settings: RankSettings, told_to_stop: Callable[[], bool]
) -> tuple[dict[str, Any], Callable[[Path], None]]:
    """Train; the summary, and a function that writes the model folder. Nothing that is returned refers to the group."""
    training, validation = load_rows(settings, group)
    learner, position = make_learner(settings, group)
    weights = train_to_the_end(settings, learner, position, training, validation, told_to_stop)
    metrics = position.best["metrics"] if position.best else {LOSS: position.loss}
    card = {
        "base": settings.job.model.base,
        "data": str(settings.job.data.train),
        "metrics": metrics,
        "steps": position.step,
        "seconds": round(position.seconds, 1),
    }
    write_model = partial(
        models.save_model_folder,
        model_or_state=weights,
        config=learner.config,
        tokenizer=learner.tokenizer,
        spec=settings.spec,
        card=card,
    )
    return {"total_steps": position.step, "metrics": metrics}, write_model


def train_to_the_end(
    settings: RankSettings,
    learner: Learner,
    position: Position,
    training: Rows,
    validation: Rows | None,
    told_to_stop: Callable[[], bool],
) -> dict[str, torch.Tensor]:
    """Go on from `position`, which moves along, to the last step; returns the best model's tensors (on rank 0)."""
    train, group = settings.job.train, learner.group
    per_epoch = steps_per_epoch(training, train)
    total = min(train.epochs * per_epoch, train.max_steps or train.epochs * per_epoch)
    batches = planned(training, train, group, range(position.step, total))
    saved = -1 if settings.checkpoint is None else position.step
    began, saved_at = time.monotonic() - position.seconds, time.monotonic()
    overdue = False
    stop = distributed.any_rank(group, told_to_stop(), "starting")
    with _telling(settings, group, position) as tell, _bar(group, total - position.step) as advance:
        while True:
            step = position.step
            at_end = step == total
            to_validate = (
                validation is not None
                and position.validated < step
                and (at_end or _falls_on(train.validate_every, step, per_epoch))
            )
            if to_validate and validation is not None and not stop:
                outcome = validate(learner, validation, train.micro_batch_tokens, told_to_stop)
                stop = outcome is None
                if outcome is not None:
                    to_validate = False
                    tell({"step": step, **{record.VALIDATION + name: value for name, value in outcome.items()}})
                    keep_if_best(settings, learner, position, outcome)
            position.seconds = time.monotonic() - began
            exhausted = train.patience is not None and position.stale >= train.patience
            finished = not to_validate and (at_end or exhausted)
            due = step > 0 and (step % per_epoch == 0 or _falls_on(train.checkpoint_every, step, per_epoch))
            if step != saved and (due or overdue or stop or finished):
                save(settings, learner, position, per_epoch)
                saved, saved_at = step, time.monotonic()
            if finished:
                break
            if stop:
                raise Interrupted(
                    f"stopped after step {step:,} of {total:,}; saved. Run the same command again to continue."
                )
            every_s = train.checkpoint_every.seconds
            clock_says = every_s is not None and time.monotonic() - saved_at >= every_s
            line, stop, overdue = train_step(learner, next(batches), position, train, total, told_to_stop, clock_says)
            tell(line)
            advance(1)
            if position.non_finite == NON_FINITE_IN_A_ROW:
                raise Diverged(
                    f"step {position.step:,}: the loss or its gradient was not finite {NON_FINITE_IN_A_ROW} times in a "
                    f"row, on other rows each time. The weights before are in {_checkpoints(settings)}. Lower "
                    "train.learning_rate, lengthen train.warmup, or use train.precision=fp32, in a new run folder."
                )
    return _best_weights(settings, learner, position)


def train_step(
    learner: Learner,
    batch: Batch,
    position: Position,
    train: TrainConfig,
    total: int,
    told_to_stop: Callable[[], bool],
    overdue: bool,
) -> tuple[record.Line, bool, bool]:
    """One optimizer step over one batch; returns its line, whether any rank was told to stop, and `overdue` of rank 0.

    A step whose loss or gradient is not finite is counted, told and not applied.
    """
    group, module, strategy = learner.group, learner.module, learner.strategy
    began, doing = time.perf_counter(), f"working on step {position.step + 1:,}"
    rate = recipe.learning_rate(position.step, total, train)
    for parameters in learner.optimizer.param_groups:
        parameters["lr"] = rate
    torch.manual_seed(recipe.step_seed(train.seed, position.step, group.rank))
    targets = learner.task.num_targets(len(batch.rows.numbers), learner.spec)
    loss_sum = torch.zeros((), device=group.device)
    with distributed.explained(group, doing):
        for index, positions in enumerate(batch.share, start=1):
            with nullcontext() if index == len(batch.share) else strategy.no_sync(module):
                _, loss = learner.forward(batch.rows, positions)
                # Gradients are averaged over the ranks; what is wanted is their sum over the targets of all.
                (loss * (group.world_size / targets)).backward()
            loss_sum += loss.detach()
        norm = strategy.clip_norm(module, math.inf if train.clip_norm is None else train.clip_norm)
    failpoint(f"rank{group.rank}.step")
    said = [loss_sum.item(), told_to_stop(), overdue and group.rank == 0]
    loss_sums, stop_sum, overdue_sum = distributed.all_sum(group, said, doing)
    loss_mean = loss_sums / targets
    if math.isfinite(loss_mean) and math.isfinite(norm):
        learner.optimizer.step()
        position.non_finite, position.loss = 0, loss_mean
    else:
        position.non_finite += 1
        log.warning("step %d is not applied: loss %s, gradient norm %s", position.step + 1, loss_mean, norm)
    learner.optimizer.zero_grad()
    position.step += 1
    line = {
        "step": position.step,
        "epoch": batch.epoch + 1,
        "loss": loss_mean,
        "learning_rate": rate,
        "grad_norm": norm,
        "rows": len(batch.rows.numbers),
        "tokens": int(batch.rows.lengths.sum()),
        "padded_tokens": batch.padded_tokens,
        "seconds": round(time.perf_counter() - began, 6),
    }
    return line, stop_sum > 0, overdue_sum > 0


def validate(
    learner: Learner, rows: Rows, micro_batch_tokens: int, told_to_stop: Callable[[], bool]
) -> record.Line | None:
    """The loss and the task's metrics over `rows`, each row once over all ranks; None when a rank was told to stop.

    Ranks run the same number of batches in step, so that all of them stop after the same one.
    """
    group, task = learner.group, learner.task
    doing = "validating"
    logits = np.zeros((len(rows.numbers), max(1, len(learner.spec.labels))), dtype=np.float32)
    loss_sum = 0.0
    shares = batching.micro_batches(rows.lengths, world_size=group.world_size, micro_batch_tokens=micro_batch_tokens)
    learner.module.eval()
    try:
        for positions in shares[group.rank]:
            with torch.no_grad(), distributed.explained(group, doing):
                out, loss = learner.forward(rows, positions)
            logits[positions] = out.float().cpu().numpy()
            loss_sum += loss.item()
            failpoint(f"rank{group.rank}.validate")
            if distributed.any_rank(group, told_to_stop(), doing):
                return None
    finally:
        learner.module.train()
    # Each row was filled by one rank and is zero on the others.
    logits = distributed.all_sum_array(group, logits, doing)
    (loss_sum,) = distributed.all_sum(group, [loss_sum], doing)
    targets = np.asarray(rows.table.targets[rows.numbers])
    mean = loss_sum / task.num_targets(len(rows.numbers), learner.spec)
    return {LOSS: mean, **task.metrics(task.probabilities(logits, learner.spec), targets, learner.spec)}


def keep_if_best(settings: RankSettings, learner: Learner, position: Position, outcome: record.Line) -> None:
    """Note a validation in `position`; where it beats all before it, keep the model."""
    value = outcome[settings.metric]
    sign = -1 if settings.metric == LOSS or settings.metric in learner.task.LOWER_IS_BETTER else 1
    before = position.best
    position.validated = position.step
    if not math.isfinite(value) or (before is not None and sign * value <= sign * before["metrics"][settings.metric]):
        position.stale += 1
        return
    position.stale, position.best = 0, {"step": position.step, "metrics": outcome}
    state = learner.strategy.state(learner.module)
    if learner.group.rank == 0:
        with _fenced(settings):
            checkpoint.save_best(_checkpoints(settings), position.step, checkpoint.untied(state), metrics=outcome)


def save(settings: RankSettings, learner: Learner, position: Position, per_epoch: int) -> None:
    """Write a checkpoint of this very moment; rank 0 writes, the others wait for it in their next collective."""
    state = learner.strategy.state(learner.module)
    if learner.group.rank != 0:
        return
    began = time.perf_counter()
    epoch, batch = divmod(position.step, per_epoch)
    with _fenced(settings):
        record.sync(Path(settings.run) / METRICS)
        path = checkpoint.save(
            _checkpoints(settings),
            model=checkpoint.untied(state),
            optimizer=checkpoint.optimizer_tensors(learner.optimizer, learner.names),
            state={
                "step": position.step,
                "epoch": epoch,
                "batch": batch,
                "best": position.best,
                "world_size": learner.group.world_size,
                "position": asdict(position),
            },
            keep=settings.job.train.keep_checkpoints,
        )
    log.info("saved %s in %.1f s", path, time.perf_counter() - began)


def _best_weights(settings: RankSettings, learner: Learner, position: Position) -> dict[str, torch.Tensor]:
    state = learner.strategy.state(learner.module)
    if learner.group.rank != 0:
        return {}
    if position.best is None or position.best["step"] == position.step:
        return {name: tensor.detach().cpu() for name, tensor in state.items()}
    best = checkpoint.load_best(_checkpoints(settings), position.best["step"], checkpoint.untied(state))
    log.info("the best model is that of step %d", position.best["step"])
    return best


def _falls_on(every: Every, step: int, per_epoch: int) -> bool:
    """Whether an interval counted in steps or epochs ends with `step`."""
    if every.steps is not None:
        return step % every.steps == 0
    return every.epochs is not None and step % (every.epochs * per_epoch) == 0


@contextmanager
def _fenced(settings: RankSettings) -> Iterator[None]:
    """Hold the run folder's lock while writing into it. Raises LeaseLost when another trainer has taken it over.

    A run whose launcher slept longer than its lease may be taken for dead; it must not write beside its successor.
    """
    folder, token = settings.lease
    with lease.locked(Path(folder)):
        if durable.read_json(Path(folder) / "lease.json")["token"] != token:
            raise LeaseLost(f"{settings.run}: another process has taken this run over and goes on with it")
        yield


@contextmanager
def _telling(settings: RankSettings, group: distributed.Group, position: Position) -> Iterator[Tell]:
    """A function that appends a line to metrics.jsonl, cut back to `position`; on other ranks it does nothing."""
    if group.rank != 0:
        yield lambda line: None
        return
    path = Path(settings.run) / METRICS
    record.cut_metrics(path, position.step, position.validated)
    with record.metrics_file(path) as file:
        yield lambda line: record.write_line(file, line)


@contextmanager
def _bar(group: distributed.Group, steps: int) -> Iterator[Callable[[int], None]]:
    if group.rank != 0:
        yield lambda steps: None
        return
    with progress("train", steps, "steps") as advance:
        yield advance


def _checkpoints(settings: RankSettings) -> Path:
    return Path(settings.run) / checkpoint.FOLDER
