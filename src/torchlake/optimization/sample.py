"""Draws the rows that `optimize` measures on: few, with the proportions of the table.

    chunks spread evenly over the table  ->  rows in the order of label, then length  ->  every k-th of them

Every k-th row of that order keeps the table's proportions: the share of each label to within a row, and within a label
the lengths from the shortest to the longest. Nothing is random, so the same table gives the same sample.

Calibration uses other rows than the measurement: a runtime fits its activation ranges to its calibration rows, so it
would agree better on those than on new ones. Rows without a text (or, if the table has labels, without a label) are
used for neither. Cost: at most 32,768 rows in memory, and reading the footers (Parquet, Arrow) or the whole table once
(CSV, JSON lines).
"""

import logging
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchlake import plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.errors import DataError
from torchlake.scoring.rows import check_text
from torchlake.tables.arrays import is_blank, string_column
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.output.spool import spooled
from torchlake.tables.plan import Chunk
from torchlake.tables.reading import ChunkReader, isolate_bad_text
from torchlake.tables.sampling import evenly_spaced
from torchlake.tables.sources._find import pinned
from torchlake.tables.sources._options import ReadOptions
from torchlake.tables.sources.frames import is_frame, to_arrow
from torchlake.tables.table import missing_column, open_table

log = logging.getLogger(__name__)

POOL_ROWS = 32_768
CHUNK_ROWS = 1_024
CALIBRATION_ROWS = 200
DECILES = np.linspace(0.1, 0.9, 9)
GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Rows to measure on, and others to calibrate with."""

    texts: pa.Array
    "(N,) strings, none of them null or blank; sorted by label, then length."
    targets: np.ndarray | None
    "The labels of these rows, encoded by the task: (N,), or (N, C) for several labels per row. None: no labels."
    calibration: pa.Array
    "(M,) strings of other rows: at most 200 and a fifth of the rows that were read. Empty for a table of one row."


def draw_sample(
    table: Any, spec: TaskSpec, *, label: str | None, rows: int, options: ReadOptions = ReadOptions()
) -> Sample:
    """Draw at most `rows` rows of a table (of those that `options` ask for), frame or stream.

    `spec.text` names the text column, `label` the label column.

    Without `label`, `spec.label` is used if the table has that column and the model knows its labels.
    Raises TableError for a column that is missing, DataError for labels that the model does not know and for a table
    that has no row with a text.
    """
    task = plugins.load("tasks", spec.task)
    column = label or spec.label
    assert column is not None, "optimize refuses tasks without labels"
    assert isinstance(spec.text, str), "optimize refuses several columns"
    if is_frame(table):
        pool, readable = _frame_pool(table, spec.text, column)
    else:
        with (
            tempfile.TemporaryDirectory(prefix="torchlake-sample-", ignore_cleanup_errors=True) as scratch,
            spooled(table, Path(scratch, "sample")) as stored,
        ):
            pool, readable = _pool(stored, spec.text, column, options)
    targets = None
    if column in pool.column_names:
        try:
            targets = task.encode_labels(pool[column], replace(spec, label=column))
        except DataError as error:
            if label is not None:
                raise
            log.warning("The sample's labels are not used: %s", error)
    elif label is not None:
        raise missing_column("the sample", label, pool.schema)
    texts = string_column(pool[spec.text])
    usable = readable & ~np.asarray(is_blank(texts))
    if targets is not None and targets.null_count == len(targets):
        targets = None
    if targets is not None:
        usable &= np.asarray(targets.is_valid())
    if not usable.any():
        labeled = "" if targets is None else f" and a label in {column!r}"
        raise DataError(f"The sample has no row with a text in {spec.text!r}{labeled}.")
    keep = pa.array(usable)
    texts, numbers = texts.filter(keep), None if targets is None else _numbers(targets.filter(keep), spec)
    lengths = pc.utf8_length(texts).to_numpy(zero_copy_only=False)
    order = np.lexsort((lengths, _strata(numbers, len(texts))))
    held_out = min(CALIBRATION_ROWS, max(len(order) // 5, int(len(order) > 1)))
    places = evenly_spaced(len(order), min(rows, len(order) - held_out))
    others = np.delete(order, places)
    return Sample(
        texts=texts.take(pa.array(order[places])),
        targets=None if numbers is None else numbers[order[places]],
        calibration=texts.take(pa.array(others[evenly_spaced(len(others), held_out)])),
    )


def _pool(source: Any, text: str, label: str, options: ReadOptions) -> tuple[pa.Table, np.ndarray]:
    """Read about `POOL_ROWS` rows of a table, from chunks spread over it. Returns them and which are readable."""
    source = pinned(source)
    table = open_table(source, columns=(text,), options=options)
    check_text(table.schema, text, table.source)
    columns = (text, label) if label in table.schema.names and label != text else (text,)
    if len(columns) > 1:
        table = open_table(source, columns=columns, options=options)
    chunks = plan_chunks(table, columns=columns, chunk_rows=CHUNK_ROWS, hashed=False).chunks
    reader = ChunkReader(columns)
    pieces, readable = [], []
    for chunk in _spread(chunks):
        rows, unreadable = reader.read(chunk)
        pieces.append(rows)
        readable.append(~np.isin(np.arange(chunk.rows), list(unreadable)))
    reader.close()
    if not pieces:
        raise DataError(f"{table.source}: has no rows")
    return pa.concat_tables(pieces), np.concatenate(readable)


def _frame_pool(frame: Any, text: str, label: str) -> tuple[pa.Table, np.ndarray]:
    """Take every k-th row of a frame. Returns the rows and which of them are readable."""
    table = to_arrow(frame)
    check_text(table.schema, text, "the frame")
    columns = [text, label] if label in table.column_names and label != text else [text]
    pool = table.select(columns).take(pa.array(evenly_spaced(len(table), min(len(table), POOL_ROWS))))
    pool, unreadable = isolate_bad_text(pool)
    return pool, ~np.isin(np.arange(len(pool)), list(unreadable))


def _spread(chunks: tuple[Chunk, ...]) -> list[Chunk]:
    """Select chunks with `POOL_ROWS` rows in total (or all), spread evenly over the table, in its order."""
    # Multiples of the golden ratio, modulo 1, leave no large gap at any number of them.
    places = np.argsort((np.arange(len(chunks)) * GOLDEN) % 1, kind="stable") if len(chunks) else np.arange(0)
    rows = np.cumsum([chunks[place].rows for place in places])
    return [chunks[place] for place in sorted(places[: int(np.searchsorted(rows, POOL_ROWS)) + 1])]


def _numbers(targets: pa.Array, spec: TaskSpec) -> np.ndarray:
    """Return encoded labels as numpy: (N,), or (N, C) for several labels per row."""
    if spec.problem == "multi_label":
        flat = targets.flatten().to_numpy(zero_copy_only=False)
        return np.asarray(flat).reshape(len(targets), len(spec.labels))
    return np.asarray(targets.to_numpy(zero_copy_only=False))


def _strata(targets: np.ndarray | None, rows: int) -> np.ndarray:
    """Return (N,) the group of each row: its class, its set of classes, or its decile of the targets."""
    if targets is None:
        return np.zeros(rows, dtype=np.int64)
    if targets.ndim == 2:
        return np.unique(targets, axis=0, return_inverse=True)[1].reshape(-1)
    if targets.dtype.kind == "f":
        return np.searchsorted(np.quantile(targets, DECILES), targets)
    return targets
