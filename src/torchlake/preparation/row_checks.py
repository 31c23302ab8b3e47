"""The rows that can be trained on, and what the data checks need of each, stored beside its tokens.

    hashes   (C + 1) uint64: of each input column, and of the target (0 without one)
    markup   whether most of its text is markup
    leak     whether its text contains its class as a word

An image is hashed by its content, not by its path. Cost: about 1 microsecond for 100 bytes of text.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchlake.config.task_spec import TaskSpec, label_name
from torchlake.data.batching import Ragged
from torchlake.data.features import Features, from_arrow, to_arrow
from torchlake.data.loading import HASHES
from torchlake.labels.values import is_missing
from torchlake.tables.arrays import from_numpy, is_text
from torchlake.tables.hashes import Words, column_hashes
from torchlake.tasks import PROMPT, Inputs
from torchlake.tasks._inputs import TEXT, columns_of
from torchlake.tasks._null_rows import read_inputs, rows_of

TAGS = r"<[/!?A-Za-z][^<>]*>|&#?[0-9A-Za-z]+;"
# Writing systems that separate words; in others a word may be beside any letter.
NOT_IN_WORDS = r"[^0-9_\p{Latin}\p{Greek}\p{Cyrillic}\p{Arabic}\p{Hebrew}\p{Devanagari}\p{Hangul}]"
MOST_CLASSES = 256
"Classes in a chunk above which texts are not searched for them, which would take longer than tokenizing."


def hashed_columns(task: Any, spec: TaskSpec) -> list[str]:
    """Return the columns of the table that are hashed, in order."""
    return [column for columns in columns_of(task.inputs, spec).values() for column in columns]


def check_fields(task: Any, spec: TaskSpec) -> list[pa.Field]:
    """Return the columns of token Parquet for the checks; their values are never null."""
    width = len(hashed_columns(task, spec)) + 1
    return [
        pa.field(HASHES, pa.list_(pa.uint64(), width)),
        pa.field("markup", pa.bool_()),
        pa.field("leak", pa.bool_()),
    ]


def usable_rows(
    task: Any, table: pa.Table, unreadable: Mapping[int, str], spec: TaskSpec, *, bad_rows: str
) -> tuple[np.ndarray, Inputs, pa.Array | None, dict[int, str]]:
    """Return the rows (M,) int64 that have inputs and a label, these, and {row: reason} for the others.

    With `bad_rows="error"` there are none if any row has an error; labels are then not checked.
    """
    inputs, errors = read_inputs(table, task.inputs, spec, unreadable)
    labels = None if spec.label is None else _plain_labels(table[spec.label], errors)
    if labels is not None and bad_rows == "drop":
        for row, reason in task.bad_labels(labels, spec).items():
            errors.setdefault(row, reason)
    refused = bool(errors) and bad_rows == "error"
    rows = np.array([row for row in range(len(table)) if row not in errors and not refused], dtype=np.int64)
    return rows, rows_of(inputs, rows), None if labels is None else labels.take(from_numpy(rows)), errors


def row_checks(
    task: Any,
    spec: TaskSpec,
    table: pa.Table,
    inputs: Inputs,
    targets: pa.Array | None,
    features: Features | None = None,
) -> dict[str, np.ndarray]:
    """Return the values of `check_fields` for rows of a table, by name, from their inputs, targets and features."""
    texts = [
        inputs[name]
        for name, kind in task.inputs.items()
        if name in inputs and kind in (TEXT, PROMPT) and is_text(inputs[name].type)
    ]
    columns = [*input_hashes(task, spec, table, features)]
    columns.append(np.zeros(len(table), np.uint64) if targets is None else column_hashes(targets))
    markup = np.zeros(len(table), bool)
    for text in texts:
        markup |= _is_mostly_markup(text)
    return {HASHES: np.column_stack(columns), "markup": markup, "leak": _has_label(texts, targets, len(table), spec)}


def input_hashes(task: Any, spec: TaskSpec, table: pa.Table, features: Features | None = None) -> Iterator[Words]:
    """Yield the hashes of each input column."""
    for name, columns in columns_of(task.inputs, spec).items():
        stored = None if features is None else features.arrays.get(name)
        if isinstance(stored, Ragged) and stored.values.dtype == np.uint8:
            yield column_hashes(to_arrow(stored, pa.large_binary()))
        else:
            for column in columns:
                yield np.concatenate([np.zeros(0, np.uint64), *map(column_hashes, table[column].chunks)])


def _is_mostly_markup(texts: pa.Array) -> np.ndarray:
    """Return (N,) bool: whether text is more than half tags and character references."""
    found = np.zeros(len(texts), bool)
    rows = np.flatnonzero(np.asarray(pc.match_substring(texts, "<")))
    if len(rows):
        some = texts.take(from_numpy(rows))
        bare = pc.binary_length(pc.replace_substring_regex(some, TAGS, ""))
        found[rows] = 2 * np.asarray(bare) < np.asarray(pc.binary_length(some))
    return found


def _has_label(texts: list[pa.Array], targets: pa.Array | None, count: int, spec: TaskSpec) -> np.ndarray:
    """Return (N,) bool: whether text contains the row's class, or one of its classes, as a word in any case."""
    found = np.zeros(count, bool)
    if targets is None or not texts or not count or spec.problem not in ("single_label", "multi_label"):
        return found
    encoded = from_arrow(targets)
    if isinstance(encoded, Ragged):
        rows, codes = np.nonzero(encoded.values.reshape(count, -1))
    else:
        rows, codes = np.arange(count), encoded
    by_class = np.argsort(codes, kind="stable")
    present, starts = np.unique(codes[by_class], return_index=True)
    for code, own in zip(present, np.split(rows[by_class], starts[1:]), strict=True):
        if len(present) > MOST_CLASSES:
            break
        word, places = re.escape(label_name(spec.labels[code]).strip()), from_numpy(own)
        pattern = f"(?:^|{NOT_IN_WORDS}){word}(?:$|{NOT_IN_WORDS})"
        for text in texts:
            matches = pc.match_substring_regex(text.take(places), pattern, ignore_case=True)
            found[own] |= np.asarray(matches)
    return found


def numbers_of(targets: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Return the targets (N,), or (N, C) bool where a row has a list of them."""
    array = pa.concat_arrays(targets.chunks) if isinstance(targets, pa.ChunkedArray) else targets
    if not pa.types.is_list(array.type):
        return np.asarray(array.to_numpy(zero_copy_only=False))
    flat = array.flatten().to_numpy(zero_copy_only=False) > 0
    return np.asarray(flat.reshape(len(array), -1)) if len(array) else np.zeros((0, 0), dtype=bool)


def _plain_labels(column: pa.ChunkedArray, errors: dict[int, str]) -> pa.Array:
    """Return the labels as one array; rows without one are `null_label` in `errors`, unless they have another error."""
    labels = column.combine_chunks()
    for row in pc.indices_nonzero(is_missing(labels)).to_pylist():
        errors.setdefault(row, "null_label")
    return labels


@dataclass(frozen=True, kw_only=True)
class TrainingRows:
    """The result of a task for some rows: M of them can be trained on."""

    rows: np.ndarray
    "(M,) int64, the positions of these rows."
    features: Features
    targets: pa.Array | None
    checks: dict[str, np.ndarray]
    "What the data checks need of these rows."
    errors: dict[int, str]
    "{position: reason} for the other rows."

    def to_table(self, count: int, schema: pa.Schema) -> pa.Table:
        """Return the columns of all `count` rows; a row with an error has no features."""
        made = {name: to_arrow(array, schema.field(name).type) for name, array in self.features.arrays.items()}
        made |= {"length": pa.array(self.features.lengths, pa.int32()), "cut": pa.array(self.features.cut, pa.int32())}
        if self.targets is not None:
            made["target"] = self.targets
        position = np.full(count, -1, dtype=np.int64)
        position[self.rows] = np.arange(len(self.rows))
        place = from_numpy(position, null=position < 0)
        taken = {name: array.take(place) for name, array in made.items()}
        for name in ("length", "cut"):
            taken[name] = pc.fill_null(taken[name], 0)
        # Parquet gives null lists of a fixed size back as lists of another size, which Arrow refuses.
        matrices = {
            name: one for name, one in self.features.arrays.items() if isinstance(one, np.ndarray) and one.ndim > 1
        }
        for name, values in {**self.checks, **matrices}.items():
            whole = np.zeros((count, *values.shape[1:]), values.dtype)
            whole[self.rows] = values
            taken[name] = to_arrow(whole, schema.field(name).type)
        taken["error"] = pa.array([self.errors.get(row) for row in range(count)], pa.string())
        return pa.table([taken[name] for name in schema.names], schema=schema)


def make_examples(
    task: Any, processor: Any, table: pa.Table, unreadable: dict[int, str], spec: TaskSpec, *, bad_rows: str
) -> TrainingRows:
    """Return the features and targets of the rows that can be trained on, and why others cannot.

    With `bad_rows="error"` nothing is made if any row has an error. Raises DataError for labels of the wrong type.
    """
    rows, inputs, wanted, errors = usable_rows(task, table, unreadable, spec, bad_rows=bad_rows)
    features, targets = task.examples(inputs, wanted, processor, spec)
    if features.errors:
        errors |= {int(rows[row]): reason for row, reason in features.errors.items()}
        good = np.setdiff1d(np.arange(len(rows)), list(features.errors))
        rows, features, inputs = rows[good], features.take(good), rows_of(inputs, good)
        targets = None if targets is None else targets.take(from_numpy(good))
    checks = row_checks(task, spec, table.take(from_numpy(rows)), inputs, targets, features)
    return TrainingRows(rows=rows, features=features, targets=targets, checks=checks, errors=errors)
