"""A launched group: wait for N ranks, find out which one failed first, stop the others.

When a rank fails, its peers fail too, because it left: their errors are noise. So failures are ordered by the moment
they happened (an exception carries the time of its rank's machine), and a death by a signal that no peer's
leaving can cause goes before any exception that arrives with it.
"""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from torchlake.errors import Interrupted, TorchlakeError
from torchlake.processes.serialization import LOST, Failure, ending, rebuild, signal_of, unpack

SETTLE_S = 0.2  # after a failure, to hear from a rank that failed earlier but was slower to say so
DUMP_S = 0.3  # for a rank to write its stacks to stderr, before it is asked to end
STOP_S = 5.0  # from SIGTERM to SIGKILL for the ranks beside a failed one
EXIT_S = 60.0  # for ranks that handed in their values: exit handlers may have something to upload
CAUSES = (-LOST, signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


class RankSet(Protocol):
    """Running ranks, alive inside `with`; `events` yields (rank, kind, value) as `processes.children.Children` does."""

    events: "SimpleQueue[tuple[Any, str, Any]]"

    def __enter__(self) -> Any: ...

    def __exit__(self, *_: Any) -> None: ...

    def signal(self, number: int) -> None:
        """Send a signal to every running rank (not to the processes that it started)."""


@dataclass(frozen=True, kw_only=True)
class _Failed:
    error: TorchlakeError
    when: float
    cause: bool = False  # certainly not a consequence of another rank's failure


@dataclass(kw_only=True)
class _Group:
    """What is known of the ranks; `listen` keeps it up to date."""

    children: RankSet
    running: set[int] = field(default_factory=set)
    values: dict[int, Any] = field(default_factory=dict)
    failures: list[_Failed] = field(default_factory=list)

    def listen(self, deadline: float | None = None) -> bool:
        """Take in one event, waiting until `deadline` for it. False when there was none."""
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
            self.failures.append(_Failed(error=rebuild(failure, rank=rank, who="rank"), when=failure.when))
        elif kind == "exit":
            self.running.discard(rank)
            if rank not in self.values:
                failure = death(rank, value, getattr(child, "node", None))
                error = rebuild(failure, rank=rank, who="rank")
                self.failures.append(_Failed(error=error, when=failure.when, cause=-value in CAUSES))
        return True

    def listen_for(self, seconds: float) -> None:
        """Take in events until all ranks ended or the time is over."""
        deadline = time.monotonic() + seconds
        while self.running and self.listen(deadline):
            pass


def run_ranks(start: Callable[[], None], number: int, children: RankSet, *, grace_s: float) -> Any:
    """Let `start` start `number` ranks as `children`; rank 0's value. `Engine.launch` says what this raises."""
    group = _Group(children=children)
    with children:
        try:
            start()
            group.running |= set(range(number))
            while not group.failures and len(group.values) < number:
                group.listen()
            group.listen_for(SETTLE_S if group.failures else EXIT_S)
        except (KeyboardInterrupt, Interrupted) as stop:
            children.signal(signal.SIGTERM)
            group.listen_for(grace_s)
            words = (str(failed.error) for failed in group.failures if isinstance(failed.error, Interrupted))
            raise interrupted(stop, next(words, None)) from stop
        if not group.failures:
            return group.values[0]
        first = min(group.failures, key=lambda failed: (not failed.cause, failed.when))
        for number, seconds in ((signal.SIGUSR1, DUMP_S), (signal.SIGTERM, STOP_S)):
            children.signal(number)
            group.listen_for(seconds)
        raise first.error


def death(rank: int, code: int, node: str | None = None) -> Failure:
    """The failure of a rank that ended, on that node, without a value and without an error."""
    return Failure(
        kind="RankFailed",
        message=f"rank {rank} {ending(code)}{f' on {node}' if node else ''} before it returned",
        fields={"rank": rank, "signal": signal_of(code), "traceback": ""},
    )


def interrupted(stop: KeyboardInterrupt | Interrupted, said: str | None = None) -> Interrupted:
    """The signal that stopped this process, in the words of a rank that `said` some (what it saved, how to go on)."""
    signum = stop.exit_code - 128 if isinstance(stop, Interrupted) else int(signal.SIGINT)
    return Interrupted(said or str(stop) or f"stopped by {signal.Signals(signum).name}", signum=signum)
