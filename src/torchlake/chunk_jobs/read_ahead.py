"""A worker of a chunk job: it reads one chunk ahead, in a thread, while it makes the rows of the current one.

A chunk that may hold a poison row runs with nothing of another chunk beside it; `poison_rows.py` decides which.
Cost: one chunk in memory besides the one being worked on.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from torchlake.chunk_jobs.poison_rows import Attempt
from torchlake.tables.output.parts import Part, part_of_lost_attempt
from torchlake.tables.plan import Chunk

Read = TypeVar("Read")
Result = TypeVar("Result")


def reading_ahead(
    staging: Path,
    limit_s: float,
    *,
    read: Callable[[Chunk, Attempt], Read],
    write: Callable[[Chunk, str, Attempt, Read], Result],
    lost: Callable[[Part], Result],
) -> Callable[[Iterator[tuple[Chunk, str]]], Iterator[Result]]:
    """Return a worker that yields a result for each (chunk, part name).

    `read` runs one chunk ahead in another thread; `write` gets what it returned, writes the part and returns the
    result; `lost` returns the result for a part that an earlier attempt has written. A step of an attempt may take
    `limit_s` seconds.
    """

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
        """Pull a chunk, and read it unless it must run alone; returns that and the function that finishes it."""
        item = next(items, None)  # waits until the engine has another chunk
        if item is None:
            return None
        chunk, name = item
        part = part_of_lost_attempt(staging, name, chunk)
        if part is not None:
            return False, partial(lost, part)
        attempt = Attempt(staging / "journal", chunk.index, chunk.rows, limit_s)
        if attempt.alone:
            return True, lambda: finish(chunk, name, attempt, start(chunk, attempt))
        return False, partial(finish, chunk, name, attempt, start(chunk, attempt))

    def worker(items: Iterator[tuple[Chunk, str]]) -> Iterator[Result]:
        with ThreadPoolExecutor(1, thread_name_prefix="read") as thread:
            ahead = thread.submit(begin, items)
            while (begun := ahead.result()) is not None:
                alone, run = begun
                if alone:
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
