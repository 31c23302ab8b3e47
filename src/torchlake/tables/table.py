"""A table: rows in files of one format, with one schema, from one or several sources.

Opening a table reads only footers and headers, and raises at once for faults that would fail a job hours later: a
truncated file, a column that is missing or has another type in one file, a Delta table read as loose Parquet files.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from itertools import groupby, islice
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from torchlake.errors import DataError, TableError, Unavailable
from torchlake.storage.spread import Spread, each_file, in_process
from torchlake.storage.urls import is_url
from torchlake.storage.versions import Version, settled_version_of
from torchlake.tables.formats.columnar import Footer
from torchlake.tables.formats.layout import EXTENSIONS, format_of, schema_of
from torchlake.tables.formats.sniffing import delimiter_hint
from torchlake.tables.formats.streams import Dialect
from torchlake.tables.formats.types import common_type
from torchlake.tables.record import output_parts
from torchlake.tables.selection.binding import bind
from torchlake.tables.selection.conditions import Condition, columns_of
from torchlake.tables.selection.grammar import parse
from torchlake.tables.sources._columns import as_in_table, check_widened
from torchlake.tables.sources._file_pruning import UNREAD, possible_files
from torchlake.tables.sources._find import source_of, with_own_names
from torchlake.tables.sources._interface import SourceFile, SourceTable, View
from torchlake.tables.sources._options import ReadOptions
from torchlake.tables.sources.files import StoredTable, describe, joined, local_path, open_each, open_source


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows in storage, in the order of `files`."""

    source: str
    "As the user wrote it."
    files: tuple[str, ...]
    "Absolute paths or URLs: those of each input in the given order, sorted by name."
    names: tuple[str, ...]
    "Each file's path relative to the given folder; used in row ids."
    format: str
    "parquet, csv, jsonl or arrow."
    schema: pa.Schema
    'CSV columns are strings ("007" stays "007"); types of JSON lines come from all lines of the requested columns.'
    quarantined: tuple[tuple[str, str], ...] = ()
    "Files left out, and why."
    footers: Mapping[str, Footer] = field(default_factory=dict, repr=False)
    "Footers of Parquet files, by path."
    views: Mapping[str, View] = field(default_factory=dict, repr=False)
    "Views of the files whose columns differ from the table's, by path."
    deleted: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    "Bitmaps of deleted rows, by path."
    sources: tuple[Mapping[str, Any], ...] = ()
    "Identity of each table with versions."
    options: ReadOptions = field(default_factory=ReadOptions)
    condition: Condition | None = None
    "The condition of the options, with the types of the columns."
    left_out: Mapping[str, int] = field(default_factory=dict)
    "Number of rows in files that the condition rules out, by reason, as counted by the table's log."
    unread_files: int = 0
    "Number of ruled-out files whose rows are not counted."


def open_table(
    source: StoredTable,
    *,
    columns: Sequence[str] = (),
    on_bad_file: Literal["error", "quarantine"] = "error",
    options: ReadOptions | None = None,
    spread: Spread = in_process,
) -> Table:
    """Open a file, folder, glob, fsspec URL, or a list of them as a table.

    Checks every file's footer or header: `columns` must exist and have one type in all files (without `columns`, all
    columns of the first file). `on_bad_file="quarantine"` leaves out files that fail, and lists them. Files without any
    requested row are not opened, if the table's log or the names of folders show that. `spread` reads JSON lines.

    Raises TableError naming file, column and types, or the nearest name of a missing column; UnsafeError when loading a
    file would have to run code.
    """
    bad: list[tuple[str, str]] = []
    options = options or ReadOptions()
    where = options.selection.where
    asked = None if where is None else parse(where)
    bounded = () if asked is None else columns_of(asked)
    found = [possible_files(table, asked, where or "") for table in _open_sources(source)]
    sources = [table for table, _ in found]
    unread = sum((counts for _, counts in found), Counter())
    columns = tuple(dict.fromkeys((*columns, *bounded))) if columns else ()

    def leave_out(path: SourceFile, error: DataError) -> None:
        if on_bad_file == "error" or isinstance(error, Unavailable):
            raise error
        bad.append((path.file, str(error)))

    readable: list[_File] = []
    for table in sources:
        inspect = partial(_inspect, columns=columns, bounded=bounded, source=table, dialect=options.csv)
        for path, result in zip(table.files, _inspected(inspect, table.files, spread), strict=True):
            if isinstance(result, DataError):
                leave_out(path, result)
            else:
                readable.append(result)
    given = next((table.schema for table in sources if table.schema is not None), None)
    schema = readable[0].schema if readable else given
    names = list(columns) or (schema.names if schema is not None else [])
    common = _majority_types(readable, names) if on_bad_file == "quarantine" else {}
    files: list[_File] = []
    for one in readable:
        try:
            _check_types(one, names, common)
            files.append(one)
        except TableError as error:
            leave_out(one.path, error)
    if schema is None or (bad and not files):
        raise TableError(f"{describe(source)}: every file is bad; the first: {bad[0][1]}")
    check_columns(describe(source), names, schema)
    formats = {one.format: one.path.file for one in files}
    if len(formats) > 1:
        listed = ", ".join(f"{format} ({file})" for format, file in formats.items())
        raise TableError(f"{describe(source)}: files of several formats: {listed}. Give the files of one format.")
    format = files[0].format if files else "parquet"
    schema = pa.schema([pa.field(field.name, common.get(field.name, (field.type,))[0]) for field in schema])
    return Table(
        source=describe(source),
        files=tuple(one.path.file for one in files),
        names=tuple(one.path.name for one in files),
        format=format,
        schema=schema,
        quarantined=tuple(bad),
        footers={one.path.file: one.footer for one in files if one.footer is not None},
        views={one.path.file: one.path.view for one in files if one.path.view != View()},
        deleted={one.path.file: one.path.deleted for one in files if one.path.deleted},
        sources=tuple(table.identity for table in sources if table.identity),
        options=options,
        condition=None if asked is None else bind(asked, schema, where or "", untyped=format == "csv"),
        left_out={reason: rows for reason, rows in unread.items() if reason != UNREAD},
        unread_files=unread[UNREAD],
    )


def missing_column(file: str, name: str, schema: pa.Schema) -> TableError:
    """Return the error for a missing column, with the nearest name and all names."""
    close = get_close_matches(name, schema.names, n=1, cutoff=0.5)
    hint = delimiter_hint(schema.names, name) or (f" Did you mean {close[0]!r}?" if close else "")
    return TableError(f"{file}: there is no column {name!r}.{hint} It has: {', '.join(schema.names) or 'no columns'}.")


def check_columns(file: str, columns: Sequence[str], schema: pa.Schema) -> None:
    """Raise TableError if one of `columns` is missing in `schema`."""
    for name in columns:
        if name not in schema.names:
            raise missing_column(file, name, schema)


class _File(NamedTuple):
    path: SourceFile
    format: str
    schema: pa.Schema
    footer: Footer | None


def _open_sources(source: StoredTable) -> list[SourceTable]:
    """Return the tables of `source` in the given order: adjacent loose files as one, each other table by its source."""
    if isinstance(source, str | os.PathLike):
        return [_open_alone(source) or open_source(source)]
    found: Any = source  # what is not a table is named below
    inputs = found if isinstance(found, Iterable) and not isinstance(found, bytes) else [found]
    given = [(one, _open_alone(one, in_list=True)) for one in inputs]
    loose = [one for one, table in given if table is None]
    opened = iter(open_each(loose) if loose or not given else ())
    tables: list[SourceTable] = []
    for is_loose, several in groupby(given, key=lambda one: one[1] is None):
        if is_loose:
            tables.append(joined(islice(opened, sum(1 for _ in several))))
        else:
            tables += [table for _, table in several if table is not None]
    return with_own_names(tables) if len(tables) > 1 else tables


def _open_alone(source: Any, *, in_list: bool = False) -> SourceTable | None:
    """Return a table that is not loose files; of a committed output, only the files in its record."""
    if isinstance(source, str) and not source:
        raise TableError("the name of an input is empty. Give a path, or '.' for the current folder.")
    kind = source_of(source)
    if kind is not None:
        return kind.open_source(source)  # type: ignore[no-any-return]
    if not isinstance(source, str | os.PathLike):
        raise TableError(
            f"{type(source).__name__}: is not a table. Name a file, folder, glob or URL, or give a pyarrow, pandas or "
            "polars frame, or a reader of Arrow (dataset.scanner().to_reader())."
        )
    place = local_path(source)
    # A local output has no files that its record does not list; a list of many files would cost a request for each.
    if in_list and (not is_url(place) or os.path.splitext(place.rstrip("/"))[1] in EXTENSIONS):
        return None
    folder = f"{place.rstrip('/').rpartition('/')[2]}/" if in_list else ""  # two outputs may have parts of one name
    parts = output_parts(place)
    if parts is None:
        return None
    return SourceTable(files=tuple(SourceFile(name=f"{folder}{name}", file=file) for name, file in parts))


def _inspected(
    inspect: Callable[[SourceFile], "_File | DataError"], files: Sequence[SourceFile], spread: Spread
) -> Iterator["_File | DataError"]:
    """Return the result for each file, in order. JSON lines have to be read to find their types: `spread` does it."""
    text = [
        one.file
        for one in files
        if os.path.splitext(one.file.lower())[1] in (".jsonl", ".ndjson", ".json") and not is_url(one.file)
    ]
    size = sum(os.path.getsize(file) for file in text if os.path.exists(file))
    if size:
        return spread(inspect, files, size=size, name="find the types")
    return each_file(inspect, files, remote=any(is_url(one.file) for one in files))


def _inspect(
    path: SourceFile, columns: Sequence[str], bounded: Sequence[str], source: SourceTable, dialect: Dialect
) -> _File | DataError:
    """Return a file's format, its footer and its columns as the table names them, or its error."""
    file = path.file
    try:
        version = settled_version_of(file)
        if path.size not in (None, version.size):
            raise TableError(
                f"{file}: has {version.size:,} bytes, but {path.size:,} in the table's log. Restore the file."
            )
        format = format_of(file)
        if dialect.given and format != "csv":
            raise TableError(f"{file}: is {format}, but csv options are only for CSV files. Leave them out.")
        schema, footer = _read_schema(path, format, version, columns, bounded, dialect)
        if source.view is not None and footer is not None:
            path = replace(path, view=source.view(path, footer.schema, columns))
            if bounded:  # statistics were read for columns with these names in the file
                schema, footer = _read_schema(path, format, version, columns, bounded, dialect)
        if dialect.given:
            path = replace(path, view=replace(path.view, csv=dialect.given))
        for name in [path.view.names.get(name, name) for name in columns] or schema.names:
            times = schema.names.count(name)
            if times > 1:
                raise TableError(f"{file}: has {times} columns named {name!r}; rename all but one.")
        path, schema = as_in_table(path, schema, source)
        check_columns(file, columns, schema)
        if source.schema is not None:
            check_widened(file, [schema.field(name) for name in columns or schema.names], source.schema)
    except Unavailable as error:
        if source.identity.get("version") is None:
            return error
        return Unavailable(
            f"{error}. Version {source.identity['version']} of {source.identity['table']} lists this file, but it was "
            "removed, for example by VACUUM or expire_snapshots. Read a version that still exists."
        )
    except DataError as error:
        return error
    return _File(path, format, schema, footer)


def _read_schema(
    path: SourceFile, format: str, version: Version, columns: Sequence[str], bounded: Sequence[str], dialect: Dialect
) -> tuple[pa.Schema, Footer | None]:
    """Return a file's columns, and its footer with statistics of the columns `bounded`, named as in the table."""
    names = path.view.names
    stored = [names.get(name, name) for name in columns if name not in path.view.constants]
    bounds = {names.get(name, name): name for name in bounded if name not in path.view.constants}
    schema, footer = schema_of(path.file, format, version, stored, tuple(bounds), dialect)
    if footer is not None and bounds:
        footer = footer._replace(bounds={bounds[name]: found for name, found in footer.bounds.items()})
    return schema, footer


def _majority_types(files: Sequence[_File], names: Sequence[str]) -> dict[str, tuple[pa.DataType, str]]:
    """Return each column's most frequent type and the first file that has it; files with other types are bad."""
    found: dict[str, tuple[pa.DataType, str]] = {}
    for name in names:
        types = [(_type_of(one, name), one.path.file) for one in files if name in one.schema.names]
        counts = Counter(kind for kind, _ in types if not pa.types.is_null(kind))
        if counts:
            most = counts.most_common(1)[0][0]
            found[name] = next(one for one in types if one[0] == most)
    return found


def _check_types(one: _File, names: Sequence[str], common: dict[str, tuple[pa.DataType, str]]) -> None:
    """Check a file's columns against `common`, the types of earlier files and the file that set each; update it."""
    file = one.path.file
    check_columns(file, names, one.schema)
    for name in names:
        kind = _type_of(one, name)
        before, where = common.get(name, (kind, file))
        wider = common_type(kind, before)
        if wider is None:
            raise TableError(
                f"{file}: the column {name!r} is {kind}, but {before} in {where}. Convert one of them, or name only "
                "files that agree."
            )
        common[name] = (before, where) if wider == before else (kind, file)


def _type_of(file: _File, name: str) -> pa.DataType:
    return file.schema.field(file.schema.get_field_index(name)).type
