"""Decide whether a label column holds classes or a number.

    strings, integers, booleans   single label; the classes, sorted, keep their type in the output
    lists of strings              multi label; any number of classes per row, including none
    floats                        regression, unless they are few whole numbers, such as integers with a missing value

`data.problem` overrides the guess. A column of strings may come from a file without types (CSV): strings that are all
integers as Python writes them ("7", not "007") are integers, and strings that are all finite numbers are floats.
Cost: one pass of Arrow's `value_counts`, and at most 10,000 classes in memory. Parts of a column may be counted in any
process; their counts are merged in order, so that the same parts give the same bytes.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchlake.config.task_spec import LabelColumn, Problem
from torchlake.errors import DataError
from torchlake.labels.values import LISTS, Moments, as_numbers, kind_of, to_plain_array

MAX_INTEGER_CLASSES = 1_000
MAX_CLASSES = 10_000
FEW = 20
"Whole floats within a smaller range, with two or more rows each on average, are classes."
EXACT = 2.0**53
"Floats represent whole numbers exactly up to this."
INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")
# A leading zero means a code, such as a postal code.
NUMBER = re.compile(r"-?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,2})?")


@dataclass
class LabelCounts:
    """The counts of a part of a label column."""

    kind: str = ""
    rows: int = 0
    counts: dict[Any, int] = field(default_factory=dict)
    "Rows of each distinct value; empty once there are too many for classes."
    many: bool = False
    "Whether there are too many."
    integers: bool = True
    "Whether all strings are integers."
    numbers: Moments | None = field(default_factory=Moments)
    "None once a value is not a number."
    word: str | None = None
    "The first value that is not a number."


def count_labels(arrays: Iterator[pa.Array], problem: Problem | None = None, *, drop_bad: bool = False) -> LabelCounts:
    """Count a part of a label column; `problem` None: it will be inferred. Nulls are skipped.

    `drop_bad` also skips values that are not finite numbers; else they raise DataError. So do too many classes, and
    types that are not labels or do not fit `problem`.
    """
    seen = LabelCounts()
    for array in arrays:
        array = to_plain_array(array).drop_null()
        if not len(array):
            continue
        _set_kind(seen, kind_of(array.type))
        _check_kind(seen.kind, problem)
        if problem == "regression":
            numbers = as_numbers(array, drop_bad=drop_bad)
            seen.rows += len(numbers)
            assert seen.numbers is not None
            seen.numbers.add(numbers.to_numpy(zero_copy_only=False))
        elif seen.kind == "floats":
            _add_floats(seen, as_numbers(array, drop_bad=drop_bad).to_numpy(zero_copy_only=False))
        else:
            _add_values(seen, array)
    return seen


def decide_labels(parts: Iterable[LabelCounts], problem: Problem | None = None) -> LabelColumn:
    """Combine the parts into the label column. Raises DataError for mixed types and for less than two classes."""
    seen = LabelCounts()
    for part in parts:
        _merge(seen, part)
    if not seen.rows:
        raise DataError("the label column is empty, or null in every row")
    return _regression(seen) if problem == "regression" else _decided(seen, problem)


def _merge(seen: LabelCounts, part: LabelCounts) -> None:
    """Add the counts of a part."""
    if not part.kind:
        return
    _set_kind(seen, part.kind)
    seen.rows += part.rows
    seen.integers = seen.integers and part.integers
    seen.word = part.word if seen.word is None else seen.word
    if seen.numbers is None or part.numbers is None:
        seen.numbers = None
    else:
        seen.numbers.merge(part.numbers)
    seen.many = seen.many or part.many
    _count(seen, part.counts, _most(seen.kind))
    _refuse_many(seen)


def _set_kind(seen: LabelCounts, kind: str) -> None:
    if seen.kind not in ("", kind):
        raise DataError(f"the label column holds {' and '.join(sorted([seen.kind, kind]))}; it must be of one type")
    seen.kind = kind


def _check_kind(kind: str, problem: Problem | None) -> None:
    if (problem == "multi_label") == (kind == LISTS) or problem is None:
        return
    expected = "lists of strings" if problem == "multi_label" else "one value per row"
    raise DataError(f"data.problem is {problem}, which needs {expected}, but the label column holds {kind}")


def _add_floats(seen: LabelCounts, numbers: np.ndarray) -> None:
    assert seen.numbers is not None
    seen.rows += len(numbers)
    seen.numbers.add(numbers)
    if seen.many:
        return
    values, counts = np.unique(numbers, return_counts=True)
    odd = values[(values != np.rint(values)) | (np.abs(values) > EXACT)]
    if len(odd):
        seen.many, seen.word = True, f"{odd[0]:g}"
    else:
        _count(seen, {int(value): int(count) for value, count in zip(values, counts, strict=True)}, _most(seen.kind))


def _add_values(seen: LabelCounts, array: pa.Array) -> None:
    """Add strings, integers, booleans or lists of strings."""
    seen.rows += len(array)
    pairs = pc.value_counts(array.flatten().drop_null() if seen.kind == LISTS else array)
    found = dict(zip(pairs.field("values").to_pylist(), pairs.field("counts").to_pylist(), strict=True))
    if seen.kind == "strings" and seen.numbers is not None:
        _add_words(seen, found)
    _count(seen, found, _most(seen.kind))
    _refuse_many(seen)


def _most(kind: str) -> int:
    """Return the most distinct values that can be classes."""
    return MAX_INTEGER_CLASSES if kind in ("integers", "floats") else MAX_CLASSES


def _refuse_many(seen: LabelCounts) -> None:
    """Raise DataError for too many classes. Strings with many values may still be numbers."""
    if seen.many and (seen.kind in ("integers", LISTS) or (seen.kind == "strings" and seen.numbers is None)):
        raise _too_many(seen)


def _add_words(seen: LabelCounts, found: dict[str, int]) -> None:
    assert seen.numbers is not None
    seen.integers = seen.integers and all(map(INTEGER.fullmatch, found))
    seen.word = next((value for value in found if not NUMBER.fullmatch(value)), None)
    if seen.word is None:
        seen.numbers.add(np.array([float(value) for value in found]), np.array(list(found.values())))
    else:
        seen.numbers = None


def _count(seen: LabelCounts, found: dict[Any, int], most: int) -> None:
    if seen.many:
        return
    for value, count in found.items():
        seen.counts[value] = seen.counts.get(value, 0) + count
    if len(seen.counts) > most:
        seen.many, seen.counts = True, {}


def _too_many(seen: LabelCounts) -> DataError:
    if seen.kind == "integers":
        return DataError(
            f"the label column holds more than {MAX_INTEGER_CLASSES:,} distinct integers, too many for classes. Set "
            "data.problem to regression to predict a number, or name another column with data.label."
        )
    among = "" if seen.word is None else f", {seen.word[:80]!r} among them"
    return DataError(
        f"the label column holds more than {MAX_CLASSES:,} distinct strings{among}. Check that it is the right column "
        "(data.label)."
    )


def _regression(seen: LabelCounts, note: str | None = None) -> LabelColumn:
    assert seen.numbers is not None
    return LabelColumn(
        problem="regression",
        labels=(),
        counts=(),
        rows=seen.rows,
        mean=seen.numbers.mean,
        deviation=seen.numbers.deviation,
        note=note,
    )


def _decided(seen: LabelCounts, problem: Problem | None) -> LabelColumn:
    """Return the inferred problem, or the classes of the requested one."""
    if seen.kind == LISTS:
        return _classes(seen, "multi_label")
    text = seen.kind == "strings"
    if text and seen.integers:
        seen.kind = "integers"
        if seen.many or len(seen.counts) > MAX_INTEGER_CLASSES:
            raise _too_many(seen)
        seen.counts = {int(value): count for value, count in seen.counts.items()}
        return _classes(seen, "single_label")
    if seen.kind in ("booleans", "integers") or (text and seen.numbers is None):
        return _classes(seen, "single_label")
    return _of_floats(seen, problem)


def _of_floats(seen: LabelCounts, problem: Problem | None) -> LabelColumn:
    """Decide for floats, or for strings that are all numbers but not all integers."""
    words = seen.counts
    if seen.kind == "strings":
        whole = _whole(words)
        if whole is None and problem == "single_label" and not seen.many:
            return _classes(seen, "single_label")
        seen.counts, seen.many = whole or {}, whole is None
    number = len(seen.counts)
    if problem == "single_label":
        if seen.many:
            found = f"{seen.word} among its numbers" if seen.word else f"more than {MAX_INTEGER_CLASSES:,} numbers"
            raise DataError(
                f"data.problem is single_label, but the label column holds {found}: classes are strings, integers or "
                "booleans. Write them as strings, or set data.problem to regression."
            )
        return _classes(seen, "single_label")
    few = not seen.many and number <= seen.rows // 2 and max(seen.counts) - min(seen.counts) < FEW
    if not seen.many and (number <= 2 or few):
        note = (
            f"the label column holds floats that are all whole, {number} different ones: they are read as classes. "
            "Set data.problem to regression to predict a number."
        )
        return _classes(seen, "single_label", note)
    uncertain = (
        f"{number:,} different ones: they are predicted as numbers. Set data.problem to single_label for classes."
    )
    return _regression(seen, None if seen.many else f"the label column holds floats that are all whole, {uncertain}")


def _whole(words: dict[str, int]) -> dict[Any, int] | None:
    """Return the rows per whole number, or None if a value is not whole or there are too many."""
    counts: dict[Any, int] = {}
    for word, count in words.items():
        number = float(word)
        if not number.is_integer() or abs(number) > EXACT:
            return None
        counts[int(number)] = counts.get(int(number), 0) + count
    return counts if 0 < len(counts) <= MAX_INTEGER_CLASSES else None


def _classes(seen: LabelCounts, problem: Problem, note: str | None = None) -> LabelColumn:
    labels = tuple(sorted(seen.counts))
    if len(labels) < (1 if problem == "multi_label" else 2):
        shown = f"only {labels[0]!r} in every row" if labels else "no label in any row"
        raise DataError(
            f"the label column holds {shown}, so there is nothing to learn. Training needs 2 or more classes."
        )
    if isinstance(labels[-1], int) and labels[-1] >= 2**63:
        raise DataError(
            f"the label column holds {labels[-1]}, but classes that are integers are at most 2^63 - 1. Write the "
            "labels as strings, or set data.problem to regression to predict a number."
        )
    return LabelColumn(
        problem=problem,
        labels=labels,
        counts=tuple(seen.counts[label] for label in labels),
        rows=seen.rows,
        note=note,
    )
