"""Rows in a writer: which ones are in it, what is reported of them, and what happens when it raises.

    prompts, longest first -> the writer, as far as the budget goes -> rows end, others take their places -> texts

The rows that are in the writer, and no others, are in the log of the attempt: only they can be what kills the process.
When the writer raises, its rows are tried again in halves, without others beside them (`isolation.py`).
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchlake.errors import TaskError, Unavailable
from torchlake.jobs.worker.isolation import run_isolated
from torchlake.jobs.worker.poison_rows import Attempt, Attempts, Step
from torchlake.jobs.worker.writing import Writing
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

    @property
    def size(self) -> int:
        """The most tokens that the row needs in the writer."""
        return len(self.ids) + self.options.max_new_tokens


@dataclass(kw_only=True)
class Budget:
    """How much a writer holds at once: the rows times the tokens of the longest one; less after memory ran out."""

    tokens: int
    rows: int

    def allows(self, rows: int, longest: int) -> bool:
        """Return whether so many rows fit; a single one always does."""
        return rows <= 1 or (rows <= self.rows and rows * longest <= self.tokens)


class Upcoming:
    """The prompts of chunks that wait, each once, for a writer that takes rows early.

    `chunks()` are their names and rows, `prompt(rows, place)` the prompt of a row.
    """

    def __init__(self, chunks: Callable[[], Sequence[tuple[str, Any]]], prompt: Callable[[Any, Any], Prompt]) -> None:
        self._chunks, self._prompt = chunks, prompt
        self._given: set[str] = set()
        self._rows: deque[tuple[Any, Any]] = deque()

    def restart(self) -> None:
        """Forget the rows of chunks that are written from now on."""
        self._rows.clear()

    def next(self) -> Prompt | None:
        """Return another prompt, or None if no other chunk has been read."""
        while not self._rows:
            found = next((one for one in self._chunks() if one[0] not in self._given), None)
            if found is None:
                return None
            name, work = found
            self._given.add(name)
            self._rows.extend((work, place) for place in np.flatnonzero(~np.isin(work.rows, list(work.errors))))
        return self._prompt(*self._rows.popleft())


def give_early(writer: Any, upcoming: Callable[[], Prompt | None]) -> None:
    """Give a writer rows of later calls as far as it has room."""
    while writer.room > 0 and (one := upcoming()) is not None:
        writer.give_early(one.ids, one.options)


def write_texts(
    writer: Writer,
    prompts: Iterable[Prompt],
    budget: Budget,
    ended: Callable[[Ended], None],
    errors: dict[int, str],
    *,
    attempt: Attempt | Attempts | None = None,
    writing: Writing | None = None,
    shrink: Callable[[Sequence[Prompt]], None],
    upcoming: Callable[[], Prompt | None] = lambda: None,
) -> None:
    """Write all prompts; `ended` gets each text, and `errors` the rows that raise.

    `writing` keeps texts as they grow. `shrink` is called with the rows that did not fit into memory. `upcoming`
    returns a prompt that is likely to be written by a later call, for a writer that takes rows early.
    """
    by_row = {one.row: one for one in prompts}
    waiting = deque(sorted(by_row.values(), key=lambda one: -one.size))
    elsewhere = getattr(writer, "elsewhere", False)
    step: Step = "elsewhere" if elsewhere else "score"

    def write(queue: deque[Prompt], running: dict[int, Prompt], *, refill: bool) -> None:
        def report(done: Sequence[Ended]) -> None:
            if writing is not None:
                writing.report(writer, done)
            for one in done:
                if one.error is None:
                    ended(one)
                else:
                    errors[one.row] = one.error
                del running[one.row]

        while queue or running:
            before = len(running)
            while queue and ((refill and writer.refills) or not before):
                longest = max(queue[0].size, *(one.size for one in running.values()), 0)
                if not budget.allows(len(running) + 1, longest):
                    break
                one = queue.popleft()
                running[one.row] = one
                writer.add(one.row, one.ids, one.options, one.begun)
            if attempt is not None and not elsewhere and len(running) > before:
                attempt.narrow(sorted(running), 0 if writing is None else writing.tokens)
            if elsewhere and not queue:
                give_early(writer, upcoming)
            writer.step(report)

    while waiting:
        running: dict[int, Prompt] = {}
        failure: Exception | None = None
        try:
            with nullcontext() if attempt is None else attempt.running(step, sorted(one.row for one in waiting)):
                write(waiting, running, refill=True)
        except Exception as error:
            if elsewhere:  # it is not due to a row
                raise
            failure = error

        def again(rows: np.ndarray) -> None:
            nonlocal failure
            if failure is not None:  # this is what has failed already
                error, failure = failure, None
                raise error
            write(deque(by_row[row] for row in rows.tolist()), {}, refill=False)

        if failure is not None:
            run_isolated(
                np.array(list(running), np.int64),
                again,
                errors,
                attempt,
                passed_on=(TaskError, Unavailable),
                out_of_memory=lambda rows: shrink([by_row[row] for row in rows.tolist()]),
            )
