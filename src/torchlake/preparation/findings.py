"""Data checks: what is probably wrong with a table, found before a model is trained on it.

    hashes, marks and targets of rows (row_checks.py), classes, columns -> findings: a sentence, a count, examples

`init` checks a sample of the table, training all rows that it prepared. The rows come in the order of the table, so the
findings are the same on every engine. Cost: sorts of 8 bytes per row.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchlake.config.task_spec import Label, TaskSpec, label_name
from torchlake.data.copies import first_rows, is_shared
from torchlake.display import Shown, shown
from torchlake.tables.hashes import Words, combined

EXAMPLES = 3
MARKUP_SHARE = 0.01
"Share of rows from which markup is reported."
LEAK_SHARE, CLASS_LEAK_SHARE, CLASS_ROWS = 0.5, 0.9, 10
"Share of all rows, or of the rows of a class with this number, from which labels in the text are reported."


@shown
@dataclass(frozen=True)
class Finding:
    """What a data check found."""

    check: str
    "classes, copies, conflicts, both_sides, ids, truncated, markup, leak, folds or constant."
    text: str
    "The finding in a sentence."
    rows: int
    "The rows (or classes) that it is about."
    of: int
    "The rows (or classes) that were checked."
    examples: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """The sentence with its examples."""
        return f"{self.text}; for example {', '.join(self.examples)}" if self.examples else self.text

    def _shown(self) -> Shown:
        return f"{self.check}: {self.line}", []


@dataclass(frozen=True, kw_only=True)
class CheckedRows:
    """Rows that can be trained on, in the order of the table."""

    columns: Sequence[str]
    "The names of the C columns that are hashed."
    hashes: Words
    "(N, C + 1), those of the input columns and of the target."
    markup: np.ndarray
    leak: np.ndarray
    targets: np.ndarray | None
    "(N,) int64 classes, (N, C) bool, or (N,) numbers; None for other targets."
    names: Callable[[Sequence[int]], list[str]]
    "The row ids of some rows."


def row_findings(rows: CheckedRows, spec: TaskSpec, *, deduplicate: bool) -> Iterator[Finding]:
    """Yield what is found in the rows of one table."""
    total, inputs = len(rows.hashes), combined(rows.hashes[:, :-1])
    for name, hashes in zip(rows.columns, rows.hashes.T, strict=False):
        if total > 1 and np.ptp(hashes) == 0:
            yield constant_column(name, total)
    if (first := first_rows(inputs)) is not None:
        if (same := first_rows(combined(rows.hashes))) is not None:
            yield _copies(rows, same, deduplicate=deduplicate)
        others = np.flatnonzero(rows.hashes[:, -1] != rows.hashes[first, -1])
        if len(others) and spec.labels:
            yield _conflicts(rows, first, others, spec)
    marked, leaks = np.flatnonzero(rows.markup), _leaks(rows, spec)
    if len(marked) and len(marked) >= MARKUP_SHARE * total:
        text = f"{_share(len(marked), total)} are mostly markup, such as tags of HTML"
        yield Finding("markup", text, len(marked), total, _names(rows, marked))
    if len(leaks):
        text = f"the text contains the label in {_share(len(leaks), total)}, which the model would learn to look for"
        yield Finding("leak", text, len(leaks), total, _names(rows, leaks))


def both_sides(
    rows: CheckedRows, training: np.ndarray, other: CheckedRows, validation: np.ndarray
) -> Iterator[Finding]:
    """Yield the `validation` rows of `other` whose inputs are those of `training` rows; both are row numbers."""
    known, asked = combined(rows.hashes[training, :-1]), combined(other.hashes[validation, :-1])
    shared = np.flatnonzero(is_shared(asked, known))
    if len(shared):
        text = f"{_share(len(shared), len(asked), 'validation rows')} have the inputs of a training row"
        twins = [training[np.flatnonzero(known == asked[row])[0]] for row in shared[:EXAMPLES]]
        pairs = zip(_names(other, validation[shared]), _names(rows, np.array(twins)), strict=True)
        yield Finding("both_sides", text, len(shared), len(asked), tuple(map(" = ".join, pairs)))


def similar_classes(labels: Sequence[Label]) -> Iterator[Finding]:
    """Yield the classes that differ in case or in the blanks around them only."""
    groups: dict[str, list[str]] = {}
    for label in map(label_name, labels):
        groups.setdefault(" ".join(label.lower().split()), []).append(repr(label))
    several = [names for names in groups.values() if len(names) > 1]
    if several:
        text = f"{len(labels):,} classes are {len(groups):,} after trimming and lower case"
        shown = tuple(map(" = ".join, several[:EXAMPLES]))
        yield Finding("classes", text, sum(map(len, several)), len(labels), shown)


def small_for_folds(classes: Mapping[str, int], folds: int) -> Iterator[Finding]:
    """Yield the classes with fewer rows than folds."""
    few = [f"{name!r} {rows:,}" for name, rows in classes.items() if rows < folds]
    if few:
        text = f"{len(few):,} of {len(classes):,} classes have fewer rows than the {folds} folds"
        yield Finding("folds", text, len(few), len(classes), tuple(few[:EXAMPLES]))


def constant_column(name: str, rows: int) -> Finding:
    """Return that a column has one value."""
    return Finding("constant", f"column {name!r} has one value in all {rows:,} rows", rows, rows)


def repeated_ids(name: str, values: Mapping[Any, int], rows: int) -> Finding:
    """Return that a column that looks like a key has these values in several rows each."""
    again = sum(values.values()) - len(values)
    text = f"column {name!r} looks like a key, but {_share(again, rows)} have the value of an earlier row"
    often = Counter(values).most_common(EXAMPLES)
    return Finding("ids", text, again, rows, tuple(f"{value!r:.60} {number:,} times" for value, number in often))


def _copies(rows: CheckedRows, same: np.ndarray, *, deduplicate: bool) -> Finding:
    copies = np.flatnonzero(same != np.arange(len(same)))
    most = int(np.bincount(same[copies]).max()) + 1
    often = f" (one row occurs {most:,} times)" if most > 2 else ""
    done = ", which are left out" if deduplicate else "; data.deduplicate: true leaves them out"
    pairs = zip(_names(rows, copies), _names(rows, same[copies]), strict=True)
    text = f"{_share(len(copies), len(same))} are copies of earlier rows{often}{done}"
    return Finding("copies", text, len(copies), len(same), tuple(map(" of ".join, pairs)))


def _conflicts(rows: CheckedRows, first: np.ndarray, others: np.ndarray, spec: TaskSpec) -> Finding:
    """Return the rows whose inputs have several labels; those in `others` differ from the `first`."""
    number = int(np.isin(first, np.unique(first[others])).sum())

    def labeled(some: np.ndarray) -> Iterator[str]:
        for row, name in zip(some, _names(rows, some), strict=False):
            codes = None if rows.targets is None else np.flatnonzero(rows.targets[row])
            if rows.targets is not None and rows.targets.ndim == 1:
                codes = rows.targets[row : row + 1]
            yield (
                name if codes is None else f"{name} {', '.join(repr(label_name(spec.labels[code])) for code in codes)}"
            )

    pairs = zip(labeled(others), labeled(first[others]), strict=True)
    text = f"{_share(number, len(first))} have inputs that other rows have with another label"
    return Finding("conflicts", text, number, len(first), tuple(map(" but ".join, pairs)))


def _leaks(rows: CheckedRows, spec: TaskSpec) -> np.ndarray:
    """Return the rows whose text contains their label, if these are most rows of the table or of a class."""
    if rows.leak.any() and rows.leak.mean() >= LEAK_SHARE:
        return np.flatnonzero(rows.leak)
    if not rows.leak.any() or rows.targets is None or spec.problem != "single_label":
        return np.zeros(0, np.int64)
    of_class = np.bincount(rows.targets, minlength=len(spec.labels))
    found = np.bincount(rows.targets, rows.leak, minlength=len(spec.labels))
    reported = (found >= CLASS_LEAK_SHARE * of_class) & (of_class >= CLASS_ROWS)
    return np.flatnonzero(rows.leak & reported[rows.targets])


def _share(number: int, of: int, noun: str = "rows") -> str:
    return f"{number:,} of {of:,} {noun} ({number / max(1, of):.1%})"


def _names(rows: CheckedRows, found: np.ndarray) -> tuple[str, ...]:
    return tuple(rows.names(found[:EXAMPLES].tolist()))
