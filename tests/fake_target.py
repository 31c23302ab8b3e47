"""An object store and a table in memory, whose every request may fail, be refused or be answered by nothing.

`FakeStore` takes the place of an obstore client: folders, leases and plans in it are written by torchlake's own code.
`FakeTarget` is a table with a log: a commit is made only on the newest version. It does not refuse a commit id that it
has: Delta and Iceberg would, and so hide a writer that commits twice.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pyarrow as pa
from obstore import exceptions

from torchlake.errors import OutputError
from torchlake.outputs.parts import PartFolder
from torchlake.outputs.records import stored_commits
from torchlake.outputs.rewrite import LiveFile
from torchlake.outputs.target import Change, CommitUnknown, Conflict, TargetOptions

REQUEST = ("error",)
UNCONDITIONAL = ("error", "lost")
"The store fails before, or answers an error although it has done it."
CONDITIONAL = ("error", "lost", "repeated", "409")
"`repeated`: the answer was lost, the client has repeated it, and the object exists. 409: refused without a reason."


class Stored(NamedTuple):
    """An object."""

    content: bytes
    version: int
    modified: float

    @property
    def meta(self) -> dict[str, Any]:
        return {"e_tag": str(self.version), "last_modified": datetime.fromtimestamp(self.modified, UTC)}

    def bytes(self) -> bytes:
        return self.content


class FakeStore:
    """Objects by path; `world` stops the writer before each request, and says what goes wrong."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.objects: dict[str, Stored] = {}
        self._versions = 0

    def put(self, path: str, content: bytes, mode: str | Mapping[str, str] | None = None) -> None:
        fault = self._request("put", path, UNCONDITIONAL if mode is None else CONDITIONAL)
        found = self.objects.get(path)
        if fault == "409":
            raise ConnectionError("status code: 409")
        if mode == "create" and found is not None:
            raise exceptions.AlreadyExistsError(path)
        if isinstance(mode, Mapping) and (found is None or found.meta["e_tag"] != mode["e_tag"]):
            raise exceptions.PreconditionError(path)
        self._versions += 1
        self.objects[path] = Stored(content, self._versions, self.world.now)
        if fault == "lost":
            raise ConnectionError("the answer was lost")
        if fault == "repeated":
            raise exceptions.PreconditionError(path) if mode != "create" else exceptions.AlreadyExistsError(path)

    def get(self, path: str) -> Stored:
        self._request("get", path, REQUEST)
        if path not in self.objects:
            raise FileNotFoundError(path)
        return self.objects[path]

    def head(self, path: str) -> dict[str, Any]:
        self._request("head", path, REQUEST)
        if path not in self.objects:
            raise FileNotFoundError(path)
        return {"size": len(self.objects[path].content)}

    def list(self, prefix: str | None) -> Iterator[list[dict[str, Any]]]:
        self._request("list", prefix or "", REQUEST)
        found = sorted((path, one) for path, one in self.objects.items() if path.startswith(f"{prefix}/"))
        yield [{"path": path, "size": len(one.content)} for path, one in found]

    def delete(self, paths: Iterable[str]) -> None:
        fault = self._request("delete", "", UNCONDITIONAL)
        for path in paths:
            self.objects.pop(path, None)
        if fault:
            raise ConnectionError("the answer was lost")

    def _request(self, kind: str, path: str, offers: tuple[str, ...]) -> str:
        fault: str = self.world.stop(f"{kind} {path.rpartition('/')[2][:8]}", offers)
        if fault == "error":
            raise ConnectionError("the store is not there")
        return fault


@dataclass(frozen=True)
class Version:
    """A table at one version."""

    number: int = 0
    files: tuple[str, ...] = ()
    "As the table names them."
    commits: tuple[str, ...] = ()
    "All that were ever made."

    @property
    def version(self) -> str:
        return str(self.number or "")

    @property
    def latest(self) -> str | None:
        return self.commits[-1] if self.commits else None


@dataclass(kw_only=True)
class FakeTarget:
    """A table at a path or a URL of the store; `versions` are shared by its writers."""

    world: Any
    root: str
    options: TargetOptions
    versions: list[Version] = field(default_factory=lambda: [Version()])
    partition_by: tuple[str, ...] = ()
    reusable: bool = False
    staged: bool = False

    @property
    def shown(self) -> str:
        return self.root

    def snapshot(self) -> Version:
        self.world.stop("target.snapshot")
        return self.versions[-1]

    def prepare(self, schema: pa.Schema) -> None:
        self.world.stop("target.prepare")

    def part_folder(self, commit: str, schema: pa.Schema) -> PartFolder:
        return PartFolder(location=f"{self.root}/{_folder(commit)}", statistics=True)

    def check(self, snapshot: Version, schema: pa.Schema, key: str | None) -> None:
        if self.options.mode == "create" and snapshot.files:
            raise OutputError(f"{self.root}: the table has rows that this job did not write.")

    def has(self, snapshot: Version, commit: str, record: Mapping[str, Any] | None = None) -> bool:
        own = None if record is None else {f"{_folder(commit)}/{part['name']}" for part in record["parts"]}
        return commit in snapshot.commits and own in (None, set(snapshot.files))

    def commits(self, snapshot: Version) -> list[str]:
        return [one for one in stored_commits(self.root) if one in snapshot.commits]

    def live(self, snapshot: Version, record: Mapping[str, Any]) -> set[str]:
        folder = f"{_folder(record['commit'])}/"
        return {path.removeprefix(folder) for path in snapshot.files if path.startswith(folder)}

    def table_id(self, snapshot: Version) -> str:
        return ""

    def lost(self, snapshot: Version, commit: str) -> bool | None:
        """It has no history."""
        return False if any(path.startswith(f"{_folder(commit)}/") for path in snapshot.files) else None

    def paths(self, snapshot: Version) -> tuple[str, ...]:
        return snapshot.files

    def live_files(self, snapshot: Version) -> list[LiveFile]:
        return [LiveFile(path=path, file=f"{self.root}/{path}", bytes=1) for path in snapshot.files]

    def logged(self, snapshot: Version) -> Mapping[str, Any]:
        """It has no statistics, and deletes no rows of a file."""
        return {}

    def position(self, snapshot: Version, name: str) -> int | None:
        return None

    def commit(self, snapshot: Version, change: Change) -> Mapping[str, Any]:
        fault = self.world.stop("target.commit", ("conflict", "unmade", "lost"))
        if fault == "unmade":
            raise CommitUnknown("no answer; it was not made")
        if fault == "conflict" or snapshot != self.versions[-1]:
            raise Conflict("another commit was made")
        removed = set(snapshot.files if change.mode == "overwrite" else change.removed)
        added = [f"{_folder(change.id)}/{part.name}" for part in (*change.files, *change.kept)]
        files = (*(path for path in snapshot.files if path not in removed), *added)
        self.versions.append(Version(snapshot.number + 1, files, (*snapshot.commits, change.id)))
        if fault == "lost":
            raise CommitUnknown("no answer; it was made")
        return change.record


def _folder(commit: str) -> str:
    return f"rows-{commit[:16]}"
