"""A worker of a chunk job: it reads one chunk ahead, in a thread, while it computes the rows of the current one.

A chunk that may have a poison row runs without any work on another chunk beside it; `poison_rows.py` decides which.
Cost: one chunk in memory besides the one being worked on. Where chunks are small, because their rows are slow, several
are read ahead, and those that are ready share batches; work that goes from row to row gets further ones while it runs.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import pyarrow as pa

from torchlake import atomic_io
from torchlake.jobs.worker.poison_rows import Attempt
from torchlake.outputs.parts import Part, PartFolder
from torchlake.storage.urls import is_url
from torchlake.tables.plan import Chunk

Read = TypeVar("Read")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Where the workers of a job write; plain values, so that every engine can send them."""

    journal: str
    "The folder for the logs of attempts."
    parts: PartFolder
    rows: str = ""
    "The folder or URL for the journals of chunks whose rows take long; empty for work without such rows."
    samples: int = 1
    "Rows that are written for each that is read."


@dataclass(frozen=True, kw_only=True)
class WrittenChunk:
    """A worker's report about a chunk."""

    part: Part
    examples: tuple[str, ...] = ()
    "Up to three errors, each with file and row."
    written: int = 0
    "The tokens that a model wrote."


class Ready(NamedTuple, Generic[Read]):
    """A chunk whose rows are read, to be written under a part's name."""

    chunk: Chunk
    name: str
    attempt: Attempt
    read: Read


More = Callable[[], Sequence[Ready[Read]]]
"Returns further chunks that are ready, which then are being worked on, too."


Write = Callable[[Sequence[Ready[Read]], More[Read]], Generator[tuple[Ready[Read], Result], None, None]]
"Yields the result of each chunk when its part is written."


def _ready(future: Future[Any]) -> Any:
    """Return what a future has returned; None while it runs, and after an error, which `result` raises later."""
    return future.result() if future.done() and future.exception() is None else None


def _close(futures: Iterable[Future[Any]]) -> None:
    for one in map(_ready, futures):
        if isinstance(one, Ready):
            one.attempt.close()


def _finish(write: "Write[Read, Result]", group: Sequence[Ready[Read]], more: More[Read]) -> Iterator[Result]:
    """Yield the results of a group, and of what `more` adds to it; each attempt ends with its result."""
    opened = [one.attempt for one in group]

    def further() -> Sequence[Ready[Read]]:
        ahead = more()
        opened.extend(one.attempt for one in ahead)
        return ahead

    try:
        with closing(write(group, further)) as results:
            for one, result in results:
                opened.remove(one.attempt)
                one.attempt.close()
                yield result
    finally:
        for attempt in opened:
            attempt.close()


def reading_ahead(
    workspace: Workspace,
    limit_s: float,
    *,
    read: Callable[[Chunk, Attempt], Read],
    write: "Write[Read, Result]",
    lost: Callable[[Part], Result],
    most: int = 1,
) -> Callable[[Iterator[tuple[Chunk, str]]], Iterator[Result]]:
    """Return a worker that yields a result for each (chunk, part name).

    `read` runs up to `most` chunks ahead in another thread; `write` gets what it returned for at most `most` chunks,
    and a function for further ones, writes their parts and yields the results; `lost` returns the result for a part
    that an earlier attempt has written. Each step of an attempt may take up to `limit_s` seconds.
    """
    journal, parts = Path(workspace.journal), workspace.parts
    if is_url(parts.location):  # logs are on each machine, because a chunk that kills its process is retried there
        atomic_io.make_private_folder(journal.parents[1])
        journal.parent.mkdir(exist_ok=True)

    def start(chunk: Chunk, name: str, attempt: Attempt) -> Ready[Read]:
        try:
            return Ready(chunk, name, attempt, read(chunk, attempt))
        except BaseException:
            attempt.close()
            raise

    def begin(items: Iterator[tuple[Chunk, str]]) -> "Ready[Read] | Callable[[], Iterable[Result]] | None":
        """Pull a chunk and read it; if it must run alone, or is done, return the function that gives its result."""
        if (item := next(items, None)) is None:  # waits until the engine has another chunk
            return None
        chunk, name = item
        if (part := parts.find(name, chunk.index, chunk.rows * workspace.samples)) is not None:
            return lambda: [lost(part)]
        attempt = Attempt(journal, chunk.index, chunk.rows, limit_s)
        if attempt.alone:
            return lambda: _finish(write, [start(chunk, name, attempt)], list)
        return start(chunk, name, attempt)

    def worker(items: Iterator[tuple[Chunk, str]]) -> Iterator[Result]:
        waiting, order = deque[Future[Ready[Read] | Callable[[], Iterable[Result]] | None]](), threading.Lock()

        def pull(again: Callable[..., Any]) -> "Ready[Read] | Callable[[], Iterable[Result]] | None":
            begun = begin(items)
            if isinstance(begun, Ready):
                with order, suppress(RuntimeError):  # the worker has ended
                    waiting.extend(thread.submit(again, again) for _ in range(len(waiting) < most))
            return begun

        def pull_next() -> None:
            with order:  # what it has pulled is there before what it begins to pull
                waiting.append(thread.submit(pull, pull))  # not named in itself: a cycle keeps what is open

        def further(limit: int) -> Sequence[Ready[Read]]:
            group: list[Ready[Read]] = []
            while len(group) < limit and waiting and isinstance(ahead := _ready(waiting[0]), Ready):
                group.append(ahead)
                waiting.popleft()
            if not waiting:  # the thread has stopped, because it was far enough ahead
                pull_next()
            return group

        with ExitStack() as stack, ThreadPoolExecutor(1, thread_name_prefix="read") as thread:
            stack.callback(_close, waiting)  # after the thread has ended, which may still be reading
            pull_next()
            while (begun := waiting.popleft().result()) is not None:
                if not isinstance(begun, Ready):
                    # The next chunk is pulled only afterwards: if the process dies now, the death has one possible
                    # cause, and no row of another chunk becomes a suspect.
                    yield from begun()
                    pull_next()
                else:
                    yield from _finish(write, [begun, *further(most - 1)], partial(further, most))

    return worker


def examples_of(chunk: Chunk, errors: pa.ChunkedArray) -> tuple[str, ...]:
    """Return up to three errors of a chunk's rows, each with its file and row."""
    reasons = errors.to_pylist()[:: max(1, len(errors) // chunk.rows)] if errors.null_count < len(errors) else []
    failed = [(row, reason) for row, reason in enumerate(reasons) if reason is not None][:3]
    return tuple(f"{chunk.file} row {chunk.number(row)}: {reason}" for row, reason in failed)
