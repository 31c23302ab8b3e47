"""Delta tables: a folder or URL with a `_delta_log`, at its current version or an earlier one (`table@v12`).

The log lists the Parquet files of a version, their partition values and deletion vectors; deltalake (delta-rs) reads
it. Each file is then read like any other, without its deleted rows. Files of a Delta table never change, so a version
that was opened stays readable until a vacuum removes its files.

Supported: partition columns, deletion vectors, column mapping, columns that were added later, widened integers and
floats. A table that needs another reader feature is refused, with the feature's name.
"""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchlake.errors import TableError, Unavailable, need_library
from torchlake.storage.errors import first_line, library_errors, storage_errors
from torchlake.storage.urls import READ_ONLY, filesystem_of, is_url, object_store_options, quoted
from torchlake.tables.formats.layout import is_table_file
from torchlake.tables.formats.types import same_name
from torchlake.tables.selection.bounds import UNKNOWN, Bounds
from torchlake.tables.sources._delta_changes import LOG, added_files, changed_rows, commit_id
from torchlake.tables.sources._iceberg_columns import FIELD_ID
from torchlake.tables.sources._interface import ChangedRows, Followed, SourceFile, SourceTable, View
from torchlake.tables.sources._lakehouse import constant_text, logged_text
from torchlake.tables.sources.files import local_path

VERSION = re.compile(r"(?P<table>.+)@v(?:(?P<since>\d+)\.\.v)?(?P<version>\d+)", re.DOTALL)
FEATURES = frozenset(
    {"columnMapping", "deletionVectors", "timestampNtz", "typeWidening", "typeWidening-preview", "v2Checkpoint",
     "vacuumProtocolCheck"}
)  # fmt: skip
"Reader features that need no work, or are supported here."
_PHYSICAL, _ID = "delta.columnMapping.physicalName", "delta.columnMapping.id"


class DeltaPath(NamedTuple):
    """A Delta table's folder as an absolute path or URL, and the requested version (None: the current one)."""

    table: str
    version: int | None
    since: int | None = None
    "If set, only the files that were added after this version are requested."


def recognizes(source: Any) -> bool:
    """Return whether a path or URL, without its version, is a folder with a `_delta_log`."""
    return isinstance(source, str | Path) and _parse(source) is not None


def names_version(source: str) -> bool:
    """Return whether a path or URL is a version of a table, and not a table of such a name."""
    found = _parse(source)
    return found is not None and found.version is not None


def pin(source: str | Path) -> str | Path:
    """Return the table as `table@v12`: the requested version, or the current one."""
    found = _parse(source)
    assert found is not None, "pin is called only for recognized sources"
    return source if found.version is not None else f"{found.table}@v{_load(found).version()}"


def open_source(source: str | Path) -> SourceTable:
    """Return the files of the table's version.

    Raises TableError for a version that does not exist and for unsupported reader features, MissingExtra when deltalake
    is not installed.
    """
    with library_errors(os.fspath(source)):
        return _opened(source)


def _opened(source: str | Path) -> SourceTable:
    found = _parse(source)
    assert found is not None, "open_source is called only for recognized sources"
    table = _load(found)
    where = f"{found.table}@v{table.version()}"
    physical = _checked_names(table, where)
    if found.since is not None:
        return _open_added(found, table, physical)
    logical = {name: one for one, name in physical.items()}
    deleted = deleted_rows(table)
    actions: Any = pa.table(table.get_add_actions()).to_struct_array().combine_chunks() if table.file_uris() else []
    files = []
    for action in actions:
        path = unquote(action["path"].as_py())
        values = {} if "partition" not in action else dict(action["partition"].items())
        constants = {logical.get(name, name): value for name, value in values.items()}
        constants = {name: constant_text(where, name, value) for name, value in constants.items()}
        one = _file(found.table, path, action["size_bytes"].as_py(), constants, physical)
        gone = deleted.pop(decoded(action["path"].as_py()), b"")
        files.append(replace(one, rows=action["num_records"].as_py(), deleted=gone))
    assert not deleted, f"{where}: deletion vectors of files that the version does not list: {sorted(deleted)}"
    order = sorted(range(len(files)), key=lambda place: files[place].name)
    bounds = _bounds(actions.take(pa.array(order)), logical) if files else {}
    return replace(_table(found, table, physical, files), bounds=bounds)


def _open_added(found: DeltaPath, table: Any, physical: dict[str, str]) -> SourceTable:
    """Return the files that were added after a version. Raises TableError if existing rows changed too."""
    assert found.since is not None, "called only for a range of versions"
    where = f"{found.table}@v{found.since}..v{found.version}"
    added = added_files(found.table, found.since, table.version())
    if added.changed:
        raise TableError(
            f"{where}: {added.changed}, so the added files are not all that is new. Turn on the table's change data "
            "feed and give a key to follow changed rows, or score the whole table again (mode overwrite)."
        )
    logical = {name: one for one, name in physical.items()}
    schema = pa.schema(table.schema().to_arrow())
    files = []
    for action in added.files:
        values = {logical.get(name, name): text for name, text in (action.get("partitionValues") or {}).items()}
        constants = {name: logged_text(where, name, text, schema.field(name).type) for name, text in values.items()}
        files.append(_file(found.table, action["path"], action["size"], constants, physical))
    return _table(found, table, physical, files)


def file_at(table: str, path: str) -> str:
    """Return the path or URL of a file that a table's log names."""
    return path if is_url(path) or path.startswith("/") else f"{table.rstrip('/')}/{path}"


def _file(table: str, path: str, size: int, constants: dict[str, str | None], physical: dict[str, str]) -> SourceFile:
    names = {one: name for one, name in physical.items() if one != name and one not in constants}
    return SourceFile(name=path, file=file_at(table, path), size=size, view=View(constants=constants, names=names))


def _table(found: DeltaPath, table: Any, physical: dict[str, str], files: list[SourceFile]) -> SourceTable:
    schema = pa.schema(table.schema().to_arrow())
    since = {} if found.since is None else {"since": found.since}
    return SourceTable(
        files=tuple(sorted(files, key=lambda one: one.name)),
        identity=_identity(found, table) | since,
        schema=schema,
        view=_view_of(table, physical),
        partitions=pa.schema([schema.field(name) for name in table.metadata().partition_columns]),
    )


def _identity(found: DeltaPath, table: Any) -> dict[str, Any]:
    version = table.version()
    return {
        "kind": "delta",
        "table": found.table,
        "id": str(table.metadata().id),
        "version": version,
        "position": version,
        "commit": commit_id(found.table, version),
    }


def follow(source: str | Path) -> Followed | None:
    """Return the table to be followed from version to version; None if a version was requested."""
    found = _parse(source)
    assert found is not None, "called for what is recognized"
    if found.version is not None:
        return None
    table = _load(found)

    def rows(since: int, version: int, key: str) -> ChangedRows | None:
        with library_errors(found.table):
            last = _load(DeltaPath(found.table, version))
            changed = changed_rows(last, since, version, key)
            return None if changed is None else changed._replace(identity=_identity(found, last) | {"since": since})

    def has_changed(since: int, version: int) -> str:
        with library_errors(found.table):
            return added_files(found.table, since, version).changed

    return Followed(
        name=found.table,
        id=str(table.metadata().id),
        position=int(table.version()),
        commit=lambda version: commit_id(found.table, version),
        at=lambda version: f"{found.table}@v{version}",
        added=lambda since, version: f"{found.table}@v{since}..v{version}",
        has_changed=has_changed,
        changed_rows=rows,
    )


def _parse(source: str | Path) -> DeltaPath | None:
    text = local_path(source)
    if _has_log(text):
        return DeltaPath(_absolute(text), None)
    match = VERSION.fullmatch(text)
    if match is None or not _has_log(match["table"]):
        return None
    since = None if match["since"] is None else int(match["since"])
    return DeltaPath(_absolute(match["table"]), int(match["version"]), since)


def _absolute(path: str) -> str:
    return path if is_url(path) else os.path.abspath(os.path.expanduser(path))


def _has_log(path: str) -> bool:
    if not is_url(path):
        return os.path.isdir(os.path.join(os.path.expanduser(path), LOG))
    last = path.rstrip("/").rpartition("/")[2]
    extension = os.path.splitext(last)[1]
    public = path.partition("://")[0] in READ_ONLY and ("*" in path or "?" in path or extension)
    if "::" in path or public or (extension and is_table_file(last)):  # a file, or a public glob: no request
        return False
    try:
        with storage_errors(path):
            filesystem, folder = filesystem_of(path)
            return bool(filesystem.isdir(f"{folder.rstrip('/')}/{LOG}"))
    except Unavailable:  # this is reported when its files are listed
        return False


def _load(found: DeltaPath) -> Any:
    """Return the deltalake table. Raises TableError when it cannot be read."""
    need_library("deltalake", "delta", f"{found.table}: a Delta table")
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError

    shown = found.table if found.version is None else f"{found.table}@v{found.version}"
    with library_errors(shown):
        try:
            return DeltaTable(quoted(found.table), found.version, object_store_options(found.table))
        except (DeltaError, OSError, ValueError) as error:
            hint = ""
            if found.version is not None:
                hint = f" Check that version {found.version} exists; its log may have been cleaned up."
            raise TableError(f"{shown}: the Delta table cannot be read: {first_line(error)}.{hint}") from error


def _checked_names(table: Any, where: str) -> dict[str, str]:
    """Return the names of the columns in the files, by those in the table. Raises TableError if not supported."""
    unknown = sorted({*(table.protocol().reader_features or ())} - FEATURES)
    if "variantType" in unknown and not any("variant" in str(one.type) for one in table.schema().fields):
        unknown.remove("variantType")  # delta-rs lists it in tables without such a column
    if unknown:
        raise TableError(
            f"{where}: needs the Delta reader features {', '.join(unknown)}, which are not supported. Write the rows "
            "to a table without them (for example CREATE TABLE ... AS SELECT), and give that one."
        )
    names = {}
    mapped = table.metadata().configuration.get("delta.columnMapping.mode", "none") != "none"
    for one in table.schema().fields:
        names[one.name] = one.metadata.get(_PHYSICAL, one.name) if mapped else one.name
        if mapped and _PHYSICAL in str(one.type.to_json() if hasattr(one.type, "to_json") else ""):
            raise TableError(
                f"{where}: the column {one.name!r} is nested, and the table maps the names of its fields (column "
                "mapping), which is not supported. Write the rows to a table without column mapping."
            )
    return names


def _view_of(table: Any, physical: dict[str, str]) -> Callable[[SourceFile, pa.Schema, Sequence[str]], View]:
    """Return how to find the columns in a file: by id if the table says so, else by name, which may differ by case."""
    by_id = table.metadata().configuration.get("delta.columnMapping.mode") == "id"
    ids = {one.name: str(one.metadata.get(_ID)) for one in table.schema().fields} if by_id else {}

    def view(file: SourceFile, stored: pa.Schema, columns: Sequence[str]) -> View:
        numbered = {(one.metadata or {}).get(FIELD_ID, b"").decode(): one.name for one in stored}
        found = {
            name: numbered.get(ids.get(name, "none")) or same_name(own, stored.names) or own
            for name, own in physical.items()
            if name not in file.view.constants
        }
        return replace(file.view, names={name: own for name, own in found.items() if name != own})

    return view


def _bounds(actions: pa.StructArray, logical: dict[str, str]) -> dict[str, Bounds]:
    """Return the log's statistics of each file, by column. Logs have milliseconds: the highest time is cut off."""
    if actions.type.get_field_index("min") < 0 or actions.type.get_field_index("max") < 0:
        return {}
    rows, low, high = (actions.field(name) for name in ("num_records", "min", "max"))
    nulls = actions.field("null_count") if actions.type.get_field_index("null_count") >= 0 else None
    found = {}
    for column in low.type:
        if pa.types.is_nested(column.type) or high.type.get_field_index(column.name) < 0:
            continue
        highest = high.field(column.name)
        if pa.types.is_timestamp(column.type):
            highest = pc.add(highest, pa.scalar(1, pa.duration("ms")))
        known = nulls is not None and nulls.type.get_field_index(column.name) >= 0
        found[logical.get(column.name, column.name)] = Bounds(
            lowest=low.field(column.name),
            highest=highest,
            nulls=_counts(nulls.field(column.name)) if nulls is not None and known else _counts(pa.nulls(len(rows))),
            rows=_counts(rows),
        )
    return found


def _counts(found: pa.Array) -> np.ndarray:
    return np.asarray(found.cast(pa.int64()).fill_null(UNKNOWN).to_numpy(zero_copy_only=False))


def decoded(path: str) -> str:
    """Return a path of the log as `deleted_rows` names it."""
    return unquote(unquote(path))


def deleted_rows(table: Any) -> dict[str, bytes]:
    """Return a bitmap of the deleted rows, by the file's path in the log, decoded."""
    if "deletionVectors" not in (table.protocol().reader_features or ()):
        return {}
    root = table.table_uri if table.table_uri.endswith("/") else f"{table.table_uri}/"
    vectors = pa.table(table.deletion_vectors())
    found = {}
    for path, kept in zip(vectors["filepath"], vectors["selection_vector"], strict=True):
        bits = ~np.asarray(kept.values.to_numpy(zero_copy_only=False), dtype=bool)
        # These URLs encode the path one more time than the log does.
        found[decoded(path.as_py().removeprefix(root))] = np.packbits(bits, bitorder="little").tobytes()
    return found
