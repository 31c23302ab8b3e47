"""A launched group: wait for N ranks, find the first one that failed, stop the others.

When a rank fails, its peers usually fail as a consequence. So failures are ordered by time (an exception has the time
of its rank's machine). A crash by a signal that cannot be a consequence of a peer's exit comes before any exception,
and a collective that was ended by a peer after all: that peer may take longer to leave its blocks and report its error.
"""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from torchlake.errors import Interrupted, Terminated, TorchlakeError, stopped_by
from torchlake.processes.serialization import LOST, Failure, describe_exit, signal_of, to_exception, unpack

SETTLE_S = 0.2  # after a failure, for the report of a rank that failed earlier
DUMP_S = 0.3  # for a rank to write its stacks to stderr before SIGTERM
STOP_S = 5.0  # from SIGTERM to SIGKILL for the peers of a failed rank
EXIT_S = 60.0  # for ranks that have returned: exit handlers may upload something
_CRASHES = (-LOST, signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


class RankSet(Protocol):
    """Running ranks, alive inside `with`; `events` are as in `processes.children.Children`."""

    events: "SimpleQueue[tuple[Any, str, Any]]"

    def __enter__(self) -> Any: ...

    def __exit__(self, *_: Any) -> None: ...

    def signal(self, number: int) -> None:
        """Send a signal to every running rank, but not to its descendants."""


@dataclass(frozen=True, kw_only=True)
class _Failed:
    error: TorchlakeError
    when: float
    crashed: bool = False
    by_a_peer: bool = False


@dataclass(kw_only=True)
class _Group:
    """The state of the ranks, updated by `listen`."""

    children: RankSet
    running: set[int] = field(default_factory=set)
    values: dict[int, Any] = field(default_factory=dict)
    failures: list[_Failed] = field(default_factory=list)

    def listen(self, deadline: float | None = None) -> bool:
        """Process one event, waiting for it until `deadline`; return False if there was none."""
        try:
            wait_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            child, kind, value = self.children.events.get(timeout=wait_s)
        except Empty:
            return False
        rank = child.number
        if kind == "value":
            self.values[rank] = unpack(value)
        elif kind == "error":
            self.values[rank], failure = None, unpack(value)
            error = to_exception(failure, rank=rank, who="rank")
            by_a_peer = bool(failure.fields.get("by_a_peer"))
            self.failures.append(_Failed(error=error, when=failure.when, by_a_peer=by_a_peer))
        elif kind == "exit":
            self.running.discard(rank)
            if rank not in self.values:
                failure = exit_failure(rank, value, getattr(child, "node", None))
                error = to_exception(failure, rank=rank, who="rank")
                self.failures.append(_Failed(error=error, when=failure.when, crashed=is_crash(value)))
        return True

    def listen_for(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Process events until all ranks have exited, `until` is true or the time is over."""
        deadline = time.monotonic() + seconds
        while self.running and not until() and self.listen(deadline):
            pass


def run_ranks(start: Callable[[], None], number: int, children: RankSet, *, grace_s: float) -> Any:
    """Call `start`, which starts `number` ranks as `children`, and return rank 0's value. Raises as `Engine.launch`."""
    group = _Group(children=children)
    with children:
        try:
            start()
            group.running |= set(range(number))
            while not group.failures and len(group.values) < number:
                group.listen()
            group.listen_for(SETTLE_S if group.failures else EXIT_S)
            if group.failures and all(failed.by_a_peer for failed in group.failures):
                group.listen_for(STOP_S, until=lambda: not group.failures[-1].by_a_peer)
        except (KeyboardInterrupt, Interrupted) as stop:
            children.signal(signal.SIGTERM)
            group.listen_for(grace_s)
            texts = (str(failed.error) for failed in group.failures if isinstance(failed.error, Interrupted))
            raise to_interrupted(stop, next(texts, None)) from stop
        if not group.failures:
            return group.values[0]
        first = min(group.failures, key=lambda failed: (not failed.crashed, failed.by_a_peer, failed.when))
        # A rank that hangs in a collective first writes its stacks to standard error, which often shows why the others
        # failed; a stop that was asked for needs no explanation. SIGTERM then lets ranks end by themselves, and leaving
        # the block kills those that do not.
        asked = all(isinstance(failed.error, Interrupted) for failed in group.failures)
        if asked:
            group.listen_for(DUMP_S)
        for number, seconds in (*([] if asked else [(signal.SIGUSR1, DUMP_S)]), (signal.SIGTERM, STOP_S)):
            children.signal(number)
            group.listen_for(seconds)
        raise first.error


def is_crash(code: int) -> bool:
    """Return whether the exit code means a crash that cannot be a consequence of a peer's exit."""
    return -code in _CRASHES


def exit_failure(rank: int, code: int, node: str | None = None) -> Failure:
    """Return the failure of a rank that exited on `node` without a value or an error."""
    return Failure(
        kind="RankFailed",
        message=f"rank {rank} {describe_exit(code)}{f' on {node}' if node else ''} before it returned",
        fields={"rank": rank, "signal": signal_of(code), "traceback": ""},
    )


def to_interrupted(stop: KeyboardInterrupt | Interrupted, message: str | None = None) -> Interrupted:
    """Return `stop` as Interrupted, with the `message` of a rank (what it saved) if there is one."""
    if isinstance(stop, Interrupted):
        return Interrupted(message or str(stop), signum=stop.exit_code - 128)
    signum = stop.signum if isinstance(stop, Terminated) else int(signal.SIGINT)
    by = stopped_by(signum)
    if message is None:
        return Interrupted(by, signum=signum)
    # A rank of a training says "stopped after step 7 of 9; saved", a user's function anything.
    said = f"{by}{message.removeprefix('stopped')}" if message.startswith("stopped") else message
    return Interrupted(said, signum=signum)
