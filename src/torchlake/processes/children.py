"""Child processes that cannot be lost: started, listened to, signalled and killed as one set.

Every child has two threads here. One starts it and waits for its end: PR_SET_PDEATHSIG is tied to the thread that
forked, so that thread has to live as long as the child, whichever thread the caller uses. The other reads its messages.
Both put events into one queue, so the caller's thread only ever waits on a queue and an exception from a signal handler
cannot tear a message apart. Price: two threads per child and one watchdog process per set, about 10 ms to start.

No child outlives its parent: the set's exit kills every process group; the watchdog does it when this process is
killed; PR_SET_PDEATHSIG ends the child itself when the watchdog is killed too.
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

from torchlake.processes.serialization import describe, pack

_BOOT = (
    "import sys; *numbers, sys.path[:] = *sys.argv[1:4], sys.argv[4:]; sys.argv[1:] = []; "
    "from torchlake.processes.child import main; main(*map(int, numbers))"
)
_JOIN_S = 5.0  # a killed process is gone in milliseconds, unless the kernel holds it in a system call


@dataclass(eq=False)
class Child:
    """One child process of this one. `running` is true from its start until the moment before it is reaped."""

    number: int
    connection: "Connection[Any, Any]"
    pid: int = 0
    running: bool = False
    signals: list[int] = field(default_factory=list)
    "Sent before it was started."
    threads: list[threading.Thread] = field(default_factory=list)

    def send(self, *values: Any) -> None:
        """Send the tuple `values`; a child that is gone is no error here, its exit is an event of its own."""
        with suppress(OSError):
            self.connection.send_bytes(pack(*values))


class Children:
    """A set of children, alive inside `with`. `events` yields (child, kind, value).

    `kind` is what the child said ("value", "error", "ready", "pull", "result", "ended"), with a value to `unpack`; or,
    once and last, "exit" with its exit code (negative: the signal that killed it). The error of a child that could not
    start is an event too. `output` are the open files that children have as stdout and stderr (None: this process's
    own), `path` what they have as sys.path and `folder` where they run (None: as this process has them). When this
    process is killed, children get SIGTERM and `grace_s` seconds before they are killed.
    """

    def __init__(
        self,
        *,
        stdout_to_stderr: bool = False,
        output: tuple[int, int] | None = None,
        path: list[str] | None = None,
        folder: str | None = None,
        grace_s: float = 0.0,
    ) -> None:
        self.events: SimpleQueue[tuple[Child, str, Any]] = SimpleQueue()
        self._stdout: int | None
        self._stderr: int | None
        self._stdout, self._stderr = output or (2 if stdout_to_stderr else None, None)
        self._path = sys.path if path is None else path
        self._folder = folder
        self._grace_s = grace_s
        self._children: list[Child] = []
        self._lock = threading.Lock()  # over `running`, `_closed` and the watchdog's pipe
        self._closed = False

    def __enter__(self) -> Self:
        self._watchdog = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("watchdog.py")), str(self._grace_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a signal to the launcher's group must not take its watchdog along
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:
            self._closed = True
            for child in self._children:
                if child.running:
                    _kill_group(child.pid)
        for child in self._children:
            for thread in child.threads:
                thread.join(_JOIN_S)
        self._watchdog.kill()  # closing its pipe is not enough where a process that the caller forked holds it too
        self._watchdog.communicate()

    def start(
        self, number: int, role: str, payload: bytes, environment: Mapping[str, str], descriptors: tuple[int, ...] = ()
    ) -> Child:
        """Start child `number` on what `serialization.pack` made; `descriptors` are open files that it inherits."""
        ours, theirs = socket.socketpair()
        child = Child(number=number, connection=Connection(ours.detach()))
        self._children.append(child)
        keeper = threading.Thread(
            target=self._keep, args=(child, theirs, role, payload, dict(environment), descriptors), daemon=True
        )
        keeper.start()
        child.threads.append(keeper)
        return child

    def signal(self, number: int) -> None:
        """Send a signal to every child (not to the processes that it started); one that starts now gets it then."""
        with self._lock:
            for child in self._children:
                if child.running:
                    os.kill(child.pid, number)
                elif child.pid == 0:
                    child.signals.append(number)

    def _keep(
        self,
        child: Child,
        theirs: socket.socket,
        role: str,
        payload: bytes,
        environment: dict[str, str],
        descriptors: tuple[int, ...],
    ) -> None:
        """Start `child`, hand it its job, wait for its end and clear its process group."""
        reader = threading.Thread(target=self._read, args=(child,), daemon=True)
        try:
            with theirs, self._lock:
                if self._closed:
                    return
                reader.start()
                path = [os.path.abspath(entry) for entry in self._path]
                death_signal = signal.SIGTERM if self._grace_s else signal.SIGKILL
                numbers = map(str, (theirs.fileno(), os.getpid(), int(death_signal)))
                process = subprocess.Popen(
                    [sys.executable, "-c", _BOOT, *numbers, *path],
                    stdin=subprocess.DEVNULL,
                    stdout=self._stdout,
                    stderr=self._stderr,
                    cwd=self._folder,
                    env=environment,
                    pass_fds=(theirs.fileno(), *descriptors),
                    start_new_session=True,
                )
                child.pid, child.running = process.pid, True
                self._watch(f"+{child.pid}")
                for number in child.signals:
                    os.kill(child.pid, number)
        except Exception as error:  # out of processes, threads or memory: the caller has to see it
            self.events.put((child, "error", pickle.dumps(describe(error))))
            self.events.put((child, "exit", 1))
            return
        with suppress(OSError):
            child.connection.send((role, payload))
        if hasattr(os, "waitid"):  # leaves the zombie, so that its number cannot be another's when its group is killed
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        else:
            process.wait()
        with self._lock:
            child.running = False
            _kill_group(child.pid)
            self._watch(f"-{child.pid}")
        code = process.wait()
        reader.join(_JOIN_S)
        if not reader.is_alive():  # else a process that the child sent out of its group holds the other end
            child.connection.close()
        self.events.put((child, "exit", code))

    def _read(self, child: Child) -> None:
        """Turn what `child` says into events, until it says nothing more."""
        while True:
            try:
                message = child.connection.recv_bytes()
            except (EOFError, OSError):
                return
            self.events.put((child, *pickle.loads(message)))

    def _watch(self, line: str) -> None:
        assert self._watchdog.stdin is not None
        with suppress(OSError):  # without its watchdog the set still has PR_SET_PDEATHSIG
            self._watchdog.stdin.write(line.encode() + b"\n")
            self._watchdog.stdin.flush()


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
