"""A snapshot of an Iceberg table, the commits that snapshots name, and the places of a commit's files."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torchlake import atomic_io
from torchlake.outputs.records import FOLDER
from torchlake.outputs.targets import _iceberg_files as files
from torchlake.tables.sources.files import local_path

COMMIT = "torchlake.commit"
"The property of a table, and the field of a snapshot's summary, with a commit's id."


@dataclass(frozen=True, kw_only=True)
class IcebergSnapshot:
    """A table at its current snapshot; `table` is None if there is none yet."""

    table: Any

    @property
    def version(self) -> str:
        """The snapshot's id; empty before the first one."""
        current = None if self.table is None else self.table.current_snapshot()
        return "" if current is None else str(current.snapshot_id)

    @property
    def latest(self) -> str | None:
        """The commit that the property names."""
        found: str | None = None if self.table is None else self.table.properties.get(COMMIT)
        return found

    @cached_property
    def paths(self) -> frozenset[str]:
        """The files with rows: read once, because each commit is looked for among them."""
        if self.table is None:
            return frozenset()
        gone, found = files.deleted_rows(self.table), files.live_files(self.table)
        return frozenset(one.file_path for one in found if gone.get(one.file_path) != one.record_count)


def root_of(table: Any) -> str:
    """Return the table's location."""
    return local_path(table.location().rstrip("/"), literal=True)


def mark_of(table: Any, commit: str) -> str:
    """Return the name of the object that shows that a commit was made; it differs for another table at the location."""
    return f"{FOLDER}/{commit}.{table.metadata.table_uuid}.made"


def data_folder(table: Any, commit: str) -> str:
    """Return the folder of a commit's files, as the metadata names it. It is this table's own, because of field ids."""
    data = table.properties.get("write.data.path") or f"{table.location().rstrip('/')}/data"
    name = atomic_io.digest([commit, str(table.metadata.table_uuid)])[:16]
    return f"{data.rstrip('/')}/torchlake-{name}"


def commit_of(snapshot: Any) -> str | None:
    """Return the commit that made a snapshot of pyiceberg; None if another program made it."""
    return None if snapshot.summary is None else snapshot.summary.additional_properties.get(COMMIT)
