"""One optimizer step on this rank: launched without waiting for the device, and read a step later.

    host      launch step n | launch step n + 1 | read n | launch n + 2 | read n + 1
    device          step n ............| step n + 1 ............| step n + 2

The device itself decides whether gradients are finite and the step is applied. The loss, the norm and the ranks' flags
come back as one vector, which the host reads after it has launched the next step, so the device never runs out of work.
Cost: what the numbers lead to (a stop, a warning, the end after non-finite steps) comes one step later. The fp16 loss
scale of a step depends on the outcome of the one before, so with fp16 each step is read before the next.

A loss that couples the rows of a batch is computed from the outputs of all of them (GradCache).
"""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from torchlake import distributed
from torchlake.config.sections.train import TrainConfig
from torchlake.data import batching
from torchlake.distributed import Reading
from torchlake.failpoints import failpoint
from torchlake.optim import averages
from torchlake.optim.optimizers import set_learning_rate
from torchlake.optim.precision import step_seed
from torchlake.optim.schedule import learning_rate
from torchlake.runs import metrics_log
from torchlake.runs.speed import Speed, peak_memory
from torchlake.training.rows import RankSettings, Rows, pack_rows
from torchlake.training.state import TrainProgress, TrainState

Mark = float | torch.cuda.Event
"A point in time, of the device if it is a GPU."


@dataclass(frozen=True, kw_only=True)
class LaunchedStep:
    """A step that the device may still be computing."""

    line: metrics_log.Line
    "The part of its metrics line that does not come from the device."
    numbers: Reading
    "The loss summed over all ranks, the number of ranks that set each flag, the norm of the gradient."
    targets: float
    "The divisor of the loss."
    scaled: bool
    "Whether the loss was scaled up for fp16."
    operations: float
    "The floating-point operations that the step's tokens need."
    began: Mark
    ended: Mark


def train_step(
    state: TrainState,
    epoch: int,
    rows: Rows,
    progress: TrainProgress,
    train: TrainConfig,
    total: int,
    flags: Callable[[], list[bool]],
) -> LaunchedStep:
    """Launch one optimizer step over the rows of all ranks, and count it.

    `flags` is called once the gradients are launched, before the update is. A step with a non-finite loss or gradient
    is not applied.
    """
    group, module, strategy = state.group, state.module, state.strategy
    before_rows = state.data_seconds
    began, doing = _mark(group.device), f"working on step {progress.step + 1:,}"
    rate = learning_rate(progress.step, total, train)
    set_learning_rate(state.optimizer, rate)
    targets = state.num_targets(rows)
    if state.noise is not None:
        state.noise.step = progress.step
    scale = progress.loss_scale if state.precision.dtype is torch.float16 else 1.0
    with distributed.explain_lost_peers(group, doing):
        seed = step_seed(train.seed, progress.step, group.data_rank)
        # Strategies average gradients over the ranks; this makes it the sum over all targets.
        loss_sum, padded = add_gradients(state, rows, factor=scale * group.data_ranks / targets, seed=seed)
    # From here on gradients are rescaled and weights partly updated: a failure restarts from the last checkpoint.
    with state.restart_on_out_of_memory(rows, doing):
        with distributed.explain_lost_peers(group, doing):
            norm = strategy.clip_norm(module, math.inf if train.clip_norm is None else train.clip_norm, scale)
        failpoint(f"rank{group.rank}.step")
        # `flags` also makes the update below wait until a checkpoint in progress has copied the old weights.
        votes = distributed.to_device(np.array(flags(), dtype=np.float64), group.device)
        # With tensor parallelism several ranks compute the same rows: one of them counts, else the loss is a multiple.
        counted = loss_sum if group.counts else torch.zeros_like(loss_sum)
        sums = distributed.sum_on_device(group, torch.cat([counted.double()[None], votes]), doing)
        norm = norm.to(group.device, torch.float64)
        # From reduced numbers, so it is equal on all ranks. A decision from a rank's own gradients would let some ranks
        # take the step and others skip it, and their weights would differ from then on.
        finite = (sums[0] + norm).isfinite()
        strategy.step(module, state.optimizer, finite)
        if train.ema is not None:
            averages.update(state.optimizer, train.ema, progress.step + 1, finite)
        numbers = distributed.start_reading(torch.cat([sums, norm[None]]))
    # Counted before the outcome is known: a skipped step uses up its rows and its learning rate, so that the order of
    # the rows stays a function of the step's number.
    progress.step += 1
    line = {
        "step": progress.step,
        "epoch": epoch + 1,
        "learning_rate": rate,
        "rows": len(rows.numbers),
        "tokens": int(rows.lengths.sum()),
        "padded_tokens": padded,
        "data_seconds": round(state.data_seconds - before_rows, 6),
    }
    return LaunchedStep(
        line=line,
        numbers=numbers,
        targets=targets,
        scaled=scale > 1,
        operations=state.speed.operations(rows.lengths),
        began=began,
        ended=_mark(group.device),
    )


def largest_batch(training: Rows, state: TrainState, settings: RankSettings) -> Rows:
    """Return rows of which each rank gets the largest micro-batch that the run can have, twice if a batch has several.

    For language models these are blocks of the first epoch. Cost: a sort of all lengths.
    """
    rows, train, ranks = pack_rows(training, settings.spec), settings.job.train, state.group.data_ranks
    lengths, limit, share = rows.lengths, state.micro_batch_tokens, math.ceil(train.batch_size / ranks)
    sizes = np.unique(lengths)
    counts = np.minimum(share, np.maximum(1, limit // np.maximum(sizes, 1)))
    chosen = int(np.argmax(counts * sizes + sizes / (sizes.max() + 1)))  # of equal products the longest rows
    fitting = np.flatnonzero(lengths <= sizes[chosen])
    number = min(train.batch_size, 2 * int(counts[chosen]) * ranks)
    return Rows(rows.table, rows.numbers[fitting[np.argsort(lengths[fitting], kind="stable")[-number:]]], rows.seed)


def try_largest(state: TrainState, rows: Rows, train: TrainConfig) -> None:
    """Compute gradients and an optimizer step over `rows` without changing weights, moments or random numbers.

    Memory that runs out here costs seconds; in the middle of a run on several ranks it costs the steps since the last
    checkpoint. The step is one that the device skips; it creates the moments, which start at 0.
    """
    devices = [state.group.device] if state.group.device.type == "cuda" else []
    doing = "trying the largest micro-batch"
    buffers = {name: buffer.clone() for name, buffer in state.model.named_buffers()}  # statistics of BatchNorm
    with torch.random.fork_rng(devices):
        with distributed.explain_lost_peers(state.group, doing):
            add_gradients(state, rows, factor=1.0, seed=0)
        with state.restart_on_out_of_memory(rows, doing), distributed.explain_lost_peers(state.group, doing):
            state.strategy.clip_norm(state.module, math.inf if train.clip_norm is None else train.clip_norm, 1.0)
            skipped = torch.zeros((), dtype=torch.bool, device=state.group.device)
            state.strategy.step(state.module, state.optimizer, skipped)
    with torch.no_grad():
        for name, buffer in state.model.named_buffers():
            buffer.copy_(buffers[name])


def read_step(
    launched: LaunchedStep, progress: TrainProgress, group: distributed.Group, speed: Speed
) -> tuple[metrics_log.Line, list[float]]:
    """Wait for a step and record its outcome in `progress`; return its metrics line and the number of ranks that set
    each flag. Steps are read in their order.
    """
    line, began = launched.line, time.perf_counter()
    with distributed.explain_lost_peers(group, f"waiting for step {line['step']:,}"):
        loss_sum, *votes, norm = launched.numbers.wait()
    waited = time.perf_counter() - began
    loss = loss_sum / launched.targets
    progress.record(line["step"], loss, norm, scaled=launched.scaled)
    seconds = _between(launched.began, launched.ended)
    share = speed.share(launched.operations, seconds, group.world_size)
    measured = {
        "seconds": round(seconds, 6),
        "wait_seconds": round(waited, 6),
        "tokens_per_s": round(line["tokens"] / seconds, 1),
        "peak_memory_bytes": peak_memory(group.device),
        **({} if share is None else {"mfu": round(share, 4)}),
    }
    return {**line, "loss": loss, "grad_norm": norm, **measured}, votes


def _mark(device: torch.device) -> Mark:
    """Return the current time; on a GPU, an event that is recorded when the device gets here."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(first: Mark, second: Mark) -> float:
    """Return the seconds between two marks that have passed."""
    if isinstance(first, float) and isinstance(second, float):
        return second - first
    assert isinstance(first, torch.cuda.Event), "both are of one device"
    assert isinstance(second, torch.cuda.Event), "both are of one device"
    return float(first.elapsed_time(second)) / 1e3


def add_gradients(state: TrainState, rows: Rows, *, factor: float, seed: int) -> tuple[torch.Tensor, int]:
    """Add up the gradients of this rank's share of the rows, each loss times `factor`.

    Return the sum of the losses, () on the device, and the tokens that all ranks computed, padding included. When
    memory runs out, the micro-batches are halved: on one rank at once; with several, the others wait in collectives, so
    all ranks restart.
    """
    module, strategy = state.module, state.strategy
    while True:
        share, padded = state.micro_batches(rows)
        # For each attempt, so that the random numbers that a failed one drew do not shift those of the next.
        torch.manual_seed(seed)
        loss_sum = torch.zeros((), device=state.group.device)
        try:
            if state.task.couples(state.spec):
                return _add_coupled_gradients(state, rows, share, factor, seed), padded
            for index, positions in enumerate(share, start=1):
                with nullcontext() if index == len(share) else strategy.no_sync(module):
                    loss_sum += _micro_batch_loss(state, rows, positions, factor)
            return loss_sum, padded
        except (RuntimeError, MemoryError) as error:
            # On several ranks this raises: the others are inside the collectives of a backward pass that never
            # completes.
            state.shrink_micro_batches(error, rows, "computing gradients")
        # Outside the handler: the error kept tensors alive.
        strategy.discard_gradients(module, state.optimizer)
        state.release_memory()


def _add_coupled_gradients(
    state: TrainState, rows: Rows, share: list[np.ndarray], factor: float, seed: int
) -> torch.Tensor:
    """Add up the gradients of a loss that couples the rows of a batch; return this rank's part of the loss, ().

    The outputs of all micro-batches and ranks are computed first, then the loss's gradient by them. So neither the
    number of ranks nor the micro-batches change the loss. What does not fit into one micro-batch is computed first
    without a graph, and again for its gradients (Gao et al. 2021): memory does not grow with the batch, for a second
    forward pass.
    """
    fits = len(share) == 1 or (
        state.group.data_ranks == 1 and batching.padded_tokens(rows.lengths, share) <= state.micro_batch_tokens
    )
    outputs, nothings = [], []
    for index, positions in enumerate(share, start=1):
        torch.manual_seed(seed + index)
        with torch.set_grad_enabled(fits):
            output, nothing, _ = state.forward(rows, positions)
        outputs.append(output.float())
        nothings.append(nothing)
    # Detached, because ranks exchange values only: each computes the gradient by the outputs of all of them.
    loss, gradient = _coupled_loss(state, rows, share, [output.detach() for output in outputs])
    wanted = [gradient[torch.from_numpy(positions).to(gradient.device)] for positions in share]
    # A rank without rows has no outputs: its `nothing` takes it through the collectives of the backward pass.
    if fits:
        parts = zip(outputs, wanted, nothings, strict=True)
        total = torch.stack([(output * each).sum() * factor + nothing * 0 for output, each, nothing in parts]).sum()
        state.strategy.backward(state.module, total)
        return loss
    for index, (positions, each) in enumerate(zip(share, wanted, strict=True), start=1):
        with nullcontext() if index == len(share) else state.strategy.no_sync(state.module):
            torch.manual_seed(seed + index)
            output, nothing, _ = state.forward(rows, positions)
            # `each` is the loss's gradient by these outputs, so this product has the loss's gradient by the weights.
            state.strategy.backward(state.module, (output.float() * each).sum() * factor + nothing * 0)
    return loss


def _coupled_loss(
    state: TrainState, rows: Rows, share: list[np.ndarray], outputs: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's part of the batch's loss, and the loss's gradient by the outputs of all rows (B, ...)."""
    whole = torch.zeros(len(rows.numbers), *outputs[0].shape[1:], device=state.group.device)
    if state.group.counts:
        whole[torch.from_numpy(np.concatenate(share)).to(whole.device)] = torch.cat(outputs)
    whole = distributed.sum_on_device(state.group, whole, "gathering the batch's outputs").requires_grad_()
    loss = state.loss_of(whole, state.batches.targets_of(rows, rows.numbers))
    (gradient,) = torch.autograd.grad(loss, whole)
    # Every rank computes the whole loss, and the caller sums over ranks: without the division it counts once per rank.
    return loss.detach() / state.group.data_ranks, gradient


def _micro_batch_loss(state: TrainState, rows: Rows, positions: np.ndarray, factor: float) -> torch.Tensor:
    """Return the sum of the losses of one micro-batch, () fp32, after its backward pass.

    A separate function, so that the logits (a language model's largest tensor) are freed before the next forward pass.
    """
    _, loss, _ = state.forward(rows, positions)
    state.strategy.backward(state.module, loss * factor)
    return loss.detach()
