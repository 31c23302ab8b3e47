"""Sections of classes, several labels and numbers, as plain values.

Precision, recall and F1 have intervals by a bootstrap of the numbers of rows of a class, which equals one of the rows.
Nothing grows with rows times classes, and no matrix is larger than that of 20 classes.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow.compute as pc

from torchlake.evaluation.sections.judged import JudgedRows, listed
from torchlake.metrics import ECE_BINS, class_scores, confidence_bins, label_scores
from torchlake.metrics import calibration as calibration_error

CELL_ROWS = 400
"Rows listed for all cells of the confusion matrix together."
MATRIX_CLASSES = 20
RESAMPLES = 1000
LABELS_AT_ONCE = 256
"Labels whose resamples are in memory."
LABELS_MISSED = 1000
KEPT = (1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.25)
WANTED = (0.8, 0.9, 0.95, 0.99)
SAMPLE = 250
"Points of a picture with one for each row."
FAR, OUTLIERS = 3.5, 50
"Standard deviations from which a residual is far (Iglewicz and Hoaglin 1993), and rows that are listed."


def per_class(rows: JudgedRows) -> list[dict[str, Any]]:
    """Return support, precision, recall and F1 of each class with intervals, the lowest F1 first."""
    label, said = rows.codes("label"), rows.codes("prediction")
    counts = [np.bincount(one, minlength=len(rows.labels)) for one in (label, said, label[label == said])]
    return _drawn_scores(rows, *counts)


def _drawn_scores(rows: JudgedRows, true: np.ndarray, said: np.ndarray, right: np.ndarray) -> list[dict[str, Any]]:
    """Return the scores of each label from the numbers of its true, found and right rows, (C,).

    A row is one of four cases for a label, so the counts of a resample are those of a multinomial.
    """
    cells, names = np.stack([right, true - right, said - right], axis=1).astype(np.int64), list(map(str, rows.labels))
    total, generator, table = len(rows.table), np.random.default_rng(0), list[dict[str, Any]]()
    cells = np.column_stack([cells, total - cells.sum(axis=1)])

    def totals(counts: np.ndarray) -> list[np.ndarray]:
        return [counts[..., 0] + counts[..., 1], counts[..., 0] + counts[..., 2], counts[..., 0]]

    for first in range(0, len(names), LABELS_AT_ONCE):
        some = cells[first : first + LABELS_AT_ONCE]
        drawn = generator.multinomial(total, some / total, size=(RESAMPLES, len(some)))
        table += scores(names[first : first + LABELS_AT_ONCE], totals(some[None]), totals(drawn))
    return sorted(table, key=lowest_first)


def lowest_first(entry: dict[str, Any]) -> tuple[float, int]:
    """Return the order of `scores`: by F1, and of equal ones the label with more rows."""
    return entry["f1"][0], -entry["rows"]


def scores(names: Sequence[str], whole: Sequence[np.ndarray], drawn: Sequence[np.ndarray]) -> list[dict[str, Any]]:
    """Return the scores of each name from its true, found and right ones, (1, C) and (R, C)."""

    def ratios(true: np.ndarray, found: np.ndarray, right: np.ndarray) -> list[np.ndarray]:
        pairs = ((right, found), (right, true), (2 * right, true + found))
        return [np.divide(a, b, out=np.zeros(a.shape), where=b > 0) for a, b in pairs]

    table = [
        {"label": name, "rows": int(true), "predicted": int(found)}
        for name, true, found in zip(names, whole[0][0], whole[1][0], strict=True)
    ]
    for score, values, draws in zip(("precision", "recall", "f1"), ratios(*whole), ratios(*drawn), strict=True):
        low, high = np.quantile(draws, (0.025, 0.975), axis=0)
        for entry, value, least, most in zip(table, values[0].tolist(), low.tolist(), high.tolist(), strict=True):
            entry[score] = [value, min(least, value), max(most, value)]
    return table


def confusion(rows: JudgedRows) -> dict[str, Any]:
    """Return the matrix of at most 20 classes, else the 20 most frequent confusions; each with numbers of rows."""
    label, said, names = rows.codes("label"), rows.codes("prediction"), [str(one) for one in rows.labels]
    classes, wrong = len(names), np.flatnonzero(label != said)
    few, cells = classes <= MATRIX_CLASSES, label * classes + said
    counts = np.bincount(cells, minlength=classes**2).reshape(classes, classes).tolist() if few else None
    found, numbers = np.unique(cells[wrong], return_counts=True)
    order = np.argsort(-numbers, kind="stable")[: classes**2 if few else MATRIX_CLASSES]
    pairs = [(*divmod(int(found[at]), classes), int(numbers[at])) for at in order]
    listing = _listed_pairs(rows, pairs, lambda true, other: wrong[cells[wrong] == true * classes + other])
    return {"labels": names, "counts": counts, "pairs": listing}


def _listed_pairs(
    rows: JudgedRows, pairs: Sequence[tuple[int, int, int]], places: Callable[[int, int], np.ndarray]
) -> list[dict[str, Any]]:
    """Return pairs of labels that are confused in a number of rows, with the worst rows of each."""
    each, losses = max(1, min(10, CELL_ROWS // max(1, len(pairs)))), rows.numbers("loss")
    listing = []
    for true, other, number in pairs:
        inside = places(true, other)
        worst = inside[np.argsort(-losses[inside], kind="stable")[:each]]
        label, predicted = str(rows.labels[true]), str(rows.labels[other])
        listing.append({"label": label, "predicted": predicted, "rows": number, "list": listed(rows, worst)})
    return listing


def baseline(rows: JudgedRows) -> dict[str, Any]:
    """Return what always answering the most frequent class, the labels of most rows, the mean or no span gives."""
    from scipy.stats import entropy

    if rows.kind == "number":
        truth = rows.numbers("label")
        away = truth - truth.mean()
        scores = {"rmse": float(np.sqrt((away**2).mean())), "mae": float(np.abs(away).mean()), "r2": 0.0}
        return {"answer": f"always the mean, {truth.mean():.4g}", "metrics": scores}
    total = len(rows.table)
    if rows.kind == "labels":
        true = np.asarray(rows.members("label").sum(axis=0))
        most = true >= total / 2
        names = ", ".join(str(label) for label, yes in zip(rows.labels, most, strict=True) if yes)
        answer = f"always the labels of at least half of the rows: {names or 'no label'}"
        return {"answer": answer, "metrics": label_scores(true, total * most, true * most)}
    if rows.kind == "spans":
        empty = pc.mean(pc.equal(pc.list_value_length(rows.table["label"]), 0)).as_py()
        scores = dict.fromkeys(("precision", "recall", "f1"), 0.0)
        return {"answer": f"no span at all, which is right in {empty:.1%} of the rows", "metrics": scores}
    counts = np.bincount(rows.codes("label"), minlength=len(rows.labels))
    said = np.zeros_like(counts)
    said[often := int(counts.argmax())] = total
    scores = {**class_scores(counts, said, np.minimum(counts, said)), "log_loss": float(entropy(counts))}
    return {"answer": f"always the most frequent class, {str(rows.labels[often])!r}", "metrics": scores}


# Several labels.


def per_label(rows: JudgedRows) -> list[dict[str, Any]]:
    """Return support, precision, recall and F1 of each label with intervals, the lowest F1 first."""
    truth, said = rows.members("label"), rows.members("prediction")
    return _drawn_scores(rows, *(np.asarray(one.sum(axis=0)) for one in (truth, said, truth * said)))


def confused_labels(rows: JudgedRows) -> dict[str, Any]:
    """Return the pairs of a missed label and one that was predicted instead, the most frequent first.

    Of many labels those that are missed most are looked at.
    """
    truth, said = rows.members("label"), rows.members("prediction")
    missed, spurious = (truth - truth * said).tocsc(), (said - truth * said).tocsc()
    often = np.argsort(-np.asarray(missed.sum(axis=0)), kind="stable")[:LABELS_MISSED]
    counts = (missed[:, often].T @ spurious).tocoo()
    order = np.lexsort((counts.col, often[counts.row], -counts.data))[:MATRIX_CLASSES]
    found = [(int(often[counts.row[at]]), int(counts.col[at]), int(counts.data[at])) for at in order]
    pairs = [pair for pair in found if pair[2]]

    def places(true: int, other: int) -> np.ndarray:
        return np.flatnonzero(missed[:, [true]].toarray().ravel() * spurious[:, [other]].toarray().ravel())

    names = [str(label) for label in rows.labels]
    return {"labels": names, "counts": None, "pairs": _listed_pairs(rows, pairs, places)}


# Probabilities.


def _chances_and_truth(rows: JudgedRows) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield probabilities (n,) of classes and labels, and whether they are right, some at a time."""
    if rows.kind != "labels":
        right = rows.right
        assert right is not None, "classes are right or wrong"
        yield rows.numbers("score"), right
        return
    truth = rows.members("label")
    for some, chances in rows.chances():
        yield chances.ravel().astype(np.float64), truth[some].toarray().ravel()


def calibration(rows: JudgedRows) -> dict[str, Any]:
    """Return bins of confidence with the share that is right, and the expected calibration error over them."""
    edges = np.linspace(0, 1, ECE_BINS + 1)
    sums = np.sum([confidence_bins(*some) for some in _chances_and_truth(rows)], axis=0)
    table = [
        {
            "from": edges[at],
            "to": edges[at + 1],
            "rows": int(count),
            "confidence": confidence / count,
            "right": right / count,
        }
        for at, (count, confidence, right) in enumerate(sums.T)
        if count
    ]
    return {"bins": table, "ece": calibration_error(*sums)}


def threshold(rows: JudgedRows) -> list[dict[str, Any]]:
    """Return for the second of two classes, or each label, precision and recall by threshold, and those wanted."""
    if rows.kind == "labels":
        first = rows.labels[:MATRIX_CLASSES]
        truth = rows.members("label")[:, : len(first)].toarray() > 0
        chances = np.concatenate([some[:, : len(first)] for _, some in rows.chances()]).astype(np.float64)
        return [
            _curve(str(label), truth[:, at], chances[:, at])
            for at, label in enumerate(first)
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


def outliers(rows: JudgedRows) -> dict[str, Any]:
    """Return the rows whose number is far from the prediction, the furthest first: labels to look at."""
    from scipy.stats import median_abs_deviation

    found = rows.numbers("label") - rows.numbers("prediction")
    away, spread = np.abs(found - np.median(found)), float(median_abs_deviation(found, scale="normal"))
    far = np.flatnonzero(away > FAR * spread) if spread else np.zeros(0, dtype=np.int64)
    by = f"residuals more than {FAR} standard deviations from their median (of normal ones 1 row in 2,000 is; the "
    by += f"deviation, {spread:.4g}, is estimated by their median distance)"
    some = far[np.argsort(-away[far], kind="stable")[:OUTLIERS]]
    return {"by": by, "rows": len(far), "list": listed(rows, some)} if spread else {}
