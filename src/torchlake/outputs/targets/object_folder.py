"""Parquet folders in an object store: parts below a name that no reader lists, and one conditional put that commits.

    URL/_torchlake/parts/<commit>/*.parquet     never replaced
    URL/_torchlake/commit.json                  the commit record; it alone determines which parts are in the output

An object store has no rename, so a reader goes through the record: `torchlake.open`, `predict`, `verify`. The record is
created only if there is none, or replaced only if it is the one that this writer has read.

Object stores have no conditional delete. So the parts of a commit are in its own folder, its id is never used again (it
depends on the commit before), and a writer deletes only after its commit, and only in the folders of commits that can
no longer be made: its own, the one that it replaced and the interrupted one that it discarded. If a writer is suspended
before it deletes, it cannot remove what its successors list. Cost: one request per part, and a few per commit.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from torchlake import atomic_io
from torchlake.errors import DataError, OutputError, UsageError
from torchlake.outputs.parts import PartFolder
from torchlake.outputs.target import (
    FOLDER_HINT,
    STATE,
    Change,
    Conflict,
    TargetOptions,
    refuse_object,
    refuse_table_options,
)
from torchlake.redaction import redacted
from torchlake.storage.folders import folder_at
from torchlake.storage.objects import Found, ObjectFolder
from torchlake.storage.urls import EXTRAS, is_url
from torchlake.tables.record import COMMIT, PARTS, is_record, recorded_schema


@dataclass(frozen=True, kw_only=True)
class FolderSnapshot:
    """A folder at one version; both fields are None before the first commit."""

    found: Found | None
    record: dict[str, Any] | None
    "The commit record, which `found` has as JSON."

    @property
    def version(self) -> str:
        """The id of the commit; empty before the first one."""
        return "" if self.record is None else str(self.record["commit"])

    @property
    def latest(self) -> str | None:
        """The same id."""
        return self.version or None


@dataclass(frozen=True, kw_only=True)
class FolderTarget:
    """A Parquet folder in an object store as an output."""

    shown: str
    root: str
    options: TargetOptions
    partition_by: tuple[str, ...] = ()
    reusable: bool = True
    staged: bool = False
    objects: ObjectFolder = field(repr=False)

    def snapshot(self) -> FolderSnapshot:
        """Return the newest version."""
        found = self.objects.read(COMMIT)
        value = None if found is None else atomic_io.parse_json(found.content, f"{self.root}/{COMMIT}")
        if value is not None and not (is_record(value) and "commit" in value):
            raise DataError(f"{self.root}/{COMMIT}: not a commit record of this version")
        return FolderSnapshot(found=found, record=value)

    def part_folder(self, commit: str, schema: pa.Schema) -> PartFolder:
        """Return the folder of all parts, with that of this commit in it."""
        return PartFolder(location=f"{self.root}/{PARTS}", below=f"{commit[:16]}/")

    def check(self, snapshot: FolderSnapshot, schema: pa.Schema, key: str | None) -> None:
        """Raise OutputError for an object, and for a folder with other objects."""
        if snapshot.found is None:
            refuse_object(self.root)
        if snapshot.found is None and (others := self._others()):
            raise OutputError(
                f"{self.shown}: holds objects that torchlake did not write, such as {others[0]}. Give another output."
            )

    def has(self, snapshot: FolderSnapshot, commit: str, record: Mapping[str, Any] | None = None) -> bool:
        """Return whether the record is of this commit; the folder has no other rows."""
        return snapshot.version == commit

    def live(self, snapshot: FolderSnapshot, record: Mapping[str, Any]) -> set[str]:
        """Return all parts of the record."""
        return {part["name"] for part in record["parts"]}

    def commit(self, snapshot: FolderSnapshot, change: Change) -> Mapping[str, Any]:
        """Create the record, or replace it if it is still that of the snapshot; then delete what it does not list."""
        positions = {"positions": dict(change.positions)} if change.positions else {}
        content = json.dumps({**change.record, **positions}, indent=1).encode()
        if not self.objects.replace(COMMIT, content, snapshot.found, site="commit"):
            raise Conflict(f"{self.shown}: another commit was made")
        # Only after the record: until then, readers and resumed jobs use what this commit replaces.
        self._clean(change, snapshot.record)
        return change.record

    def _clean(self, change: Change, replaced: Mapping[str, Any] | None) -> None:
        """Delete what this commit made obsolete."""
        before = [*([] if replaced is None else [str(replaced["commit"])]), *change.discarded]
        listed = {part.name for part in change.files}
        # Never everything that the record does not list: the parts of a writer that began after this commit are not
        # listed either. Parts that the replaced commit kept are in the folders of commits before it.
        ended = {f"{name[:16]}/" for name in (change.id, *before)}
        ended |= {f"{part['name'].partition('/')[0]}/" for part in (replaced or {}).get("parts", ())}
        parts = folder_at(f"{self.root}/{PARTS}")
        parts.delete([name for name in parts.sizes() if name[:17] in ended and name not in listed])
        self.objects.delete(f"{STATE}/commits/{name}{kind}.json" for name in before for kind in ("", ".plan"))

    def _others(self) -> list[str]:
        return sorted(name for name in self.objects.sizes() if not name.startswith(f"{STATE}/"))


def recognizes(output: str, format: str | None) -> bool:
    """Return whether `output` is a URL of an object store."""
    return format in (None, "parquet") and is_url(output) and not output.startswith("hf://")


def open_target(output: str, options: TargetOptions) -> FolderTarget:
    """Return the folder at a URL, which need not exist yet. Raises UsageError for options that it does not support."""
    if output.partition("://")[0] not in EXTRAS or "::" in output:
        raise UsageError(
            f"{redacted(output)}: cannot be written to. Give a local path, a URL of {', '.join(EXTRAS)}, a Hub dataset "
            "or the name of an Iceberg table."
        )
    refuse_table_options(output, options, kind="a Parquet folder", hint=FOLDER_HINT)
    url = output.rstrip("/")
    return FolderTarget(shown=url, root=url, options=options, objects=ObjectFolder(url))


def open_dataset(output: str) -> Any:
    """Return the committed rows as a pyarrow dataset. Raises OutputError when nothing is committed."""
    import pyarrow.dataset as ds

    from torchlake.storage.urls import filesystem_of

    target = open_target(output, TargetOptions())
    record = target.snapshot().record
    if record is None:
        raise OutputError(f"{output}: has no committed rows yet.")
    filesystem, path = filesystem_of(f"{target.root}/{PARTS}")
    files = [f"{path}/{part['name']}" for part in record["parts"]]
    return ds.dataset(files, schema=recorded_schema(record), format="parquet", filesystem=filesystem)
