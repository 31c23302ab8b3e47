"""One writer at a time: a lease on the staging folder, with an epoch and a fencing token.

`lease.json` names the writer: epoch, token, process, host, and when the lease was last renewed. It is changed only
under an exclusive `flock` on the file `lock` beside it, and so is the rename that publishes. A lease whose process is
dead (same machine) or that was not renewed in time (any machine) is taken over with the next epoch. A writer that was
suspended meanwhile finds another token in the lease, and cannot commit. Cost: one small fsync per quarter of a lease.
"""

import fcntl
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torchlake import atomic_io
from torchlake.errors import DataError, LeaseLost, Locked, OutputError, StorageError
from torchlake.storage import liveness
from torchlake.storage.liveness import ProcessIdentity

LOCK_WAIT_S = 30.0
LOCK_POLL_S = 0.01


class Lease:
    """A lease, renewed by a thread until `stop`; see `acquire`."""

    def __init__(self, staging: Path, mine: dict[str, Any]) -> None:
        self.staging = staging
        self.mine = mine
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="torchlake-lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise LeaseLost if another writer has taken over. Call it with the lock held."""
        current = _read(self.staging)
        check_holder(current, self.mine, str(self.staging))

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock for a change of the staging folder. Raises LeaseLost if another writer has taken over."""
        with locked(self.staging):
            self.check()
            yield

    def stop(self) -> None:
        """Stop renewing. The lease ends with `release`, or when the staging folder is removed."""
        self._stopped.set()
        self._thread.join()

    def release(self) -> None:
        """Allow the next writer to start at once; a lease that was taken over stays as it is."""
        self.stop()
        try:
            # Checked under the lock: a lease that was taken over meanwhile is the successor's, and marking that one as
            # released would let a third writer in beside it.
            with self.exclusive():
                _write(self.staging, self.mine | {"released": True})
        except (LeaseLost, StorageError, OSError):
            return

    def _renew(self) -> None:
        # Four times per lease, so that a few renewals may fail or be late (a full disk, a slow network file system)
        # before another writer takes over.
        while not self._stopped.wait(self.mine["lease_s"] / 4):
            try:
                with self.exclusive():
                    self.mine["renewed"] = time.time()
                    _write(self.staging, self.mine)
            except LeaseLost:
                return  # the commit finds this out by its own check
            except (StorageError, OSError):  # a full disk may have space again before the lease expires
                continue


def acquire(staging: Path, lease_s: float, *, name: str | None = None) -> Lease:
    """Become the only writer of `staging`, which is created; `name` is used in messages (default: the output's path).

    Raises Locked naming the active writer, OutputError when the folder cannot be created.
    """
    with locked(staging, create=True):
        current = _read(staging)
        if current and _is_live(staging, current):
            raise held_by(current, name or str(staging.parent / staging.name[1:].removesuffix(".staging")))
        # Only the holder of the lock writes the lease, so these are left from killed writers.
        atomic_io.remove(atomic_io.stale_temporaries(staging / "lease.json"))
        mine = next_lease(current, lease_s)
        _write(staging, mine)
        return Lease(staging, mine)


def next_lease(current: dict[str, Any], lease_s: float) -> dict[str, Any]:
    """Return the lease of this process after the `current` one, which may be empty."""
    now, process = time.time(), liveness.this_process()
    return {
        "epoch": int(current.get("epoch", 0)) + 1,
        "token": secrets.token_hex(8),
        "pid": process.pid,
        "created": process.created,
        "host": socket.gethostname(),
        "machine": process.machine,
        "started": now,
        "renewed": now,
        "lease_s": lease_s,
    }


def held_by(current: dict[str, Any], name: str) -> Locked:
    """Return the error for an output with an active writer."""
    return Locked(
        f"{name}: being written by {describe_holder(current)}. Wait for it, or stop it; finished work is kept."
    )


def check_holder(current: dict[str, Any], mine: dict[str, Any], place: str) -> None:
    """Raise LeaseLost if the lease of this process is no longer the current one."""
    if current.get("token") != mine["token"]:
        raise LeaseLost(
            f"{place}: taken over by {describe_holder(current)}, because this process did not renew its lease for "
            f"{mine['lease_s']:.0f} s. That writer finishes the job; nothing of this one is committed."
        )


@contextmanager
def locked(staging: Path, *, create: bool = False) -> Iterator[None]:
    """Hold the exclusive lock of a staging folder; a new writer (`create`) creates the folder first.

    Raises LeaseLost when the folder does not exist (without `create`), OutputError when it cannot be created, Locked
    when a new writer has waited for LOCK_WAIT_S; the holder of the lease waits without limit.
    """
    path = staging / "lock"
    while True:
        descriptor = _open(path, create)
        if descriptor is None:
            continue
        try:
            if create:
                _lock_in_time(descriptor, staging)
            else:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            # The writer before may have removed the folder while this one waited for its lock. The lock held now is
            # then on a deleted file, and another writer may hold the lock on the new file of the same name: try again.
            if _is_at(descriptor, path):
                yield
                return
        finally:
            os.close(descriptor)


def _lock_in_time(descriptor: int, staging: Path) -> None:
    """Take the lock. Raises Locked after LOCK_WAIT_S: a writer that was stopped must not block a new one forever."""
    until = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= until:
                raise Locked(
                    f"{staging}: locked for {LOCK_WAIT_S:.0f} s by {describe_holder(_read(staging))}, which may have "
                    "been stopped in the middle of publishing. Continue it (kill -CONT) or end it, then run the same "
                    "command again."
                ) from None
            time.sleep(LOCK_POLL_S)


def _open(path: Path, create: bool) -> int | None:
    """Open the lock file; None if the folder was removed right after it was created: try again."""
    if create:
        try:
            atomic_io.make_folder(path.parent)
            with suppress(FileNotFoundError):
                return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            return None
        except OSError as error:
            raise OutputError(
                f"{path.parent}: cannot be created: {error.strerror}. Results are staged there, beside the output; "
                "give an output whose parent folder can be written."
            ) from error
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        raise LeaseLost(
            f"{path.parent}: does not exist any more. Another writer has finished and removed it, or it was deleted; "
            "run the same command again."
        ) from None


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _is_live(staging: Path, lease: dict[str, Any]) -> bool:
    # Time decides before the process does: a writer that is suspended, or hangs on a dead mount, still exists, but has
    # stopped renewing. Its token no longer fits when it wakes up, so it cannot commit.
    if lease.get("released") or _age_s(staging) > lease["lease_s"]:
        return False
    return liveness.is_running(writer_of(lease)) is not False


def writer_of(lease: dict[str, Any]) -> ProcessIdentity:
    """Return the process that a lease names."""
    return ProcessIdentity(lease["machine"], lease["pid"], lease["created"])


def _age_s(staging: Path) -> float:
    """Return the seconds since the lease was written, by its storage's clock: machines' clocks may differ by hours."""
    # Touching the lock file asks the storage for its time now; on NFS that is the server's, as is the lease's mtime.
    lock = staging / "lock"
    os.utime(lock)
    return max(0.0, os.stat(lock).st_mtime - os.stat(staging / "lease.json").st_mtime)


def describe_holder(lease: dict[str, Any]) -> str:
    """Return the process that holds a lease, and since when."""
    if not lease:
        return "another process"
    since = datetime.fromtimestamp(lease["started"], UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"pid {lease['pid']} on {lease['host']} since {since}"


def _read(staging: Path) -> dict[str, Any]:
    """Return the lease; empty if there is none, or a damaged one (a live writer would have renewed it)."""
    try:
        value = atomic_io.read_json(staging / "lease.json")
    except DataError:
        return {}
    return value if isinstance(value, dict) and "token" in value else {}


def _write(staging: Path, lease: dict[str, Any]) -> None:
    atomic_io.write_json(staging / "lease.json", lease, site="lease")
