"""Metrics as functions of sums over rows: a bootstrap needs only weights of rows, or of groups of equal ones."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from torchlake.evaluation.sections.judged import JudgedRows
from torchlake.metrics import class_scores, label_scores

if TYPE_CHECKING:
    from scipy.sparse import csr_array

RESAMPLES = 1000
RESAMPLED_NUMBERS = 200_000_000
"Rows drawn by all resamples together, where rows cannot be drawn as counts."
METRICS: tuple[str, ...] = (
    *("accuracy", "balanced_accuracy", "macro_f1", "log_loss", "micro_f1", "subset_accuracy", "mae", "rmse"),
    *("precision", "recall", "f1", "exact_match", "token_f1", "recall_at_1", "recall_at_10", "mrr_at_10", "loss"),
)
"All metrics that are compared, of any task."
Finish = Callable[[np.ndarray, int], dict[str, float]]
"The metrics of the sums (K,) over a number of rows."


@dataclass(frozen=True)
class SumGroup:
    """Metrics that are computed from the same sums."""

    counts: np.ndarray
    "(M,) rows that are drawn together."
    sums: "list[np.ndarray | csr_array]"
    "For each model, what a row adds: (M, K), sparse with a column for each class."
    finish: Finish


def drawn(group: SumGroup) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return for each metric the values of the models (M,), and those of resamples (R, M)."""
    generator, total = np.random.default_rng(0), int(group.counts.sum())
    every_row = len(group.counts) == total
    resamples = min(RESAMPLES, max(100, RESAMPLED_NUMBERS // len(group.counts)))
    share = group.counts / total

    def estimate(weights: np.ndarray) -> list[dict[str, float]]:
        return [group.finish(weights @ sums, total) for sums in group.sums]

    def draw() -> np.ndarray:
        if every_row:
            return np.bincount(generator.integers(0, total, total), minlength=total)
        return generator.multinomial(total, share)

    whole = estimate(group.counts)
    found = [estimate(draw()) for _ in range(resamples)]
    return {
        metric: (np.array([one[metric] for one in whole]), np.array([[one[metric] for one in some] for some in found]))
        for metric in whole[0]
    }


def groups_of(sides: Sequence[JudgedRows]) -> Iterator[SumGroup]:
    """Yield the metrics of models over the same rows."""
    kind, rows = sides[0].kind, len(sides[0].table)
    every = np.ones(rows, dtype=np.int64)
    if kind == "classes":
        yield _of_classes(sides)
    elif kind == "labels":
        classes = len(sides[0].labels)
        sums = [_label_sums(side, sides[0].labels) for side in sides]

        def finish(found: np.ndarray, total: int) -> dict[str, float]:
            return {**label_scores(*found[:-1].reshape(3, classes)), "subset_accuracy": float(found[-1] / total)}

        yield SumGroup(every, sums, finish)
    elif kind == "spans":
        yield SumGroup(every, [_span_sums(side) for side in sides], _span_metrics)
    elif kind in ("answers", "texts"):
        yield SumGroup(every, [np.stack([side.numbers("right")], axis=1) for side in sides], _exact)
    losses = [side.numbers("loss") for side in sides]
    if kind == "vectors" and sides[0].right is not None:
        yield SumGroup(every, [np.stack([one == 1, one <= 10, (one <= 10) / one], axis=1) for one in losses], _found)
        return
    yield SumGroup(every, [np.stack([one, one**2], axis=1) for one in losses], FINISH_LOSS.get(kind, _loss))


def _of_classes(sides: Sequence[JudgedRows]) -> SumGroup:
    """Return the counts of equal rows: those with the same label and the same predictions."""
    from scipy.sparse import csr_array

    labels, classes = sides[0].labels, len(sides[0].labels)
    codes = [sides[0].codes("label"), *(side.codes("prediction", labels) for side in sides)]
    cells, counts = np.unique(np.stack(codes, axis=1), axis=0, return_counts=True)
    every = np.arange(len(cells))
    sums: list[np.ndarray | csr_array] = []
    for said in cells.T[1:]:
        right = every[cells[:, 0] == said]
        columns = np.concatenate([cells[:, 0], classes + said, 2 * classes + said[right]])
        rows = np.concatenate([every, every, right])
        sums.append(csr_array((np.ones(len(rows)), (rows, columns)), shape=(len(cells), 3 * classes)))
    return SumGroup(counts, sums, lambda found, n: class_scores(*found.reshape(3, classes)))


def _label_sums(side: JudgedRows, labels: Sequence[object]) -> "csr_array":
    from scipy.sparse import csr_array, hstack

    truth, said = side.members("label", labels), side.members("prediction", labels)
    right = csr_array(side.numbers("right")[:, None])
    return csr_array(hstack([truth, said, truth * said, right], format="csr"))


def _span_sums(side: JudgedRows) -> np.ndarray:
    """Return the true, the found and the right spans of each row."""
    counts = []
    pairs = zip(side.table["label"].to_pylist(), side.table["prediction"].to_pylist(), strict=True)
    for spans in pairs:
        true, found = ({(one["start"], one["end"], one["label"]) for one in some} for some in spans)
        counts.append((len(true), len(found), len(true & found)))
    return np.array(counts, dtype=np.float64)


def _span_metrics(sums: np.ndarray, rows: int) -> dict[str, float]:
    true, found, right = sums
    return {
        "precision": float(right / found) if found else 0.0,
        "recall": float(right / true) if true else 0.0,
        "f1": float(2 * right / (true + found)) if true + found else 0.0,
    }


def _found(sums: np.ndarray, rows: int) -> dict[str, float]:
    names = ("recall_at_1", "recall_at_10", "mrr_at_10")
    return {name: float(one / rows) for name, one in zip(names, sums, strict=True)}


def _exact(sums: np.ndarray, rows: int) -> dict[str, float]:
    return {"exact_match": float(sums[0] / rows)}


def _loss(sums: np.ndarray, rows: int) -> dict[str, float]:
    return {"loss": float(sums[0] / rows)}


FINISH_LOSS: dict[str, Finish] = {
    "classes": lambda sums, rows: {"log_loss": float(sums[0] / rows)},
    "number": lambda sums, rows: {"mae": float(sums[0] / rows), "rmse": float(np.sqrt(sums[1] / rows))},
    "answers": lambda sums, rows: {"f1": float(1 - sums[0] / rows)},
    "texts": lambda sums, rows: {"token_f1": float(1 - sums[0] / rows)},
}
"What the mean loss is called."
