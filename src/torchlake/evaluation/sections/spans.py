"""Sections of spans, answers and vectors."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from torchlake.evaluation.sections.classes import MATRIX_CLASSES, lowest_first, scores
from torchlake.evaluation.sections.judged import JudgedRows, listed
from torchlake.evaluation.sections.slices import BINS, interval

RESAMPLES = 200
CELL_ROWS = 10
CUTOFFS = (1, 3, 5, 10, 20, 50)
MISSED, SPURIOUS = "missed", "spurious"
Span = tuple[int, int, str]


def entities(rows: JudgedRows) -> dict[str, Any]:
    """Return each type's exact and partial matches with scores, and the confusions, also with nothing.

    An exact match has the right start, end and label; a partial one overlaps a true span of its label.
    """
    from scipy.sparse import csr_array

    pairs = [
        ([_span(one) for one in true], [_span(one) for one in found])
        for true, found in zip(rows.table["label"].to_pylist(), rows.table["prediction"].to_pylist(), strict=True)
    ]
    names = sorted({label for pair in pairs for spans in pair for _, _, label in spans})
    if not names:
        return {}
    number = {name: at for at, name in enumerate(names)}
    counts = Counter[tuple[int, int]]()
    cells: dict[tuple[str, str], Counter[int]] = {}
    for row, (true, found) in enumerate(pairs):
        exact = set(true) & set(found)
        partial = [one for one in set(found) - exact if any(_overlap(one, o) and one[2] == o[2] for o in true)]
        for kind, group in enumerate((true, found, exact, partial)):
            counts.update((row, 4 * number[label] + kind) for _, _, label in group)
        for label, predicted in _confused(set(true) - exact, set(found) - exact):
            cells.setdefault((label, predicted), Counter())[row] += 1
    places = np.array(list(counts)).reshape(-1, 2).T
    shape = (len(pairs), 4 * len(names))
    sums = csr_array((np.array(list(counts.values()), dtype=np.float64), (places[0], places[1])), shape=shape)
    generator = np.random.default_rng(0)
    weights = (generator.integers(0, len(pairs), len(pairs)) for _ in range(RESAMPLES))
    drawn = np.stack([np.bincount(some, minlength=len(pairs)) @ sums for some in weights])
    whole = np.asarray(sums.sum(axis=0))
    table = scores(names, [whole[None, at::4] for at in range(3)], [drawn[:, at::4] for at in range(3)])
    for entry in table:
        entry["partial"] = int(whole[4 * number[entry["label"]] + 3])
    table.sort(key=lowest_first)
    most = sorted(cells.items(), key=lambda cell: (-cell[1].total(), cell[0]))[:MATRIX_CLASSES]
    listing = [
        {
            "label": label,
            "predicted": predicted,
            "rows": found.total(),
            "list": listed(rows, np.array([row for row, _ in found.most_common(CELL_ROWS)])),
        }
        for (label, predicted), found in most
    ]
    return {"types": table, "pairs": listing}


def _span(span: Mapping[str, Any]) -> Span:
    return span["start"], span["end"], span["label"]


def _overlap(one: Span, other: Span) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _confused(missed: set[Span], spurious: set[Span]) -> list[tuple[str, str]]:
    """Pair each wrong span with one that it overlaps and that has another label; what remains pairs with nothing."""
    pairs, left = [], sorted(spurious)
    for span in sorted(missed):
        other = next((one for one in left if _overlap(one, span) and one[2] != span[2]), None)
        pairs.append((span[2], MISSED if other is None else other[2]))
        if other is not None:
            left.remove(other)
    return pairs + [(SPURIOUS, label) for _, _, label in left]


def answerable(rows: JudgedRows) -> list[dict[str, Any]]:
    """Return the share of exact answers and the mean F1 of questions with and without an answer."""
    without = np.array([not _has_answer(label) for label in rows.table["label"].to_pylist()])
    right, losses = rows.right, rows.numbers("loss")
    assert right is not None, "answers are right or wrong"
    return [
        {"kind": kind, **interval(right[some].astype(float), is_share=True), "f1": float(1 - losses[some].mean())}
        for kind, some in (("with an answer", ~without), ("without an answer", without))
        if some.any()
    ]


def _has_answer(label: Mapping[str, Any]) -> bool:
    texts: str | Sequence[str] | None = label["text"]
    return bool(texts if isinstance(texts, str) else [text for text in texts or [] if text])


def retrieval(rows: JudgedRows) -> list[dict[str, Any]]:
    """Return recall and nDCG at each number of texts, and the mean reciprocal rank; empty for wanted similarities."""
    if rows.table["right"].null_count:
        return []
    ranks = rows.numbers("loss")
    gains = 1 / np.log2(1 + ranks)
    return [
        {"k": k, "recall": float((ranks <= k).mean()), "ndcg": float(np.where(ranks <= k, gains, 0).mean())}
        | {"mrr": float(np.where(ranks <= k, 1 / ranks, 0).mean())}
        for k in CUTOFFS
    ]


def cosines(rows: JudgedRows) -> dict[str, Any]:
    """Return the quantiles of the cosines of pairs and of random ones, and both histograms over the same bins."""
    both = {"of the pairs": rows.numbers("score"), "of random pairs": rows.numbers("random")}
    found = {name: some[np.isfinite(some)] for name, some in both.items()}
    found = {name: some for name, some in found.items() if len(some)}
    edges = np.histogram_bin_edges(np.concatenate([*found.values()]), BINS)
    quantiles = [
        {"rows below": f"{share:.0%}", **{name: float(np.quantile(some, share)) for name, some in found.items()}}
        for share in (0.05, 0.25, 0.5, 0.75, 0.95)
    ]
    counts = {name: np.histogram(some, edges)[0].tolist() for name, some in found.items()}
    return {"quantiles": quantiles, "edges": edges.tolist(), "counts": counts}
