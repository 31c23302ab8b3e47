"""A set of child processes that are started, monitored, signaled and killed together.

Every child has two threads in this process. One starts the child and waits for its exit: PR_SET_PDEATHSIG is tied to
the thread that forked, so that thread must live as long as the child. The other reads its messages. Both put events
into one queue, so the caller only waits on a queue, and an exception from a signal handler cannot interrupt the reading
of a message. Cost: two threads per child and one watchdog process per set, about 10 ms to start.

No child outlives its parent: leaving the set kills every process group; if this process is killed, the watchdog does;
if the watchdog is killed too, PR_SET_PDEATHSIG ends the child itself.
"""

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

from torchlake.processes.serialization import pack, to_failure

_BOOT = (
    "import sys; *numbers, sys.path[:] = *sys.argv[1:4], sys.argv[4:]; sys.argv[1:] = []; "
    "from torchlake.processes.child import main; main(*map(int, numbers))"
)
_JOIN_S = 5.0  # a killed process exits in milliseconds unless it is inside an uninterruptible system call


@dataclass(eq=False)
class Child:
    """A child process. `running` is true from its start until just before it is reaped."""

    number: int
    connection: "Connection[Any, Any]"
    pid: int = 0
    running: bool = False
    signals: list[int] = field(default_factory=list)
    "Signals to send once it has started."
    threads: list[threading.Thread] = field(default_factory=list)

    def send(self, *values: Any) -> None:
        """Send the tuple `values`; do nothing if the child has exited, which is reported as an event."""
        with suppress(OSError):
            self.connection.send_bytes(pack(*values))


class Children:
    """A set of children, alive inside `with`. `events` yields (child, kind, value).

    `kind` is a message ("value", "error", "ready", "pull", "result", "ended"), with a value to `unpack`; the last
    one is "exit" with the exit code (negative: a signal). A child that cannot start sends "error" and "exit" too.
    `output` are the file descriptors of the children's stdout and stderr, `path` their sys.path and `folder` their
    working directory (None: those of this process). If this process is killed, children get SIGTERM, and are killed
    after `grace_s` seconds. Signals that are `held` are blocked in a child from its start, until it unblocks them.
    """

    def __init__(
        self,
        *,
        stdout_to_stderr: bool = False,
        output: tuple[int, int] | None = None,
        path: list[str] | None = None,
        folder: str | None = None,
        grace_s: float = 0.0,
        held: tuple[int, ...] = (),
    ) -> None:
        self.events: SimpleQueue[tuple[Child, str, Any]] = SimpleQueue()
        self._stdout: int | None
        self._stderr: int | None
        self._stdout, self._stderr = output or (2 if stdout_to_stderr else None, None)
        self._path = sys.path if path is None else path
        self._folder = folder
        self._grace_s = grace_s
        self._held = held
        self._children: list[Child] = []
        self._lock = threading.Lock()  # guards `running`, `_closed` and the watchdog's pipe
        self._closed = False

    def __enter__(self) -> Self:
        self._watchdog = start_watchdog(self._grace_s)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:
            self._closed = True
            for child in self._children:
                if child.running:
                    kill_group(child.pid)
        for child in self._children:
            for thread in child.threads:
                thread.join(_JOIN_S)
        self._watchdog.kill()  # closing its pipe is not enough if a process forked by the caller has it open too
        self._watchdog.communicate()

    def start(
        self, number: int, role: str, payload: bytes, environment: Mapping[str, str], descriptors: tuple[int, ...] = ()
    ) -> Child:
        """Start child `number` with a payload from `serialization.pack`; it inherits the file descriptors."""
        ours, theirs = socket.socketpair()
        child = Child(number=number, connection=Connection(ours.detach()))
        self._children.append(child)
        monitor = threading.Thread(
            target=self._run_child, args=(child, theirs, role, payload, dict(environment), descriptors), daemon=True
        )
        monitor.start()
        child.threads.append(monitor)
        return child

    def signal(self, number: int) -> None:
        """Send a signal to every child, but not to its descendants; a child that is starting gets it once it has."""
        with self._lock:
            for child in self._children:
                if child.running:
                    os.kill(child.pid, number)
                elif child.pid == 0:
                    child.signals.append(number)

    def _run_child(
        self,
        child: Child,
        theirs: socket.socket,
        role: str,
        payload: bytes,
        environment: dict[str, str],
        descriptors: tuple[int, ...],
    ) -> None:
        """Start `child`, send it its job, wait for its exit and kill its process group."""
        reader = threading.Thread(target=self._read, args=(child,), daemon=True)
        signal.pthread_sigmask(signal.SIG_BLOCK, self._held)  # in this thread, from which the child inherits it
        try:
            with theirs, self._lock:
                if self._closed:
                    return
                reader.start()
                death_signal = signal.SIGTERM if self._grace_s else signal.SIGKILL
                process = start_python(
                    (theirs.fileno(), os.getpid(), int(death_signal)),
                    [os.path.abspath(entry) for entry in self._path],
                    environment=environment,
                    folder=self._folder,
                    stdout=self._stdout,
                    stderr=self._stderr,
                    descriptors=descriptors,
                )
                child.pid, child.running = process.pid, True
                # Under the lock, so that `__exit__` either finds the child running and kills it, or has set `_closed`
                # before it was started: a child that started in between would outlive the set.
                self._watch(f"+{child.pid}")
                for number in child.signals:
                    os.kill(child.pid, number)
        except Exception as error:  # such as a lack of processes, threads or memory
            self.events.put((child, "error", pickle.dumps(to_failure(error))))
            self.events.put((child, "exit", 1))
            return
        with suppress(OSError):
            child.connection.send((role, payload))
        wait_for_end(process)
        # Its descendants (data loaders, programs that the user's code started) may still run and hold memory or GPUs.
        with self._lock:
            child.running = False
            kill_group(child.pid)
            self._watch(f"-{child.pid}")
        code = process.wait()
        reader.join(_JOIN_S)
        if not reader.is_alive():  # else a descendant outside its group has the other end open
            child.connection.close()
        self.events.put((child, "exit", code))

    def _read(self, child: Child) -> None:
        """Put the messages of `child` into the queue until it closes its end."""
        while True:
            try:
                message = child.connection.recv_bytes()
            except (EOFError, OSError):
                return
            self.events.put((child, *pickle.loads(message)))

    def _watch(self, line: str) -> None:
        assert self._watchdog.stdin is not None
        with suppress(OSError):  # without the watchdog there is still PR_SET_PDEATHSIG
            self._watchdog.stdin.write(line.encode() + b"\n")
            self._watchdog.stdin.flush()


def start_python(
    numbers: tuple[int, int, int],
    path: list[str],
    *,
    environment: Mapping[str, str],
    folder: str | None,
    stdout: int | None,
    stderr: int | None,
    descriptors: tuple[int, ...],
) -> "subprocess.Popen[bytes]":
    """Start a Python process that calls `child.main(*numbers)`, in a session of its own, with `path` as its sys.path.

    It inherits the file descriptors, and its end of the connection, which is the first of the numbers.
    """
    return subprocess.Popen(
        [sys.executable, "-c", _BOOT, *map(str, numbers), *path],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        cwd=folder,
        env=environment,
        pass_fds=(numbers[0], *descriptors),
        start_new_session=True,
    )


def wait_for_end(process: "subprocess.Popen[bytes]") -> None:
    """Wait until the process has ended. It stays a zombie, so that its pid is not reused before its group is killed."""
    if hasattr(os, "waitid"):
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    else:
        process.wait()


def start_watchdog(grace_s: float) -> "subprocess.Popen[bytes]":
    """Start a process that ends the groups whose numbers it gets when this process ends; see `watchdog.py`."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(__file__).with_name("watchdog.py")), str(grace_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # so that a signal to the parent's group does not reach it
    )


def kill_group(pid: int) -> None:
    """Kill the processes of a group, if there are any."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
