"""Spans of labels: from tags of words, from a column of spans, and how well predicted ones agree with true ones.

A span is (start, end, label), `end` exclusive. Tags are IOB1, IOB2, BIOES or BILOU, or plain labels with O; a span
begins where the tag says so, or where the label changes, as conlleval and seqeval read them.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from torchlake.errors import DataError, MissingExtra, pip_install
from torchlake.tables.arrays import is_text

OUTSIDE = "O"
BEGINS, ENDS = "BSU", "ESLU"
METRICS = ("precision", "recall", "f1")

Span = tuple[int, int, str]


def label_of(tag: str) -> tuple[str, str]:
    """Return the prefix and the label of a tag: ("B", "PER") for "B-PER", ("I", "PER") for "PER", ("O", "") for "O"."""
    if tag == OUTSIDE:
        return OUTSIDE, ""
    prefix, dash, label = tag.partition("-")
    return (prefix, label) if dash and prefix in "IBESLU" and len(prefix) == 1 else ("I", tag)


def spans_of(tags: Iterable[str]) -> list[Span]:
    """Return the spans in the tags of a row's words."""
    spans: list[Span] = []
    open_label, start, last = "", 0, -1
    for place, tag in enumerate(tags):
        prefix, label = label_of(tag)
        if open_label and (label != open_label or prefix in BEGINS):
            spans.append((start, place, open_label))
            open_label = ""
        if label and not open_label:
            open_label, start = label, place
        if open_label and prefix in ENDS:
            spans.append((start, place + 1, open_label))
            open_label = ""
        last = place
    return [*spans, (start, last + 1, open_label)] if open_label else spans


def tags_of(spans: Iterable[Span], starts: np.ndarray, ends: np.ndarray) -> list[str]:
    """Return IOB2 tags of words from `starts` to `ends` (W,): a word is in the first span that overlaps it."""
    tags = [OUTSIDE] * len(starts)
    for start, end, label in sorted(spans):
        inside = np.flatnonzero((starts < end) & (ends > start))
        free = [word for word in inside.tolist() if tags[word] == OUTSIDE]
        for word in free:
            tags[word] = f"{'B' if word == free[0] else 'I'}-{label}"
    return tags


def is_spans(kind: pa.DataType) -> bool:
    """Return whether a column of labels holds spans, not tags."""
    return is_list(kind) and pa.types.is_struct(kind.value_type)


def is_list(kind: pa.DataType) -> bool:
    """Return whether a type is a list of any kind."""
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def check_labels(kind: pa.DataType) -> None:
    """Raise DataError for a column that holds neither spans nor tags."""
    if is_spans(kind) and {"start", "end", "label"} <= {field.name for field in kind.value_type}:
        return
    if is_list(kind) and (pa.types.is_integer(kind.value_type) or is_text(kind.value_type)):
        return
    raise DataError(
        f"the label column holds {kind}; it must hold a list for each row: of tags of its words (strings, or numbers "
        "with model.task_options.tags), or of spans (structs with start, end and label)"
    )


def row_spans(row: Sequence[dict[str, Any]]) -> list[Span]:
    """Return one row of a column of spans. Raises ValueError for an invalid span."""
    found = []
    for span in row:
        start, end, label = span["start"], span["end"], span["label"]
        if not (isinstance(start, int) and isinstance(end, int) and isinstance(label, str) and 0 <= start < end):
            raise ValueError(f"{start!r} to {end!r}, {label!r} is not a span")
        found.append((start, end, label))
    return found


def agreement(true: Sequence[Sequence[Span]], found: Sequence[Sequence[Span]]) -> dict[str, float]:
    """Return precision, recall and F1 over all spans of rows: start, end and label must be right, as in seqeval.

    nervaluate counts them ("strict"); its ends are inclusive, so spans that follow one another do not overlap.
    """
    try:
        from nervaluate.entities import Entity
        from nervaluate.strategies import StrictEvaluation
    except ImportError:
        raise MissingExtra(f"the metrics of spans need 'nervaluate': {pip_install('torchlake[tokens]')}") from None
    strict, right, wanted, given = StrictEvaluation(), 0, 0, 0
    for one, other in zip(true, found, strict=True):
        labels = sorted({label for _, _, label in (*one, *other)})
        pair = ([Entity(label=label, start=start, end=end - 1) for start, end, label in each] for each in (one, other))
        result, _ = strict.evaluate(*pair, labels)
        right, wanted, given = right + result.correct, wanted + len(one), given + len(other)
    precision, recall = right / given if given else 0.0, right / wanted if wanted else 0.0
    both = precision + recall
    return dict(zip(METRICS, (precision, recall, 2 * precision * recall / both if both else 0.0), strict=True))
