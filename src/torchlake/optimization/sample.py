"""Draws the rows that `optimize` measures on: few, with the proportions of the table.

    chunks spread evenly over the table  ->  rows in the order of label, then length  ->  every k-th of them

Every k-th row of that order keeps the table's proportions: the share of each label to within a row, and within a label
the lengths from the shortest to the longest. Nothing is random, so the same table gives the same sample.

Calibration and measurement use different rows: a runtime fits its activation ranges to its calibration rows, so it
would agree better on those than on new ones. Rows that lack an input (or, if the table has labels, a label) are used
for neither. Cost: at most 32,768 rows in memory, and reading the footers (Parquet, Arrow) or the whole table once (CSV,
JSON lines).
"""

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchlake import plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.errors import DataError
from torchlake.outputs.staging.spool import spooled
from torchlake.tables.chunks import evenly_spaced, first_rows, sample_rows
from torchlake.tables.reading import isolate_bad_text
from torchlake.tables.sources._find import pinned
from torchlake.tables.sources._options import ReadOptions
from torchlake.tables.sources.frames import is_frame, to_arrow
from torchlake.tables.table import missing_column, open_table
from torchlake.tasks._inputs import NUMBER, Inputs, check_columns
from torchlake.tasks._null_rows import read_inputs

log = logging.getLogger(__name__)

POOL_ROWS, FIRST_ROWS = 32_768, 1000
CALIBRATION_ROWS = 200
DECILES = np.linspace(0.1, 0.9, 9)

ColumnsOf = Callable[[pa.Schema, str, Callable[[str], pa.Table]], Sequence[str]]
"From the schema, the table's name and a function that reads the first rows of a column, to the columns to read."


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Rows to measure on, and others to calibrate with."""

    rows: pa.Table
    "N rows of the input columns, none of them lacking an input; sorted by label, then length of the texts."
    targets: np.ndarray | None
    "The labels of these rows, encoded by the task: (N,), or (N, C) for several labels per row. None: no labels."
    calibration: pa.Table
    "M other rows: at most 200 and a fifth of the rows that were read. Empty for a table of one row."


def draw_sample(
    table: Any, spec: TaskSpec, *, label: str | None, rows: int, options: ReadOptions = ReadOptions()
) -> Sample:
    """Draw at most `rows` rows of a table (of those that `options` ask for), frame or stream.

    `spec` names the input columns, `label` the label column. Without `label`, `spec.label` is used if the table has
    that column and the model knows its labels. Raises TableError for a column that is missing or cannot be that input,
    DataError for labels that the model does not know and for a table that has no row with all inputs.
    """
    task = plugins.load("tasks", spec.task)
    column = label or spec.label
    columns = spec.input_columns
    pool, unreadable = _read(table, lambda schema, where, _: _checked(schema, spec, column, where), options, columns)
    targets = None
    if column is not None and column in pool.column_names:
        try:
            targets = task.encode_labels(pool[column], replace(spec, label=column))
        except DataError as error:
            if label is not None:
                raise
            log.warning("The sample's labels are not used: %s", error)
    elif label is not None:
        raise missing_column("the sample", label, pool.schema)
    inputs, errors = read_inputs(pool, task.inputs, spec, unreadable)
    usable = ~np.isin(np.arange(len(pool)), list(errors))
    if targets is not None and targets.null_count == len(targets):
        targets = None
    if targets is not None:
        usable &= np.asarray(targets.is_valid())
    if not usable.any():
        labeled = "" if targets is None else f" and a label in {column!r}"
        named = ", ".join(map(repr, spec.input_columns))
        raise DataError(f"The sample has no row with a value in {named}{labeled}.")
    keep = pa.array(usable)
    kept, lengths = pool.select(list(spec.input_columns)).filter(keep), _lengths(inputs, task.inputs)[usable]
    numbers = None if targets is None else _numbers(targets.filter(keep), spec)
    order = np.lexsort((lengths, _strata(numbers, len(kept))))
    held_out = min(CALIBRATION_ROWS, max(len(order) // 5, int(len(order) > 1)))
    places = evenly_spaced(len(order), min(rows, len(order) - held_out))
    others = np.delete(order, places)
    return Sample(
        rows=kept.take(pa.array(order[places])),
        targets=None if numbers is None else numbers[order[places]],
        calibration=kept.take(pa.array(others[evenly_spaced(len(others), held_out)])),
    )


def draw_prompts(table: Any, columns_of: ColumnsOf, *, rows: int, options: ReadOptions) -> pa.Table:
    """Draw at most `rows` prompts, spread over a table, frame or stream, in its order.

    `columns_of` raises the errors of `draw_sample`.
    """
    found, _ = _read(table, columns_of, options)
    if not len(found):
        raise DataError("The sample has no rows.")
    return found.take(pa.array(evenly_spaced(len(found), min(rows, len(found)))))


def _read(
    table: Any, columns_of: ColumnsOf, options: ReadOptions, needed: Sequence[str] = ()
) -> tuple[pa.Table, dict[int, str]]:
    """Return rows spread over a table, frame or stream, and the reasons of unreadable ones.

    With `needed`, files may differ in columns that are neither needed nor read.
    """
    if is_frame(table):
        whole = to_arrow(table)
        columns = columns_of(whole.schema, "the frame", lambda column: whole.select([column]).slice(0, FIRST_ROWS))
        places = evenly_spaced(len(whole), min(len(whole), POOL_ROWS))
        return isolate_bad_text(whole.select(list(columns)).take(pa.array(places)))
    with (
        tempfile.TemporaryDirectory(prefix="torchlake-sample-", ignore_cleanup_errors=True) as scratch,
        spooled(table, Path(scratch, "sample")) as stored,
    ):
        source = pinned(stored)
        opened = open_table(source, columns=needed, options=options)
        columns = tuple(columns_of(opened.schema, opened.source, lambda column: first_rows(opened, [column])))
        if needed and not set(columns) <= set(needed):  # the files' other columns were not compared
            opened = open_table(source, columns=columns, options=options)
        found, unreadable, plan = sample_rows(opened, columns)
        if not plan.chunks:
            raise DataError(f"{opened.source}: has no rows")
        return found, unreadable


def _checked(schema: pa.Schema, spec: TaskSpec, label: str | None, where: str) -> tuple[str, ...]:
    """Return the columns to read: the inputs, and the label if the table has it. Raises TableError."""
    check_columns(schema, plugins.load("tasks", spec.task).inputs, spec, where)
    labeled = label is not None and label in schema.names
    return tuple(dict.fromkeys((*spec.input_columns, *([label] if labeled and label is not None else []))))


def _lengths(inputs: Inputs, kinds: Mapping[str, str]) -> np.ndarray:
    """Return the number of characters of each row's texts, (N,)."""
    texts = [each for name, each in inputs.items() if kinds[name] != NUMBER and pa.types.is_large_string(each.type)]
    found: np.ndarray = sum(pc.utf8_length(each).to_numpy(zero_copy_only=False) for each in texts)
    return found if texts else np.zeros(len(next(iter(inputs.values()))), dtype=np.int64)


def _numbers(targets: pa.Array, spec: TaskSpec) -> np.ndarray:
    """Return encoded labels as numpy: (N,), or (N, C) for several labels per row."""
    if spec.problem == "multi_label":
        flat = targets.flatten().to_numpy(zero_copy_only=False)
        return np.asarray(flat).reshape(len(targets), len(spec.labels))
    return np.asarray(targets.to_numpy(zero_copy_only=False))


def _strata(targets: np.ndarray | None, rows: int) -> np.ndarray:
    """Return the group of each row, (N,): its class, its set of classes, or its decile of the targets."""
    if targets is None:
        return np.zeros(rows, dtype=np.int64)
    if targets.ndim == 2:
        return np.unique(targets, axis=0, return_inverse=True)[1].reshape(-1)
    if targets.dtype.kind == "f":
        return np.searchsorted(np.quantile(targets, DECILES), targets)
    return targets
