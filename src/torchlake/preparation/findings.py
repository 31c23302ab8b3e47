"""Data checks: what is probably wrong with a table, found before a model is trained on it.

    hashes, marks and targets of rows (row_checks.py), classes, columns -> findings: a sentence, a count, examples

`init` checks a sample of the table, training all rows that it prepared. The rows come in the order of the table, so the
findings are the same on every engine. Cost: sorts of 8 bytes per row.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from torchlake.config.task_spec import Label, TaskSpec, label_name
from torchlake.data.copies import first_rows, is_shared
from torchlake.tables.hashes import Words, combined

EXAMPLES = 3
MARKUP_SHARE = 0.01
"Share of rows from which markup is reported."
LEAK_SHARE, CLASS_LEAK_SHARE, CLASS_ROWS = 0.5, 0.9, 10
"Share of all rows, or of the rows of a class with this number, from which labels in the text are reported."


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a data check found."""

    check: str
    "The check: classes, copies, conflicts, both_sides, ids, truncated, markup, leak, folds or constant."
    text: str
    "The finding in a sentence."
    rows: int
    "The rows, or classes, that it is about."
    of: int
    "All rows, or classes, that were checked."
    examples: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """The sentence with its examples."""
        return f"{self.text}; for example {', '.join(self.examples)}" if self.examples else self.text


@dataclass(frozen=True, kw_only=True)
class CheckedRows:
    """Rows in the order of the table, without those that cannot be trained on."""

    columns: Sequence[str]
    "The names of the columns that are hashed (C)."
    hashes: Words
    "(N, C + 1), those of the input columns and of the target."
    markup: np.ndarray
    leak: np.ndarray
    targets: np.ndarray | None
    "(N,) int64 classes, (N, C) or another type; None without labels."
    names: Callable[[Sequence[int]], list[str]]
    "The row ids of some rows."

    @property
    def inputs(self) -> Words:
        """One hash for the inputs of each row."""
        return combined(self.hashes[:, :-1])

    def take(self, rows: np.ndarray) -> "CheckedRows":
        """Return some of the rows."""
        return replace(
            self,
            hashes=self.hashes[rows],
            markup=self.markup[rows],
            leak=self.leak[rows],
            targets=None if self.targets is None else self.targets[rows],
            names=lambda some: self.names([int(rows[row]) for row in some]),
        )


def counted(number: int, of: int, noun: str = "rows") -> str:
    """Return "5 of 100 rows (5.0%)"."""
    return f"{number:,} of {of:,} {noun} ({number / max(1, of):.1%})"


def row_findings(rows: CheckedRows, spec: TaskSpec, *, deduplicate: bool) -> Iterator[Finding]:
    """Yield what is found in the rows of one table."""
    total, every = len(rows.hashes), np.arange(len(rows.hashes))
    constant = [name for at, name in enumerate(rows.columns) if total > 1 and np.ptp(rows.hashes[:, at]) == 0]
    for name in constant:
        yield constant_column(name, total)
    same_input = first_rows(rows.inputs)
    same = None if same_input is None else first_rows(combined(rows.hashes))
    if same is not None:
        copies = np.flatnonzero(same != every)
        most = int(np.bincount(same[copies]).max()) + 1
        often = f" (one occurs {most:,} times)" if most > 2 else ""
        done = ", which are left out" if deduplicate else "; data.deduplicate: true leaves them out"
        places = [rows.names([int(same[row]), int(row)]) for row in copies[:EXAMPLES]]
        yield Finding(
            check="copies",
            text=f"{counted(len(copies), total)} are copies of earlier rows{often}{done}",
            rows=len(copies),
            of=total,
            examples=tuple(f"{copy} of {first}" for first, copy in places),
        )
    if same_input is not None and spec.labels:
        yield from _conflicts(rows, same_input, spec)
    marked = np.flatnonzero(rows.markup)
    if len(marked) and len(marked) >= MARKUP_SHARE * total:
        text = f"{counted(len(marked), total)} are mostly markup, such as tags of HTML"
        yield _of_rows("markup", text, marked, rows)
    leaks = _leaks(rows, spec)
    if len(leaks):
        text = f"the text contains the label in {counted(len(leaks), total)}, which the model would learn to look for"
        yield _of_rows("leak", text, leaks, rows)


def both_sides(training: CheckedRows, validation: CheckedRows) -> Iterator[Finding]:
    """Yield the rows to validate on whose inputs are trained on."""
    known, asked = training.inputs, validation.inputs
    shared = np.flatnonzero(is_shared(asked, known))
    if len(shared):
        pairs = [(int(row), int(np.flatnonzero(known == asked[row])[0])) for row in shared[:EXAMPLES]]
        yield Finding(
            check="both_sides",
            text=f"{counted(len(shared), len(asked), 'validation rows')} have the inputs of a training row",
            rows=len(shared),
            of=len(asked),
            examples=tuple(f"{validation.names([row])[0]} = {training.names([one])[0]}" for row, one in pairs),
        )


def similar_classes(labels: Sequence[Label]) -> Iterator[Finding]:
    """Yield the classes that differ in case or in the blanks around them only."""
    groups: dict[str, list[str]] = {}
    for label in labels:
        groups.setdefault(label_name(label).strip().lower(), []).append(label_name(label))
    several = [names for names in groups.values() if len(names) > 1]
    if several:
        yield Finding(
            check="classes",
            text=f"{len(labels):,} classes are {len(groups):,} after trimming and lower case",
            rows=sum(map(len, several)),
            of=len(labels),
            examples=tuple(" = ".join(map(repr, names)) for names in several[:EXAMPLES]),
        )


def small_for_folds(classes: Mapping[str, int], folds: int) -> Iterator[Finding]:
    """Yield the classes with fewer rows than folds."""
    few = [f"{name!r} {rows:,}" for name, rows in classes.items() if rows < folds]
    if few:
        text = f"{len(few):,} of {len(classes):,} classes have fewer rows than the {folds} folds"
        yield Finding(check="folds", text=text, rows=len(few), of=len(classes), examples=tuple(few[:EXAMPLES]))


def constant_column(name: str, rows: int) -> Finding:
    """Return that a column has one value."""
    return Finding(check="constant", text=f"column {name!r} has one value in all {rows:,} rows", rows=rows, of=rows)


def repeated_ids(name: str, values: Mapping[Any, int], rows: int) -> Finding:
    """Return that a column that looks like a key has these values in several rows each."""
    often = Counter(values).most_common(EXAMPLES)
    again = sum(values.values()) - len(values)
    return Finding(
        check="ids",
        text=f"column {name!r} looks like a key, but {counted(again, rows)} have the value of an earlier row",
        rows=again,
        of=rows,
        examples=tuple(f"{value!r} {number:,} times" for value, number in often),
    )


def _conflicts(rows: CheckedRows, same_input: np.ndarray, spec: TaskSpec) -> Iterator[Finding]:
    own = rows.hashes[:, -1]
    others = np.flatnonzero(own != own[same_input])
    if len(others):
        mixed = np.zeros(len(own), bool)
        mixed[same_input[others]] = True
        number = int(mixed[same_input].sum())
        pairs = [[int(same_input[row]), int(row)] for row in others[:EXAMPLES]]
        shown = [
            zip(rows.names(pair), (_label_of(rows.targets, row, spec) for row in pair), strict=True) for pair in pairs
        ]
        yield Finding(
            check="conflicts",
            text=f"{counted(number, len(own))} have inputs that other rows have with another label",
            rows=number,
            of=len(own),
            examples=tuple(" and ".join(" ".join(each).strip() for each in pair) for pair in shown),
        )


def _label_of(targets: np.ndarray | None, row: int, spec: TaskSpec) -> str:
    if targets is None or spec.problem not in ("single_label", "multi_label"):
        return ""
    codes = [int(targets[row])] if targets.ndim == 1 else np.flatnonzero(targets[row]).tolist()
    return (
        "[" * (targets.ndim - 1)
        + ", ".join(repr(label_name(spec.labels[code])) for code in codes)
        + "]" * (targets.ndim - 1)
    )


def _leaks(rows: CheckedRows, spec: TaskSpec) -> np.ndarray:
    """Return the rows whose text contains their label, if these are most rows of the table or of a class."""
    if rows.targets is not None and rows.targets.ndim == 1 and spec.problem == "single_label" and spec.labels:
        of_class = np.bincount(rows.targets, minlength=len(spec.labels))
        found = np.bincount(rows.targets, rows.leak, minlength=len(spec.labels))
        wide = rows.leak.sum() >= LEAK_SHARE * len(rows.leak)
        told = (found >= CLASS_LEAK_SHARE * of_class) & (of_class >= CLASS_ROWS)
        return np.flatnonzero(rows.leak & (wide | told[rows.targets]))
    return np.flatnonzero(rows.leak) if rows.leak.any() and rows.leak.mean() >= LEAK_SHARE else np.zeros(0, int)


def _of_rows(check: str, text: str, found: np.ndarray, rows: CheckedRows) -> Finding:
    names = rows.names([int(row) for row in found[:EXAMPLES]])
    return Finding(check=check, text=text, rows=len(found), of=len(rows.hashes), examples=tuple(names))
