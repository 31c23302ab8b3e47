"""Delta tables: the parts are files of the table, and one entry of its log makes them visible.

Parts are uploaded into a folder of the table that the log does not list. The commit adds them all in one transaction
with an application id that the log keeps; Delta's own conflict check refuses a second transaction with the same id. A
transaction is only made on top of the newest version, without retries inside the library: if the library retried an
overwrite by itself, rows that another writer added meanwhile would stay in the table. Cost: one log entry.
"""

import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote

import pyarrow as pa

from torchlake.errors import OutputError, UsageError, need_library
from torchlake.outputs.parts import PartFolder
from torchlake.outputs.records import read_record, stored_commits
from torchlake.outputs.rewrite import LiveFile
from torchlake.outputs.target import (
    Change,
    Conflict,
    Logged,
    Target,
    TargetOptions,
    check_existing,
    check_partitions,
    files_of,
    reads_log,
    refuse_object,
)
from torchlake.outputs.targets._delta_history import is_lost
from torchlake.outputs.targets._delta_rules import check_rules, commit_error
from torchlake.outputs.targets._delta_snapshot import KEPT_COMMITS, DeltaSnapshot
from torchlake.outputs.targets._schemas import check_fit, check_nulls, delta_schema
from torchlake.storage.errors import first_line, library_errors, storage_failure
from torchlake.storage.objects import RETRIES, RETRY_S
from torchlake.storage.urls import EXTRAS, is_url, object_store_options, quoted
from torchlake.tables.sources import delta as source
from torchlake.tables.sources.files import local_path

APP = "torchlake"


@reads_log
@dataclass(frozen=True, kw_only=True)
class DeltaTarget:
    """A Delta table as an output."""

    shown: str
    root: str
    options: TargetOptions
    partition_by: tuple[str, ...]
    required: frozenset[str] = frozenset()
    "The table's NOT NULL columns."
    reusable: bool = False
    staged: bool = False

    @property
    def address(self) -> str:
        """The root."""
        return self.root

    def snapshot(self) -> DeltaSnapshot:
        """Return the newest version."""
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError, TableNotFoundError

        with library_errors(self.shown):
            try:
                return DeltaSnapshot(table=DeltaTable(quoted(self.root), storage_options=self._storage))
            except TableNotFoundError:
                return DeltaSnapshot(table=None)
            except (DeltaError, OSError, ValueError) as error:
                raise storage_failure(self.shown, f"the Delta table cannot be opened: {error}") from error

    def table_id(self, snapshot: DeltaSnapshot) -> str:
        """Return the id in the metadata of the table."""
        return "" if snapshot.table is None else str(snapshot.table.metadata().id)

    def prepare(self, schema: pa.Schema) -> None:
        """Do nothing: a table is created at its first commit."""

    def part_folder(self, commit: str, schema: pa.Schema) -> PartFolder:
        """Return a folder of this commit, in the table; a part with null in a NOT NULL column cannot be written."""
        fields = [field.with_nullable(field.name not in self.required) for field in delta_schema(schema)]
        location = f"{self.root.rstrip('/')}/{APP}-{commit[:16]}"
        return PartFolder(location=location, schema=pa.schema(fields), statistics=True)

    def check(self, snapshot: DeltaSnapshot, schema: pa.Schema, key: str | None) -> None:
        """Raise OutputError if the table has rows that the mode does not replace, or has other columns."""
        schema = delta_schema(schema)
        check_partitions(
            self.shown,
            self.partition_by,
            schema,
            options=self.options,
            key=key,
            cannot=lambda kind: pa.types.is_nested(kind) or pa.types.is_binary(kind),
        )
        table = snapshot.table
        if table is None:
            refuse_object(self.root)
            return
        check_rules(self.shown, table, self.options.mode)
        check_existing(self.shown, table.metadata().partition_columns, options=self.options, has_rows=table.file_uris)
        there = pa.schema(table.schema().to_arrow())
        if self.options.mode == "overwrite":  # it replaces the columns too, but does not weaken them
            check_nulls(self.shown, schema, there)
        else:
            check_fit(self.shown, schema, there, add_columns=self.options.add_columns)

    def has(self, snapshot: DeltaSnapshot, commit: str, record: Mapping[str, Any] | None = None) -> bool:
        """Return whether the log has the transaction of this commit and, with its record, lists just its files."""
        if snapshot.table is None or snapshot.table.transaction_version(f"{APP}-{commit}") is None:
            return False
        if record is None:
            return True
        files = {f"{APP}-{commit[:16]}/{part['name']}" for part in record["parts"]}
        return files == set(snapshot.paths) and not snapshot.deleted

    def lost(self, snapshot: DeltaSnapshot, commit: str) -> bool | None:
        """Return whether no row of a commit is in the table any more; None if it has no file, and that is unclear."""
        record = read_record(cast(Target, self), commit)
        if record is None or not record["parts"] or self.live(snapshot, record):
            return False
        if not snapshot.paths:
            return True
        made = next((int(one["version"]) for one in snapshot.history if one.get(KEPT_COMMITS) == commit), None)
        return True if made is not None and is_lost(snapshot.history, made, self._adds_only) else None

    def _adds_only(self, entry: Mapping[str, Any]) -> bool:
        """Return whether an entry of the log that adds rows did nothing else; replace-where rewrites other rows."""
        commit = entry.get(KEPT_COMMITS)
        record = None if commit is None else read_record(cast(Target, self), str(commit))
        return commit is None or (record is not None and record.get("mode") in ("create", "append"))

    def commits(self, snapshot: DeltaSnapshot) -> list[str]:
        """Return the commits whose records are kept."""
        return [one for one in stored_commits(self.root) if self.has(snapshot, one)]

    def live(self, snapshot: DeltaSnapshot, record: Mapping[str, Any]) -> set[str]:
        """Return the parts that the log still lists."""
        folder = f"{APP}-{record['commit'][:16]}/"
        return {path.removeprefix(folder) for path in snapshot.paths if path.startswith(folder)}

    def paths(self, snapshot: DeltaSnapshot) -> Collection[str]:
        """Return the files with rows."""
        return snapshot.paths

    def live_files(self, snapshot: DeltaSnapshot) -> list[LiveFile]:
        """Return the files of this version. Raises OutputError for deletion vectors, which a removal must name."""
        if snapshot.deleted:
            raise OutputError(
                f"{self.shown}: has files with deletion vectors, in which rows cannot be replaced. Apply the vectors "
                "first (REORG TABLE ... APPLY (PURGE))."
            )
        return files_of(self.logged(snapshot), partial(source.file_at, self.root))

    def logged(self, snapshot: DeltaSnapshot) -> Mapping[str, Logged]:
        """Return the statistics and partitions in the log."""
        return snapshot.logged

    def position(self, snapshot: DeltaSnapshot, name: str) -> int | None:
        """Return the position, which is stored as the version of a transaction with this name."""
        if snapshot.table is None:
            return None
        found: int | None = snapshot.table.transaction_version(name)
        return found

    def commit(self, snapshot: DeltaSnapshot, change: Change) -> Mapping[str, Any]:
        """Make one transaction on top of this version."""
        from deltalake import CommitProperties, DeltaTable, Transaction
        from deltalake.transaction import AddAction, RemoveAction

        table, schema = snapshot.table, change.schema
        try:
            if table is None:
                # Create an empty table first. If two writers created it together with their files, both would succeed:
                # "ignore" makes the second one do nothing, without an error. The Conflict leads to the next attempt,
                # which adds the files to whichever table exists.
                DeltaTable.create(
                    quoted(self.root),
                    schema,
                    mode="ignore",
                    partition_by=[*self.partition_by] or None,
                    storage_options=self._storage,
                )
                raise Conflict(f"{self.shown}: the table was created")
            missing = [field for field in schema if field.name not in table.schema().to_arrow().names]
            if missing and self.options.mode != "overwrite":
                from deltalake import Schema

                # This makes a separate version, because a transaction that appends does not change the schema. The
                # table is then newer than the snapshot, so the next attempt adds the files.
                table.alter.add_columns([*Schema.from_arrow(pa.schema(missing)).fields])
                raise Conflict(f"{self.shown}: columns were added")
            # Delta's conflict check refuses a transaction whose application id another one has used since the snapshot.
            # The id of this commit guards against adding its rows twice, and a position against a second job that adds
            # the same versions of a source.
            apps = [Transaction(f"{APP}-{change.id}", 1), *(Transaction(*one) for one in change.positions.items())]
            folder, now = f"{APP}-{change.id[:16]}", int(time.time() * 1000)
            added = [
                AddAction(f"{folder}/{one.name}", one.bytes, dict(one.partition), now, True, one.statistics)
                for one in (*change.files, *change.kept)
            ]
            table.create_write_transaction(
                [*added, *(RemoveAction(path, True, now) for path in change.removed)],
                "overwrite" if change.mode == "overwrite" else "append",
                schema,
                partition_by=[*self.partition_by] or None,
                # No retries in the library: it would repeat the same removals and additions on a newer version without
                # the checks of `_commit`, and rows that another writer added would survive an overwrite.
                commit_properties=CommitProperties(
                    custom_metadata={KEPT_COMMITS: change.id}, max_commit_retries=0, app_transactions=apps
                ),
            )
        except Conflict:
            raise
        except Exception as error:  # deltalake raises plain ones, too
            raise commit_error(self.shown, error) from error
        return change.record

    @property
    def _storage(self) -> dict[str, str] | None:
        options = object_store_options(self.root)
        if options is None:
            return None
        # With conditional puts two writers cannot both create the same entry of the log on S3. Without them delta-rs
        # needs a lock table in DynamoDB.
        retries = {"max_retries": str(RETRIES), "retry_timeout": f"{RETRY_S:.0f}s"}
        return {**options, **retries, "aws_conditional_put": "etag"}


def recognizes(output: str, format: str | None) -> bool:
    """Return whether `output` is a folder with a `_delta_log`, or `format` asks for one."""
    if format is not None or (is_url(output) and output.partition("://")[0] not in EXTRAS):
        return format == "delta"
    return source.recognizes(output)


def open_target(output: str, options: TargetOptions) -> DeltaTarget:
    """Return the table at a path or URL, which need not exist yet."""
    need_library("deltalake", "delta", f"{output}: a Delta table")
    text = local_path(output)
    if source.names_version(text):
        raise UsageError(f"{output}: a version of a table cannot be written to; give the table without @v.")
    root = text.rstrip("/") if is_url(text) else os.path.realpath(os.path.expanduser(text))
    if unquote(root) != root or "\\" in root:  # its library opens the log of another name
        raise UsageError(f"{output}: a Delta table cannot have % or a backslash in its path. Give another path.")
    if not is_url(root) and Path(root).exists() and not Path(root).is_dir():
        raise OutputError(f"{root}: is a file; an output is a folder. Give another output.")
    if not is_url(root) and Path(root).is_dir() and any(Path(root).iterdir()) and not source.recognizes(root):
        _refuse_other_files(Path(root))
    target = DeltaTarget(shown=root, root=root, options=options, partition_by=options.partition_by)
    table = target.snapshot().table
    if table is None:
        return target
    required = frozenset(field.name for field in table.schema().fields if not field.nullable)
    return replace(target, partition_by=tuple(table.metadata().partition_columns), required=required)


def open_dataset(output: str) -> Any:
    """Return the table's current rows as a pyarrow dataset. Raises StorageError when it cannot be read."""
    from deltalake.exceptions import DeltaError

    target = open_target(output, TargetOptions(format="delta"))
    table = target.snapshot().table
    if table is None:
        raise OutputError(f"{output}: there is no Delta table yet.")
    try:
        return _without_statistics(table)
    except DeltaError as error:
        raise OutputError(
            f"{output}: cannot be opened as a pyarrow dataset: {first_line(error)}. Read it with DuckDB (delta_scan) "
            "or Spark."
        ) from error


def _without_statistics(table: Any) -> Any:
    """Return delta-rs' dataset without its filters by statistics, which take missing ones for null and lose rows."""
    import pyarrow.dataset as ds

    dataset = table.to_pyarrow_dataset()
    actions = pa.table(table.get_add_actions()).to_pylist() if table.file_uris() else []
    partitions = {_plain(one["path"]): one.get("partition") or {} for one in actions}
    fragments = []
    for one in dataset.get_fragments():
        chosen = ds.scalar(True)
        for name, value in partitions[_plain(one.path)].items():
            same = ds.field(name).is_null() if value is None else ds.field(name) == value
            chosen = chosen & same
        fragments.append(one.format.make_fragment(one.path, one.filesystem, partition_expression=chosen))
    if not fragments:
        return dataset
    return ds.FileSystemDataset(fragments, dataset.schema, fragments[0].format, fragments[0].filesystem)


def _plain(path: str) -> str:
    """Return the path of a file as it is: actions and fragments have it encoded a different number of times."""
    while (decoded := unquote(path)) != path:
        path = decoded
    return path


def _refuse_other_files(root: Path) -> None:
    """Raise OutputError for a folder with files other than those of an interrupted first write."""
    others = [one.name for one in root.iterdir() if not one.name.startswith(("_torchlake", f"{APP}-", "_delta_log"))]
    if others:
        raise OutputError(
            f"{root}: is not a Delta table, and holds other files ({', '.join(sorted(others)[:3])}). Give another "
            "output."
        )
