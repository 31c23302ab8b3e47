"""The other side of the socket: what a child process of the local engine does from its first line to its last.

The child talks only to its parent, over an inherited socket; it never imports the user's `__main__`, so unguarded
scripts and notebooks work. Messages to the parent are `(kind, value)`:

    rank      value (rank 0's, None from the others) | error
    worker    ready, then pull ... result ...        | error

A worker's `pull` is answered with `(chunk,)`, or with `()` when there is no further chunk.
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
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from torchlake.engines._crossing import describe

_PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent: int) -> None:
    """Receive one job, do it, hand over its outcome. Exit code 1 when it failed."""
    _die_with(parent)
    if sys.stderr is not None:
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a line shows when it is printed, also in a file
    os.set_inheritable(descriptor, False)
    connection: Connection[Any, Any] = Connection(descriptor)
    sending = threading.Lock()  # a worker may pull from a thread of its own

    def send(kind: str, value: Any = None) -> None:
        message = cloudpickle.dumps((kind, value))
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
            send("error", describe(error))
        except OSError:
            os._exit(1)  # the parent is gone: nobody listens
        sys.exit(1)


def _call(function: Callable[..., Any], args: list[Any]) -> Any:
    """`function(*args)`, where sys.exit() and sys.exit(0) are as good as a return."""
    try:
        return function(*args)
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise
        return None


def _work(make_worker: Callable[[], Any], connection: "Connection[Any, Any]", send: Callable[..., None]) -> None:
    """Run the worker over the chunks that the parent hands out, one result per chunk."""
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

    worker = make_worker()
    send("ready")
    for result in worker(chunks()):
        yielded += 1
        if yielded > pulled:
            raise RuntimeError(f"the worker yielded {yielded} results for {pulled} chunks")
        send("result", result)
    if not ended or yielded < pulled:
        raise RuntimeError(f"the worker stopped after {yielded} results for {pulled} chunks, before its chunks ended")


def _leave() -> None:
    """End at once: the worker's generator has ended, so what it held is closed; taking torch apart takes a second."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(0)


def _die_with(parent: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends, and see that it has not yet."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
