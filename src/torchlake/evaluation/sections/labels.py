"""The labels of rows: read before anything is scored, so that one that the model does not know ends the job."""

import json
from collections.abc import Sequence
from contextlib import closing
from functools import partial

import numpy as np
import pyarrow as pa

from torchlake import plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.data.features import as_matrix, from_arrow
from torchlake.errors import DataError
from torchlake.preparation.row_checks import input_hashes
from torchlake.scoring.options.table import COLUMN
from torchlake.storage.spread import Spread
from torchlake.tables.arrays import string_column
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.hashes import combined
from torchlake.tables.keys import ITEM_ROWS, READ_BYTES, bundled
from torchlake.tables.plan import Chunk
from torchlake.tables.reading import ChunkReader
from torchlake.tables.table import Table
from torchlake.tasks._chat import NAMES, without_fillers
from torchlake.tasks._null_rows import columns_in


def labels_of(source: Table, spec: TaskSpec, spread: Spread, *, hashed: bool = False) -> pa.Table:
    """Return the `label` of all rows, in the table's order, why it is `unreadable`, and if asked for the `hash` of the
    inputs. Raises DataError for unknown labels."""
    columns = spec.columns if hashed else (spec.label or "",)
    plan = plan_chunks(source, columns=columns, hashed=False, spread=spread)
    bundles = bundled(plan.chunks, [chunk.rows for chunk in plan.chunks], ITEM_ROWS)
    read = plugins.carried(spec.task, partial(_labels, spec, columns))
    parts = spread(read, bundles, size=plan.rows * READ_BYTES, name="read the labels")
    with closing(parts):
        found = list(parts)
    if not found:
        raise DataError("the table has no rows to evaluate on")
    return pa.concat_tables(found)


def _labels(spec: TaskSpec, columns: Sequence[str], chunks: Sequence[Chunk]) -> pa.Table:
    assert spec.label is not None, "a task without labels is measured on its texts"
    reader, pieces, task = ChunkReader(tuple(columns)), [], plugins.load("tasks", spec.task)
    try:
        for chunk in chunks:
            rows, unreadable = reader.read(chunk)
            labels = rows[spec.label].combine_chunks()
            try:
                encoded_labels(labels, spec)
            except DataError as error:
                raise DataError(f"{chunk.file}, {chunk.where}: {error}") from error
            reasons = [unreadable.get(row) for row in range(len(labels))] if unreadable else [None] * len(labels)
            found = {"label": labels, "unreadable": pa.array(reasons, pa.string())}
            if len(columns) > 1:
                found["hash"] = pa.array(combined(np.column_stack([*input_hashes(task, spec, rows)])))
            pieces.append(pa.table(found))
    finally:
        reader.close()
    return pa.concat_tables(pieces)


def encoded_labels(labels: pa.Array, spec: TaskSpec) -> pa.Array:
    """Return labels as the task encodes them, and of a task that writes as texts: structs and lists as JSON.

    Raises DataError for labels that the model does not know.
    """
    task = plugins.load("tasks", spec.task)
    if not task.generates:
        encoded: pa.Array = task.encode_labels(labels, spec)
        return encoded
    if not pa.types.is_nested(labels.type):
        return string_column(pa.chunked_array([labels])).cast(pa.large_string())
    values = (without_fillers(each) for each in labels.to_pylist())
    return pa.array([None if each is None else json.dumps(each, default=str) for each in values], pa.large_string())


def targets_of(labels: pa.Array, spec: TaskSpec) -> np.ndarray:
    encoded = plugins.load("tasks", spec.task).encode_labels(labels, spec)
    return np.asarray(as_matrix(from_arrow(encoded))) if len(labels) else np.zeros(0, dtype=np.int64)


def prompt_columns(spec: TaskSpec, prompt: str | None, schema: pa.Schema) -> tuple[str, ...]:
    """Return the columns of the prompts of a model that writes: those named, or the one that is found by its name."""
    if prompt is not None:
        return columns_in(prompt)
    named = [name for name in spec.input_columns if name in schema.names and name != spec.label]
    return tuple(named or [name for name in (COLUMN, *NAMES) if name in schema.names][:1])
