"""The main function of a child process.

The child communicates only with its parent, over an inherited socket. It never imports the user's `__main__`, so
scripts without a main guard and notebooks work. Messages to the parent are `(kind, packed value)`:

    rank      value (rank 0's; None from the others)            | error
    worker    ready, then series of pull ... result ... ended   | error

The reply to `pull` is `(chunk,)`, or `()` at the end of a series. The reply to `ended` is `(True,)` if another series
follows, else `()`. Values are packed separately, so a parent that only forwards them does not need their classes.
"""

import ctypes
import faulthandler
import io
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from torchlake.logs import log_as_parent
from torchlake.processes.serialization import to_failure

_PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent: int, death_signal: int) -> None:
    """Receive a job, run it and send its outcome. Exits with code 1 on failure."""
    _die_with(parent, death_signal)
    log_as_parent()
    if sys.stderr is not None:
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # even if stdout is a file
    os.set_inheritable(descriptor, False)
    connection: Connection[Any, Any] = Connection(descriptor)
    sending = threading.Lock()  # a worker may pull from another thread

    def send(kind: str, value: Any = None) -> None:
        message = pickle.dumps((kind, cloudpickle.dumps(value)))
        with sending:
            connection.send_bytes(message)

    try:
        role, payload = connection.recv()
        function, *args = pickle.loads(payload)
        if role == "worker":
            _work(function, connection, send)
            _leave()
        else:
            value = _call(function, args)
            send("value", value if os.environ["RANK"] == "0" else None)
    except BaseException as error:
        if isinstance(error, SystemExit) and isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        try:
            send("error", to_failure(error))
        except OSError:
            os._exit(1)  # the parent has exited
        sys.exit(1)


def _call(function: Callable[..., Any], args: list[Any]) -> Any:
    """Return `function(*args)`; sys.exit() and sys.exit(0) count as a return."""
    try:
        return function(*args)
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise
        return None


def _work(make_worker: Callable[[], Any], connection: "Connection[Any, Any]", send: Callable[..., None]) -> None:
    """Run the worker on one series of chunks after another, until the parent has no more."""
    worker = make_worker()
    send("ready")
    while True:
        _work_series(worker, connection, send)
        send("ended")
        if not connection.recv():
            return


def _work_series(worker: Any, connection: "Connection[Any, Any]", send: Callable[..., None]) -> None:
    """Send one result per chunk, in the chunks' order."""
    pulled = yielded = 0
    ended = False

    def chunks() -> Iterator[Any]:
        nonlocal pulled, ended
        while not ended:
            send("pull")
            answer = connection.recv()
            ended = not answer
            if answer:
                pulled += 1
                yield answer[0]

    for result in worker(chunks()):
        yielded += 1
        if yielded > pulled:
            raise RuntimeError(f"the worker yielded {yielded} results for {pulled} chunks")
        send("result", result)
    if not ended or yielded < pulled:
        raise RuntimeError(f"the worker stopped after {yielded} results for {pulled} chunks, before its chunks ended")


def _leave() -> None:
    """Exit without interpreter shutdown, which takes a second with torch loaded."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError):  # a full disk
                stream.flush()
    os._exit(0)


def _die_with(parent: int, death_signal: int) -> None:
    """Let the kernel send this signal when the thread that started this process ends; exit if it already ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, death_signal)
    # The parent may have died before the call above, which then has no effect.
    if os.getppid() != parent:
        os._exit(1)
