"""Slices, the worst and the least sure rows, and histograms, of every kind of prediction.

Shares have Wilson's interval, means one by Student's t; both are scipy's.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchlake.errors import UsageError
from torchlake.evaluation.sections.judged import JudgedRows, listed

WORST, PICKED = 50, 20
SLICE_VALUES, SLICES_SHOWN, SMALL_SLICE = 50, 30, 30
BINS = 20


def refuse_slices(schema: pa.Schema, names: Sequence[str]) -> None:
    """Raise UsageError for a column whose values, or items, do not name slices."""
    for name in names:
        kind = schema.field(name).type
        while pa.types.is_dictionary(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
            kind = kind.value_type
        if pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            raise UsageError(
                f"slices: the column {name!r} holds {schema.field(name).type}. A slice (--slice) is a plain value, "
                "such as a word or a number, or each item of a list of them."
            )


def by_slice(rows: JudgedRows, names: Sequence[str]) -> dict[str, Any]:
    """Return the slices that lose the most rows (of numbers and texts: loss), compared with the average; how many were
    looked at; and of `cut` columns, whose rare values were not, the number of values."""
    right, losses = None if rows.kind == "texts" else rows.right, rows.numbers("loss")
    values = losses if right is None else right.astype(np.float64)
    sign, cut = 1 if right is None else -1, dict[str, int]()
    found = [
        {"slice": name, "value": value, **interval(values[same], right is not None)}
        | {"lost": float(sign * (values[same].mean() - values.mean()) * same.sum())}
        for name, value, same in _slices(rows, names, cut)
        if 0 < same.sum() < len(same)
    ]
    found.sort(key=lambda entry: -entry["lost"])
    unit = "mean loss" if right is None else "share right"
    return {"looked_at": len(found), "cut": cut, "unit": unit, "slices": found[:SLICES_SHOWN]} if found else {}


def _slices(rows: JudgedRows, names: Sequence[str], cut: dict[str, int]) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield the column, the value and the rows (N,) bool of each slice; a row is in that of each item of a list."""
    for name in names:
        column, members = rows.table[name].combine_chunks(), np.arange(len(rows.table))
        if pa.types.is_nested(column.type) and column.null_count:
            yield name, "null", column.is_null().to_numpy(zero_copy_only=False)
        while pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            members, column = members[pc.list_parent_indices(column).to_numpy()], pc.list_flatten(column)
        codes = column.cast(pa.string()).dictionary_encode("encode")
        places, values = codes.indices.to_numpy(), codes.dictionary.to_pylist()
        counts = np.bincount(places, minlength=len(values))
        cut |= {name: len(values)} if len(values) > SLICE_VALUES else {}
        for at in sorted(range(len(values)), key=lambda at: (-counts[at], str(values[at])))[:SLICE_VALUES]:
            same = np.zeros(len(rows.table), dtype=bool)
            same[members[places == at]] = True
            yield name, "null" if values[at] is None else values[at], same
    tokens = rows.numbers("tokens")
    if not np.isnan(tokens).any():
        edges = np.unique(np.quantile(tokens, (0, 0.25, 0.5, 0.75, 1)).round())
        for low, high in pairwise(edges.tolist()):
            inside = (tokens > low if low > edges[0] else tokens >= low) & (tokens <= high)
            yield "length", f"{low + (low > edges[0]):,.0f} to {high:,.0f} tokens", inside
    named = {"truncated": "truncated", "trained_on": "in the training table"}
    for column in [one for one in named if one in rows.table.column_names]:
        yes = rows.numbers(column) > 0
        if yes.any():
            yield named[column], "yes", yes
            yield named[column], "no", ~yes


def interval(values: np.ndarray, is_share: bool) -> dict[str, Any]:
    """Return the mean of some rows with its 95 % interval."""
    from scipy.stats import binomtest, sem, t

    rows, mean = len(values), float(values.mean())
    if is_share:
        low, high = binomtest(round(values.sum()), rows).proportion_ci(method="wilson")
    else:
        spread = float(sem(values)) if rows > 1 else 0.0
        low, high = t.interval(0.95, rows - 1, mean, spread) if spread else (mean, mean)
    return {"rows": rows, "mean": mean, "low": float(low), "high": float(high), "small": rows < SMALL_SLICE}


def pick(rows: JudgedRows) -> dict[str, Any]:
    """Return the rows with the highest loss, wrong ones with the highest score, and those with the lowest score."""
    losses, score, right = rows.numbers("loss"), np.nan_to_num(rows.numbers("score"), nan=-1), rows.right
    found = {"worst": _first(-losses, WORST, losses > 0)}
    if right is not None and (score >= 0).any():
        found["surest_wrong"] = _first(-score, PICKED, ~right & (score >= 0))
        found["least_sure"] = _first(score, PICKED, score >= 0)
    return {name: listed(rows, some) for name, some in found.items()}


def hinted(rows: JudgedRows) -> dict[str, Any]:
    """Return the number of labels to look at, and the first rows of them, the lowest quality first."""
    issue = rows.numbers("label_issue") > 0
    return {"rows": int(issue.sum()), "list": listed(rows, _first(rows.numbers("label_quality"), WORST, issue))}


def trained(rows: JudgedRows) -> dict[str, Any]:
    """Return the number of rows that are in the training table too, and the first of them; empty if not known."""
    if "trained_on" not in rows.table.column_names:
        return {}
    some = np.flatnonzero(rows.numbers("trained_on") > 0)
    return {"rows": len(some), "of": len(rows.table), "list": listed(rows, some[:PICKED])}


def _first(order: np.ndarray, most: int, among: np.ndarray) -> np.ndarray:
    some = np.flatnonzero(among)
    if len(some) > most:
        bound = np.partition(order[some], most - 1)[most - 1]
        some = some[order[some] <= bound]
    return some[np.argsort(order[some], kind="stable")[:most]]


def histogram(values: np.ndarray) -> list[list[float]]:
    """Return [from, to, rows] of at most 20 bins; empty if there is nothing to see."""
    known = values[np.isfinite(values)]
    if len(known) < 2 or known.min() == known.max():
        return []
    counts, edges = np.histogram(known, BINS)
    return [[float(a), float(b), int(n)] for (a, b), n in zip(pairwise(edges), counts, strict=True)]
