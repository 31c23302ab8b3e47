"""Sections of classes, several labels and numbers, as plain values.

Precision, recall and F1 have intervals by a bootstrap of the confusion matrix, which equals one of the rows.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchlake.evaluation.sections.judged import JudgedRows, listed
from torchlake.metrics import ECE_BINS

CELL_ROWS = 400
"Rows listed for all cells of the confusion matrix together."
MATRIX_CLASSES = 20
RESAMPLES = 1000
KEPT = (1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.25)
WANTED = (0.8, 0.9, 0.95, 0.99)
SAMPLE = 250
"Points of a picture with one for each row."


def confusion_of(rows: JudgedRows) -> np.ndarray:
    """Return the counts (C, C) by true class, then by predicted class."""
    classes = len(rows.labels)
    cells = rows.codes("label") * classes + rows.codes("prediction")
    return np.bincount(cells, minlength=classes * classes).reshape(classes, classes)


def per_class(rows: JudgedRows) -> list[dict[str, Any]]:
    """Return support, precision, recall and F1 of each class with intervals, the lowest F1 first."""
    counts = confusion_of(rows)
    cells = np.flatnonzero(counts)
    share = counts.ravel()[cells] / counts.sum()
    drawn = np.random.default_rng(0).multinomial(counts.sum(), share, size=RESAMPLES)
    true, predicted = np.divmod(cells, len(counts))
    every = np.arange(len(counts))

    def totals(drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        sides = [(drawn @ (side[:, None] == every).astype(np.float32)) for side in (true, predicted)]
        hits = drawn @ ((true == predicted)[:, None] & (true[:, None] == every)).astype(np.float32)
        return sides[0], sides[1], hits

    return scores([str(label) for label in rows.labels], totals(counts.ravel()[cells][None]), totals(drawn))


def scores(names: Sequence[str], whole: Sequence[np.ndarray], drawn: Sequence[np.ndarray]) -> list[dict[str, Any]]:
    """Return the scores of each name from its true, found and right ones, (1, C) and (R, C)."""

    def ratios(true: np.ndarray, found: np.ndarray, right: np.ndarray) -> list[np.ndarray]:
        pairs = ((right, found), (right, true), (2 * right, true + found))
        return [np.divide(a, b, out=np.zeros(a.shape), where=b > 0) for a, b in pairs]

    values, draws = ratios(*whole), ratios(*drawn)
    table = []
    for at, name in enumerate(names):
        entry: dict[str, Any] = {"label": name, "rows": int(whole[0][0, at]), "predicted": int(whole[1][0, at])}
        for score, value, some in zip(("precision", "recall", "f1"), values, draws, strict=True):
            low, high = np.quantile(some[:, at], (0.025, 0.975))
            entry[score] = [float(value[0, at]), float(min(low, value[0, at])), float(max(high, value[0, at]))]
        table.append(entry)
    return sorted(table, key=lambda entry: (entry["f1"][0], -entry["rows"]))


def confusion(rows: JudgedRows) -> dict[str, Any]:
    """Return the matrix of at most 20 classes, else the 20 most frequent confusions; each with numbers of rows."""
    counts, names = confusion_of(rows), [str(label) for label in rows.labels]
    cells = rows.codes("label") * len(names) + rows.codes("prediction")
    wrong = np.where(np.eye(len(names), dtype=bool), 0, counts).ravel()
    most = np.argsort(-wrong, kind="stable")[: MATRIX_CLASSES**2]
    most = most[wrong[most] > 0][: MATRIX_CLASSES if len(names) > MATRIX_CLASSES else None]
    each = max(1, min(10, CELL_ROWS // max(1, len(most))))
    losses = rows.numbers("loss")
    pairs = []
    for cell in most.tolist():
        inside = np.flatnonzero(cells == cell)
        worst = inside[np.argsort(-losses[inside], kind="stable")[:each]]
        true, predicted = divmod(cell, len(names))
        pairs.append(
            {"label": names[true], "predicted": names[predicted], "rows": int(wrong[cell]), "list": listed(rows, worst)}
        )
    return {"labels": names, "counts": counts.tolist() if len(names) <= MATRIX_CLASSES else None, "pairs": pairs}


def baseline(rows: JudgedRows) -> dict[str, Any]:
    """Return what always answering the most frequent class, the labels of most rows, or the mean would give."""
    from scipy.stats import entropy
    from sklearn.metrics import f1_score

    if rows.kind == "number":
        truth = rows.numbers("label")
        away = truth - truth.mean()
        scores = {"rmse": float(np.sqrt((away**2).mean())), "mae": float(np.abs(away).mean()), "r2": 0.0}
        return {"answer": f"the mean, {truth.mean():.4g}", "metrics": scores}
    if rows.kind == "labels":
        truth = positives(rows)
        often = truth.mean(axis=0) >= 0.5
        said = np.broadcast_to(often, truth.shape)
        found = {kind: f1_score(truth, said, average=kind, zero_division=0) for kind in ("micro", "macro")}
        names = ", ".join(str(label) for label, yes in zip(rows.labels, often, strict=True) if yes)
        metrics = {f"{kind}_f1": float(value) for kind, value in found.items()}
        return {"answer": f"the labels of at least half of the rows: {names or 'no label'}", "metrics": metrics}
    codes = rows.codes("label")
    counts = np.bincount(codes, minlength=len(rows.labels))
    often = int(counts.argmax())
    scores = {
        "accuracy": float(counts[often] / counts.sum()),
        "balanced_accuracy": float(1 / (counts > 0).sum()),
        "macro_f1": float(f1_score(codes, np.full(len(codes), often), average="macro", zero_division=0)),
        "log_loss": float(entropy(counts)),
    }
    return {"answer": f"the most frequent class, {str(rows.labels[often])!r}", "metrics": scores}


# Several labels.


def positives(rows: JudgedRows) -> np.ndarray:
    """Return which labels each row has, (N, C) bool."""
    column = rows.table["label"].combine_chunks()
    hot = np.zeros((len(column), len(rows.labels)), dtype=bool)
    members = pc.index_in(pc.list_flatten(column), pa.array(rows.labels, column.type.value_type))
    hot[pc.list_parent_indices(column).to_numpy(), members.to_numpy()] = True
    return hot


def chances_of(rows: JudgedRows) -> np.ndarray:
    """Return the probability of each label, (N, C)."""
    flat = pc.list_flatten(rows.table["probabilities"].combine_chunks()).to_numpy()
    return np.asarray(flat, dtype=np.float64).reshape(-1, len(rows.labels))


def per_label(rows: JudgedRows) -> list[dict[str, Any]]:
    """Return support, precision, recall and F1 of each label with intervals, the lowest F1 first."""
    truth, said = positives(rows), chances_of(rows) >= 0.5
    cells = np.stack([(truth & said).sum(0), (truth & ~said).sum(0), (~truth & said).sum(0)], axis=1)
    cells = np.column_stack([cells, len(truth) - cells.sum(1)])
    drawn = np.random.default_rng(0).multinomial(len(truth), cells / len(truth), size=(RESAMPLES, len(cells)))

    def totals(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return counts[..., 0] + counts[..., 1], counts[..., 0] + counts[..., 2], counts[..., 0]

    return scores([str(label) for label in rows.labels], totals(cells[None]), totals(drawn))


def confused_labels(rows: JudgedRows) -> dict[str, Any]:
    """Return the pairs of a missed label and one that was predicted instead, the most frequent first."""
    truth, said = positives(rows), chances_of(rows) >= 0.5
    missed, spurious = truth & ~said, ~truth & said
    counts = missed.astype(np.float32).T @ spurious.astype(np.float32)
    names, losses = [str(label) for label in rows.labels], rows.numbers("loss")
    pairs = []
    for cell in np.argsort(-counts.ravel(), kind="stable")[:MATRIX_CLASSES].tolist():
        true, predicted = divmod(cell, len(names))
        if (number := int(counts[true, predicted])) == 0:
            break
        inside = np.flatnonzero(missed[:, true] & spurious[:, predicted])
        worst = inside[np.argsort(-losses[inside], kind="stable")[:10]]
        pairs.append({"label": names[true], "predicted": names[predicted], "rows": number, "list": listed(rows, worst)})
    return {"labels": names, "counts": None, "pairs": pairs}


# Probabilities.


def calibration(rows: JudgedRows) -> dict[str, Any]:
    """Return bins of confidence with the share that is right, and the expected calibration error over them."""
    if rows.kind == "labels":
        confidence, happened = chances_of(rows).ravel(), positives(rows).ravel()
    else:
        right = rows.right
        assert right is not None, "classes are right or wrong"
        confidence, happened = rows.numbers("score"), right
    edges = np.linspace(0, 1, ECE_BINS + 1)
    bins = np.digitize(confidence, edges[1:-1], right=True)
    counts = np.bincount(bins, minlength=ECE_BINS)
    sums = [np.bincount(bins, values, ECE_BINS) for values in (confidence, happened)]
    table = [
        {
            "from": edges[at],
            "to": edges[at + 1],
            "rows": counts[at],
            "confidence": a / counts[at],
            "right": b / counts[at],
        }
        for at, (a, b) in enumerate(zip(*sums, strict=True))
        if counts[at]
    ]
    return {"bins": table, "ece": float(np.abs(sums[0] - sums[1]).sum() / len(confidence))}


def threshold(rows: JudgedRows) -> list[dict[str, Any]]:
    """Return for the second of two classes, or each label, precision and recall by threshold, and those wanted."""
    if rows.kind == "labels":
        truth, chances = positives(rows), chances_of(rows)
        return [
            _curve(str(label), truth[:, at], chances[:, at])
            for at, label in enumerate(rows.labels[:MATRIX_CLASSES])
            if 0 < truth[:, at].sum() < len(truth)
        ]
    truth = rows.codes("label") == 1
    if len(rows.labels) != 2 or truth.all() or not truth.any():
        return []
    given = rows.numbers("probability")
    return [_curve(str(rows.labels[1]), truth, np.where(truth, given, 1 - given))]


def _curve(label: str, truth: np.ndarray, chances: np.ndarray) -> dict[str, Any]:
    from sklearn.metrics import average_precision_score, precision_recall_curve

    precision, recall, thresholds = precision_recall_curve(truth, chances)
    wanted = []
    for least in WANTED:
        enough = np.flatnonzero(precision[:-1] >= least)
        if len(enough):
            best = enough[recall[enough].argmax()]
            wanted.append([least, float(thresholds[best]), float(precision[best]), float(recall[best])])
    kept = np.unique(np.linspace(0, len(thresholds) - 1, 60).astype(int))
    points = np.stack([thresholds, precision[:-1], recall[:-1]], axis=1)[kept]
    score = float(average_precision_score(truth, chances))
    return {"label": label, "average_precision": score, "points": points.tolist(), "wanted": wanted}


def coverage(rows: JudgedRows) -> list[dict[str, Any]]:
    """Return the share of right rows if only the surest are answered, and the score from which on they are."""
    right, score = rows.right, rows.numbers("score")
    if right is None or np.isnan(score).all():
        return []
    order = np.argsort(-np.nan_to_num(score, nan=-1), kind="stable")
    counts = np.maximum(1, np.ceil(np.array(KEPT) * len(order)).astype(int))
    hits = np.cumsum(right[order])
    return [
        {
            "answered": share,
            "rows": int(some),
            "right": float(hits[some - 1] / some),
            "score": float(score[order[some - 1]]),
        }
        for share, some in zip(KEPT, counts, strict=True)
    ]


# Numbers.


def residuals(rows: JudgedRows) -> dict[str, Any]:
    """Return how far off predictions are, by tenths of the label, and the width that holds a share of the rows."""
    truth, said, away = rows.numbers("label"), rows.numbers("prediction"), rows.numbers("loss")
    edges = np.unique(np.quantile(truth, np.linspace(0, 1, 11)))
    bins = np.digitize(truth, edges[1:-1], right=True)
    bands = []
    for at in np.unique(bins):
        some = bins == at
        bands.append(
            {
                "from": float(truth[some].min()),
                "to": float(truth[some].max()),
                "rows": int(some.sum()),
                "prediction": float(said[some].mean()),
                "residual": float((said - truth)[some].mean()),
                "absolute": float(away[some].mean()),
            }
        )
    sample = np.random.default_rng(0).choice(len(truth), min(len(truth), SAMPLE), replace=False)
    widths = [[share, float(np.quantile(away, share))] for share in (0.5, 0.8, 0.9, 0.95)]
    points = np.stack([truth, said], axis=1)[sample]
    return {"bands": bands, "widths": widths, "points": points.tolist()}
