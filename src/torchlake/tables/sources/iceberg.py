"""Iceberg tables: `iceberg:catalog.namespace.table`, at the current snapshot, or after `@` a snapshot, tag or branch.

pyiceberg reads the catalog and the table's metadata. Without a catalog, the path of a `*.metadata.json` is a table. The
metadata lists the Parquet files of a snapshot and their delete files; each file is read like any other, without its
deleted rows. Files never change, so a snapshot that was opened stays readable until its files are removed.

Supported: position deletes, deletion vectors, identity partitions, columns that were added, renamed, dropped or widened
(`_iceberg_columns.py`). Equality deletes, files of other formats and changed nested columns are refused.
"""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from torchlake.errors import TableError, Unavailable
from torchlake.storage.errors import first_line, library_errors
from torchlake.tables.sources._catalogs import TableName, load_table, parse_name
from torchlake.tables.sources._iceberg_columns import Columns
from torchlake.tables.sources._interface import Followed, SourceFile, SourceTable, View
from torchlake.tables.sources.files import local_path

_NUMBER = re.compile(r"(?P<snapshot>\d+)(?::(?P<schema>\d+))?")
"A snapshot, and the number of the schema if it is not the one that the snapshot was written with."


_RANGE = re.compile(r"(?P<since>\d+)\.\.(?P<snapshot>\d+)")
"Two snapshots: the files that were added after the first one, up to the second."


class _State(NamedTuple):
    """A table at a snapshot."""

    table: Any
    snapshot: Any
    "None for a table without rows yet."
    schema: Any


def recognizes(source: Any) -> bool:
    """Return whether a string names a table of a catalog or the path of a metadata file."""
    return isinstance(source, str | Path) and parse_name(os.fspath(source)) is not None


def pin(source: str | Path) -> str | Path:
    """Return the table with its snapshot's number, and its schema's if the snapshot was written with another."""
    parsed = _parse(source)
    state = _at(parsed)
    if state.snapshot is None:  # a table without rows has no snapshot to name
        return source
    schema = "" if state.schema.schema_id == state.snapshot.schema_id else f":{state.schema.schema_id}"
    return f"{parsed.name}@{state.snapshot.snapshot_id}{schema}"


def open_source(source: str | Path) -> SourceTable:
    """Return the files of the table's snapshot.

    Raises TableError for a catalog, table or snapshot that does not exist and for unsupported features, MissingExtra
    when pyiceberg is not installed.
    """
    parsed = _parse(source)
    between = _RANGE.fullmatch(parsed.ref or "")
    with library_errors(parsed.shown):
        if between is not None:
            return _open_added(parsed, int(between["since"]), int(between["snapshot"]))
        return _opened(parsed)


def _opened(parsed: TableName) -> SourceTable:
    table, snapshot, schema = _at(parsed)
    number = None if snapshot is None else int(snapshot.snapshot_id)
    tasks = [] if number is None else planned_files(table, number, parsed.shown)
    identity = _identity(parsed, table, snapshot)
    return _table(parsed, table, schema, [one.file for one in tasks], identity, deleted_rows(table, tasks))


def _table(
    parsed: TableName, table: Any, schema: Any, found: Iterable[Any], identity: Mapping[str, Any],
    deleted: Mapping[str, bytes],
) -> SourceTable:  # fmt: skip
    """Return a table with these data files, which are entries of manifests."""
    columns, specs = Columns.of(parsed.shown, schema, table.name_mapping()), table.specs()
    location = local_path(table.location()).rstrip("/")
    files = [
        SourceFile(
            name=local_path(one.file_path).removeprefix(f"{location}/"),
            file=local_path(one.file_path),
            size=one.file_size_in_bytes,
            rows=one.record_count,
            view=View(constants=columns.partition_values(one, specs[one.spec_id])),
            deleted=deleted.get(one.file_path, b""),
        )
        for one in found
    ]
    ordered = tuple(sorted(files, key=lambda one: one.name))
    return SourceTable(files=ordered, identity=identity, schema=columns.schema, view=columns.view)


def _identity(parsed: TableName, table: Any, snapshot: Any) -> dict[str, Any]:
    version, position = (None, None) if snapshot is None else (int(snapshot.snapshot_id), snapshot.sequence_number)
    return {
        "kind": "iceberg",
        "table": parsed.shown,
        "id": str(table.metadata.table_uuid),
        "version": version,
        # Snapshots of format version 1 have no sequence numbers, so a table of that version cannot be followed.
        "position": position if table.metadata.format_version > 1 else None,
        "commit": str(version or ""),
    }


def follow(source: str | Path) -> Followed | None:
    """Return the table to be followed from snapshot to snapshot; None if a snapshot was requested.

    Positions are sequence numbers, which grow with every snapshot.
    """
    parsed = _parse(source)
    if parsed.ref is not None:
        return None
    table = load_table(parsed)
    newest = table.metadata.current_snapshot()
    columns = table.schema().schema_id  # as a whole run reads it: columns may change without a new snapshot
    if table.metadata.format_version < 2:
        raise TableError(
            f"{parsed.shown}: snapshots of format version 1 have no sequence numbers. Upgrade the table to version 2."
        )

    def snapshot(position: int) -> int:
        return _snapshot_of(parsed, load_table(parsed), position)

    def commit(position: int) -> str:
        found = (one for one in load_table(parsed).metadata.snapshots if one.sequence_number == position)
        return str(next((one.snapshot_id for one in found), ""))

    def has_changed(since: int, position: int) -> str:
        read = load_table(parsed)
        with library_errors(parsed.shown):
            first, last = _snapshot_of(parsed, read, since), _snapshot_of(parsed, read, position)
            return _added_files(parsed, read, first, last)[1]

    return Followed(
        name=parsed.shown,
        id=str(table.metadata.table_uuid),
        position=-1 if newest is None else int(newest.sequence_number),
        commit=commit,
        at=lambda position: parsed.name if position < 0 else f"{parsed.name}@{snapshot(position)}:{columns}",
        added=lambda since, position: f"{parsed.name}@{snapshot(since)}..{snapshot(position)}",
        has_changed=has_changed,
        changed_rows=lambda since, position, key: None,  # Iceberg has no feed of changed rows
    )


def _snapshot_of(parsed: TableName, table: Any, position: int) -> int:
    """Return the id of the snapshot with a sequence number. Raises TableError when it has expired."""
    for one in table.metadata.snapshots:
        if one.sequence_number == position:
            return int(one.snapshot_id)
    raise TableError(
        f"{parsed.shown}: the snapshot with sequence number {position} has expired, so new rows cannot be found. Score "
        "the whole table again (mode overwrite)."
    )


def _added_files(parsed: TableName, table: Any, since: int, snapshot: int) -> tuple[list[Any], str]:
    """Return the data files that the snapshots after `since` added, and why they are not all that is new (or "")."""
    files: list[Any] = []
    changed = ""
    number: int | None = snapshot
    while number is not None and number != since:
        one = table.metadata.snapshot_by_id(number)
        if one is None:
            break
        operation = one.summary.operation.value if one.summary is not None else "overwrite"
        if operation == "append":
            for manifest in one.manifests(table.io):
                if manifest.added_snapshot_id == number:
                    entries = manifest.fetch_manifest_entry(table.io)
                    files += [entry.data_file for entry in entries if entry.status.name == "ADDED"]
        elif operation != "replace":  # a compaction has no new rows
            changed = f"snapshot {number} changed or deleted rows ({operation})"
        number = one.parent_snapshot_id
    if number != since:
        changed = f"snapshot {since} is not an ancestor of {snapshot}, or it has expired"
    return files, changed


def _open_added(parsed: TableName, since: int, snapshot: int) -> SourceTable:
    """Return the files that were added between two snapshots. Raises TableError if existing rows changed too."""
    table = load_table(parsed)
    added, changed = _added_files(parsed, table, since, snapshot)
    if changed:
        raise TableError(
            f"{parsed.shown}@{since}..{snapshot}: {changed}, so the added files are not all that is new. Score the "
            "whole table again (mode overwrite)."
        )
    identity = _identity(parsed, table, table.metadata.snapshot_by_id(snapshot)) | {"since": since}
    return _table(parsed, table, table.schema(), added, identity, {})


def _parse(source: str | Path) -> TableName:
    parsed = parse_name(local_path(source))
    assert parsed is not None, "called only for recognized sources"
    return parsed


def _at(parsed: TableName) -> _State:
    """Return the table at the snapshot, tag or branch. Raises TableError if that does not exist.

    As Iceberg defines, a branch is read with the table's columns, and a tag or snapshot with those that it was written
    with.
    """
    table = load_table(parsed)
    metadata, ref = table.metadata, parsed.ref
    if ref is None:
        return _State(table, metadata.current_snapshot(), table.schema())
    named, number = metadata.refs.get(ref), _NUMBER.fullmatch(ref)
    if named is not None:
        snapshot = metadata.snapshot_by_id(named.snapshot_id)
    else:
        snapshot = metadata.snapshot_by_id(int(number["snapshot"])) if number else None
    if snapshot is None:
        known = ", ".join([*metadata.refs, *(str(one.snapshot_id) for one in metadata.snapshots[-3:])])
        raise TableError(
            f"{parsed.shown}@{ref}: there is no such snapshot, tag or branch; it may have expired. The table has: "
            f"{known or 'none'}."
        )
    wanted = int(number["schema"]) if number and number["schema"] else snapshot.schema_id
    if wanted is None or (named is not None and named.snapshot_ref_type.value == "branch"):
        return _State(table, snapshot, table.schema())
    schema = next((one for one in metadata.schemas if one.schema_id == wanted), None)
    if schema is None:
        raise TableError(f"{parsed.shown}@{ref}: the table no longer has schema {wanted}. Leave the schema out.")
    return _State(table, snapshot, schema)


def planned_files(table: Any, snapshot: int, name: str) -> list[Any]:
    """Return the scan's tasks: data files, each with its delete files. Raises TableError for unsupported files."""
    try:
        tasks = list(table.scan(snapshot_id=snapshot).plan_files())
    except (ValueError, NotImplementedError) as error:
        if "equality deletes" not in str(error):
            raise TableError(f"{name}@{snapshot}: cannot be planned: {first_line(error)}.") from error
        raise TableError(
            f"{name}@{snapshot}: has equality deletes, which are not supported. Compact the table (rewrite_data_files)."
        ) from error
    except OSError as error:
        raise Unavailable(f"{name}@{snapshot}: its manifests cannot be read: {first_line(error)}.") from error
    for task in tasks:
        for file, formats in ((task.file, ("PARQUET",)), *((one, ("PARQUET", "PUFFIN")) for one in task.delete_files)):
            if file.file_format.name not in formats:
                raise TableError(f"{name}: {file.file_path} is {file.file_format.name}; only Parquet is read.")
    return tasks


def deleted_rows(table: Any, tasks: Iterable[Any]) -> dict[str, bytes]:
    """Return a bitmap of the deleted rows, by data file; each delete file is read once."""
    read: dict[str, dict[str, np.ndarray]] = {}
    found = {}
    for task in tasks:
        path, rows = task.file.file_path, np.zeros(task.file.record_count, bool)
        for delete in task.delete_files:
            if delete.file_path not in read:
                read[delete.file_path] = _read_deletes(table.io, delete)
            places = read[delete.file_path].get(path)
            if places is not None:
                rows[places] = True
        if rows.any():
            found[path] = np.packbits(rows, bitorder="little").tobytes()
    return found


def _read_deletes(io: Any, delete: Any) -> dict[str, np.ndarray]:
    """Return the numbers of the rows that a delete file deletes, by data file."""
    try:
        with io.new_input(delete.file_path).open() as stream:
            content = stream.read()
    except OSError as error:
        raise Unavailable(f"{delete.file_path}: the delete file cannot be read: {first_line(error)}.") from error
    with library_errors(delete.file_path):
        return _deleted_places(delete, content)


def _deleted_places(delete: Any, content: bytes) -> dict[str, np.ndarray]:
    if delete.file_format.name == "PUFFIN":
        from pyiceberg.table.deletion_vector import deletion_vectors_from_puffin_file
        from pyiceberg.table.puffin import PuffinFile

        vectors = deletion_vectors_from_puffin_file(PuffinFile(content))
        return {one.referenced_data_file: one.to_vector().to_numpy() for one in vectors}
    rows = pq.read_table(pa.BufferReader(content), columns=["file_path", "pos"]).group_by("file_path")
    grouped = rows.aggregate([("pos", "list")]).select(["file_path", "pos_list"])
    return {path.as_py(): places.values.to_numpy() for path, places in zip(*grouped.columns, strict=True)}
