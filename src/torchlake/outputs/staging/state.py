"""The state of a job beside its target: the writer's lease, the stored plan, and a folder for the logs of attempts.

For a local target it is the folder `.NAME.staging`, as for a Parquet folder. For a target in an object store, lease and
plan are objects below `_torchlake/staging`, and attempts are logged in a temporary folder of each machine: the same
task retries a chunk that kills its process, so it finds the log there.
"""

import getpass
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from torchlake import atomic_io
from torchlake.errors import DataError, OutputError
from torchlake.outputs.staging import folders as staging
from torchlake.outputs.target import STATE
from torchlake.storage.lease import Lease, acquire
from torchlake.storage.object_lease import ObjectLease, acquire_object
from torchlake.storage.objects import ObjectFolder
from torchlake.storage.urls import is_url


class JobState(Protocol):
    """The state of one target's job."""

    folder: Path
    "A folder on this machine; logs of attempts are in its folder `journal`."

    def acquire(self, lease_s: float, name: str) -> None:
        """Become the only writer. Raises Locked naming the active one, OutputError when nothing can be written."""

    def exclusive(self) -> Any:
        """Return a context in which this writer may commit. Raises LeaseLost if another one has taken over."""

    def read_plan(self) -> dict[str, Any] | None:
        """Return the plan of an interrupted job."""

    def write_plan(self, value: dict[str, Any]) -> None:
        """Store the plan, before any part is written."""

    def clear(self) -> None:
        """Remove the plan and the logs of attempts."""

    def release(self) -> None:
        """End the lease; the plan stays for the next run."""

    def finish(self) -> None:
        """End the lease and remove everything."""


class LocalState:
    """State in the folder `.NAME.staging` beside the target."""

    def __init__(self, root: Path) -> None:
        self.folder = staging.staging_of(root)
        self._lease: Lease | None = None

    def acquire(self, lease_s: float, name: str) -> None:
        staging.vacuum(self.folder)
        self._lease = acquire(self.folder, lease_s, name=name)
        (self.folder / staging.ATTEMPT_LOG).mkdir(exist_ok=True)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        assert self._lease is not None, "called between acquire and release"
        with self._lease.exclusive():
            yield

    def read_plan(self) -> dict[str, Any] | None:
        path = self.folder / staging.PLAN
        if not path.is_file():
            return None
        value: dict[str, Any] = atomic_io.read_json(path)
        return value

    def write_plan(self, value: dict[str, Any]) -> None:
        with self.exclusive():
            atomic_io.write_bytes(self.folder / staging.PLAN, json.dumps(value).encode(), site="plan")

    def clear(self) -> None:
        with self.exclusive():
            atomic_io.remove([self.folder / staging.PLAN, self.folder / staging.ATTEMPT_LOG])
            (self.folder / staging.ATTEMPT_LOG).mkdir(exist_ok=True)

    def release(self) -> None:
        if self._lease is not None:
            lease, self._lease = self._lease, None
            lease.release()

    def finish(self) -> None:
        if self._lease is not None:
            lease, self._lease = self._lease, None
            staging.remove_leased(self.folder, lease)


class StoredState:
    """State in objects below the target."""

    def __init__(self, root: str) -> None:
        self._objects = ObjectFolder(f"{root.rstrip('/')}/{STATE}/staging")
        self.folder = temporary_folder(root)
        self._lease: ObjectLease | None = None

    def acquire(self, lease_s: float, name: str) -> None:
        self._lease = acquire_object(self._objects, lease_s, name=name)
        (self.folder / staging.ATTEMPT_LOG).mkdir(parents=True, exist_ok=True)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        assert self._lease is not None, "called between acquire and release"
        self._lease.check()
        yield

    def read_plan(self) -> dict[str, Any] | None:
        content = self._objects.content(staging.PLAN)
        try:
            value: dict[str, Any] | None = None if content is None else json.loads(content)
        except ValueError as error:
            raise DataError(f"{self._objects.location}/{staging.PLAN}: not valid JSON ({error})") from None
        return value

    def write_plan(self, value: dict[str, Any]) -> None:
        self._objects.write(staging.PLAN, json.dumps(value).encode(), site="plan")

    def clear(self) -> None:
        self._objects.delete([staging.PLAN])
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / staging.ATTEMPT_LOG).mkdir(parents=True, exist_ok=True)

    def release(self) -> None:
        if self._lease is not None:
            lease, self._lease = self._lease, None
            lease.release()

    def finish(self) -> None:
        """End the lease and remove everything; the lease goes last, because without it another writer may begin."""
        if self._lease is not None:
            lease, self._lease = self._lease, None
            self._objects.delete([staging.PLAN])
            lease.release()
        shutil.rmtree(self.folder, ignore_errors=True)


def temporary_folder(name: str) -> Path:
    """Return a folder of this user on this machine, for the files of an output that is not on this machine."""
    return Path(tempfile.gettempdir()) / f"torchlake-{getpass.getuser()}" / atomic_io.fingerprint(name)[:16]


def state_of(root: str) -> JobState:
    """Return the state of the job whose target is at this path or URL."""
    if is_url(root):
        return StoredState(root)
    path = Path(root)
    if path.exists() and not path.is_dir():
        raise OutputError(f"{root}: is a file; an output is a folder. Give another output.")
    return LocalState(path)
