"""A table names rows in storage and how to read them: its files, their format, their common schema.

Opening one reads footers and headers only, and refuses what a job would trip over hours later: a truncated file, a
column that is missing or of another type in the third file, a Delta table read as loose Parquet.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import pyarrow as pa

from torchlake.errors import DataError, TableError, Unavailable
from torchlake.tables.formats.columnar import Footer
from torchlake.tables.formats.layout import format_of, is_table_file, schema_of
from torchlake.tables.record import COMMIT, committed_files
from torchlake.tables.sources.files import InputPath, describe, find, local_path, unavailable
from torchlake.tables.sources.lakehouse import refuse_lakehouse_tables
from torchlake.tables.sources.urls import is_url
from torchlake.tables.sources.versions import settled_version_of

T = TypeVar("T")
THREADS = 16


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows in storage; the order of `files` is the order of the rows."""

    source: str
    "As the user wrote it."
    files: tuple[str, ...]
    "Absolute paths or URLs, sorted by name."
    names: tuple[str, ...]
    "Each file's path relative to the folder that was given; row ids are made of them."
    format: str
    "parquet, csv, jsonl or arrow."
    schema: pa.Schema
    'CSV columns are strings ("007" stays "007"); JSON lines are typed by all lines of the columns asked for.'
    quarantined: tuple[tuple[str, str], ...] = ()
    "Files left out and why."
    footers: Mapping[str, Footer] = field(default_factory=dict, repr=False)
    "Of Parquet files, as they were read."


def open_table(
    source: str | Path | Sequence[str | Path],
    *,
    columns: Sequence[str] = (),
    on_bad_file: Literal["error", "quarantine"] = "error",
) -> Table:
    """The table that `source` names: a file, folder, glob, fsspec URL, or a list of them.

    Every file's footer or header is checked; `columns` must be there and have one type in all files (all columns of
    the first file, when none are named). With `on_bad_file="quarantine"` files that fail are left out and listed.

    Raises TableError naming file, column and types, or the nearest name of a missing column; UnsafeError when a file
    would have to run code to be loaded.
    """
    seen, bad = [], []
    for one, looked in _each(_found(source), partial(_look_at, columns=columns)):
        if isinstance(looked, DataError):
            if on_bad_file == "error" or isinstance(looked, Unavailable):
                raise looked
            bad.append((one.file, str(looked)))
        else:
            seen.append((one, *looked))
    names = list(columns) or (seen[0][2].names if seen else [])
    common: dict[str, tuple[pa.DataType, str]] = _most_common(seen, names) if on_bad_file == "quarantine" else {}
    schemas: dict[InputPath, pa.Schema] = {}
    formats: dict[str, str] = {}
    footers: dict[str, Footer] = {}
    for one, format, schema, footer in seen:
        try:
            _agree(one.file, schema, names, common)
        except TableError as error:
            if on_bad_file == "error":
                raise
            bad.append((one.file, str(error)))
            continue
        schemas[one], formats[one.file] = schema, format
        if footer is not None:
            footers[one.file] = footer
    if not schemas:
        raise TableError(f"{describe(source)}: every file is bad; the first: {bad[0][1]}")
    kinds = {formats[one.file]: one.file for one in schemas}
    if len(kinds) > 1:
        listed = ", ".join(f"{kind} ({file})" for kind, file in kinds.items())
        raise TableError(f"{describe(source)}: files of several formats: {listed}. A table has one; name its files.")
    first = next(iter(schemas.values()))
    schema = pa.schema([pa.field(field.name, common.get(field.name, (field.type,))[0]) for field in first])
    return Table(
        source=describe(source),
        files=tuple(one.file for one in schemas),
        names=tuple(one.name for one in schemas),
        format=next(iter(kinds)),
        schema=schema,
        quarantined=tuple(bad),
        footers=footers,
    )


def missing_column(file: str, name: str, schema: pa.Schema) -> TableError:
    """The error for a column that is not there, with the nearest name and all names."""
    close = get_close_matches(name, schema.names, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return TableError(f"{file}: there is no column {name!r}.{hint} It has: {', '.join(schema.names) or 'no columns'}.")


def is_compatible(one: pa.DataType, other: pa.DataType) -> bool:
    """Whether columns of these types may be parts of one column: equal, both strings, or one of them all null."""
    if pa.types.is_null(one) or pa.types.is_null(other) or one == other:
        return True
    texts = (pa.string(), pa.large_string())
    binaries = (pa.binary(), pa.large_binary())
    return (one in texts and other in texts) or (one in binaries and other in binaries)


def _found(source: str | Path | Sequence[str | Path]) -> list[InputPath]:
    """The files, those of a committed output by its record and never by what lies in the folder."""
    if isinstance(source, str | Path) and not is_url(local_path(os.fspath(source))):
        folder = Path(os.path.abspath(os.path.expanduser(local_path(os.fspath(source)))))
        try:
            is_output = (folder / COMMIT).is_file()
        except OSError as error:
            raise unavailable(os.fspath(source), error) from error
        if is_output:
            return [InputPath(path.name, str(path)) for path in committed_files(folder)]
    found = find(source, is_table_file)
    refuse_lakehouse_tables(found)
    return found


_Looked = tuple[str, pa.Schema, Footer | None]


def _look_at(one: InputPath, columns: Sequence[str]) -> _Looked | DataError:
    """Format, schema and footer of a file, or what is wrong with it."""
    try:
        version = settled_version_of(one.file)
        format = format_of(one.file)
        schema, footer = schema_of(one.file, format, version, columns)
        for name in columns:
            if name not in schema.names:
                raise missing_column(one.file, name, schema)
            if schema.names.count(name) > 1:
                times = schema.names.count(name)
                raise TableError(f"{one.file}: has {times} columns named {name!r}; rename all but one.")
    except DataError as error:
        return error
    return format, schema, footer


def _each(found: Sequence[InputPath], look: Callable[[InputPath], T]) -> Iterator[tuple[InputPath, T]]:
    """What `look` gives for each file, in their order; by several threads where most of it is waiting for answers.

    Local files are looked at one after the other: it is Python's own work, and 16 threads take four times as long.
    """
    if not any(is_url(one.file) for one in found):
        yield from zip(found, map(look, found), strict=True)
        return
    with ThreadPoolExecutor(THREADS) as threads:
        yield from zip(found, threads.map(look, found), strict=True)


def _most_common(
    seen: Sequence[tuple[InputPath, str, pa.Schema, Footer | None]], names: Sequence[str]
) -> dict[str, tuple[pa.DataType, str]]:
    """The type that most files give each column, and the first of these files: the others are the bad ones."""
    found: dict[str, tuple[pa.DataType, str]] = {}
    for name in names:
        types = [
            (schema.field(schema.get_field_index(name)).type, one.file)
            for one, _, schema, _ in seen
            if name in schema.names
        ]
        counts = Counter(kind for kind, _ in types if not pa.types.is_null(kind))
        if counts:
            most = counts.most_common(1)[0][0]
            found[name] = next(one for one in types if one[0] == most)
    return found


def _agree(file: str, schema: pa.Schema, names: Sequence[str], common: dict[str, tuple[pa.DataType, str]]) -> None:
    """Hold one file's columns against those of the files before it, in `common`: type and the file that set it."""
    for name in names:
        if name not in schema.names:
            raise missing_column(file, name, schema)
        kind = schema.field(schema.get_field_index(name)).type
        before, where = common.get(name, (kind, file))
        if not is_compatible(kind, before):
            raise TableError(
                f"{file}: the column {name!r} is {kind}, but {before} in {where}. Convert one of them, or name only "
                "files that agree."
            )
        widened = pa.types.is_null(before) or kind in (pa.large_string(), pa.large_binary())
        common[name] = (kind, file) if widened and not pa.types.is_null(kind) else (before, where)
