"""Iceberg tables: `iceberg:catalog.namespace.table`, at its current snapshot or another (`...table@REF`).

REF is the number of a snapshot, a branch or a tag. Catalogs and their credentials are configured for pyiceberg
(`.pyiceberg.yaml` or PYICEBERG_CATALOG__... variables). A scan gives the Parquet files of a snapshot and their delete
files; each file is then read like any other, without its deleted rows. Its columns are found by their field ids, so
that columns may be renamed, dropped and added. Files of an Iceberg table never change, so a snapshot that was opened
stays readable until its files are removed.

Equality deletes are refused, and so are files that are not Parquet, and nested columns whose fields have changed.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from torchlake.config.redaction import redacted
from torchlake.errors import MissingExtra, TableError, Unavailable
from torchlake.tables.sources._iceberg_columns import Columns
from torchlake.tables.sources._interface import SourceFile, SourceTable, View
from torchlake.tables.sources.files import local_path

PREFIX = "iceberg:"
SPELLING = re.compile(r"iceberg:(?P<catalog>[^.@]+)\.(?P<table>[^@]+\.[^@.]+)(?:@(?P<ref>.+))?", re.DOTALL)
NUMBER = re.compile(r"(?P<snapshot>\d+)(?::(?P<schema>\d+))?")
"A snapshot, and the number of a schema that is not the snapshot's own."
SHOWN = 5


class IcebergName(NamedTuple):
    """An Iceberg table's name in its catalog, and what was asked for (None: the current snapshot)."""

    catalog: str
    table: str
    ref: str | None

    @property
    def name(self) -> str:
        return f"{PREFIX}{self.catalog}.{self.table}"


class _State(NamedTuple):
    """A table at one snapshot."""

    table: Any
    snapshot: Any
    "None: the table has none yet."
    schema: Any


def recognizes(source: Any) -> bool:
    """Whether a string or path begins with `iceberg:`."""
    return isinstance(source, str | Path) and str(source).startswith(PREFIX)


def pin(source: str | Path) -> str | Path:
    """The table with the number of its snapshot, and of the schema if the snapshot was written with another one."""
    found = _parse(source)
    state = _load(found)
    if state.snapshot is None:  # no rows, and no number to give
        return source
    schema = "" if state.schema.schema_id == state.snapshot.schema_id else f":{state.schema.schema_id}"
    return f"{found.name}@{state.snapshot.snapshot_id}{schema}"


def open_source(source: str | Path) -> SourceTable:
    """The files of the snapshot.

    Raises TableError for a table or snapshot that is not there and for what cannot be read, MissingExtra when pyiceberg
    or the library of the catalog is not installed, Unavailable when the catalog or its storage does not answer.
    """
    found = _parse(source)
    state = _load(found)
    table, schema = state.table, state.schema
    number = None if state.snapshot is None else state.snapshot.snapshot_id
    columns = Columns.of(found.name, schema, table.name_mapping())
    tasks = [] if number is None else _plan_files(found, table, number)
    deleted, specs = _deleted_rows(table, tasks), table.metadata.specs()
    files = []
    for task in tasks:
        path = task.file.file_path
        files.append(
            SourceFile(
                name=path.removeprefix(f"{table.location().rstrip('/')}/"),
                file=local_path(path),
                size=task.file.file_size_in_bytes,
                view=View(constants=columns.partition_values(task.file, specs[task.file.spec_id])),
                deleted=deleted.get(path, b""),
            )
        )
    return SourceTable(
        files=tuple(sorted(files, key=lambda one: one.name)),
        identity={"kind": "iceberg", "table": found.name, "version": number, "schema": schema.schema_id},
        schema=columns.schema,
        view=columns.view,
    )


def _parse(source: str | Path) -> IcebergName:
    match = SPELLING.fullmatch(str(source))
    if match is None:
        raise TableError(
            f"{source}: not the name of an Iceberg table. Write iceberg:CATALOG.NAMESPACE.TABLE, and for another "
            "snapshot than the current one iceberg:CATALOG.NAMESPACE.TABLE@REF, with its number, a branch or a tag."
        )
    return IcebergName(match["catalog"], match["table"], match["ref"])


def _load(found: IcebergName) -> _State:
    """The table, at the snapshot that was asked for."""
    try:
        from pyiceberg.catalog import load_catalog
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError, NotInstalledError
    except ImportError as error:
        raise MissingExtra(
            f"{found.name}: an Iceberg table needs the library 'pyiceberg', which is not installed: "
            "pip install 'torchlake[iceberg]'"
        ) from error
    try:
        catalog = load_catalog(found.catalog)
        _ignore_named_code(catalog)
        table = catalog.load_table(found.table)
    except (NoSuchTableError, NoSuchNamespaceError) as error:
        raise TableError(f"{found.name}: the catalog {found.catalog!r} has no table {found.table!r}.") from error
    except (NotInstalledError, ModuleNotFoundError) as error:
        raise MissingExtra(f"{found.name}: the catalog needs another library of pyiceberg: {error}") from error
    except Exception as error:  # each kind of catalog raises the errors of its client
        kind = Unavailable if isinstance(error, OSError) else TableError
        lines = str(error).splitlines() or [""]
        raise kind(
            f"{found.name}: the Iceberg table cannot be loaded: {type(error).__name__}: {redacted(lines[0])}. Is the "
            f"catalog {found.catalog!r} configured for pyiceberg (.pyiceberg.yaml, or PYICEBERG_CATALOG__... "
            "variables), with its credentials?"
        ) from error
    return _at(found, table)


def _ignore_named_code(catalog: Any) -> None:
    """Ignore the class that a table's own properties name for its storage: pyiceberg would import and run it."""
    load_file_io: Callable[..., Any] = catalog._load_file_io

    def load(properties: Mapping[str, str] | None = None, location: str | None = None) -> Any:
        safe = {name: value for name, value in (properties or {}).items() if name != "py-io-impl"}
        return load_file_io(safe, location)

    catalog._load_file_io = load


def _at(found: IcebergName, table: Any) -> _State:
    """The table at a snapshot, with the schema that Iceberg defines: a branch has the table's, a tag its snapshot's."""
    metadata = table.metadata
    if found.ref is None:
        return _State(table, metadata.current_snapshot(), table.schema())
    schemas = {schema.schema_id: schema for schema in metadata.schemas}
    ref = metadata.refs.get(found.ref)
    match = NUMBER.fullmatch(found.ref)
    if ref is not None:
        snapshot = metadata.snapshot_by_id(ref.snapshot_id)
    else:
        snapshot = metadata.snapshot_by_id(int(match["snapshot"])) if match else None
    if snapshot is None:
        latest = [str(one.snapshot_id) for one in metadata.snapshots][-SHOWN:]
        raise TableError(
            f"{found.name}@{found.ref}: there is no such snapshot, branch or tag; a snapshot may have expired. Latest "
            f"snapshots: {', '.join(latest) or 'none'}. Branches and tags: {', '.join(sorted(metadata.refs)) or 'none'}."
        )
    number = int(match["schema"]) if match and match["schema"] else snapshot.schema_id
    branch = ref is not None and ref.snapshot_ref_type.value == "branch"
    return _State(table, snapshot, table.schema() if branch else schemas.get(number, table.schema()))


def _plan_files(found: IcebergName, table: Any, snapshot: int) -> list[Any]:
    """The scan's tasks: data files, each with its delete files. Raises TableError for what is not read."""
    where = f"{found.name}@{snapshot}"
    try:
        tasks = list(table.scan(snapshot_id=snapshot).plan_files())
    except (ValueError, NotImplementedError) as error:
        if "equality deletes" in str(error):
            raise TableError(
                f"{where}: has equality deletes, which are not read. Compact the table first, for example by Spark's "
                "rewrite_data_files."
            ) from error
        raise TableError(f"{where}: cannot be planned: {error}") from error
    except OSError as error:
        raise Unavailable(f"{where}: its metadata cannot be read: {error}. Was the snapshot removed?") from error
    for task in tasks:
        for file, formats in ((task.file, {"PARQUET"}), *((one, {"PARQUET", "PUFFIN"}) for one in task.delete_files)):
            if file.file_format.name not in formats:
                raise TableError(f"{where}: {file.file_path} is {file.file_format.name}; only Parquet files are read.")
    return tasks


def _deleted_rows(table: Any, tasks: Iterable[Any]) -> dict[str, bytes]:
    """A bitmap of the deleted rows, by the path of the data file."""
    read: dict[str, dict[str, np.ndarray]] = {}
    found = {}
    for task in tasks:
        rows = np.zeros(task.file.record_count, bool)
        for delete in task.delete_files:
            if delete.file_path not in read:
                read[delete.file_path] = _read_deletes(table.io, delete)
            rows[read[delete.file_path].get(task.file.file_path, np.array([], int))] = True
        if rows.any():
            found[task.file.file_path] = np.packbits(rows, bitorder="little").tobytes()
    return found


def _read_deletes(io: Any, delete: Any) -> dict[str, np.ndarray]:
    """The numbers of deleted rows in a delete file, by the path of the data file."""
    try:
        with io.new_input(delete.file_path).open() as source:
            content = source.read()
    except OSError as error:
        raise Unavailable(f"{delete.file_path}: the delete file cannot be read: {error}") from error
    if delete.file_format.name == "PUFFIN":
        from pyiceberg.table.deletion_vector import deletion_vectors_from_puffin_file
        from pyiceberg.table.puffin import PuffinFile

        vectors = deletion_vectors_from_puffin_file(PuffinFile(content))
        return {one.referenced_data_file: one.to_vector().to_numpy() for one in vectors}
    positions = pq.read_table(pa.BufferReader(content), columns=["file_path", "pos"]).group_by("file_path")
    grouped = positions.aggregate([("pos", "list")]).select(["file_path", "pos_list"])
    return {path.as_py(): rows.values.to_numpy() for path, rows in zip(*grouped.columns, strict=True)}
