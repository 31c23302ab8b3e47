"""Iceberg tables, `iceberg:catalog.namespace.table`: the parts are files of the table, and one snapshot adds them all.

Parts are uploaded below the table's data folder. The commit adds them in one transaction with the property
`torchlake.commit`, the id of the newest commit. Before the next commit replaces it, the id is kept in an object of its
own, `_torchlake/commits/<id>.<table>.made`, so the number of properties stays the same and commits are known after
their snapshots expire. A transaction is tried once, on top of the snapshot that was looked at: pyiceberg's own retry
adds the files of a commit that another process made meanwhile a second time.

A table that does not exist is created, empty, when the job begins, because only the catalog knows where its files
belong, and every part has the table's field ids. Missing columns are added at that time too.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

import pyarrow as pa

from torchlake.errors import OutputError, StorageError, TableError, UsageError
from torchlake.failpoints import failpoint
from torchlake.outputs.parts import PartFolder
from torchlake.outputs.records import read_record, stored_commits
from torchlake.outputs.rewrite import LiveFile
from torchlake.outputs.target import (
    Change,
    CommitUnknown,
    Conflict,
    Logged,
    Target,
    TargetOptions,
    check_existing,
    check_partitions,
    reads_log,
)
from torchlake.outputs.targets import _iceberg_files as files
from torchlake.outputs.targets._iceberg_snapshot import (
    COMMIT,
    IcebergSnapshot,
    commit_of,
    data_folder,
    mark_of,
    root_of,
)
from torchlake.outputs.targets._iceberg_tables import (
    add_columns,
    check_features,
    checked_spec,
    create_table,
    refusal,
    single_attempt,
)
from torchlake.outputs.targets._schemas import check_fit, iceberg_schema, widened
from torchlake.storage.errors import first_line
from torchlake.storage.folders import folder_at
from torchlake.tables.sources._catalogs import TableName, catalog_errors, opened_catalog, parse_name
from torchlake.tables.sources.files import local_path

POSITION = "torchlake.position."
PREPARE_ATTEMPTS = 20


@reads_log
@dataclass(kw_only=True)
class IcebergTarget:
    """A table of a catalog as an output."""

    name: TableName
    options: TargetOptions
    table: Any
    "The table as it was when the job began; None if there was none."
    catalog: str
    "The address of the catalog, and its warehouse."
    reusable: bool = False
    staged: bool = False

    @property
    def shown(self) -> str:
        """The table's name."""
        return self.name.name

    @property
    def root(self) -> str:
        """The table's location; empty before there is a table."""
        return "" if self.table is None else root_of(self.table)

    @property
    def address(self) -> str:
        """The table's location; before there is one, its name and its catalog."""
        return self.root or f"{self.name.name} {self.catalog}"

    @property
    def partition_by(self) -> tuple[str, ...]:
        """The partition columns of the table, else the requested ones."""
        return self.options.partition_by if self.table is None else checked_spec(self.shown, self.table)

    def snapshot(self) -> IcebergSnapshot:
        """Return the newest version."""
        from pyiceberg.exceptions import NoSuchTableError

        try:
            with catalog_errors(self.name), opened_catalog(self.name) as catalog:
                try:
                    return IcebergSnapshot(table=catalog.load_table(self.name.table))
                except NoSuchTableError:
                    return IcebergSnapshot(table=None)
        except TableError as error:
            raise StorageError(f"{error} Finished work is kept.") from error

    def table_id(self, snapshot: IcebergSnapshot) -> str:
        """Return the uuid of the table."""
        return "" if snapshot.table is None else str(snapshot.table.metadata.table_uuid)

    def prepare(self, schema: pa.Schema) -> None:
        """Create the table, or add the columns that it lacks, if asked."""
        # After a conflict the table is loaded again: another job may have created it, or added the same columns.
        rows, problem = _stored(schema), ""
        for _ in range(PREPARE_ATTEMPTS):
            table = self.snapshot().table
            known = [] if table is None else table.schema().column_names
            missing = pa.schema([field for field in rows if field.name not in known])
            if table is not None and not (missing.names and self.options.add_columns):
                self.table = table
                return
            with opened_catalog(self.name) as catalog:
                try:
                    if table is None:
                        create_table(catalog, self.name, rows, self.options.partition_by)
                    else:
                        add_columns(catalog, table, missing)
                except (Conflict, CommitUnknown) as error:
                    problem = str(error)
            failpoint("table.prepared")
        raise StorageError(f"{self.shown}: the table cannot be prepared: {problem}. Run the same command again.")

    def part_folder(self, commit: str, schema: pa.Schema) -> PartFolder:
        """Return a folder of this commit and this table, below the table's data."""
        known = files.schema_to_arrow(self.table, ids=True)
        fields = [known.field(one.name) if one.name in known.names else one for one in _stored(schema)]
        location = local_path(data_folder(self.table, commit), literal=True)
        return PartFolder(location=location, schema=pa.schema(fields), statistics=True)

    def check(self, snapshot: IcebergSnapshot, schema: pa.Schema, key: str | None) -> None:
        """Raise OutputError if the table has rows that the mode does not replace, or has other columns."""
        rows, table = iceberg_schema(schema), snapshot.table
        if table is not None:
            check_features(self.shown, table)
        columns = self.options.partition_by if table is None else checked_spec(self.shown, table)
        check_partitions(self.shown, columns, rows, options=self.options, key=key, cannot=_cannot_partition)
        if table is None:
            return
        check_existing(self.shown, columns, options=self.options, has_rows=lambda: files.has_rows(table))
        identifiers = table.schema().identifier_field_names()
        there = pa.schema(
            [one.with_nullable(one.nullable and one.name not in identifiers) for one in files.schema_to_arrow(table)]
        )
        check_fit(self.shown, widened(rows, there), there, add_columns=self.options.add_columns)

    def has(self, snapshot: IcebergSnapshot, commit: str, record: Mapping[str, Any] | None = None) -> bool:
        """Return whether the table or an object beside it names the commit.

        With its record: whether the table also has just its files, and no deleted rows.
        """
        table = snapshot.table
        if table is None:
            return False
        if table.properties.get(COMMIT) != commit and folder_at(root_of(table)).content(mark_of(table, commit)) is None:
            return False
        if record is None:
            return True
        folder = data_folder(table, commit)
        return snapshot.paths == {f"{folder}/{part['name']}" for part in record["parts"]} and not files.has_deletes(
            table
        )

    def lost(self, snapshot: IcebergSnapshot, commit: str) -> bool | None:
        """Return whether no row of a commit is in the table any more; None if it has no file, and that is unclear."""
        made = [one for one in snapshot.table.snapshots() if commit_of(one) == commit]
        if files.was_rolled_back(snapshot.table, made):
            return True
        record = read_record(cast(Target, self), commit)
        if record is None or not record["parts"] or self.live(snapshot, record):
            return False
        if not snapshot.paths:
            return True
        if not made:
            return None

        def replaced_all(one: Any) -> bool:
            commit = commit_of(one)
            other = None if commit is None else read_record(cast(Target, self), commit)
            return other is not None and other.get("mode") == "overwrite"

        return True if files.were_deleted(snapshot.table, {one.snapshot_id for one in made}, replaced_all) else None

    def commits(self, snapshot: IcebergSnapshot) -> list[str]:
        """Return the commits whose records are kept."""
        root = "" if snapshot.table is None else root_of(snapshot.table)
        return [one for one in stored_commits(root) if self.has(snapshot, one)] if root else []

    def live(self, snapshot: IcebergSnapshot, record: Mapping[str, Any]) -> set[str]:
        """Return the parts that the current snapshot still lists."""
        if snapshot.table is None:
            return set()
        folder = data_folder(snapshot.table, record["commit"])
        return {part["name"] for part in record["parts"] if f"{folder}/{part['name']}" in snapshot.paths}

    def paths(self, snapshot: IcebergSnapshot) -> Collection[str]:
        """Return the files with rows."""
        return snapshot.paths

    def live_files(self, snapshot: IcebergSnapshot) -> list[LiveFile]:
        """Return the files of this snapshot. Raises OutputError if a reader needs more than the files."""
        return [] if snapshot.table is None else files.replaceable_files(snapshot.table, self.shown)

    def logged(self, snapshot: IcebergSnapshot) -> Mapping[str, Logged]:
        """Return the counts, bounds and partitions in the manifests."""
        return {} if snapshot.table is None else files.logged(snapshot.table)

    def position(self, snapshot: IcebergSnapshot, name: str) -> int | None:
        """Return the number in the property of this name."""
        text = None if snapshot.table is None else snapshot.table.properties.get(f"{POSITION}{name}")
        return None if text is None else int(text)

    def commit(self, snapshot: IcebergSnapshot, change: Change) -> Mapping[str, Any]:
        """Make one snapshot on top of this one; see the module's docstring."""
        table = snapshot.table
        # A table that was dropped and created again has other field ids, which are in the parts' files: its readers
        # would find other columns under them, or nothing.
        if table is None or table.metadata.table_uuid != self.table.metadata.table_uuid:
            raise OutputError(f"{self.shown}: the table was dropped during the job. Run the same command again.")
        if checked_spec(self.shown, table) != self.partition_by:
            raise OutputError(
                f"{self.shown}: the table's partitions were changed during the job. Run the same command again."
            )
        # The property names one commit only. The mark of the previous one is written before it is replaced: with a
        # crash in between it is known twice, in the other order not at all, and its job would add its rows again.
        previous = table.properties.get(COMMIT)
        if previous is not None and previous != change.id:
            folder_at(root_of(table)).write(mark_of(table, previous), b"", site="commit.mark")
        positions = {f"{POSITION}{name}": str(number) for name, number in change.positions.items()}
        with opened_catalog(self.name) as catalog:
            attempt, transaction = single_attempt(catalog, table)
            try:
                # Property and snapshot are one transaction, so a commit is never known without its rows. The summary
                # has the id too, by which `has` notices that the snapshot was rolled back.
                transaction.set_properties({COMMIT: change.id, **positions})
                _stage(table, change, transaction.update_snapshot(snapshot_properties={COMMIT: change.id}))
            except OSError as error:
                raise StorageError(f"{self.shown}: {first_line(error)}. Run the same command again.") from error
            except Exception as error:  # from pyiceberg, which makes the manifests
                raise refusal(self.shown, error) from error
            try:
                transaction.commit_transaction()
            except Conflict:
                # Each refused attempt has written manifests that no snapshot lists. After an unclear answer they stay,
                # because the snapshot may exist.
                attempt.discard(self.snapshot().table)
                raise
        return change.record


def recognizes(output: str, format: str | None) -> bool:
    """Return whether `output` is the name of an Iceberg table."""
    return format in (None, "iceberg") and (output.startswith("iceberg:") or parse_name(output) is not None)


def open_target(output: str, options: TargetOptions) -> IcebergTarget:
    """Return the table of this name, which need not exist yet; its namespace must.

    Raises UsageError if it is not the name of a table, TableError when the catalog cannot be read.
    """
    name = parse_name(output)
    assert name is not None, "called only for recognized names"
    if not name.catalog:
        raise UsageError(f"{output}: a metadata file cannot be written to; give iceberg:catalog.namespace.table.")
    if name.ref is not None:
        raise UsageError(f"{output}: a snapshot cannot be written to; give the table without @{name.ref}.")
    with catalog_errors(name), opened_catalog(name) as catalog:
        namespace = name.table.rpartition(".")[0]
        if not namespace or not catalog.namespace_exists(namespace):
            raise OutputError(
                f"{output}: the catalog {name.catalog!r} has no namespace {namespace!r}. Create it: "
                f"pyiceberg --catalog {name.catalog} create namespace {namespace or 'NAME'}"
            )
        address = f"{catalog.properties.get('uri')} {catalog.properties.get('warehouse')}"
    target = IcebergTarget(name=name, options=options, table=None, catalog=address)
    target.table = target.snapshot().table
    return target


def open_dataset(output: str) -> Any:
    """Return the current rows as a pyarrow dataset. Raises OutputError if there is no table or Arrow cannot read it."""
    target = open_target(output, TargetOptions())
    if target.table is None:
        raise OutputError(f"{output}: the table does not exist yet.")
    return files.dataset(target.table, target.shown)


def _stored(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_nullable(True) for field in iceberg_schema(schema)])


def _cannot_partition(kind: pa.DataType) -> bool:
    return bool(pa.types.is_nested(kind) or pa.types.is_floating(kind) or pa.types.is_binary(kind))


def _stage(table: Any, change: Change, update: Any) -> None:
    """Write the manifests of a snapshot with the change."""
    folder, removed = data_folder(table, change.id), {*change.removed}
    replaces = change.mode in ("overwrite", "replace-where")
    with update.overwrite() if replaces else update.fast_append() as producer:
        for part in (*change.files, *change.kept):
            producer.append_data_file(files.data_file(table, f"{folder}/{part.name}", part))
        for file in files.live_files(table) if replaces else ():
            if change.mode == "overwrite" or file.file_path in removed:
                producer.delete_data_file(file)
