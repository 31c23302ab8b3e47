"""Callers share batches: one thread computes what has arrived while it was busy.

    calls, in the order of their arrival -> rows up to a budget of tokens -> compute -> to each call its own rows

Nothing waits for company: a lone call starts at once, and calls that arrive meanwhile are the next batch. First come,
first served: a call is served after those before it, and a call of more rows than the budget in several batches. A call
whose caller has gone is dropped before it is computed. Cost beside `compute`: two switches of threads. What `compute`
does may hang, or lose its device: then `broken` says so, and nothing more is computed.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any

import numpy as np

from torchlake.errors import UsageError

CLOSED = "The model is closed. Load it again."


class RowTimeout(TimeoutError):
    """A row took too long; whichever of its batch it is, all of them are given up."""


class Call:
    """Rows that one caller waits for. `future` gets the pieces of its answer: [(rows (B,), answer of these rows)]."""

    def __init__(self, work: Any, costs: np.ndarray, kind: Hashable = None) -> None:
        self.work, self.costs, self.kind = work, costs, kind
        self.future: Future[list[tuple[np.ndarray, Any]]] = Future()
        self.arrived = self.started = self.ended = time.perf_counter()
        self.tokens = self.queued_tokens = int(costs.sum())
        "The cost of all rows, (N,) int64 `costs`, and of those not taken. Calls of another `kind` share no batch."
        self._pieces: list[tuple[np.ndarray, Any]] = []
        self._order: np.ndarray | None = None
        self._next = 0

    @property
    def waits(self) -> bool:
        """Whether no row of the call has been taken."""
        return self._next == 0 and not self._pieces

    def take(self, room: int, *, at_least: int) -> np.ndarray:
        """Return the next rows (B,) that cost at most `room`, longest first if not all do; `at_least`: their number."""
        if self._order is None:
            whole = self.tokens <= room
            self._order = np.arange(len(self.costs)) if whole else np.argsort(-self.costs, kind="stable")
        left = self._order[self._next :]
        fitting = int(np.searchsorted(self.costs[left].cumsum(), room, side="right"))
        rows = left[: max(at_least, fitting)]
        self._next += len(rows)
        self.queued_tokens -= int(self.costs[rows].sum())
        return rows

    def left(self) -> int:
        """Return how many rows have not been taken."""
        return len(self.costs) - self._next

    def add(self, rows: np.ndarray, answer: Any) -> None:
        """Add the answer of some rows; the last ones end the call."""
        self._pieces.append((rows, answer))
        if sum(len(each) for each, _ in self._pieces) == len(self.costs):
            self.ended = time.perf_counter()
            self.end(self._pieces)

    def give_up(self) -> None:
        """End the call with TimeoutError if no row of it has been taken."""
        if self.waits:
            self.end(TimeoutError("no answer began in time (--queue-timeout)"))

    def end(self, result: Any) -> None:
        """Give the caller a result or an exception, unless it has one or has gone."""
        try:
            if isinstance(result, BaseException):
                self.future.set_exception(result)
            else:
                self.future.set_result(result)
        except InvalidStateError:  # the caller has gone
            pass


END_S = 1.0
"Seconds in which the thread of a model that was dropped may end."
Part = tuple[Call, np.ndarray]
"A call, and the rows of it that are computed."


class Batcher:
    """A queue of calls, and the thread that computes them. `compute` returns an answer for each part of a batch.

    `lost` tells exceptions after which nothing can be computed in this process; `done` is what errors call the work.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[Part]], Sequence[Any]],
        budget: Callable[[], int],
        *,
        lost: Callable[[Exception], bool] = lambda error: False,
        done: str = "computed",
    ) -> None:
        self._compute, self._budget, self._lost, self._done = compute, budget, lost, done
        self._changed = threading.Condition()
        self._waiting: deque[Call] = deque()
        self._running: Sequence[Part] = ()
        self._began = 0.0
        self._thread: threading.Thread | None = None
        self._closed: str | None = None
        self.broken: str | None = None
        "Why the process has to be started again."
        self.queued_tokens = 0
        self.last_batch = (0, 0)
        "Rows and tokens of the batch that was taken last."

    @property
    def queued(self) -> int:
        """The number of calls that wait."""
        return len(self._waiting)

    def result(self, call: Call) -> list[tuple[np.ndarray, Any]]:
        """Return the pieces of a call's answer. Raises UsageError if the model is closed, and what the call raises."""
        self.submit(call)
        try:
            return call.future.result()
        finally:
            call.future.cancel()  # for a caller that was interrupted

    async def aresult(self, call: Call, patience: float | None = None) -> list[tuple[np.ndarray, Any]]:
        """Return what `result` returns, without blocking the event loop.

        Raises TimeoutError, too: if no row has been taken after `patience` seconds.
        """
        self.submit(call)
        late = None if patience is None else asyncio.get_running_loop().call_later(patience, call.give_up)
        try:
            return await asyncio.wrap_future(call.future)
        finally:
            if late is not None:
                late.cancel()

    def submit(self, call: Call) -> None:
        """Put a call at the end of the queue. Raises UsageError if the model is closed."""
        with self._changed:
            if self._closed is not None:
                raise UsageError(self._closed)
            self._waiting.append(call)
            self.queued_tokens += call.tokens
            if self._thread is None or not self._thread.is_alive():  # a fork has the object, but not its thread
                self._running = ()
                self._thread = threading.Thread(target=self._work, name="torchlake model", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self, *, wait: bool = True) -> None:
        """Refuse further calls, compute those that wait, and end the thread; `wait` until it has ended.

        An idle thread ends at once in any case: one that wakes while the interpreter ends would abort the process.
        """
        with self._changed:
            self._closed = self._closed or CLOSED
            self._changed.notify()
        if self._thread is threading.current_thread():
            return
        if self._thread is not None:
            self._thread.join(None if wait else END_S)
        if wait:
            self._compute, self._budget = (lambda parts: ()), (lambda: 0)  # they hold the model

    def abandon(self, seconds: float) -> bool:
        """Give up a batch that has taken more than `seconds`; return whether there was one.

        Its callers get RowTimeout. The thread cannot be stopped, so this is `broken`.
        """
        with self._changed:
            if not self._running or time.perf_counter() - self._began < seconds:
                return False
            for call, _ in self._running:
                call.end(RowTimeout(f"timeout: {self._done} for more than {seconds:g} seconds"))
            self._break(f"A batch was {self._done} for more than {seconds:g} seconds: start again.")
        return True

    def _break(self, reason: str) -> None:
        """Compute nothing more: those that wait get TimeoutError, and further calls are refused."""
        self._closed = self.broken = reason
        while self._waiting:
            self._waiting.popleft().end(TimeoutError(reason))
        self.queued_tokens = 0

    def _work(self) -> None:
        while True:
            with self._changed:
                self._running = ()
                while not self._waiting and self._closed is None:
                    self._changed.wait()
                if not self._waiting:
                    return
                parts = self._running = self._take()
                self._began = time.perf_counter()
            if parts:
                self._answer(parts)
            del parts  # an idle thread keeps no rows

    def _take(self) -> list[Part]:
        """Return the rows of the next batch: those of the first calls, up to the budget."""
        parts: list[Part] = []
        budget = room = self._budget()
        while self._waiting:
            call = self._waiting[0]
            if call.future.done():
                self.queued_tokens -= call.queued_tokens
                self._waiting.popleft()
                continue
            if parts and (call.kind != parts[0][0].kind or room <= 0):
                break
            if call.waits:
                fits = not parts or call.tokens <= room or call.tokens > budget
                if not fits:
                    break
                call.started = time.perf_counter()
            rows = call.take(room, at_least=0 if parts else 1)
            if not len(rows) and call.left():
                break
            parts.append((call, rows))
            taken = int(call.costs[rows].sum())
            room -= taken
            self.queued_tokens -= taken
            if call.left():
                break
            self._waiting.popleft()
        self.last_batch = (sum(len(rows) for _, rows in parts), budget - room)
        return parts

    def _answer(self, parts: Sequence[Part]) -> None:
        try:
            answers = self._compute(parts)
        except BaseException as error:
            if isinstance(error, Exception) and self._lost(error):
                with self._changed:
                    self._break(f"The device is lost ({type(error).__name__}): start again.")
            if len(parts) == 1 or self.broken is not None:
                for call, _ in parts:
                    call.end(error)
                return
            for part in parts:  # what one call raises must not harm the others
                self._answer([part])
            return
        for (call, rows), answer in zip(parts, answers, strict=True):
            call.add(rows, answer)
