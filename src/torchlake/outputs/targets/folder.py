"""Local Parquet folders: parts wait in a staging folder beside the output, and one rename publishes them.

    plan.json first -> parts, each named by a hash of its inputs and settings -> commit.json -> one rename

Even if processes are killed, the output is the old table or the whole new one. Late workers (a speculative copy, a task
of a lost node) write by path: after the fence their path leads nowhere, so no file is added or replaced between the
last check of the parts and the rename. Cost: one fsync and rename per part.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from torchlake import atomic_io
from torchlake.errors import OutputError, StorageError
from torchlake.outputs.parts import TABLE, PartFolder
from torchlake.outputs.records import schema_fields
from torchlake.outputs.staging import folders as staging
from torchlake.outputs.target import FOLDER_HINT, Change, TargetOptions, refuse_table_options
from torchlake.storage.urls import is_url
from torchlake.tables.record import (
    COMMIT,
    FOLDER,
    PLAN,
    committed_files,
    output_path,
    read_commit,
    recorded_schema,
    sealed,
)


@dataclass(frozen=True, kw_only=True)
class LocalSnapshot:
    """A folder at one version."""

    version: str
    "The identity of the record's file, because the record has no id; empty before the first commit."

    @property
    def latest(self) -> str | None:
        """The same identity."""
        return self.version or None


@dataclass(frozen=True, kw_only=True)
class LocalFolderTarget:
    """A local folder as an output."""

    root: str
    options: TargetOptions
    partition_by: tuple[str, ...] = ()
    reusable: bool = True
    staged: bool = True

    @property
    def shown(self) -> str:
        """Its path, without links."""
        return self.root

    def snapshot(self) -> LocalSnapshot:
        """Return the version that is published now."""
        try:
            found = os.stat(f"{self.root}/{COMMIT}")
        except (FileNotFoundError, NotADirectoryError):
            return LocalSnapshot(version="")
        return LocalSnapshot(version=f"{found.st_ino}-{found.st_ctime_ns}-{found.st_size}")

    def check(self, snapshot: LocalSnapshot, schema: pa.Schema, key: str | None) -> None:
        """Raise OutputError if something other than an output is there, or something that no rename can replace."""
        out = Path(self.root)
        if not out.exists():
            if out.is_symlink():
                raise OutputError(f"{out}: is a symbolic link to itself. Give another output.")
        elif not out.is_dir():
            raise OutputError(f"{out}: is a file; an output is a folder. Give another output.")
        elif os.path.ismount(out):
            raise OutputError(
                f"{out}: is a mount point, which no rename can replace; give a folder in it: {out / 'table'}"
            )
        elif not snapshot.version and any(out.iterdir()):
            raise OutputError(
                f"{out}: holds files that torchlake did not write ({COMMIT} is missing). Give another output."
            )

    def has(self, snapshot: LocalSnapshot, commit: str, record: Mapping[str, Any] | None = None) -> bool:
        """Return whether this version is published; the folder has no other rows."""
        return snapshot.version == commit

    def part_folder(self, commit: str, schema: pa.Schema) -> PartFolder:
        """Return the folder that becomes the output."""
        return PartFolder(location=str(staging.staging_of(Path(self.root)) / TABLE))

    def live(self, snapshot: LocalSnapshot, record: Mapping[str, Any]) -> None:
        """Return None: the folder must have all parts and nothing else."""

    def commit(self, snapshot: LocalSnapshot, change: Change) -> Mapping[str, Any]:
        """Fence the staged folder, add plan and record, and exchange it with the output.

        The caller holds the lock until the rename is done. A writer that takes the lease over needs the lock, so it
        cannot begin between the check of the token and the rename. If this process is suspended here, a new writer
        gives up after LOCK_WAIT_S and names it, instead of publishing beside it.
        """
        out = Path(self.root)
        folder = staging.staging_of(out)
        try:
            fenced = staging.fence(folder)
            _keep_only(fenced, folder / staging.MEMBERS, change)
            record = sealed({**change.record, **schema_fields(pq.read_schema(fenced / change.files[0].name))})
            # Plan and record are inside before the rename, so the output never exists without them. After a crash up
            # to the rename, `reopen` moves the folder back, and the next run keeps its parts.
            (fenced / FOLDER).mkdir()
            atomic_io.write_bytes(fenced / PLAN, (folder / staging.PLAN).read_bytes(), site="commit.plan")
            atomic_io.write_json(fenced / COMMIT, record, site="commit")
            staging.publish(folder, out)
        except OSError as error:
            raise atomic_io.storage_error(error, out) from error
        return record


def _keep_only(fenced: Path, members: Path, change: Change) -> None:
    """Delete files that are not parts of this job (from late workers). Raises StorageError if a part is missing.

    Parts whose rows are in larger files are moved: if the commit is interrupted, the job continues with them.
    """
    sizes = {part.name: part.bytes for part in change.files}
    joined = {name for part in change.files for name in part.members}
    if joined:
        members.mkdir(exist_ok=True)
    for path in list(fenced.iterdir()):
        if path.name in joined:
            os.rename(path, members / path.name)
        elif path.name not in sizes:
            atomic_io.remove([path])
    for name, size in sizes.items():
        if not (fenced / name).is_file() or (fenced / name).stat().st_size != size:
            raise StorageError(f"{fenced / name}: the part is missing or truncated; run the same command again.")


def recognizes(output: str, format: str | None) -> bool:
    """Return whether `output` is a local path."""
    return format in (None, "parquet") and not is_url(output)


def open_target(output: str, options: TargetOptions) -> LocalFolderTarget:
    """Return the folder at a path, which need not exist yet. Raises UsageError for options that it does not support."""
    refuse_table_options(output, options, kind="a Parquet folder", hint=FOLDER_HINT)
    return LocalFolderTarget(root=str(output_path(output)), options=options)


def open_dataset(output: str) -> Any:
    """Return the committed rows as a pyarrow dataset. Raises TableError when it is not a finished output."""
    import pyarrow.dataset as ds

    files = [str(path) for path in committed_files(output)]
    return ds.dataset(files, schema=recorded_schema(read_commit(output)), format="parquet")
