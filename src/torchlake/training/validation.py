"""A validation: the loss and the metrics of the model as it is, each row once over all ranks."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch

from torchlake import distributed
from torchlake.checkpoints.async_writer import CheckpointWriter
from torchlake.data.features import joined_outputs
from torchlake.distributed import Group
from torchlake.failpoints import failpoint
from torchlake.optim import averages
from torchlake.runs import metrics_log
from torchlake.training import saving
from torchlake.training.model.writing import Prompts, store_texts, write_answers
from torchlake.training.rows import RankSettings, Rows
from torchlake.training.state import TrainProgress, TrainState

Pieces = list[tuple[np.ndarray, np.ndarray]]
"Outputs of this rank's batches: positions (B,) in the rows, and what the task keeps of them, (B, ...)."


def validate(
    state: TrainState, rows: Rows, stop_requested: Callable[[], bool], kept: list[np.ndarray] | None = None
) -> metrics_log.Line | None:
    """Return the loss and the task's metrics over `rows`, each row once over all ranks; None if a rank was asked to
    stop.

    The answers of all rows are added to `kept`.

    When memory runs out, it starts again with smaller micro-batches.
    """
    group, task = state.group, state.task
    doing = "validating"
    while True:
        pieces: Pieces = []
        state.module.eval()
        try:
            loss_sum = _validation_pass(state, rows, pieces if task.measures_outputs else None, stop_requested)
            break
        except (RuntimeError, MemoryError) as error:
            state.shrink_micro_batches(error, rows, doing)
        finally:
            state.module.train()
        state.release_memory()
    if loss_sum is None:
        return None
    outputs = _gathered(group, pieces, len(rows.numbers), doing) if task.measures_outputs else None
    if task.couples(state.spec):
        assert outputs is not None, "a task whose loss couples rows measures outputs"
        loss_sum = _coupled_loss(state, rows, outputs)
    else:
        (loss_sum,) = distributed.all_sum(group, [loss_sum], doing)
    mean = loss_sum / state.num_targets(rows)
    found: metrics_log.Line = {saving.LOSS: mean, **task.loss_metrics(mean)}
    if outputs is None:
        return found
    answers = task.answers(outputs, state.spec)
    if kept is not None:
        kept.append(answers)
    found |= task.checked_metrics(answers, state.batches.targets_of(rows, rows.numbers), state.spec)
    return found


def validate_model(
    settings: RankSettings,
    state: TrainState,
    progress: TrainProgress,
    validating: tuple[Rows, Prompts | None],
    stop_requested: Callable[[], bool],
    writer: CheckpointWriter,
) -> metrics_log.Line | None:
    """Validate the model, or the average of its weights, and save it if it is the best so far. None if a stop was
    requested."""
    averaged, (rows, prompts) = settings.job.train.ema is not None, validating
    with averages.exchanged(state.module, state.optimizer) if averaged else nullcontext():
        answers_of_rows: list[np.ndarray] = []
        outcome = validate(state, rows, stop_requested, answers_of_rows)
        if outcome is not None and prompts is not None:
            with state.restart_on_out_of_memory(rows, "writing for a validation"):
                answers = write_answers(state, prompts, stop_requested)
            outcome = None if answers is None else outcome | answers[0]
            if answers is not None and state.group.rank == 0:
                store_texts(Path(settings.run), progress.step, answers[1])
        if outcome is not None:
            saving.save_if_best(settings, state, progress, outcome, writer)
            is_best = progress.best is not None and progress.best["step"] == progress.step
            if is_best and answers_of_rows and state.group.rank == 0:
                saving.store_answers(settings, outcome, rows.numbers, answers_of_rows[0])
            if averaged:
                writer.hold_updates()  # the exchange back is one
    return outcome


def _validation_pass(
    state: TrainState, rows: Rows, pieces: Pieces | None, stop_requested: Callable[[], bool]
) -> float | None:
    """Return the summed loss of this rank's share of the rows; add their outputs to `pieces`, unless it is None.

    Every rank runs the same number of batches and all stop after the same one; None if one was asked to stop.
    """
    group, loss_sum = state.group, 0.0
    for positions in state.micro_batches(rows)[0]:
        with torch.no_grad(), distributed.explain_lost_peers(group, "validating"):
            out, loss, batch = state.forward(rows, positions)
        if pieces is not None:
            pieces.append((positions, state.task.reduce_outputs(out.float().cpu().numpy(), batch, state.spec)))
        loss_sum += loss.item() if group.counts else 0.0
        del out, loss, batch  # free them before the next forward pass
        failpoint(f"rank{group.rank}.validate")
        if distributed.any_rank(group, stop_requested(), "validating"):
            return None
    return loss_sum


def _coupled_loss(state: TrainState, rows: Rows, outputs: np.ndarray) -> float:
    """Return the summed loss of rows that are coupled within batches of the training's size, in the order of the
    table."""
    total = 0.0
    for first in range(0, len(outputs), state.batch_size):
        positions = np.arange(first, min(first + state.batch_size, len(outputs)))
        with torch.no_grad():
            piece = torch.from_numpy(outputs[positions]).to(state.group.device)
            total += state.loss_of(piece, state.batches.targets_of(rows, rows.numbers[positions])).item()
    return total


def _gathered(group: Group, pieces: Pieces, rows: int, doing: str) -> np.ndarray:
    """Return the outputs (N, ...) of all rows on every rank, from the pieces of all ranks."""
    # Every rank has a piece, maybe of no row; their widths may differ.
    widths = np.zeros((group.world_size, pieces[0][1].ndim - 1))
    widths[group.rank] = np.max([piece.shape[1:] for _, piece in pieces], axis=0)
    widths = np.reshape(distributed.all_sum(group, widths.ravel().tolist(), doing), widths.shape)
    shape = tuple(int(width) for width in widths.max(axis=0)) if widths.size else ()
    mine = joined_outputs([piece for _, piece in pieces], shape)
    whole = np.zeros((rows, *shape), dtype=np.float32)
    if group.counts:  # each row is filled on one rank and zero on the others
        whole[np.concatenate([positions for positions, _ in pieces])] = mine
    return distributed.all_sum_array(group, whole, doing).astype(mine.dtype, copy=False)
