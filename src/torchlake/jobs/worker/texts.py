"""Rows in a writer: which ones are in it, what is reported of them, and what happens when it raises.

    prompts, longest first -> the writer, as far as the budget goes -> rows end, others take their places -> texts

The rows that are in the writer, and no others, are in the log of the attempt: only they can be what kills the process.
When the writer raises, its rows are tried again in halves, without others beside them (`isolation.py`).
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

from torchlake.errors import TaskError, Unavailable
from torchlake.jobs.worker.isolation import run_isolated
from torchlake.jobs.worker.poison_rows import Attempt, Attempts
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
        return (len(self.ids) + self.options.max_new_tokens) * self.options.num_beams


@dataclass(kw_only=True)
class Budget:
    """How much a writer holds at once: the rows times the tokens of the longest one; less after memory ran out."""

    tokens: int
    rows: int

    def allows(self, rows: int, longest: int) -> bool:
        """Return whether so many rows fit; a single one always does."""
        return rows <= 1 or (rows <= self.rows and rows * longest <= self.tokens)


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
) -> None:
    """Write all prompts; `ended` gets each text, and `errors` the rows that raise.

    `writing` keeps texts as they grow. `shrink` is called with the rows that did not fit into memory.
    """
    by_row = {one.row: one for one in prompts}
    waiting = deque(sorted(by_row.values(), key=lambda one: -one.size))

    def write(queue: deque[Prompt], running: dict[int, Prompt], *, refill: bool) -> None:
        def report(done: Sequence[Ended]) -> None:
            if writing is not None:
                writing.report(writer, done)
            for one in done:
                ended(one)
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
            if attempt is not None and len(running) > before:
                attempt.narrow(sorted(running), 0 if writing is None else writing.tokens)
            writer.step(report)

    while waiting:
        running: dict[int, Prompt] = {}
        failure: Exception | None = None
        try:
            with nullcontext() if attempt is None else attempt.running("score", sorted(one.row for one in waiting)):
                write(waiting, running, refill=True)
        except Exception as error:
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
