"""One writer at a time: a lease on a staging folder, here or in an object store, with an epoch and a random token.

`lease.json` names the writer: epoch, token, process, host, and when a thread last renewed it. A lease whose process is
dead (same machine), or that was not renewed in time by its storage's clock (any machine), is taken over with the next
epoch. A writer that was suspended meanwhile finds another token in the lease, and cannot commit.

A local lease is changed only under an exclusive `flock` on the file `lock` beside it, and so is the rename that
publishes. In an object store it is changed only by conditional writes. The commit there is conditional too, so the
lease only saves two writers from computing the same rows; it is not what prevents duplicate rows. Cost: one small
fsync, or two requests, per quarter of a lease.
"""

import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torchlake import atomic_io
from torchlake.errors import LeaseLost, Locked, OutputError, StorageError
from torchlake.storage.liveness import ProcessIdentity, is_running, this_process
from torchlake.storage.objects import Found, ObjectFolder

NAME, CLOCK = "lease.json", "lease.clock"
LEASE_S = 60.0
"How long a writer that stops renewing keeps others out, unless it is seen to have ended."
LOCK_WAIT_S = 30.0
LOCK_POLL_S = 0.01


class LocalPlace:
    """A folder with a lease on this machine, or on a file system that is mounted here."""

    def __init__(self, folder: Path) -> None:
        self.location, self._folder, self._path = str(folder), folder, folder / NAME

    def locked(self, *, create: bool = False) -> AbstractContextManager[None]:
        """Return a context in which no other process changes the lease, where that is possible; see `locked`."""
        return locked(self._folder, create=create)

    def read(self) -> Found | None:
        """Return the lease's file, or None if there is none."""
        try:
            return Found(self._path.read_bytes(), {}, _modified(self._path))
        except OSError:
            return None

    def write(self, content: bytes, before: Found | None) -> bool:
        """Replace the lease's file `before`; return False, having written nothing, if it has changed."""
        # Only the holder of the lock writes the lease, so these are left from killed writers.
        atomic_io.remove(atomic_io.stale_temporaries(self._path))
        atomic_io.write_bytes(self._path, content, site="lease")
        return True

    def now(self) -> datetime | None:
        """Return the time by the storage's clock; machines' clocks may differ by hours. None without an answer."""
        # Touching the lock file asks the storage for its time; on NFS it is the server's, as is the lease's mtime.
        lock = self._folder / "lock"
        os.utime(lock)
        return _modified(lock)


class ObjectPlace:
    """A folder with a lease in an object store; see LocalPlace for its methods."""

    def __init__(self, folder: ObjectFolder) -> None:
        self.location, self._folder = folder.location, folder

    def locked(self, *, create: bool = False) -> AbstractContextManager[None]:
        return nullcontext()

    def read(self) -> Found | None:
        return self._folder.read(NAME)

    def write(self, content: bytes, before: Found | None) -> bool:
        return self._folder.replace(NAME, content, before, site="lease")

    def now(self) -> datetime | None:
        self._folder.write(CLOCK, secrets.token_hex(4).encode(), site="lease.clock")
        found = self._folder.read(CLOCK)
        return None if found is None else found.modified


Place = LocalPlace | ObjectPlace


class Lease:
    """A lease, renewed by a thread until `stop`; see `acquire`. A `with` block releases it."""

    def __init__(self, place: Place, mine: dict[str, Any]) -> None:
        self.mine = mine
        self._place = place
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="torchlake-lease", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def check(self) -> Found | None:
        """Return the lease as it is stored. Raises LeaseLost if another writer has taken over."""
        found = self._place.read()
        current = _parsed(found)
        if current.get("token") != self.mine["token"]:
            raise LeaseLost(
                f"{self._place.location}: taken over by {_describe(current)}, because this process did not renew "
                f"its lease for {self.mine['lease_s']:.0f} s. That writer finishes the job; nothing of this one is "
                "committed."
            )
        return found

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock, where there is one, for a change. Raises LeaseLost if another writer has taken over."""
        with self._place.locked():
            self.check()
            yield

    def renew(self) -> None:
        """Renew the lease once. Raises LeaseLost if another writer has taken over."""
        self._change(renewed=time.time())

    def stop(self) -> None:
        """Stop renewing. The lease ends with `release`, or when the staging folder is removed."""
        self._stopped.set()
        self._thread.join()

    def release(self) -> None:
        """Allow the next writer to start at once; a lease that was taken over stays as it is."""
        self.stop()
        with suppress(LeaseLost, StorageError, OSError):
            self._change(released=True)

    def _change(self, **fields: Any) -> None:
        value = {**self.mine, **fields}
        # Checked under the lock, or replaced only if unchanged: a lease that was taken over meanwhile is the
        # successor's, and marking that one as released would let a third writer in beside it.
        with self._place.locked():
            # After a refusal it is the successor's, or an earlier change was made and its answer lost.
            while not self._place.write(_encoded(value), self.check()):
                pass
        self.mine = value

    def _keep(self) -> None:
        # Four times per lease, so that a few renewals may fail or be late (a full disk, a slow network file system)
        # before another writer takes over.
        while not self._stopped.wait(self.mine["lease_s"] / 4):
            try:
                self.renew()
            except LeaseLost:
                return  # the commit finds this out by its own check
            except (StorageError, OSError):  # a full disk may have space again before the lease expires
                continue


def acquire(where: Path | ObjectFolder, lease_s: float = LEASE_S, *, name: str) -> Lease:
    """Become the only writer of the folder `where`, which is created; `name` is used in messages.

    Raises Locked naming the active writer, OutputError when a local folder cannot be created, StorageError.
    """
    place: Place = LocalPlace(where) if isinstance(where, Path) else ObjectPlace(where)
    with place.locked(create=True):
        while True:
            before = place.read()
            current = _parsed(before)
            if before is not None and _is_live(place, before, current):
                raise Locked(
                    f"{name}: being written by {_describe(current)}. Wait for it, or stop it; finished work is kept."
                )
            # Of two writers that find the same expired lease only one replaces it. The other one reads again, and finds
            # a live lease.
            now = time.time()
            mine = {
                "epoch": int(current.get("epoch", 0)) + 1,
                "token": secrets.token_hex(8),
                **this_process()._asdict(),
                "host": socket.gethostname(),
                "started": now,
                "renewed": now,
                "lease_s": lease_s,
            }
            if place.write(_encoded(mine), before):
                return Lease(place, mine)


def _is_live(place: Place, found: Found, lease: dict[str, Any]) -> bool:
    if not lease or lease.get("released"):
        return False
    if is_running(ProcessIdentity(lease["machine"], lease["pid"], lease["created"])) is False:
        return False
    # A writer that is suspended, or hangs on a dead mount, still exists, but has stopped renewing. Its token no longer
    # fits when it wakes up, so it cannot commit. Without an answer of the clock the lease counts as live: a needless
    # wait costs a retry, a wrong takeover ends the other writer's job.
    now = place.now()
    return now is None or (now - found.modified).total_seconds() <= lease["lease_s"]


def _describe(lease: dict[str, Any]) -> str:
    """Return who holds a lease, and since when."""
    if not lease:
        return "another process"
    since = datetime.fromtimestamp(lease["started"], UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"pid {lease['pid']} on {lease['host']} since {since}"


def _parsed(found: Found | None) -> dict[str, Any]:
    """Return the lease; empty if there is none, or a damaged one (a live writer would have renewed it)."""
    try:
        value = {} if found is None else json.loads(found.content)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) and "token" in value else {}


def _encoded(lease: dict[str, Any]) -> bytes:
    # The nonce makes every renewal different. With equal content, a store could not tell a write that was refused from
    # an earlier one whose answer was lost.
    return json.dumps({**lease, "nonce": secrets.token_hex(4)}, indent=1).encode()


def _modified(path: Path) -> datetime:
    return datetime.fromtimestamp(path.stat().st_mtime, UTC)


@contextmanager
def locked(folder: Path, *, create: bool = False) -> Iterator[None]:
    """Hold the exclusive lock of a staging folder; a new writer (`create`) creates the folder first.

    Raises LeaseLost when the folder does not exist (without `create`), OutputError when it cannot be created, Locked
    when a new writer has waited for LOCK_WAIT_S; the holder of the lease waits without limit.
    """
    path = folder / "lock"
    while True:
        descriptor = _created(path) if create else _opened(path)
        try:
            if create:
                lock_in_time(descriptor, folder)
            else:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            # The writer before may have removed the folder while this one waited for its lock. The lock held now is
            # then on a deleted file, and another writer may hold the lock on the new file of the same name: try again.
            if _is_at(descriptor, path):
                yield
                return
        finally:
            os.close(descriptor)


def lock_in_time(descriptor: int, folder: Path) -> None:
    """Take a lock. Raises Locked after LOCK_WAIT_S: a writer that was stopped must not block a new one forever."""
    until = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= until:
                raise Locked(
                    f"{folder}: locked for {LOCK_WAIT_S:.0f} s by {_describe(_parsed(LocalPlace(folder).read()))}"
                    ", which may have been stopped in the middle of publishing. Continue it (kill -CONT) or end it, "
                    "then run the same command again."
                ) from None
            time.sleep(LOCK_POLL_S)


def _created(path: Path) -> int:
    """Open the lock file, which is created with its folder."""
    try:
        while True:
            atomic_io.make_folder(path.parent)
            with suppress(FileNotFoundError):  # the folder was removed right after it was created: try again
                return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise OutputError(
            f"{path.parent}: cannot be created: {error.strerror}. Results are staged there, beside the output; give an "
            "output whose parent folder can be written."
        ) from error


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        raise LeaseLost(
            f"{path.parent}: does not exist any more. Another writer has finished and removed it, or it was deleted; "
            "run the same command again."
        ) from None


def _is_at(descriptor: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    return False
