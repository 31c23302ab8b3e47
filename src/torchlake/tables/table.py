"""A table: rows in files of one format, with one schema.

Opening a table reads only footers and headers, and raises at once for what would fail a job hours later: a truncated
file, a column that is missing or has another type in the third file, a Delta table read as loose Parquet files.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import pyarrow as pa

from torchlake.errors import DataError, TableError, Unavailable
from torchlake.tables.formats.columnar import Footer
from torchlake.tables.formats.layout import format_of, schema_of
from torchlake.tables.record import COMMIT, committed_files
from torchlake.tables.sources._interface import SourceFile, SourceTable
from torchlake.tables.sources.files import StoredTable, describe, local_path
from torchlake.tables.sources.files import open_source as open_files
from torchlake.tables.storage.access import unavailable
from torchlake.tables.storage.urls import is_url
from torchlake.tables.storage.versions import settled_version_of

T = TypeVar("T")
THREADS = 16


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows in storage, in the order of `files`."""

    source: str
    "As the user wrote it."
    files: tuple[str, ...]
    "Absolute paths or URLs, sorted by name."
    names: tuple[str, ...]
    "Each file's path relative to the folder that was given; used in row ids."
    format: str
    "parquet, csv, jsonl or arrow."
    schema: pa.Schema
    'CSV columns are strings ("007" stays "007"); types of JSON lines come from all lines of the requested columns.'
    quarantined: tuple[tuple[str, str], ...] = ()
    "Files left out, and why."
    footers: Mapping[str, Footer] = field(default_factory=dict, repr=False)
    "Of Parquet files, by path."


def open_table(
    source: StoredTable,
    *,
    columns: Sequence[str] = (),
    on_bad_file: Literal["error", "quarantine"] = "error",
) -> Table:
    """Open a file, folder, glob, fsspec URL, or a list of them as a table.

    Checks every file's footer or header: `columns` must exist and have one type in all files (without `columns`, all
    columns of the first file). `on_bad_file="quarantine"` leaves out files that fail, and lists them.

    Raises TableError naming file, column and types, or the nearest name of a missing column; UnsafeError when a file
    would have to run code to be loaded.
    """
    bad: list[tuple[str, str]] = []

    def leave_out(path: SourceFile, error: DataError) -> None:
        if on_bad_file == "error" or isinstance(error, Unavailable):
            raise error
        bad.append((path.file, str(error)))

    readable: list[_File] = []
    for path, result in _map_files(partial(_inspect, columns=columns), _open_source(source).files):
        if isinstance(result, DataError):
            leave_out(path, result)
        else:
            readable.append(result)
    names = list(columns) or (readable[0].schema.names if readable else [])
    common = _majority_types(readable, names) if on_bad_file == "quarantine" else {}
    files: list[_File] = []
    for one in readable:
        try:
            _check_types(one, names, common)
            files.append(one)
        except TableError as error:
            leave_out(one.path, error)
    if not files:
        raise TableError(f"{describe(source)}: every file is bad; the first: {bad[0][1]}")
    formats = {one.format: one.path.file for one in files}
    if len(formats) > 1:
        listed = ", ".join(f"{format} ({file})" for format, file in formats.items())
        raise TableError(f"{describe(source)}: files of several formats: {listed}. A table has one; name its files.")
    return Table(
        source=describe(source),
        files=tuple(one.path.file for one in files),
        names=tuple(one.path.name for one in files),
        format=files[0].format,
        schema=pa.schema([pa.field(field.name, common.get(field.name, (field.type,))[0]) for field in files[0].schema]),
        quarantined=tuple(bad),
        footers={one.path.file: one.footer for one in files if one.footer is not None},
    )


def missing_column(file: str, name: str, schema: pa.Schema) -> TableError:
    """The error for a missing column, with the nearest name and all names."""
    close = get_close_matches(name, schema.names, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return TableError(f"{file}: there is no column {name!r}.{hint} It has: {', '.join(schema.names) or 'no columns'}.")


def check_columns(file: str, columns: Sequence[str], schema: pa.Schema) -> None:
    """Raise TableError if one of `columns` is missing in `schema`."""
    for name in columns:
        if name not in schema.names:
            raise missing_column(file, name, schema)


def is_compatible(one: pa.DataType, other: pa.DataType) -> bool:
    """Whether files may have one column in these types: equal, both strings, both binary, or one of them null."""
    if pa.types.is_null(one) or pa.types.is_null(other) or one == other:
        return True
    texts = (pa.string(), pa.large_string())
    binaries = (pa.binary(), pa.large_binary())
    return (one in texts and other in texts) or (one in binaries and other in binaries)


class _File(NamedTuple):
    path: SourceFile
    format: str
    schema: pa.Schema
    footer: Footer | None


def _open_source(source: StoredTable) -> SourceTable:
    """The files of `source`; of a committed output those in its record, whatever else is in the folder."""
    if isinstance(source, str | Path) and not is_url(local_path(os.fspath(source))):
        folder = Path(os.path.abspath(os.path.expanduser(local_path(os.fspath(source)))))
        try:
            is_output = (folder / COMMIT).is_file()
        except OSError as error:
            raise unavailable(os.fspath(source), error) from error
        if is_output:
            return SourceTable(
                files=tuple(SourceFile(name=path.name, file=str(path)) for path in committed_files(folder))
            )
    return open_files(source)


def _inspect(path: SourceFile, columns: Sequence[str]) -> _File | DataError:
    """A file's format, schema and footer, or its error."""
    file = path.file
    try:
        version = settled_version_of(file)
        format = format_of(file)
        schema, footer = schema_of(file, format, version, columns)
        check_columns(file, columns, schema)
        for name in columns:
            times = schema.names.count(name)
            if times > 1:
                raise TableError(f"{file}: has {times} columns named {name!r}; rename all but one.")
    except DataError as error:
        return error
    return _File(path, format, schema, footer)


def _map_files(function: Callable[[SourceFile], T], files: Sequence[SourceFile]) -> Iterator[tuple[SourceFile, T]]:
    """Each file with the result of `function`; URLs by several threads, as most of the time is waiting.

    Local files take mostly Python's own time, and 16 threads would be four times slower.
    """
    if not any(is_url(one.file) for one in files):
        yield from zip(files, map(function, files), strict=True)
        return
    with ThreadPoolExecutor(THREADS) as threads:
        yield from zip(files, threads.map(function, files), strict=True)


def _majority_types(files: Sequence[_File], names: Sequence[str]) -> dict[str, tuple[pa.DataType, str]]:
    """Each column's most frequent type, and the first file that has it; files with other types are the bad ones."""
    found: dict[str, tuple[pa.DataType, str]] = {}
    for name in names:
        types = [(_type_of(one, name), one.path.file) for one in files if name in one.schema.names]
        counts = Counter(kind for kind, _ in types if not pa.types.is_null(kind))
        if counts:
            most = counts.most_common(1)[0][0]
            found[name] = next(one for one in types if one[0] == most)
    return found


def _check_types(one: _File, names: Sequence[str], common: dict[str, tuple[pa.DataType, str]]) -> None:
    """Check a file's columns against `common`, the types of earlier files and the file that set each; updates it."""
    file = one.path.file
    check_columns(file, names, one.schema)
    for name in names:
        kind = _type_of(one, name)
        before, where = common.get(name, (kind, file))
        if not is_compatible(kind, before):
            raise TableError(
                f"{file}: the column {name!r} is {kind}, but {before} in {where}. Convert one of them, or name only "
                "files that agree."
            )
        widened = pa.types.is_null(before) or kind in (pa.large_string(), pa.large_binary())
        common[name] = (kind, file) if widened and not pa.types.is_null(kind) else (before, where)


def _type_of(file: _File, name: str) -> pa.DataType:
    return file.schema.field(file.schema.get_field_index(name)).type
