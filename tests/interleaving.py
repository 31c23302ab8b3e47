"""Writers whose every interleaving is the choice of a test: threads of which one runs at a time, from stop to stop.

A `World` replaces what a write has from its process and its machine: failpoints, clock, locks, threads, process ids. A
writer stops at every failpoint, request of a store, lock and wait; the test says who goes on, and with which fault.
A killed writer never goes on, and its locks are free, as after SIGKILL: not one line of its clean-up runs.
"""

import errno
import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from fake_target import FakeStore
from torchlake import atomic_io
from torchlake.errors import TorchlakeError
from torchlake.outputs import begin
from torchlake.outputs import transaction as _write
from torchlake.outputs.staging import folders as staging
from torchlake.outputs.staging import state as _state
from torchlake.storage import lease, liveness, objects

HANG_S = 60.0
"Until a thread that does not stop fails the test; nothing waits for it otherwise."
LOCK_WAIT_S = 2 * lease.LOCK_POLL_S
DISK = ("error",)
"The faults of a file system."
BEFORE = (
    (begin, "last_job"),
    (begin, "_interrupted"),
    (staging, "repair"),
    (staging, "clear_job"),
    (staging, "reopen"),
)
"Functions before which a writer stops, as a process can be stopped anywhere: they have no failpoint."


class Abandoned(BaseException):
    """Ends the thread of a writer that stands at a stop when a test is over."""


class Fiber:
    """A thread that runs only between two stops; it is started when it first goes on."""

    def __init__(self, writer: "Writer", work: Callable[[], Any]) -> None:
        self.writer, self.work = writer, work
        self.site = "start"
        self.offers: tuple[str, ...] = ()
        "The faults that can happen where it stands."
        self.fault = ""
        self.blocked = self.ended = False
        self.error: BaseException | None = None
        self.go = _closed()
        self.thread: threading.Thread | None = None


class Writer:
    """A process that writes: its job's thread, and the one that renews its lease."""

    def __init__(self, name: str, pid: int, machine: str, work: Callable[["Writer"], Any]) -> None:
        self.name, self.pid, self.machine = name, pid, machine
        self.main = Fiber(self, lambda: self._run(work))
        self.renewer: Fiber | None = None
        self.lease: Any = None
        "The lease that it holds or held."
        self.killed = False
        self.faults = 0
        "That have happened to it."
        self.result: Any = None
        self.refused: TorchlakeError | None = None
        self.descriptors: set[int] = set()
        "Of the locks that it holds."

    def _run(self, work: Callable[["Writer"], Any]) -> None:
        try:
            self.result = work(self)
        except TorchlakeError as error:
            self.refused = error

    @property
    def ended(self) -> bool:
        """Whether it has returned or raised."""
        return self.main.ended

    @property
    def active(self) -> bool:
        """Whether it can still do anything."""
        return not (self.killed or self.ended)

    @property
    def next(self) -> Fiber:
        """The thread that goes on next by itself: the job's, unless it waits for what the other one does."""
        other = self.renewer
        waits = (
            self.main.blocked and other is not None and not other.ended and other.site not in ("start", "lease.wait")
        )
        return other if waits and other is not None else self.main


class World:
    """Everything that writers share, with the names in torchlake replaced from `__init__` until `close`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, 1_700_000_000.0
        self.writers: list[Writer] = []
        self.current: Fiber | None = None
        self.abandoned = False
        self.trace: list[tuple[str, str, str]] = []
        "Who went on, from which stop, with which fault: the interleaving."
        self.store = FakeStore(self)
        self._back = _closed()
        self._replaced: list[tuple[Any, str, Any]] = []
        self._replace_all()

    def start(self, work: Callable[[Writer], Any], *, machine: str = "one") -> Writer:
        """A writer that stands before its first line."""
        number = len(self.writers)
        writer = Writer("ABCDEFGHIJKLMNOPQRSTUVWXYZ"[number], 1000 + number, machine, work)
        self.writers.append(writer)
        return writer

    def step(self, fiber: Fiber, fault: str = "") -> None:
        """Let a thread go on to its next stop. Raises what it raised, unless that is an error for the user."""
        assert not fiber.ended
        assert not fiber.writer.killed
        assert not fault or fault in fiber.offers, f"{fault} can happen at {fiber.site}"
        self.trace.append((fiber.writer.name, fiber.site, fault))
        fiber.fault, fiber.blocked = fault, False
        fiber.writer.faults += bool(fault)
        self._switch(fiber)
        if fiber.error is not None:
            raise fiber.error

    def kill(self, writer: Writer) -> None:
        """End a writer's process where it stands: nothing more of it happens, and its locks are free."""
        writer.killed = True
        self.trace.append((writer.name, writer.main.site, "killed"))
        for descriptor in writer.descriptors:
            fcntl.flock(descriptor, fcntl.LOCK_UN)

    def pass_time(self, seconds: float) -> None:
        """All clocks go on, without any writer renewing its lease."""
        self.now += seconds
        for path in self.folder.glob(".*.staging/lease.json"):
            written = path.stat().st_mtime - seconds
            os.utime(path, (written, written))

    def stop(self, site: str, offers: tuple[str, ...] = (), *, blocked: bool = False) -> str:
        """Stop the thread that runs, until the test lets it go on; returns the fault that happens now, or nothing."""
        fiber = self.current
        if fiber is None:
            return ""
        if not self.abandoned:
            fiber.site, fiber.offers, fiber.blocked = site, offers, blocked
            self._back.release()
            fiber.go.acquire()
        if self.abandoned:
            raise Abandoned
        return fiber.fault

    def close(self) -> None:
        """End all threads and give torchlake its names back."""
        self.abandoned = True
        fibers = [one for writer in self.writers for one in (writer.main, writer.renewer) if one is not None]
        for fiber in fibers:
            if fiber.thread is not None and not fiber.ended:
                self._switch(fiber)
            if fiber.thread is not None:
                fiber.thread.join()
        for module, name, value in self._replaced:
            setattr(module, name, value)

    def _switch(self, fiber: Fiber) -> None:
        self.current = fiber
        if fiber.thread is None:
            fiber.thread = threading.Thread(target=self._work, args=(fiber,), daemon=True)
            fiber.thread.start()
        else:
            fiber.go.release()
        assert self._back.acquire(timeout=HANG_S), f"{fiber.writer.name} does not stop after {fiber.site}"
        self.current = None

    def _work(self, fiber: Fiber) -> None:
        try:
            fiber.work()
        except Abandoned:
            pass
        except BaseException as error:
            fiber.error = error
        fiber.ended = True
        self._back.release()

    def _writer(self, pid: int | None = None) -> Writer:
        if pid is None:
            assert self.current is not None, "asked by a writer"
            return self.current.writer
        return next(one for one in self.writers if one.pid == pid)

    # What torchlake's modules get in place of the names that they imported.

    def _replace_all(self) -> None:
        time = SimpleNamespace(time=lambda: self.now, monotonic=lambda: self.now, sleep=self._sleep)
        threads = SimpleNamespace(Thread=self._thread, Event=lambda: _Event(self))
        process = SimpleNamespace(**{**vars(psutil), "Process": self._process})
        system = SimpleNamespace(**{**vars(os), "getpid": lambda: self._writer().pid, "close": self._close})
        self._set(lease, time=time, threading=threads, os=system, LOCK_WAIT_S=LOCK_WAIT_S)
        self._set(liveness, psutil=process, os=system, machine_id=lambda: self._writer().machine)
        self._set(lease, fcntl=SimpleNamespace(**{**vars(fcntl), "flock": self._flock}))
        self._set(_write, time=time, failpoint=self.stop)
        self._set(objects, failpoint=self.stop, _store=lambda url: self.store)
        self._set(_state, temporary_folder=lambda name: self.folder / f"logs-{atomic_io.digest(name)[:16]}")
        for module in (atomic_io, staging):
            self._set(module, failpoint=self._durable)
        for module, name in BEFORE:
            self._set(module, **{name: self._stopping(getattr(module, name), name)})

    def _set(self, module: Any, **names: Any) -> None:
        for name, value in names.items():
            self._replaced.insert(0, (module, name, getattr(module, name)))
            setattr(module, name, value)

    def _stopping(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def stopping(*arguments: Any, **options: Any) -> Any:
            self.stop(f"before {name}")
            return function(*arguments, **options)

        return stopping

    def _durable(self, site: str) -> None:
        """A failpoint of a file system; after `done` nothing is left that could fail."""
        if self.stop(site, () if site.endswith(".done") else DISK):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), site)

    def _sleep(self, seconds: float) -> None:
        self.stop("sleep", blocked=seconds == lease.LOCK_POLL_S)
        self.now += seconds

    def _flock(self, descriptor: int, operation: int) -> None:
        writer = self._writer()
        self.stop("lock")
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if operation & fcntl.LOCK_NB:
                    raise
                self.stop("waits for the lock", blocked=True)
        writer.descriptors.add(descriptor)

    def _close(self, descriptor: int) -> None:
        self._writer().descriptors.discard(descriptor)
        os.close(descriptor)

    def _process(self, pid: int | None = None) -> Any:
        writer = self._writer(pid)
        if not writer.active:
            raise psutil.NoSuchProcess(writer.pid)
        return SimpleNamespace(create_time=lambda: float(writer.pid), status=lambda: psutil.STATUS_RUNNING)

    def _thread(self, *, target: Any, name: str, daemon: bool) -> "_Renewer":
        """The only threads of a write: those that renew its lease."""
        writer = self._writer()
        writer.lease = target.__self__
        return _Renewer(self, writer, target)


def _closed() -> threading.Lock:
    """A lock that is taken: one thread waits for it, another one opens it."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class _Renewer:
    """A thread that renews a lease, in place of a `threading.Thread`."""

    def __init__(self, world: World, writer: Writer, target: Any) -> None:
        self.world, self.fiber, self.writer = world, Fiber(writer, target), writer

    def start(self) -> None:
        self.writer.renewer = self.fiber

    def join(self) -> None:
        """Wait for its end. It ends by itself where it waits for its time: the event is set then."""
        while not (self.fiber.ended or self.fiber.thread is None or self.fiber.site == "lease.wait"):
            self.world.stop("waits for its lease", blocked=True)
        self.writer.renewer = None if self.fiber.thread is None else self.fiber


class _Event:
    def __init__(self, world: World) -> None:
        self.world, self.is_set = world, False

    def set(self) -> None:
        self.is_set = True

    def wait(self, timeout: float) -> bool:
        """Whether it was set before the test lets the time pass."""
        if not self.is_set:
            self.world.stop("lease.wait")
        return self.is_set
