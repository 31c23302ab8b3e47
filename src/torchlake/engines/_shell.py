"""The far end of a seat: runs children for a launcher on another machine, and passes on what they say.

An engine places this function where it has room (a Spark task, a Ray task); it dials the launcher, says what it found
there, and starts and signals children as it is told. Children are processes of its own, because the process that an
engine gives is the engine's: its environment is settled before we come, and it must not die with a row that kills.
When the launcher is gone, the children are killed; when this process is, `_processes.py` sees to it.

Messages are pickled tuples over one TCP connection, after both sides have proved that they know the job's key:

    to the launcher     hello | said, exit (of a child, by its ticket) | output (of all children)
    to the shell        welcome | start, send (a child, by its ticket) | signal | leave
"""

import os
import platform
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from queue import SimpleQueue
from typing import Any

from torchlake.engines._machine import MASTER_FD, RANK_VARIABLES, held_port, interface_of
from torchlake.engines._processes import Child, Children
from torchlake.errors import RankFailed

DIAL_S = 20.0
OUTPUT_S = 2.0  # for the last words of children that have ended
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # a machine that vanished shows in a minute

Address = tuple[str, int]
Send = Callable[..., None]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a shell says of the place it was given."""

    seat: int
    address: str
    "Of its machine, as the launcher's network sees it."
    port: int
    "A free one that it holds at that address, for ranks to meet at."
    interface: str | None
    gpus: tuple[str, ...] | None
    "The devices that the engine granted, in CUDA's words; None where it grants none."
    host: str
    python: str
    torchlake: str


def sit(address: Address, key: bytes, seat: int, gpus: Sequence[str] | None = None) -> None:
    """Run the children of `seat` until the launcher at `address` says to leave, or is gone.

    A second shell of the same seat (a retry, a speculative twin) is made to wait until the first is gone.
    Raises RankFailed when the launcher cannot be reached or is not the one that has the job's key.
    """
    connection, own = _dial(address, key)
    sending = threading.Lock()

    def send(*message: Any) -> None:
        with sending, suppress(OSError):  # a launcher that is gone shows where it is listened to
            connection.send(message)

    with connection, held_port(own) as holder:
        send("hello", _facts(seat, own, holder.getsockname()[1], gpus))
        try:
            answer, *setting = connection.recv()
        except (EOFError, OSError):
            return
        if answer == "leave":
            return
        path, folder = setting
        with (
            _captured(send) as output,
            Children(
                output=output, relay=True, path=_here(path), folder=folder if os.path.isdir(folder) else None
            ) as children,
        ):
            threading.Thread(target=_relay, args=(children.events, send), daemon=True).start()
            _obey(connection, children, holder, gpus)
        children.events.put((Child(number=-1, connection=connection), "end", None))


def shake_hands(connection: "Connection[Any, Any]", key: bytes, *, first: bool) -> None:
    """Both sides prove that they know `key`; raises AuthenticationError, EOFError or OSError when one does not."""
    for step in (deliver_challenge, answer_challenge) if first else (answer_challenge, deliver_challenge):
        step(connection, key)


def tuned(channel: socket.socket) -> "Connection[Any, Any]":
    """A socket as a connection that delays no small message and finds out when the other machine has vanished."""
    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            channel.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    channel.settimeout(None)
    return Connection(channel.detach())


def _dial(address: Address, key: bytes) -> tuple["Connection[Any, Any]", str]:
    """A connection to the launcher, and this machine's address on the way to it."""
    try:
        channel = socket.create_connection(address, timeout=DIAL_S)
        own = str(channel.getsockname()[0])
        connection = tuned(channel)
        shake_hands(connection, key, first=False)
    except Exception as error:
        raise RankFailed(
            f"{platform.node()} cannot reach the launcher at {address[0]}:{address[1]} ({type(error).__name__}: "
            f"{error}). The machines that run processes connect to the one that starts the job: open that way.",
            rank=0,
        ) from error
    return connection, own


def _facts(seat: int, own: str, port: int, gpus: Sequence[str] | None) -> Facts:
    return Facts(
        seat=seat,
        address=own,
        port=port,
        interface=interface_of(own),
        gpus=None if gpus is None else tuple(gpus),
        host=platform.node(),
        python=platform.python_version(),
        torchlake=version("torchlake"),
    )


def _here(path: Sequence[str]) -> list[str]:
    """The launcher's sys.path as far as it exists on this machine, then what this process has besides."""
    launchers = [entry for entry in path if os.path.exists(entry)]
    return launchers + [entry for entry in sys.path if entry not in launchers]


def _obey(
    connection: "Connection[Any, Any]", children: Children, holder: socket.socket, gpus: Sequence[str] | None
) -> None:
    running: dict[int, Child] = {}
    while True:
        try:
            order, *values = connection.recv()
        except (EOFError, OSError):
            return
        if order == "start":
            ticket, role, payload, variables = values
            running[ticket] = _start(children, ticket, role, payload, variables, holder, gpus)
        elif order == "send":
            ticket, message = values
            running[ticket].send_bytes(message)
        elif order == "signal":
            children.signal(*values)
        else:
            return


def _start(
    children: Children,
    ticket: int,
    role: str,
    payload: bytes,
    variables: dict[str, str],
    holder: socket.socket,
    gpus: Sequence[str] | None,
) -> Child:
    """Start a child; rank 0 inherits the port at which all ranks meet."""
    environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    environment |= variables
    descriptors: tuple[int, ...] = ()
    if variables.get("RANK") == "0":
        environment[MASTER_FD] = str(holder.fileno())
        descriptors = (holder.fileno(),)
    return children.start(ticket, role, payload, environment, descriptors)


def _relay(events: "SimpleQueue[tuple[Child, str, Any]]", send: Send) -> None:
    while True:
        child, kind, value = events.get()
        if kind == "end":
            return
        send(kind, child.number, value)


@contextmanager
def _captured(send: Send) -> Iterator[tuple[int, int]]:
    """Two open files for children to print to; whole lines go to the launcher, whatever bytes they are."""
    pipes = [os.pipe() for _ in (1, 2)]
    threads = [
        threading.Thread(target=_pass_on, args=(read, stream, send), daemon=True)
        for stream, (read, _) in enumerate(pipes, start=1)
    ]
    for thread in threads:
        thread.start()
    try:
        yield pipes[0][1], pipes[1][1]
    finally:
        for _, write in pipes:
            os.close(write)
        for thread in threads:
            thread.join(OUTPUT_S)


def _pass_on(descriptor: int, stream: int, send: Send) -> None:
    with open(descriptor, "rb", buffering=0) as pipe:
        rest = b""
        while data := pipe.read(1 << 16):
            lines, newline, rest = (rest + data).rpartition(b"\n")
            if newline:
                send("output", stream, lines + newline)
        if rest:
            send("output", stream, rest + b"\n")
