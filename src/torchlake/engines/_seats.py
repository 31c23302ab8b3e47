"""Children on other machines: the same words and events as `_processes.Children`, through shells that dial in.

An engine is asked for seats (`Placement.run`: one `_shell.sit` per seat, kept alive until all were told to leave). Each
shell connects to this process, and from then on a child is started, spoken to and signalled as if it ran here: handing
out chunks and launching ranks are the same code on every engine. Who is not in the job cannot take a seat: both sides
prove that they know a key that is made for the job and travels only inside the engine's own task.
Price: one thread and one connection per seat; a message is about 0.1 ms on one machine.
"""

import itertools
import os
import platform
import secrets
import socket
import struct
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pickle import loads
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Protocol, Self

from torchlake.engines._crossing import LOST, Failure, describe, pack
from torchlake.engines._machine import rank_variables, thread_variables
from torchlake.engines._shell import Address, Facts, shake_hands, tuned
from torchlake.errors import RankFailed

MOST_BARREN = 2  # placements in a row that no shell came from, before the job is given up
GREET_S = 20  # for whoever connects to prove that it knows the key
LEAVE_S = 10.0  # for shells to leave, and for their placement to end after that


class Placement(Protocol):
    """How an engine fills seats with shells."""

    seats: int
    together: bool
    "Whether all seats are filled at once or none; if not, seats that were lost may be filled again."

    def run(self, address: Address, key: bytes) -> None:
        """Run `sit(address, key, seat)` for every seat; return when all have ended, raise when they cannot be kept."""

    def cancel(self) -> None:
        """End what `run` began, also shells that have not started yet."""


@dataclass(eq=False, kw_only=True)
class Seated:
    """One child in a seat; `send` is that of `_processes.AnyChild`."""

    number: int
    ticket: int
    seats: "Seats"

    def send(self, *values: Any) -> None:
        self.seats.tell(self, pack(*values))


@dataclass(eq=False, kw_only=True)
class _Link:
    """The connection to one shell."""

    connection: "Connection[Any, Any]"
    facts: Facts
    seat: int
    turn: threading.Event = field(default_factory=threading.Event)
    "Set when it is the one shell of its seat, or when all have to leave."
    sending: threading.Lock = field(default_factory=threading.Lock)
    children: dict[int, Seated] = field(default_factory=dict)

    def send(self, *message: Any) -> None:
        with self.sending, suppress(OSError):  # its reader finds out, and tells what was lost
            self.connection.send(message)


class Seats:
    """Children in the seats of a placement, alive inside `with`.

    The shells dial `host`, an address of this machine; `listen_on` is the one to listen on where that is another one.
    """

    def __init__(
        self, placement: Placement, *, host: str, listen_on: str | None = None, stdout_to_stderr: bool = False
    ) -> None:
        self.events: SimpleQueue[tuple[Any, str, Any]] = SimpleQueue()
        self._placement, self._host, self._listen_on = placement, host, listen_on or host
        self._streams = {1: 2 if stdout_to_stderr else 1, 2: 2}
        self._key = secrets.token_bytes(32)
        self._tickets = itertools.count()
        self._changed = threading.Condition()  # over all that follows
        self._links: dict[int, _Link] = {}
        self._standby: defaultdict[int, deque[_Link]] = defaultdict(deque)
        self._unplaced: dict[int, tuple[Seated, tuple[Any, ...]]] = {}
        self._greeted = 0
        self._closed = False
        self._failure: Failure | None = None

    def __enter__(self) -> Self:
        self._listener = socket.create_server((self._listen_on, 0), backlog=max(128, self._placement.seats))
        self._placing = threading.Thread(target=self._place, daemon=True)
        for thread in (threading.Thread(target=self._accept, daemon=True), self._placing):
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._changed:
            self._closed = True
            links = [*self._links.values(), *itertools.chain.from_iterable(self._standby.values())]
            missing = len(self._links) < self._placement.seats
        for link in links:
            link.send("leave")
            link.turn.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        if not missing:
            self._placing.join(LEAVE_S)
        if self._placing.is_alive():
            self._placement.cancel()
            self._placing.join(LEAVE_S)

    def start(self, number: int, role: str, payload: bytes, environment: Mapping[str, str]) -> Seated:
        """Start a child in seat `number` on `payload`, as soon as somebody sits there.

        `environment` is laid over the environment that the shell has.
        """
        child = Seated(number=number, ticket=next(self._tickets), seats=self)
        order = ("start", child.ticket, role, payload, dict(environment))
        with self._changed:
            link = self._links.get(number)
            if link is None:
                self._unplaced[number] = (child, order)
                return child
            link.children[child.ticket] = child
        link.send(*order)
        return child

    def signal(self, number: int) -> None:
        """Send a signal to every running child."""
        with self._changed:
            links = list(self._links.values())
        for link in links:
            link.send("signal", number)

    def tell(self, child: Seated, message: bytes) -> None:
        """Send to a child. Where it went with its shell, that is an event of its own; another may have the seat now."""
        with self._changed:
            link = self._links.get(child.number)
            there = link is not None and child.ticket in link.children
        if link is not None and there:
            link.send("send", child.ticket, message)

    def taken(self, within_s: float) -> list[Facts]:
        """Wait until every seat is taken, and say by whom, in the order of the seats.

        The seats are numbered anew, so that those of one machine follow each other: a group's ranks have to.
        Raises RankFailed when the engine gives up, or when `within_s` seconds were not enough.
        """
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._failure is not None or len(self._links) == self._placement.seats, within_s
            )
            if self._failure is not None:
                raise RankFailed(self._failure.message, rank=0, traceback=self._failure.traceback)
            if not done:
                raise RankFailed(
                    f"{len(self._links)} of {self._placement.seats} processes could be placed within {within_s:.0f} s: "
                    "the cluster has no room for the others, or they cannot connect to this machine "
                    f"({self._host}).",
                    rank=0,
                )
            machines = list(dict.fromkeys(link.facts.address for _, link in sorted(self._links.items())))
            ordered = sorted(self._links.values(), key=lambda link: (machines.index(link.facts.address), link.seat))
            self._links = dict(enumerate(ordered))
            for seat, link in self._links.items():
                link.seat = seat
            return [link.facts for link in ordered]

    def _place(self) -> None:
        """Keep the seats filled until there is no more need of them."""
        barren = 0
        while True:
            before = self._greeted
            try:
                self._placement.run(self._listener_address(), self._key)
                failure = Failure(kind="RankFailed", message="the engine ended the processes of this job")
            except Exception as error:  # whatever an engine raises, the caller must hear of it
                failure = describe(error)
            if self._closed:
                return
            barren = 0 if self._greeted > before else barren + 1
            if self._placement.together or barren == MOST_BARREN:
                self._fail(failure)
                return

    def _listener_address(self) -> Address:
        return self._host, self._listener.getsockname()[1]

    def _fail(self, failure: Failure) -> None:
        with self._changed:
            self._failure = failure
            self._changed.notify_all()
        self.events.put((Seated(number=0, ticket=next(self._tickets), seats=self), "error", failure))

    def _accept(self) -> None:
        while not self._closed:
            try:
                channel, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(channel,), daemon=True).start()

    def _serve(self, channel: socket.socket) -> None:
        """One shell, from its first word to its last."""
        with channel.dup() as control, tuned(channel) as connection:
            try:
                control.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", GREET_S, 0))
                shake_hands(connection, self._key, first=True)
                _, facts = connection.recv()
                control.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
            except (AuthenticationError, EOFError, OSError):
                return  # somebody else, or a shell that is gone already
            self._greeted += 1
            problem = _misfit(facts)
            if problem is not None:
                self._fail(Failure(kind="RankFailed", message=problem))
                return
            link = _Link(connection=connection, facts=facts, seat=facts.seat)
            with self._changed:
                if self._closed:
                    link.turn.set()
                elif facts.seat in self._links:
                    self._standby[facts.seat].append(link)
                else:
                    self._seat(link)
            link.turn.wait()
            if self._closed:
                link.send("leave")
                return
            self._listen(link)
            self._vacate(link)

    def _seat(self, link: _Link) -> None:
        """Make it the shell of its seat, and start there what waits for it; the caller holds the lock."""
        seat = link.seat
        self._links[seat] = link
        link.send("welcome", [os.path.abspath(entry) for entry in sys.path], os.getcwd())
        if seat in self._unplaced:
            child, order = self._unplaced.pop(seat)
            link.children[child.ticket] = child
            link.send(*order)
        link.turn.set()
        self._changed.notify_all()

    def _listen(self, link: _Link) -> None:
        """Turn what the shell says into events, until it says nothing more."""
        while True:
            try:
                kind, number, value = link.connection.recv()
            except (EOFError, OSError):
                return
            if kind == "output":
                self._print(number, value)
                continue
            child = link.children.get(number)
            if child is None:  # ended, and something that it had started still spoke
                continue
            if kind == "said":
                try:
                    kind, value = loads(value)
                except Exception as error:  # a value of a class that this process cannot import
                    kind, value = "error", describe(error)
            elif kind == "exit":
                del link.children[number]
            self.events.put((child, kind, value))

    def _vacate(self, link: _Link) -> None:
        """Give the seat to whoever waits for it, and tell of the children that went with the shell."""
        with self._changed:
            seat = link.seat
            del self._links[seat]
            lost = list(link.children.values())
            if self._standby[seat] and not self._closed:
                self._seat(self._standby[seat].popleft())
        for child in lost:
            self.events.put((child, "exit", LOST))

    def _print(self, stream: int, data: bytes) -> None:
        """Whole lines of a child, on this process's stream; in a notebook that is no file but takes text."""
        file = sys.stderr if self._streams[stream] == 2 else sys.stdout
        if file is not None:
            with suppress(ValueError):  # closed
                file.write(data.decode(errors="replace"))
                file.flush()


def group_variables(places: Sequence[Facts], threads: int) -> list[dict[str, str]]:
    """The environment of each rank of a group that sits in these places, with `threads` cores for each."""
    addresses = list(dict.fromkeys(place.address for place in places))
    machines = [addresses.index(place.address) for place in places]
    result = []
    for rank, place in enumerate(places):
        variables = thread_variables(threads) | rank_variables(
            rank, machines=machines, master=places[0].address, port=places[0].port, interface=place.interface
        )
        neighbours = [other.gpus for other in places if other.address == place.address]
        if all(gpus is not None for gpus in neighbours):
            # As under torchrun: a rank sees the devices of all its machine's ranks; LOCAL_RANK numbers its own.
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(name for gpus in neighbours if gpus for name in gpus)
        result.append(variables)
    return result


def _misfit(facts: Facts) -> str | None:
    """Why functions cannot travel between this process and the shell's; None when they can."""
    for what, here, there in (
        ("Python", platform.python_version().rpartition(".")[0], facts.python.rpartition(".")[0]),
        ("torchlake", version("torchlake"), facts.torchlake),
    ):
        if here != there:
            return (
                f"{facts.host} has {what} {there} and this machine {what} {here}; functions cannot travel between "
                "them. Install the same version on all machines of the cluster."
            )
    return None
