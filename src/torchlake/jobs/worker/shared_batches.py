"""The attempts at several chunks whose rows share batches: each chunk's log names its own rows."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from torchlake.jobs.worker.poison_rows import Attempt, Step


class Attempts:
    """The attempts at several chunks whose rows share batches; rows are numbered from chunk to chunk.

    If each row is scored several `times`, the numbers are those of the answers.
    """

    def __init__(self, attempts: Sequence[Attempt] = (), times: int = 1) -> None:
        self.elsewhere = False
        "Whether rows are scored in another process."
        self._times = times
        self._open: dict[int, Attempt] = {}
        "The chunks in work, by the number of their first row, ascending; so are the next three."
        self._rows: dict[int, set[int]] = {}
        "The rows of each chunk that its log has as running."
        self._steps: dict[int, AbstractContextManager[None]] = {}
        self._tokens: dict[int, int] = {}
        self._next = 0
        self.join(attempts)

    def join(self, attempts: Sequence[Attempt]) -> int:
        """Add chunks; return the number of their first row."""
        first = self._next
        for one in attempts:
            self._open[self._next] = one
            self._next += one.rows
        return first * self._times

    @property
    def suspects(self) -> set[int]:
        """The rows that must be alone when they are scored."""
        found = [first + row for first, one in self._open.items() for row in one.suspects["score"]]
        return {row * self._times + one for row in found for one in range(self._times)}

    @contextmanager
    def running(self, step: Step, rows: Sequence[int]) -> Iterator[None]:
        """Log in each chunk's log that a step of its rows begins; see `Attempt.running`."""
        self.now(rows)
        try:
            yield
        finally:
            self.close()

    def close(self) -> None:
        """End the running steps, without a line in the logs."""
        for first in [*self._steps]:
            self._end_step(first)

    def now(self, rows: Sequence[int], tokens: Mapping[int, int] | None = None) -> None:
        """Log in each chunk's log which of its rows are scored from now on; the time limit of new ones begins.

        `tokens` {row: how many were written}, also of rows that have ended; None: as many as before.
        """
        own = self._split(rows)
        if tokens is not None:
            self._tokens = {}
            for row, count in tokens.items():
                first = self._first_of(row // self._times)
                self._tokens[first] = self._tokens.get(first, 0) + count
        for first in self._rows.keys() - own.keys():  # a later death is not due to its rows
            self._end_step(first)
            self._open[first].idle()
        for first, some in own.items():
            count = self._tokens.get(first, 0)
            if first in self._steps and self._rows[first].issuperset(some):
                self._open[first].narrow(some, count)
            else:
                self._end_step(first)
                step: Step = "elsewhere" if self.elsewhere else "score"
                self._steps[first] = self._open[first].running(step, some, len(rows), count)
                self._steps[first].__enter__()
        self._rows = {first: set(some) for first, some in own.items()}

    def leave(self, first: int) -> None:
        """Forget the chunk with this first row, whose attempt is about to end."""
        first //= self._times
        self._end_step(first)
        del self._open[first]
        self._rows.pop(first, None)
        self._tokens.pop(first, None)

    def _end_step(self, first: int) -> None:
        if (step := self._steps.pop(first, None)) is not None:
            step.__exit__(None, None, None)

    def count(self, rows: Sequence[int]) -> None:
        """Log that these rows are known from an earlier attempt: they count as progress."""
        for first, some in self._split(rows).items():
            with self._open[first].running("score", some):
                pass
            self._open[first].idle()

    def advance(self) -> None:
        """Count the time limit of the running step from now."""
        for first in self._rows:
            self._open[first].advance()

    def idle(self) -> None:
        """Log that no step is running."""
        self.now([])

    def _first_of(self, row: int) -> int:
        """Return the number of the first row of the chunk that has this row."""
        firsts = [*self._open]
        return firsts[bisect_right(firsts, row) - 1]

    def _split(self, rows: Sequence[int]) -> dict[int, list[int]]:
        """Return the rows of each chunk, as the chunk numbers them."""
        own: dict[int, list[int]] = {}
        for row in sorted({row // self._times for row in rows}):
            first = self._first_of(row)
            own.setdefault(first, []).append(row - first)
        return own
