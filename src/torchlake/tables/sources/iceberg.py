"""Iceberg tables: `iceberg:catalog.namespace.table`, at the current snapshot, or after `@` a snapshot, tag or branch.

pyiceberg reads the catalog and the table's metadata. Without a catalog, the path of a `*.metadata.json` is a table. The
metadata lists the Parquet files of a snapshot and their delete files; each file is read like any other, without its
deleted rows. Files never change, so a snapshot that was opened stays readable until its files are removed.

Read: position deletes, deletion vectors, identity partitions, columns that were added, renamed, dropped or widened
(columns are found by field id). Equality deletes, and fields of nested columns that were renamed, are refused.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from torchlake.errors import TableError
from torchlake.tables.formats.columnar import open_parquet
from torchlake.tables.sources._interface import SourceFile, SourceTable, View
from torchlake.tables.sources.files import local_path
from torchlake.tables.storage.catalogs import first_line, load_table, parse_name
from torchlake.tables.storage.spread import each_file
from torchlake.tables.storage.urls import is_url

_FIELD_ID = b"PARQUET:field_id"


def recognizes(source: Any) -> bool:
    """Whether a string names a table of a catalog, or a path a metadata file."""
    return isinstance(source, str | Path) and parse_name(os.fspath(source)) is not None


def open_source(source: str | Path) -> SourceTable:
    """The files of the table's snapshot.

    Raises TableError for a catalog, table or snapshot that is not there and for what is not read, MissingExtra when
    pyiceberg is not installed.
    """
    parsed = parse_name(local_path(os.fspath(source)))
    assert parsed is not None, "open_source is called for what is recognized"
    name, table = parsed.shown, load_table(parsed)
    snapshot = _snapshot(table, parsed.ref, name)
    # Without a reference the columns are the current ones, even if no snapshot was written with them yet.
    schema = table.schema() if parsed.ref is None else table.scan(snapshot_id=snapshot).projection()
    columns = pa.schema([pa.field(one.name, _plain(one.type)) for one in schema.as_arrow()])
    tasks = [] if snapshot is None else _tasks(table, snapshot, name)
    for task in tasks:
        if task.file.file_format.name != "PARQUET":
            raise TableError(f"{name}: {task.file.file_path} is {task.file.file_format.name}; only Parquet is read.")
    columns_of = _columns_by_id(table, schema, tasks, name)
    deleted = _deleted_rows(table, tasks)
    files = []
    for task, stored in zip(tasks, columns_of, strict=True):
        file = local_path(task.file.file_path)
        view = _view(schema, stored, _partition_values(table, schema, columns, task))
        files.append(
            SourceFile(
                name=file.removeprefix(local_path(table.location()).rstrip("/") + "/"),
                file=file,
                size=task.file.file_size_in_bytes,
                view=view,
                deleted=deleted.get(task.file.file_path, b""),
            )
        )
    return SourceTable(
        files=tuple(sorted(files, key=lambda one: one.name)),
        identity={"kind": "iceberg", "table": name, "version": snapshot},
        schema=columns,
    )


def _view(schema: Any, stored: Mapping[int, str | None] | None, constants: Mapping[str, str | None]) -> View:
    """How a file's columns are read: `stored` has its name of each field, None where it lacks it."""
    if stored is None:
        return View(constants=constants)
    own = {one.name: stored[one.field_id] for one in schema.fields if one.name not in constants}
    lacking = {one.name: _default(one) for one in schema.fields if one.name in own and own[one.name] is None}
    names = {name: found for name, found in own.items() if found is not None and found != name}
    return View(constants={**constants, **lacking}, names=names)


def _snapshot(table: Any, ref: str | None, name: str) -> int | None:
    """The id of the snapshot, tag or branch; None for a table without rows yet. Raises TableError if there is none."""
    if ref is None:
        current = table.current_snapshot()
        return None if current is None else int(current.snapshot_id)
    found = table.snapshot_by_name(ref)
    if found is None and ref.isdigit():
        found = table.snapshot_by_id(int(ref))
    if found is None:
        known = ", ".join([*table.refs(), *(str(one.snapshot_id) for one in table.snapshots()[-3:])])
        raise TableError(
            f"{name}@{ref}: there is no such snapshot, tag or branch; it may have expired. There are: "
            f"{known or 'none'}."
        )
    return int(found.snapshot_id)


def _tasks(table: Any, snapshot: int, name: str) -> list[Any]:
    try:
        return list(table.scan(snapshot_id=snapshot).plan_files())
    except ValueError as error:
        if "equality deletes" not in str(error):
            raise
        raise TableError(
            f"{name}@{snapshot}: has equality deletes, which are not supported. Have them applied by a compaction "
            "(rewrite_data_files), and give the new snapshot."
        ) from error
    except OSError as error:
        raise TableError(f"{name}@{snapshot}: its manifests cannot be read: {first_line(error)}") from error


def _columns_by_id(table: Any, schema: Any, tasks: list[Any], name: str) -> list[dict[int, str | None] | None]:
    """For each file the stored name of every field id, None for a field that it lacks.

    None instead of them if names always meant the same fields; then no file is opened. Raises TableError for nested
    fields whose names changed, which the reader does not translate.
    """
    names: dict[int, set[str]] = {}
    for one in table.metadata.schemas:
        for field in _all_ids(one.fields):
            names.setdefault(field, set()).add(one.find_column_name(field))
    wanted = {field: schema.find_column_name(field) for field in _all_ids(schema.fields)}
    top = {one.field_id for one in schema.fields}
    for field, own in wanted.items():
        ends = {one.rpartition(".")[2] for one in names[field]}
        reused = any(other != field and own in all_ for other, all_ in names.items())
        if field not in top and (len(ends) > 1 or reused):
            raise TableError(
                f"{name}: the nested field {own!r} was renamed, or replaces another of its name, which is not "
                "supported. Rewrite the table's rows (for example CREATE TABLE ... AS SELECT)."
            )
    others = [field for field in names if field not in wanted]
    same = all(names[field] == {own} for field, own in wanted.items() if field in top)
    free = not any(names[field] & {wanted[one] for one in top} for field in others)
    if same and free and not any(one.initial_default is not None for one in schema.fields):
        return [None] * len(tasks)
    files = [local_path(task.file.file_path) for task in tasks]
    mapping = table.name_mapping()
    fallback = {} if mapping is None else {
        one.field_id: list(one.names) for one in mapping.root if one.field_id is not None
    }  # fmt: skip
    remote = any(map(is_url, files))
    return [
        {field: stored.get(field) or next((one for one in fallback.get(field, ()) if one in plain), None)
         for field in top}
        for stored, plain in each_file(_stored_ids, files, remote=remote)
    ]  # fmt: skip


def _all_ids(fields: Iterable[Any]) -> Iterator[int]:
    """The ids of fields and of those nested in them."""
    for one in fields:
        yield one.field_id
        yield from _all_ids(getattr(one.field_type, "fields", ()))


def _stored_ids(file: str) -> tuple[dict[int, str], set[str]]:
    """A file's columns by field id, and the names of those without one."""
    with open_parquet(file) as parquet:
        columns = list(parquet.schema_arrow)
    ids = {int(one.metadata[_FIELD_ID]): one.name for one in columns if one.metadata and _FIELD_ID in one.metadata}
    return ids, {one.name for one in columns} - {*ids.values()}


def _default(field: Any) -> str | None:
    """The value of a column in files that lack it, as Arrow casts it back."""
    if field.initial_default is None:
        return None
    value = field.initial_default
    return str(value).lower() if isinstance(value, bool) else str(value)


def _partition_values(table: Any, schema: Any, columns: pa.Schema, task: Any) -> dict[str, str | None]:
    """Columns that the file's partition gives the value of: those partitioned by identity; files may lack them."""
    values: dict[str, str | None] = {}
    for place, one in enumerate(table.specs()[task.file.spec_id].fields):
        name = schema.find_column_name(one.source_id)
        if str(one.transform) != "identity" or name is None or name not in columns.names:
            continue
        kind, value = columns.field(name).type, task.file.partition[place]
        if value is None:
            values[name] = None
        elif pa.types.is_temporal(kind) and isinstance(value, int):
            whole = pa.int32() if kind.bit_width == 32 else pa.int64()
            values[name] = pa.array([value], whole).view(kind).cast(pa.string())[0].as_py()
        elif isinstance(value, bool):
            values[name] = str(value).lower()
        elif not isinstance(value, bytes):  # these are read from the file
            values[name] = str(value)
    return values


def _deleted_rows(table: Any, tasks: list[Any]) -> Mapping[str, bytes]:
    """A bitmap of the deleted rows, by data file; each delete file is read once."""

    @lru_cache(maxsize=64)
    def positions(file: Any) -> dict[str, np.ndarray]:
        with table.io.new_input(file.file_path).open() as stream:
            if file.file_format.name == "PUFFIN":
                return _vectors(stream.read())
            rows = pq.read_table(stream, columns=["file_path", "pos"])
        paths, places = rows["file_path"].to_numpy(), rows["pos"].to_numpy()
        return {path: places[paths == path] for path in np.unique(paths)}

    found: dict[str, bytes] = {}
    for task in tasks:
        path = task.file.file_path
        deleted = [positions(one).get(path) for one in sorted(task.delete_files, key=lambda one: one.file_path)]
        rows = [one for one in deleted if one is not None and len(one)]
        if rows:
            bits = np.zeros(max(int(one.max()) for one in rows) + 1, bool)
            bits[np.concatenate(rows)] = True
            found[path] = np.packbits(bits, bitorder="little").tobytes()
    return found


def _vectors(puffin: bytes) -> dict[str, np.ndarray]:
    from pyiceberg.table.deletion_vector import deletion_vectors_from_puffin_file
    from pyiceberg.table.puffin import PuffinFile

    vectors = deletion_vectors_from_puffin_file(PuffinFile(puffin))
    return {one.referenced_data_file: one.to_vector().to_numpy() for one in vectors}


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type without 64-bit offsets, which pyiceberg gives every string and list."""
    if kind == pa.large_string():
        return pa.string()
    if kind == pa.large_binary():
        return pa.binary()
    if pa.types.is_large_list(kind):
        return pa.list_(kind.value_field.with_type(_plain(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([one.with_type(_plain(one.type)) for one in kind])
    if pa.types.is_map(kind):
        return pa.map_(
            kind.key_field.with_type(_plain(kind.key_type)), kind.item_field.with_type(_plain(kind.item_type))
        )
    return kind
