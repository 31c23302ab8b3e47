"""The state of a job beside its target: the writer's lease, the stored plan, and a folder for the logs of attempts.

For a local target it is the folder `.NAME.staging`, which also has the parts of a local folder (`folders.py`). For a
target in an object store, lease and plan are objects below `_torchlake/staging`, and attempts are logged in a temporary
folder of each machine: the same task retries a chunk that kills its process, so it finds the log there.
"""

import getpass
import json
import shutil
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torchlake import atomic_io
from torchlake.errors import OutputError, StorageError
from torchlake.outputs.staging import folders as staging
from torchlake.outputs.target import STATE, Target
from torchlake.storage.lease import Lease, acquire
from torchlake.storage.objects import ObjectFolder
from torchlake.storage.urls import is_url


class LocalState:
    """State in the folder `.NAME.staging` beside the target, which also has the parts of a `staged` one."""

    locks = True
    "Whether no other writer can begin or commit while one is in `exclusive`."

    def __init__(self, root: Path, *, staged: bool) -> None:
        self.folder = staging.staging_of(root)
        "A folder on this machine; logs of attempts are in its folder `journal`."
        self.location = str(self.folder)
        "Where the plan is."
        self.rows = str(self.folder.absolute() / staging.ROWS)
        "Where workers keep finished rows of unfinished chunks."
        self._root, self._staged = root, staged
        self._lease: Lease | None = None

    def is_left(self) -> bool:
        """Return whether an earlier writer has left something, after removing what it was removing."""
        staging.vacuum(self.folder)
        return self.folder.exists()

    def acquire(self, lease_s: float, name: str) -> None:
        """Become the only writer. Raises Locked naming the active one, OutputError when nothing can be written."""
        self._lease = acquire(self.folder, lease_s, name=name)
        # This writer may be suspended anywhere, and wake beside its successor: each change is made with the lock held.
        with self.exclusive():
            # Before anything is read at the output: a crash between the two renames leaves none there, and this job
            # would then be taken for the first one, and would not be compared with the old output.
            staging.repair(self.folder, self._root)
            if not self._has_plan:
                staging.clear_job(self.folder)

    def exclusive(self) -> AbstractContextManager[None]:
        """Return a context in which this writer may commit. Raises LeaseLost if another one has taken over."""
        assert self._lease is not None, "called between acquire and release"
        return self._lease.exclusive()

    def read_plan(self) -> dict[str, Any] | None:
        """Return the plan of an interrupted job."""
        if not self._has_plan:
            return None
        value: dict[str, Any] = atomic_io.read_json(self.folder / staging.PLAN)
        return value

    def write_plan(self, value: dict[str, Any]) -> None:
        """Store the plan, before any part is written."""
        with self.exclusive():
            if self._staged:
                staging.reopen(self.folder)
            (self.folder / staging.ATTEMPT_LOG).mkdir(exist_ok=True)
            atomic_io.write_bytes(self.folder / staging.PLAN, json.dumps(value).encode(), site="plan")

    def clear(self) -> None:
        """Remove the plan and the logs of attempts."""
        with self.exclusive():
            staging.clear_job(self.folder)

    def release(self) -> None:
        """End the lease; the plan stays for the next run."""
        # A plan means that an interrupted write is stored here: its parts may have cost hours, so only the lease ends.
        # Without a plan the folder is empty, and would stay beside the output forever.
        if not self._has_plan:
            self.finish()
        elif self._lease is not None:
            lease, self._lease = self._lease, None
            lease.release()

    def finish(self) -> None:
        """End the lease and remove everything."""
        if self._lease is not None:
            lease, self._lease = self._lease, None
            staging.remove_leased(self.folder, lease)

    @property
    def _has_plan(self) -> bool:
        return (self.folder / staging.PLAN).is_file()


class StoredState:
    """State in objects below the target; see LocalState for its methods."""

    locks = False

    def __init__(self, root: str) -> None:
        self.location = f"{root.rstrip('/')}/{STATE}/staging"
        self.rows = f"{self.location}/{staging.ROWS}"
        self._objects = ObjectFolder(self.location)
        self.folder = temporary_folder(root)
        self._lease: Lease | None = None

    def is_left(self) -> bool:
        return self._objects.content(staging.PLAN) is not None

    def acquire(self, lease_s: float, name: str) -> None:
        try:
            self._lease = acquire(self._objects, lease_s, name=name)
        except StorageError as error:
            raise OutputError(f"{name}: cannot be written: {error}") from error
        make_temporary_root(self.folder)
        (self.folder / staging.ATTEMPT_LOG).mkdir(parents=True, exist_ok=True)

    def exclusive(self) -> AbstractContextManager[None]:
        assert self._lease is not None, "called between acquire and release"
        return self._lease.exclusive()

    def read_plan(self) -> dict[str, Any] | None:
        content = self._objects.content(staging.PLAN)
        return None if content is None else dict(atomic_io.parse_json(content, f"{self.location}/{staging.PLAN}"))

    def write_plan(self, value: dict[str, Any]) -> None:
        self._objects.write(staging.PLAN, json.dumps(value).encode(), site="plan")

    def clear(self) -> None:
        self._remove()
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / staging.ATTEMPT_LOG).mkdir(parents=True, exist_ok=True)

    def release(self) -> None:
        if self._lease is not None:
            lease, self._lease = self._lease, None
            lease.release()

    def finish(self) -> None:
        if self._lease is not None:
            lease, self._lease = self._lease, None
            # Before the lease ends, because after that another writer may store its plan.
            self._remove()
            lease.release()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _remove(self) -> None:
        """Remove the plan, then the rows of chunks that were never finished."""
        self._objects.delete([staging.PLAN])
        self._objects.delete(self._objects.sizes(staging.ROWS))


JobState = LocalState | StoredState
"The state of one target's job."


def temporary_folder(name: str) -> Path:
    """Return a folder on this machine for the files of an output that is not on it; see `make_temporary_root`."""
    return _temporary_root() / atomic_io.digest(name)[:16]


def make_temporary_root(folder: Path) -> None:
    """Create the folder that all temporary folders of this user are in, if `folder` is one of them.

    Other users cannot read it. Raises StorageError if another user has made a folder or link of its name.
    """
    if folder.parent == _temporary_root():
        atomic_io.make_private_folder(folder.parent)


def _temporary_root() -> Path:
    return Path(tempfile.gettempdir()) / f"torchlake-{getpass.getuser()}"


def state_of(target: Target) -> JobState:
    """Return the state of a target's jobs."""
    if is_url(target.root):
        return StoredState(target.root)
    path = Path(target.root)
    if path.exists() and not path.is_dir():
        raise OutputError(f"{path}: is a file; an output is a folder. Give another output.")
    return LocalState(path, staged=target.staged)
