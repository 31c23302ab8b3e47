"""One writer at a time, and none that believes it still is: a lease on the staging folder with an epoch.

`lease.json` says who writes: epoch, process, host, and when the lease was last renewed. It is changed only while an
exclusive `flock` is held on the file `lock` beside it, and so is the rename that publishes. A lease whose process is
dead (same machine) or that was not renewed in time (any machine) is taken over with the next epoch. A writer that wakes
up late finds another's token in the lease, and its commit is refused. Price: one small fsync per quarter of a lease.
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

import psutil

from torchlake import atomic_io
from torchlake.errors import DataError, LeaseLost, Locked, OutputError, StorageError

LOCK_WAIT_S = 30.0
LOCK_POLL_S = 0.01


class Lease:
    """A lease that is held and renewed by a thread until `stop`; see `acquire`."""

    def __init__(self, staging: Path, mine: dict[str, Any]) -> None:
        self.staging = staging
        self.mine = mine
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="torchlake-lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise LeaseLost when another writer has taken over. Call it with the lock held."""
        current = _read(self.staging)
        if current.get("token") != self.mine["token"]:
            raise LeaseLost(
                f"{self.staging}: taken over by {_holder(current)} while this process was not heard of for "
                f"{self.mine['lease_s']:.0f} s. That writer finishes the job; nothing of this one is published."
            )

    def stop(self) -> None:
        """Renew no more. The lease itself is given back by `release`, or goes with the staging folder."""
        self._stopped.set()
        self._thread.join()

    def release(self) -> None:
        """Let the next writer in at once; a lease that is no longer ours is left alone."""
        self.stop()
        try:
            with locked(self.staging):
                self.check()
                _write(self.staging, self.mine | {"released": True})
        except (LeaseLost, StorageError, OSError):
            return

    def _renew(self) -> None:
        while not self._stopped.wait(self.mine["lease_s"] / 4):
            try:
                with locked(self.staging):
                    self.check()
                    self.mine["renewed"] = time.time()
                    _write(self.staging, self.mine)
            except LeaseLost:
                return
            except (StorageError, OSError):  # a full disk may have room again before the lease runs out
                continue


def acquire(staging: Path, lease_s: float, *, name: str | None = None) -> Lease:
    """Become the one writer of `staging`, which is created; messages call what is held `name`, by default the output.

    Raises Locked naming the writer that is at work, OutputError when the folder cannot be made.
    """
    with locked(staging, create=True):
        current = _read(staging)
        if current and _is_live(staging, current):
            held = name or str(staging.parent / staging.name[1:].removesuffix(".staging"))
            raise Locked(
                f"{held}: being written by {_holder(current)}. Wait for it, or stop it; finished work is kept."
            )
        # Only who holds the lock writes the lease: these are of writers that were killed while they did.
        atomic_io.remove(atomic_io.stale_temporaries(staging / "lease.json"))
        now = time.time()
        mine = {
            "epoch": int(current.get("epoch", 0)) + 1,
            "token": secrets.token_hex(8),
            "pid": os.getpid(),
            "created": psutil.Process().create_time(),
            "host": socket.gethostname(),
            "machine": _machine(),
            "started": now,
            "renewed": now,
            "lease_s": lease_s,
        }
        _write(staging, mine)
        return Lease(staging, mine)


@contextmanager
def locked(staging: Path, *, create: bool = False) -> Iterator[None]:
    """Hold the exclusive lock of a staging folder; a newcomer (`create`) makes the folder first.

    Raises LeaseLost when the folder is gone (and is not to be made), OutputError when it cannot be made, Locked when
    a newcomer has waited for half a minute: who is at home waits as long as it takes.
    """
    path = staging / "lock"
    while True:
        descriptor = _open(path, create)
        if descriptor is None:
            continue
        try:
            if create:
                _take(descriptor, staging)
            else:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(descriptor, path):  # else the folder was removed and made again while this one waited
                yield
                return
        finally:
            os.close(descriptor)


def _take(descriptor: int, staging: Path) -> None:
    """Take the lock. Raises Locked when its holder keeps it: a writer stopped inside it must not hang another one."""
    until = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= until:
                current = _read(staging)
                holder = _holder(current)
                raise Locked(
                    f"{staging}: locked for {LOCK_WAIT_S:.0f} s by {holder}, which may have been stopped in the middle "
                    "of publishing. Continue it (kill -CONT) or end it, then run the same command again."
                ) from None
            time.sleep(LOCK_POLL_S)


def _open(path: Path, create: bool) -> int | None:
    """A descriptor of the lock; None when the folder vanished just after it was made: try again."""
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
            f"{path.parent}: gone. Another writer has finished and removed it, or it was deleted; "
            "run the same command again."
        ) from None


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _is_live(staging: Path, lease: dict[str, Any]) -> bool:
    if lease.get("released") or _age_s(staging) > lease["lease_s"]:
        return False
    if lease["machine"] != _machine():
        return True
    try:
        process = psutil.Process(lease["pid"])
        return bool(abs(process.create_time() - lease["created"]) < 1 and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def _age_s(staging: Path) -> float:
    """Seconds since the lease was written, by the clock of its storage: those of machines may differ by hours."""
    lock = staging / "lock"
    os.utime(lock)
    return max(0.0, os.stat(lock).st_mtime - os.stat(staging / "lease.json").st_mtime)


def _machine() -> str:
    """Where a process id means something: this boot of this kernel, this process namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _holder(lease: dict[str, Any]) -> str:
    if not lease:
        return "another process"
    since = datetime.fromtimestamp(lease["started"], UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"pid {lease['pid']} on {lease['host']} since {since}"


def _read(staging: Path) -> dict[str, Any]:
    """The lease, empty when there is none (a damaged one cannot be anybody's: its writer would have to renew it)."""
    try:
        value = atomic_io.read_json(staging / "lease.json")
    except DataError:
        return {}
    return value if isinstance(value, dict) and "token" in value else {}


def _write(staging: Path, lease: dict[str, Any]) -> None:
    atomic_io.write_json(staging / "lease.json", lease, site="lease")
