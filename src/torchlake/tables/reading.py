"""Read a chunk's rows as an Arrow table: exactly as many as planned; unreadable rows are null and listed as errors.

Parquet and Arrow files are streamed with a forward cursor: a later chunk of the same row group continues where the last
one stopped, so nothing is decoded twice, and a row group of any size takes constant memory. Page checksums are
verified. Strings are validated by column; only a column that fails is searched for its bad rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pyarrow as pa

from torchlake.errors import TableError
from torchlake.storage.versions import ContentChecker
from torchlake.tables.arrays import from_numpy, from_strings
from torchlake.tables.formats import values
from torchlake.tables.formats.bad_text import without_bad_text
from torchlake.tables.formats.columnar import (
    open_arrow,
    open_parquet,
    parquet_batches,
    record_batches,
    translate_errors,
)
from torchlake.tables.formats.layout import UTF8, storage_type
from torchlake.tables.formats.lines import BadRecord, csv_header, read_records
from torchlake.tables.formats.streams import Dialect, TextRanges
from torchlake.tables.formats.types import converted, fits
from torchlake.tables.plan import Chunk
from torchlake.tables.sources._interface import View, view_of
from torchlake.tables.table import check_columns

BATCH_ROWS = 4096
FEW_ROWS = 10_000
"Up to this many values, `from_strings` takes less time than `pyarrow.array`, which imports pandas."
BAD_UTF8 = "bad_utf8"


class ChunkReader:
    """A reader of chunks, fastest in ascending order; `columns` is a subset of the plan's columns."""

    def __init__(self, columns: Sequence[str]) -> None:
        self.columns = tuple(columns)
        self._cursor: _Cursor | None = None
        self._unchanged = ContentChecker()
        self._headers: dict[tuple[str, str], list[str]] = {}
        self._ranges = TextRanges()
        self._schemas: dict[bytes, pa.Schema] = {}

    def read(self, chunk: Chunk) -> tuple[pa.Table, dict[int, str]]:
        """Return the chunk's rows, and {row in the chunk: reason} for unreadable ones, which have null values.

        Reasons: `bad_utf8`, `bad_csv: ...`, `bad_json: ...`. Raises FingerprintError when the file has changed since
        planning, checked before and after; TableError naming file and rows when it is damaged.
        """
        self._unchanged.check(chunk.file, chunk.version, chunk.sha256)
        try:
            return self._read(chunk)
        except TableError:
            self._unchanged.check(chunk.file, chunk.version, chunk.sha256)  # if the file changed, say that instead
            raise

    def _read(self, chunk: Chunk) -> tuple[pa.Table, dict[int, str]]:
        schema, view = self._schema(chunk), view_of(chunk.view)
        stored = pa.schema([field for field in schema if field.name not in view.constants]) if chunk.view else schema
        if chunk.format == "csv":
            table, errors = self._read_csv(chunk, stored, Dialect(**view.csv))
        elif chunk.format == "jsonl":
            table, errors = _read_json(chunk, stored, self._ranges)
        else:
            with translate_errors(chunk.file, f": {chunk.where}"):
                table, errors = isolate_bad_text(self._read_binary(chunk, stored, view.names))
        _check_rows(chunk, table.num_rows, chunk.rows)
        self._unchanged.check(chunk.file, chunk.version, chunk.sha256)
        return _with_constants(table, schema, view, chunk.rows), dict(sorted(errors.items()))

    def close(self) -> None:
        """Close the open files."""
        self._ranges.close()
        if self._cursor is not None:
            self._cursor.close()
        self._cursor = None

    def _schema(self, chunk: Chunk) -> pa.Schema:
        if chunk.schema not in self._schemas:
            planned = pa.ipc.read_schema(pa.py_buffer(chunk.schema))
            self._schemas[chunk.schema] = pa.schema([planned.field(name) for name in self.columns])
        return self._schemas[chunk.schema]

    def _read_csv(self, chunk: Chunk, schema: pa.Schema, dialect: Dialect) -> tuple[pa.Table, dict[int, str]]:
        if (chunk.file, chunk.view) not in self._headers:
            self._headers = {(chunk.file, chunk.view): csv_header(chunk.file, dialect)}
        header = self._headers[chunk.file, chunk.view]
        check_columns(chunk.file, schema.names, pa.schema([pa.field(name, pa.string()) for name in header]))
        places = [header.index(name) for name in schema.names]
        found = read_records(self._ranges, chunk.file, chunk.format, dialect, chunk.offset, chunk.bytes, len(header))
        records = _kept_records(chunk, found)
        errors = _bad_records(chunk, records)
        columns = [
            _text_column([None if row in errors else record[place] for row, record in enumerate(records)])
            for place in places
        ]
        for _, bad in columns:
            errors.update(dict.fromkeys(bad, BAD_UTF8))
        arrays = [array.cast(field.type) for (array, _), field in zip(columns, schema, strict=True)]
        return pa.table(arrays, schema=schema) if arrays else _no_columns(len(records)), errors

    def _read_binary(self, chunk: Chunk, schema: pa.Schema, renamed: Mapping[str, str]) -> pa.Table:
        names = [renamed.get(field.name, field.name) for field in schema]
        try:
            with translate_errors(chunk.file, f": {chunk.where}"):
                if self._cursor is None or not self._cursor.reaches(chunk):
                    self.close()
                    self._cursor = _Cursor(chunk, names)
                batches = self._cursor.take(chunk)
        except TableError:
            self.close()
            raise
        table = pa.Table.from_batches(batches) if batches else schema.empty_table()
        _check_rows(chunk, table.num_rows, chunk.span)
        arrays = [_as_planned(chunk.file, table[name], field) for name, field in zip(names, schema, strict=True)]
        if not arrays:
            return _no_columns(chunk.rows)
        # Rows are taken from the planned types: Arrow cannot take them from the views in which a file may have strings.
        table = pa.table(arrays, schema=schema)
        return table.take(from_numpy(np.flatnonzero(chunk.kept))) if chunk.skipped else table


class _Cursor:
    """An open file that is read forward, through one range of row groups or record batches."""

    def __init__(self, chunk: Chunk, columns: Sequence[str]) -> None:
        self.file, self.row_groups = chunk.file, chunk.row_groups
        self.row = chunk.groups_row
        self.left: pa.RecordBatch | None = None
        self._open = ExitStack()
        first, count = chunk.row_groups
        try:
            if chunk.format == "parquet":
                self._open_parquet(first, count, columns)
            else:
                self._open_arrow(first, count, columns)
        except BaseException:
            self._open.close()
            raise

    def reaches(self, chunk: Chunk) -> bool:
        return (chunk.file, chunk.row_groups) == (self.file, self.row_groups) and self.row <= chunk.first_row

    def take(self, chunk: Chunk) -> list[pa.RecordBatch]:
        """Return the rows of the chunk's range, fewer if the file ends; skip the rows before it."""
        stop, taken = chunk.first_row + chunk.span, []
        while self.row < stop:
            batch = self.left if self.left is not None else next(self.batches, None)
            self.left = None
            if batch is None:
                break
            begin = max(0, chunk.first_row - self.row)
            end = min(batch.num_rows, stop - self.row)
            if begin < end:
                taken.append(batch.slice(begin, end - begin))
            if end < batch.num_rows:
                self.left = batch.slice(end)
            self.row += end
        return taken

    def close(self) -> None:
        self._open.close()

    def _open_parquet(self, first: int, count: int, columns: Sequence[str]) -> None:
        parquet = self._open.enter_context(open_parquet(self.file))
        groups = range(first, min(first + count, parquet.metadata.num_row_groups))
        check_columns(self.file, columns, parquet.schema_arrow)
        self.batches: Iterator[pa.RecordBatch] = (
            parquet_batches(self.file, parquet, groups, columns, BATCH_ROWS) if groups else iter(())
        )

    def _open_arrow(self, first: int, count: int, columns: Sequence[str]) -> None:
        reader = self._open.enter_context(open_arrow(self.file, columns))
        check_columns(self.file, columns, reader.schema)
        self.batches = (batch.select(list(columns)) for batch in record_batches(reader, first, count))


def _text_column(texts: list[str | None]) -> tuple[pa.Array, list[int]]:
    """Return a string array with null in the rows that are not UTF-8, and these rows."""
    try:
        return from_strings(texts) if len(texts) <= FEW_ROWS else pa.array(texts, pa.string()), []
    except UnicodeEncodeError:
        fitted, errors = _fit_column(texts, pa.string())
        return pa.array(fitted, pa.string()), list(errors)


def _fit_column(items: list[Any], kind: pa.DataType) -> tuple[list[Any], dict[int, str]]:
    """Return every value converted by `strict_cast`, None where that fails, and {row: reason} for these."""
    fitted, errors = [], {}
    for row, item in enumerate(items):
        try:
            fitted.append(values.strict_cast(item, kind))
        except UnicodeEncodeError:
            fitted.append(None)
            errors[row] = BAD_UTF8
        except (ValueError, RecursionError) as error:
            fitted.append(None)
            errors[row] = str(error)
    return fitted, errors


def _bad_records(chunk: Chunk, records: Sequence[Any]) -> dict[int, str]:
    """Return {row: reason} for malformed records; the reason includes the place, because such a row has no key."""
    return {row: record + _where(chunk, row) for row, record in enumerate(records) if isinstance(record, BadRecord)}


def _where(chunk: Chunk, row: int) -> str:
    return f" (row {chunk.number(row):,} of {chunk.name})"


def _kept_records(chunk: Chunk, records: Iterator[Any]) -> list[Any]:
    """Return the records of the chunk's range, without those that are skipped."""
    found = list(records)
    _check_rows(chunk, len(found), chunk.span)
    return [found[row] for row in np.flatnonzero(chunk.kept)] if chunk.skipped else found


def _check_rows(chunk: Chunk, rows: int, planned: int) -> None:
    if rows != planned:
        raise TableError(
            f"{chunk.file}: {planned:,} rows were planned from row {chunk.first_row:,} on, but there are {rows:,} now: "
            "the file has changed. Run the same command again."
        )


def _read_json(chunk: Chunk, schema: pa.Schema, ranges: TextRanges) -> tuple[pa.Table, dict[int, str]]:
    records = _kept_records(chunk, read_records(ranges, chunk.file, chunk.format, UTF8, chunk.offset, chunk.bytes))
    errors = _bad_records(chunk, records)
    arrays = []
    for field in schema:
        items = [None if row in errors else record.get(field.name) for row, record in enumerate(records)]
        fitted, bad = _fit_column(items, field.type)
        arrays.append(pa.array(fitted, field.type))
        for row, reason in bad.items():
            if reason != BAD_UTF8:
                reason = f"bad_json: column {field.name!r}: {reason}{_where(chunk, row)}"
            errors.setdefault(row, reason)
    return pa.table(arrays, schema=schema) if arrays else _no_columns(len(records)), errors


def _with_constants(table: pa.Table, schema: pa.Schema, view: View, rows: int) -> pa.Table:
    """Return the table with the columns that have the same value in all rows of the file."""
    if not view.constants:
        return table
    arrays = {name: table[name] for name in table.column_names}
    for name in schema.names:
        if name in view.constants:
            value, kind = view.constants[name], schema.field(name).type
            constant = pa.nulls(rows, kind) if value is None else from_strings([value])[0].cast(kind)
            arrays[name] = constant if value is None else pa.repeat(constant, rows)
    return pa.table([arrays[name] for name in schema.names], schema=schema)


def _as_list(array: pa.FixedSizeListArray) -> pa.ListArray:
    """Convert to lists, because Arrow's cast and `flatten` lose values in slices and next to nulls."""
    size, valid = array.type.list_size, array.is_valid().to_numpy(zero_copy_only=False)
    places = (np.flatnonzero(valid)[:, None] + array.offset) * size + np.arange(size)
    offsets = pa.array(np.concatenate([[0], np.cumsum(valid * size)]), pa.int32())
    values = array.values.take(pa.array(places.ravel()))
    return pa.ListArray.from_arrays(offsets, values, type=storage_type(array.type), mask=pa.array(~valid))


def _as_planned(file: str, column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
    """Return the column in the planned type: encodings undone, an all-null column cast. Values never change."""
    if isinstance(column.type, pa.BaseExtensionType):
        column = pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
    if pa.types.is_fixed_size_list(column.type):
        column = pa.chunked_array([_as_list(chunk) for chunk in column.chunks], storage_type(column.type))
    if column.type == field.type:
        return column
    if not fits(column.type, field.type):
        raise TableError(
            f"{file}: the column {field.name!r} is {column.type} now, but was {field.type} when the job was planned."
        )
    with translate_errors(file, f": the column {field.name!r}"):
        return converted(column, field.type)


def isolate_bad_text(table: pa.Table) -> tuple[pa.Table, dict[int, str]]:
    """Return the table with null for values that are not UTF-8, and {row: reason} for these."""
    errors: dict[int, str] = {}
    for place, field in enumerate(table.schema):
        if pa.types.is_primitive(field.type) or pa.types.is_null(field.type):
            continue
        sound, start, changed = [], 0, False
        for array in table.column(place).chunks:
            readable, bad = without_bad_text(array)
            changed |= readable is not array
            errors.update({start + row: BAD_UTF8 for row in bad})
            start += len(array)
            sound.append(readable)
        if changed:
            table = table.set_column(place, field, pa.chunked_array(sound, field.type))
    return table, errors


def _no_columns(rows: int) -> pa.Table:
    """Return a table without columns, but with a number of rows."""
    return pa.table({"": pa.nulls(rows)}).select([])
