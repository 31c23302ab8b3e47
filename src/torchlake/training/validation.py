"""A validation: the loss and the metrics of the model as it is, each row once over all ranks."""

from collections.abc import Callable

import numpy as np
import torch

from torchlake import distributed
from torchlake.failpoints import failpoint
from torchlake.runs import metrics_log
from torchlake.training.rows import Rows
from torchlake.training.saving import LOSS
from torchlake.training.state import TrainState


def validate(state: TrainState, rows: Rows, stop_requested: Callable[[], bool]) -> metrics_log.Line | None:
    """The loss and the task's metrics over `rows`, each row once over all ranks; None when a rank was asked to stop.

    When memory runs out, it starts again with smaller micro-batches.
    """
    group, task, labels = state.group, state.task, rows.table.targets
    doing = "validating"
    logits = np.zeros((0 if labels is None else len(rows.numbers), max(1, len(state.spec.labels))), dtype=np.float32)
    while True:
        state.module.eval()
        try:
            loss_sum = _validation_pass(state, rows, logits, stop_requested)
            break
        except (RuntimeError, MemoryError) as error:
            state.shrink_micro_batches(error, rows, doing)
        finally:
            state.module.train()
        state.release_memory()
    if loss_sum is None:
        return None
    (loss_sum,) = distributed.all_sum(group, [loss_sum], doing)
    mean = loss_sum / state.num_targets(rows)
    if labels is None:
        return {LOSS: mean, **task.loss_metrics(mean)}
    # Each row is filled on one rank and zero on the others.
    logits = distributed.all_sum_array(group, logits, doing)
    targets = np.asarray(labels[rows.numbers])
    return {LOSS: mean, **task.metrics(task.probabilities(logits, state.spec), targets, state.spec)}


def _validation_pass(
    state: TrainState, rows: Rows, logits: np.ndarray, stop_requested: Callable[[], bool]
) -> float | None:
    """The summed loss of this rank's share of the rows; writes their logits into `logits` (N, C), if it has rows.

    Every rank runs the same number of batches and all stop after the same one; None when one was asked to stop.
    """
    group, loss_sum = state.group, 0.0
    for positions in state.micro_batches(rows)[0]:
        with torch.no_grad(), distributed.explain_lost_peers(group, "validating"):
            out, loss = state.forward(rows, positions)
        if len(logits):
            logits[positions] = out.float().cpu().numpy()
        loss_sum += loss.item()
        del out, loss  # free them before the next forward pass
        failpoint(f"rank{group.rank}.validate")
        if distributed.any_rank(group, stop_requested(), "validating"):
            return None
    return loss_sum
