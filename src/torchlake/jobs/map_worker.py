"""The worker of `map`: it calls the user's function with batches of rows and writes the results.

    read a chunk -> batches of rows without read errors -> function -> checked -> original order, error rows null

The function sees each row once, unless its batch raises or dies; it must not depend on which rows share a batch.
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from torchlake.errors import UsageError
from torchlake.jobs.worker.isolation import run_isolated
from torchlake.jobs.worker.poison_rows import Attempt, read_chunk
from torchlake.jobs.worker.read_ahead import More, Ready, Workspace, WrittenChunk, examples_of, reading_ahead
from torchlake.outputs.parts import Part, schema_in_words
from torchlake.tables.arrays import from_numpy, from_strings
from torchlake.tables.formats.types import common_type
from torchlake.tables.keys import row_ids
from torchlake.tables.plan import Chunk
from torchlake.tables.reading import ChunkReader

BatchFunction = Callable[[pa.Table], pa.Table | pa.RecordBatch]
MakeWorker = Callable[[], BatchFunction]


@dataclass(frozen=True, kw_only=True)
class MapSettings:
    """The settings of a worker: the function, and plain values."""

    make_worker: MakeWorker
    name: str
    "The function's name, for messages."
    columns: tuple[str, ...]
    "The columns that the function reads."
    key: str | None
    schema: pa.Schema
    "The schema of its results."
    batch_rows: int
    row_timeout_s: float
    workspace: Workspace | None = None
    "Where the worker writes; set when the job starts."


@dataclass(frozen=True, kw_only=True)
class MappedChunk(WrittenChunk):
    """A worker's report about a chunk that it has mapped."""

    seconds: float = 0.0
    "Seconds in the function."


class WrongResult(UsageError):
    """The function broke its promise about the result: a mistake in the code, not in a row."""


def make_map_worker(settings: MapSettings) -> Callable[[Iterator[tuple[Chunk, str]]], Iterator[MappedChunk]]:
    """Make the user's function; the returned worker maps (chunk, part name) pairs and yields a `MappedChunk` each."""
    function = settings.make_worker()
    if not callable(function):
        raise UsageError(
            f"{settings.name} returned a {type(function).__name__}, not a function. It has to return the function that "
            "gets the batches."
        )
    reader = ChunkReader(tuple(dict.fromkeys((*([settings.key] if settings.key else []), *settings.columns))))
    workspace = settings.workspace
    assert workspace is not None, "a job has a workspace"

    def read(chunk: Chunk, attempt: Attempt) -> tuple[pa.Table, dict[int, str]]:
        table, unreadable = read_chunk(reader, chunk, attempt)
        attempt.idle()
        return table, unreadable

    def write(chunk: Chunk, name: str, attempt: Attempt, ready: tuple[pa.Table, dict[int, str]]) -> MappedChunk:
        table, unreadable = ready
        began = time.perf_counter()
        columns, errors = map_rows(function, settings, table.select(settings.columns), unreadable, attempt, chunk)
        seconds = time.perf_counter() - began
        identity = row_ids(chunk) if settings.key is None else table[settings.key]
        reasons = pa.chunked_array([from_strings([errors.get(row) for row in range(chunk.rows)])])
        output = pa.table([identity, *columns.columns, reasons], output_schema(settings, table.schema))
        return MappedChunk(
            part=workspace.parts.write(name, output, chunk=chunk.index),
            seconds=seconds,
            examples=examples_of(chunk, reasons),
        )

    def write_each(
        group: Sequence[Ready[tuple[pa.Table, dict[int, str]]]], more: More[tuple[pa.Table, dict[int, str]]]
    ) -> Generator[tuple[Ready[tuple[pa.Table, dict[int, str]]], MappedChunk], None, None]:
        return ((one, write(*one)) for one in group)

    def lost(part: Part) -> MappedChunk:
        return MappedChunk(part=part)

    return reading_ahead(workspace, settings.row_timeout_s, read=read, write=write_each, lost=lost)


def output_schema(settings: MapSettings, source: pa.Schema) -> pa.Schema:
    """Return the schema of the output: key or row id, the function's columns, `error`."""
    key = pa.field("row_id", pa.string()) if settings.key is None else source.field(settings.key)
    columns = (key, *settings.schema, pa.field("error", pa.string()))
    return pa.schema([column.remove_metadata().with_nullable(True) for column in columns])


def map_rows(
    function: BatchFunction,
    settings: MapSettings,
    table: pa.Table,
    unreadable: dict[int, str],
    attempt: Attempt,
    chunk: Chunk,
) -> tuple[pa.Table, dict[int, str]]:
    """Return the function's columns for all rows of a chunk, and {row: reason} for rows without a result.

    Raises WrongResult naming file and rows.
    """
    table, errors = table.combine_chunks(), dict(unreadable)
    rows: list[np.ndarray] = []
    made: list[pa.Table] = []

    def run(batch: np.ndarray) -> None:
        whole = int(batch[-1]) - int(batch[0]) + 1 == len(batch)
        given = table.slice(int(batch[0]), len(batch)) if whole else table.take(from_numpy(batch))
        made.append(_checked(function(given), settings, chunk, batch))
        rows.append(batch)

    alone = sorted(attempt.suspects["score"] - errors.keys())
    free = np.setdiff1d(np.arange(len(table)), np.fromiter((*alone, *errors), dtype=np.int64))
    batches = [free[first : first + settings.batch_rows] for first in range(0, len(free), settings.batch_rows)]
    for batch in [*(np.array([row]) for row in alone), *batches]:
        run_isolated(batch, run, errors, attempt, passed_on=(WrongResult,))
    attempt.idle()
    return _in_order(len(table), rows, made, settings.schema), errors


def _in_order(count: int, rows: list[np.ndarray], made: list[pa.Table], schema: pa.Schema) -> pa.Table:
    """Return the made rows at their places among `count`, with null at the other places."""
    if not made:
        return pa.table([pa.nulls(count, column.type) for column in schema], schema)
    found, order = pa.concat_tables(made), np.concatenate(rows)
    if len(order) == count and (np.diff(order) > 0).all():
        return found
    place = np.full(count, -1, dtype=np.int64)
    place[order] = np.arange(len(order))
    return found.take(from_numpy(place, null=place < 0))


def _checked(result: pa.Table | pa.RecordBatch, settings: MapSettings, chunk: Chunk, batch: np.ndarray) -> pa.Table:
    """Return the result as a table of the promised columns. Raises WrongResult."""
    where = f"{settings.name}, {chunk.file} rows {chunk.number(int(batch[0])):,} to {chunk.number(int(batch[-1])):,}"
    if isinstance(result, pa.RecordBatch):
        result = pa.Table.from_batches([result])
    if not isinstance(result, pa.Table):
        raise WrongResult(f"{where}: the function returned a {type(result).__name__}, not a pyarrow Table.")
    if len(result) != len(batch):
        raise WrongResult(
            f"{where}: the function returned {len(result):,} rows for {len(batch):,}. It has to return one row for "
            "each row, in the same order; return several values of a row as a list."
        )
    promised = settings.schema
    if sorted(result.column_names) != sorted(promised.names):
        raise WrongResult(
            f"{where}: the function returned the columns {', '.join(result.column_names) or '(none)'}, but schema has "
            f"{', '.join(promised.names)}."
        )
    arrays = []
    for field in promised:
        column = result[field.name]
        if common_type(column.type, field.type) != field.type:
            raise WrongResult(
                f"{where}: the column {field.name!r} is {column.type}, but {field.type} in schema. The schema is "
                f"{schema_in_words(promised)}: cast the column in the function, or change schema."
            )
        arrays.append(column if column.type == field.type else column.cast(field.type))
    return pa.table(arrays, promised)
