"""Rows in a writer: which ones are in it, what is reported of them, and what happens when it raises.

    prompts, longest first -> the writer, as far as the budget goes -> rows end, others take their places -> texts

When there are no more prompts and places are free, those of the next chunks enter. The rows that are in the writer, and
no others, are in the logs of the attempts: only they can be what kills the process. When the writer raises, its rows
are tried again in halves, without others beside them (`isolation.py`).

A writer whose rows are in another process finds by itself those that kill it, and has no rows to blame when it raises.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchlake.errors import TaskError, Unavailable
from torchlake.jobs.worker.isolation import run_isolated
from torchlake.jobs.worker.shared_batches import Attempts
from torchlake.models.generation import GenerationOptions
from torchlake.runtimes import EMPTY, Ended, Text, Writer


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A row to be written."""

    row: int
    ids: np.ndarray
    "(L,) int64"
    options: GenerationOptions
    begun: Text = EMPTY
    "What an earlier attempt has written."
    alone: bool = False
    "Whether it must have the writer for itself: it may be what killed a process."

    @property
    def size(self) -> int:
        """The most tokens that the row needs in the writer."""
        return (len(self.ids) + self.options.max_new_tokens) * self.options.num_beams


@dataclass(kw_only=True)
class Budget:
    """How much a writer holds at once: the rows times the tokens of the longest one, and once those that they share;
    less after memory ran out."""

    tokens: int
    rows: int

    def allows(self, rows: int, longest: int, shared: int = 0) -> bool:
        """Return whether this number of rows fits; a single one always does."""
        return rows <= 1 or (rows <= self.rows and rows * longest + shared <= self.tokens)


@dataclass(kw_only=True)
class Texts:
    """The rows of one writer. `more` returns further prompts, none if there are none at the moment.

    `report` gets the rows that have ended, at each step; `shrink` the rows that did not fit into memory.
    """

    writer: Writer
    budget: Budget
    more: Callable[[], Sequence[Prompt]]
    attempts: Attempts | None = None
    report: Callable[[Writer, Sequence[Ended]], None] = lambda writer, ended: None
    shrink: Callable[[Sequence[Prompt]], None] = lambda prompts: None
    _waiting: deque[Prompt] = field(init=False, default_factory=deque)
    _running: dict[int, Prompt] = field(init=False, default_factory=dict)

    def write(self) -> Iterator[tuple[int, Ended | str]]:
        """Yield each row with its text, or with the reason why it has none, as they end."""
        while True:
            try:
                yield from self._write(refill=True)
                return
            except Exception as error:
                if self._elsewhere:
                    raise
                failure = error
            yield from self._in_parts(failure)

    def _write(self, *, refill: bool) -> Iterator[tuple[int, Ended | str]]:
        while True:
            self._admit(refill=refill)
            if not self._running:
                return
            done: list[Ended] = []

            def report(ended: Sequence[Ended], done: list[Ended] = done) -> None:
                self.report(self.writer, ended)
                done += ended

            self.writer.step(report)
            # Not rows that an `add` has left which raised: they are written again.
            done = [one for one in done if self._running.pop(one.row, None) is not None]
            if done:
                self._log()
            for one in done:
                yield one.row, one if one.error is None else one.error

    def _admit(self, *, refill: bool) -> None:
        """Add the prompts that fit to the writer."""
        before = len(self._running)
        if before and not (refill and self.writer.refills):
            return
        alone = any(one.alone for one in self._running.values())
        longest = shared = 0
        for one in self._running.values():
            longest, shared = self._with(one, longest, shared)
        while not alone:
            if not self._waiting and refill:
                self._waiting += sorted(self.more(), key=lambda one: (not one.alone, -one.size))
            if not self._waiting or (self._waiting[0].alone and self._running):
                break
            one = self._waiting[0]
            longest, shared = self._with(one, longest, shared)
            if not self._allows(len(self._running) + 1, longest, shared):
                break
            self._waiting.popleft()
            self._running[one.row], alone = one, one.alone
        added = list(self._running.values())[before:]
        if added:
            self._log()
        for one in added:
            self.writer.add(one.row, one.ids, one.options, one.begun)

    def _with(self, one: Prompt, longest: int, shared: int) -> tuple[int, int]:
        """Return the most tokens of its own that a row has, and the most that it shares, with one more row."""
        shares = getattr(self.writer, "shared", None)
        common = 0 if shares is None else int(shares(one.ids, one.options))
        return max(longest, one.size - common), max(shared, common)

    @property
    def _elsewhere(self) -> bool:
        return bool(getattr(self.writer, "elsewhere", False))

    def _allows(self, rows: int, longest: int, shared: int) -> bool:
        writer: Any = self.writer
        return bool(rows <= writer.most) if self._elsewhere else self.budget.allows(rows, longest, shared)

    def _log(self) -> None:
        if self.attempts is not None and not self._elsewhere:
            self.attempts.now([*self._running])

    def _in_parts(self, failure: Exception) -> Iterator[tuple[int, Ended | str]]:
        """Write the rows that were in the writer when it raised `failure`: in halves, the others wait."""
        if not self._running:  # no row's fault: further chunks could not be begun
            raise failure
        failed, self._running = self._running, {}
        waiting, self._waiting = self._waiting, deque()
        found: list[tuple[int, Ended | str]] = []
        errors: dict[int, str] = {}
        first: list[Exception] = [failure]

        def again(rows: np.ndarray) -> None:
            if first:  # what has failed already is all of them together
                raise first.pop()
            self._running.clear()
            self._waiting = deque(failed[row] for row in rows.tolist())
            written = list(self._write(refill=False))
            found.extend(written)

        run_isolated(
            np.array(list(failed), np.int64),
            again,
            errors,
            self.attempts,
            passed_on=(TaskError, Unavailable),
            out_of_memory=lambda rows: self.shrink([failed[row] for row in rows.tolist()]),
        )
        self._waiting = waiting
        yield from found
        yield from errors.items()
