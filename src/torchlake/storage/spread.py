"""Apply a function to many items that read much data, in this process or in the processes of an engine.

All work that grows with the bytes or rows of a table uses this: hashing files, scanning text, checking keys and parts.
Callers pass an engine's `spread`; without one, the work is done in this process.
"""

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

T = TypeVar("T")
R = TypeVar("R")

THREADS = 8
"Maximum number of threads; each may hold a part or a million keys in memory."
REQUESTS = 16
"Number of threads that wait for an object store at the same time."
SMALL = 16 << 20
"Bytes below which threads are not worth starting."


class Spread(Protocol):
    """A function that yields `function(item)` for each item, in order; closing it cancels what has not begun."""

    def __call__(
        self, function: Callable[[T], R], items: Sequence[T], *, size: int, name: str
    ) -> Generator[R, None, None]:
        """Yield the results. All items together read `size` bytes; an engine's user interface shows `name`."""


def in_process(
    function: Callable[[T], R], items: Sequence[T], *, size: int, name: str = ""
) -> Generator[R, None, None]:
    """Yield a `Spread` over threads of this process: hashing, decoding and sorting release the GIL."""
    threads = min(len(items), THREADS, os.cpu_count() or 1)
    if threads < 2 or size < SMALL:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(function, items)


def each_file(function: Callable[[T], R], items: Sequence[T], *, remote: bool) -> Iterator[R]:
    """Yield `function` of each file, in order, with threads if files are remote and most of the time is waiting.

    Local files mostly take Python's own time, and threads would make that four times slower.
    """
    if not remote:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(REQUESTS) as pool:
        yield from pool.map(function, items)
