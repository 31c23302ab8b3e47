"""A worker of a chunk job: it reads one chunk ahead, in a thread, while it makes the rows of the current one.

A chunk that may have a poison row runs without any work on another chunk beside it; `poison_rows.py` decides which.
Cost: one chunk in memory besides the one being worked on.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

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


@dataclass(frozen=True, kw_only=True)
class WrittenChunk:
    """A worker's report about a chunk."""

    part: Part
    examples: tuple[str, ...] = ()
    "Up to three errors, each with file and row."
    written: int = 0
    "The tokens that a model wrote."


def reading_ahead(
    workspace: Workspace,
    limit_s: float,
    *,
    read: Callable[[Chunk, Attempt], Read],
    write: Callable[[Chunk, str, Attempt, Read], Result],
    lost: Callable[[Part], Result],
) -> Callable[[Iterator[tuple[Chunk, str]]], Iterator[Result]]:
    """Return a worker that yields a result for each (chunk, part name).

    `read` runs one chunk ahead in another thread; `write` gets what it returned, writes the part and returns the
    result; `lost` returns the result for a part that an earlier attempt has written. Each step of an attempt may take
    up to `limit_s` seconds.
    """
    journal, parts = Path(workspace.journal), workspace.parts
    if is_url(parts.location):  # logs are on each machine, because a chunk that kills its process is retried there
        atomic_io.make_private_folder(journal.parents[1])
        journal.parent.mkdir(exist_ok=True)

    def start(chunk: Chunk, attempt: Attempt) -> Read:
        try:
            return read(chunk, attempt)
        except BaseException:
            attempt.close()
            raise

    def finish(chunk: Chunk, name: str, attempt: Attempt, ready: Read) -> Result:
        with closing(attempt):
            return write(chunk, name, attempt, ready)

    def begin(items: Iterator[tuple[Chunk, str]]) -> tuple[bool, Callable[[], Result]] | None:
        """Pull a chunk, and read it unless it must run alone; return that and the function that finishes it."""
        item = next(items, None)  # waits until the engine has another chunk
        if item is None:
            return None
        chunk, name = item
        part = parts.find(name, chunk.index, chunk.rows)
        if part is not None:
            return False, partial(lost, part)
        attempt = Attempt(journal, chunk.index, chunk.rows, limit_s)
        if attempt.alone:
            return True, lambda: finish(chunk, name, attempt, start(chunk, attempt))
        return False, partial(finish, chunk, name, attempt, start(chunk, attempt))

    def worker(items: Iterator[tuple[Chunk, str]]) -> Iterator[Result]:
        with ThreadPoolExecutor(1, thread_name_prefix="read") as thread:
            ahead = thread.submit(begin, items)
            while (begun := ahead.result()) is not None:
                alone, run = begun
                if alone:
                    # The next chunk is pulled only afterwards: if the process dies now, the death has one possible
                    # cause, and no row of another chunk becomes a suspect.
                    result = run()
                    ahead = thread.submit(begin, items)
                else:
                    ahead = thread.submit(begin, items)
                    result = run()
                yield result

    return worker


def examples_of(chunk: Chunk, errors: pa.ChunkedArray) -> tuple[str, ...]:
    """Return up to three errors of a chunk's rows, each with its file and row."""
    reasons = errors.to_pylist() if errors.null_count < len(errors) else []
    failed = [(row, reason) for row, reason in enumerate(reasons) if reason is not None][:3]
    return tuple(f"{chunk.file} row {chunk.number(row)}: {reason}" for row, reason in failed)
