"""Where checkpoint files are stored: a draft of a checkpoint, and the store in a folder.

    step_00000120/   model*.safetensors  optimizer*.safetensors  state.json  manifest.json
    best/step_00000080/   model*.safetensors  manifest.json

A folder checkpoint is built under a hidden name that all ranks share, and one rename makes it visible. A crash leaves a
`.tmp`. In an external store the rename, and each other change of what is visible, is made under a lock, and only while
run.json names this launch (`location.py`). `object_store.py` is the store without rename. Names in a store are those of
checkpoints (`step_00000120`, `best/step_00000080`) or of files in them.
"""

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchlake import atomic_io
from torchlake.errors import LeaseLost, StorageError
from torchlake.failpoints import failpoint
from torchlake.storage.lease import lock_in_time

if TYPE_CHECKING:
    from torchlake.checkpoints.location import CheckpointStore

STATE = "state.json"
BEST = "best"
TORN = ".torn"
RUN = "run.json"
"The file that states which run the checkpoints of an external store belong to."
LOCK = f".{RUN}.lock"
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
"Errors of file systems that have no locks."

Files = Mapping[str, Mapping[str, Any]]
"Files by name, each with its `bytes` and `sha256`."


class Owner(NamedTuple):
    """What an external store says about its run."""

    belongs: Mapping[str, Any] | None
    "What identifies the run; None if the file is damaged."
    attempt: str | None
    "The launch that may write."
    found: Any = None
    "What the store needs to replace exactly this."


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A checkpoint that is being written, as one rank sees it."""

    store: "CheckpointStore"
    "The store that it is for."
    name: str
    "Its name in the store."
    site: str
    "Its prefix in names of failpoints."
    attempt: str
    "The launch that writes it; the same on all its ranks."
    rank: int = 0
    world_size: int = 1

    @property
    def path(self) -> Path:
        """Its final path on disk."""
        return self.store.path(self.name)

    @property
    def staging(self) -> Path:
        """The hidden folder in which it is built."""
        return self.path.with_name(f".{self.path.name}.{self.attempt}.tmp")

    def rank_manifest(self, rank: int) -> Path:
        """Return the list of files that a rank wrote."""
        return self.staging / f".rank_{rank:05d}.json"


@dataclass(frozen=True)
class FolderStore:
    """A folder that all ranks can reach. Messages show a store as `str` gives it."""

    root: Path
    external: bool = False
    "Whether it is outside the run folder, so that other runs may use it."

    def __str__(self) -> str:
        return str(self.root)

    def path(self, name: str) -> Path:
        """Return the local path for a name."""
        return self.root / name

    def upload(self, draft: Draft, files: Files) -> None:
        """Move this rank's `files` and its manifest out of the draft's staging folder. Raises StorageError."""
        # Nothing to do: files are written in place.

    def rank_manifests(self, draft: Draft) -> list[dict[str, Any]]:
        """Return the manifest of each rank, in order, once all have uploaded."""
        return [atomic_io.read_json(draft.rank_manifest(rank)) for rank in range(draft.world_size)]

    def commit(self, draft: Draft, manifest: dict[str, Any], mine: Files) -> None:
        """Make a draft visible by its manifest; `mine` are this rank's files. Raises StorageError, OSError."""
        # The folder is complete, with its manifest synced, before the rename gives it a name that is looked for. After
        # a crash before that, the next start removes the hidden folder.
        atomic_io.remove(draft.rank_manifest(rank) for rank in range(draft.world_size))
        atomic_io.write_json(draft.staging / atomic_io.MANIFEST, manifest, site=f"{draft.site}.manifest")
        failpoint(f"{draft.site}.rename")
        with self._changing(draft.attempt):
            # The name exists only if this step was trained before, with equal content.
            atomic_io.remove([draft.path])
            os.rename(draft.staging, draft.path)
            atomic_io.sync_folder(draft.path.parent)
        failpoint(f"{draft.site}.verify")
        # The caller prunes older checkpoints after this. A disk that acknowledged writes without keeping them is found
        # while there is still an older checkpoint to continue from.
        _verify_files(draft.path, manifest["files"], mine)

    def list_complete(self, within: str = "") -> list[str]:
        """Return the names of the visible checkpoints, oldest first; those of best models if `within` is BEST."""
        folders = [path for path in (self.root / within).glob("step_*") if path.is_dir()]
        return sorted(path.relative_to(self.root).as_posix() for path in folders if not path.name.endswith(TORN))

    def read_state(self, name: str) -> Any:
        """Return the state of a visible checkpoint."""
        return atomic_io.read_json(self.root / name / STATE)

    def read_manifest(self, name: str) -> Any:
        """Return the manifest of a visible checkpoint."""
        return atomic_io.read_json(self.root / name / atomic_io.MANIFEST)

    def delete(self, name: str, attempt: str) -> None:
        """Delete a checkpoint; a half-deleted one is not visible. Raises StorageError, OSError.

        Like `commit`, `remove_incomplete` and `set_aside` it raises LeaseLost unless the launch `attempt` still is the
        writer of an external store; in the run folder, its callers hold the lock of that.
        """
        path = self.root / name
        # A crash during the deletion must not leave a folder that looks like a corrupt checkpoint.
        leaving = atomic_io.temporary_path(path)
        with self._changing(attempt):
            os.replace(path, leaving)
        atomic_io.remove([leaving])

    def remove_incomplete(self, attempt: str) -> None:
        """Remove what crashes left of this run; no rank may be writing."""
        with self._changing(attempt):
            atomic_io.remove([*self.root.glob(".*.tmp"), *(self.root / BEST).glob(".*.tmp")])

    def fetch(self, name: str, kind: str = "") -> Path:
        """Return a local folder with those files of a checkpoint whose names begin with `kind`, verified.

        Raises DataError naming a file that is missing or corrupt, UnsafeError for a name that leads out.
        """
        atomic_io.check_manifest(self.root / name, kind=kind)
        return self.root / name

    def delete_fetched(self) -> None:
        """Delete fetched copies."""
        # This store copies nothing.

    def set_aside(self, name: str, attempt: str) -> str:
        """Hide a corrupt checkpoint without deleting it; return where it is listed, or its new name."""
        path = self.root / name
        torn = path.with_name(path.name + TORN)
        with self._changing(attempt):
            atomic_io.remove([torn])
            os.replace(path, torn)
        return torn.name

    def has_corrupt(self) -> bool:
        """Return whether any corrupt checkpoint was set aside."""
        return any(self.root.glob(f"*{TORN}"))

    def is_used(self) -> bool:
        """Return whether it holds anything besides RUN."""
        return self.root.is_dir() and any(RUN not in entry.name for entry in self.root.iterdir())

    def read_owner(self) -> Owner | None:
        """Return whose it is; None if it is new. Raises DataError, StorageError."""
        path = self.root / RUN
        if not path.exists():
            return None
        run = atomic_io.read_json(path)
        if not isinstance(run, dict):
            return Owner(None, None)
        # Whether it is used, because that decides whether it may become another run's.
        return Owner(run.get("belongs"), run.get("attempt"), self.is_used())

    def write_owner(self, before: Owner | None, belongs: Mapping[str, Any], attempt: str) -> bool:
        """Replace `before`; return False, having written nothing, if it has changed. Raises StorageError."""
        run = {"format": 1, "belongs": dict(belongs), "attempt": attempt}
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with self._locked():
                if self.read_owner() != before:
                    return False
                atomic_io.write_json(self.root / RUN, run, site="checkpoint.claim")
        except OSError as error:
            raise atomic_io.storage_error(error, self.root) from error
        return True

    @contextmanager
    def _changing(self, attempt: str) -> Iterator[None]:
        """Hold the lock for a change of what is visible. Raises LeaseLost unless `attempt` is the writer."""
        with self._locked():
            check_owner(self, attempt)
            yield

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of an external store. Raises Locked when its holder seems to be stopped."""
        if not self.external:
            yield
            return
        with open(self.root / LOCK, "ab") as file:
            try:
                lock_in_time(file.fileno(), self.root)
            except OSError as error:
                # Some network file systems have no locks. What is read right before the change has to do there.
                if error.errno not in NO_LOCKS:
                    raise
            yield


def step_name(step: int) -> str:
    """Return the name of checkpoint `step` in its store."""
    return f"step_{step:08d}"


def check_owner(store: "CheckpointStore", attempt: str) -> Owner:
    """Return whose a store is. Raises LeaseLost unless `attempt` is the launch that an external one belongs to."""
    owner = store.read_owner() if store.external else Owner({}, attempt)
    if owner is None or owner.belongs is None or owner.attempt != attempt:
        raise LeaseLost(
            f"{store}: another process has taken this run over, or {RUN} was deleted there. Nothing more of this run "
            "is saved."
        )
    return owner


def _verify_files(path: Path, files: Files, mine: Files) -> None:
    """Raise StorageError unless every file exists with its size, and this rank's own files with their sha256."""
    for name, expected in files.items():
        file = path / name
        size = file.stat().st_size if file.is_file() else None
        if size != expected["bytes"] or (name in mine and atomic_io.size_and_sha256(file) != expected):
            raise StorageError(f"{file}: differs when read back right after writing. The disk is failing.")
