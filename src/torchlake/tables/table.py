"""A table names rows in storage and how to read them: its files, their format, their common schema.

Opening one reads footers and headers only, and refuses what a job would trip over hours later: a truncated file, a
column that is missing or of another type in the third file, a Delta table read as loose Parquet.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

import pyarrow as pa

from torchlake.errors import DataError, TableError
from torchlake.tables.committed import COMMIT, committed_files
from torchlake.tables.files import Found, describe, find, is_url
from torchlake.tables.formats import format_of, is_table_file, schema_of


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
    'CSV columns are strings ("007" stays "007"); JSON lines are typed by each file\'s first 1,000 lines.'
    quarantined: tuple[tuple[str, str], ...] = ()
    "Files left out and why."


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
    found = _found(source)
    formats: dict[str, str] = {}
    schemas: dict[Found, pa.Schema] = {}
    bad: list[tuple[str, str]] = []
    for one in found:
        try:
            formats[one.file] = format_of(one.file)
            schemas[one] = _checked_schema(one.file, formats[one.file], columns)
        except DataError as error:
            if on_bad_file == "error":
                raise
            bad.append((one.file, str(error)))
    names = list(columns) or (next(iter(schemas.values())).names if schemas else [])
    common: dict[str, tuple[pa.DataType, str]] = {}
    for one, schema in list(schemas.items()):
        try:
            _agree(one.file, schema, names, common)
        except TableError as error:
            if on_bad_file == "error":
                raise
            del schemas[one]
            bad.append((one.file, str(error)))
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
    )


def missing_column(file: str, name: str, schema: pa.Schema) -> TableError:
    """The error for a column that is not there, with the nearest name and all names."""
    close = get_close_matches(name, schema.names, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return TableError(f"{file}: there is no column {name!r}.{hint} It has: {', '.join(schema.names) or 'no columns'}.")


def same_type(one: pa.DataType, other: pa.DataType) -> bool:
    """Whether columns of these types may be parts of one column: equal, both strings, or one of them all null."""
    if pa.types.is_null(one) or pa.types.is_null(other) or one == other:
        return True
    texts = (pa.string(), pa.large_string())
    binaries = (pa.binary(), pa.large_binary())
    return (one in texts and other in texts) or (one in binaries and other in binaries)


def _found(source: str | Path | Sequence[str | Path]) -> list[Found]:
    """The files, those of a committed output by its record and never by what lies in the folder."""
    if isinstance(source, str | Path) and not is_url(os.fspath(source)):
        folder = Path(os.path.abspath(os.path.expanduser(os.fspath(source))))
        if (folder / COMMIT).is_file():
            return [Found(path.name, str(path)) for path in committed_files(folder)]
    for one in [source] if isinstance(source, str | Path) else source:
        _refuse_table_log(os.fspath(one))
    return find(source, is_table_file)


def _refuse_table_log(source: str) -> None:
    folder = Path(os.path.expanduser(source))
    kind = "Delta" if (folder / "_delta_log").is_dir() else ""
    if next((folder / "metadata").glob("*.metadata.json"), None) is not None:
        kind = "Iceberg"
    if kind:
        raise TableError(
            f"{source}: a table in {kind} format; read as loose Parquet files it would give deleted rows too. Give the "
            "files of one version, for example those of deltalake's DeltaTable(...).file_uris()."
        )


def _checked_schema(file: str, format: str, columns: Sequence[str]) -> pa.Schema:
    schema = schema_of(file, format, columns)
    for name in columns:
        if name not in schema.names:
            raise missing_column(file, name, schema)
        if schema.names.count(name) > 1:
            raise TableError(f"{file}: has {schema.names.count(name)} columns named {name!r}; rename all but one.")
    return schema


def _agree(file: str, schema: pa.Schema, names: Sequence[str], common: dict[str, tuple[pa.DataType, str]]) -> None:
    """Hold one file's columns against those of the files before it, in `common`: type and the file that set it."""
    for name in names:
        if name not in schema.names:
            raise missing_column(file, name, schema)
        kind = schema.field(schema.get_field_index(name)).type
        before, where = common.get(name, (kind, file))
        if not same_type(kind, before):
            raise TableError(
                f"{file}: the column {name!r} is {kind}, but {before} in {where}. Convert one of them, or name only "
                "files that agree."
            )
        widened = pa.types.is_null(before) or kind in (pa.large_string(), pa.large_binary())
        common[name] = (kind, file) if widened and not pa.types.is_null(kind) else (before, where)
