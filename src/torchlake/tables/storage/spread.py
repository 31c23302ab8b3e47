"""Apply a function to many items that read much data: in this process, or wherever an engine runs it.

What grows with the bytes or rows of a table goes through here: hashing files, scanning text, checking keys and parts.
The code above passes an engine's `spread`; without one, work stays in this process.
"""

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

T = TypeVar("T")
R = TypeVar("R")

THREADS = 8
"At most; each may hold a part or a million keys in memory."
REQUESTS = 16
"Threads that wait for an object store at the same time."
SMALL = 16 << 20
"Bytes for which threads are not worth starting."


class Spread(Protocol):
    """Yields `function(item)` for each item, in order. Closing the iterator cancels what has not begun."""

    def __call__(
        self, function: Callable[[T], R], items: Sequence[T], *, size: int, name: str
    ) -> Generator[R, None, None]:
        """The items read `size` bytes in all; `name` is shown in an engine's user interface."""


def in_process(
    function: Callable[[T], R], items: Sequence[T], *, size: int, name: str = ""
) -> Generator[R, None, None]:
    """A `Spread` over threads of this process: hashing, decoding and sorting release the GIL."""
    threads = min(len(items), THREADS, os.cpu_count() or 1)
    if threads < 2 or size < SMALL:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(function, items)


def each_file(function: Callable[[T], R], items: Sequence[T], *, remote: bool) -> Iterator[R]:
    """`function` of each file, in order: by threads if they are remote, as most of the time is waiting.

    Local files take mostly Python's own time, and threads would be four times slower.
    """
    if not remote:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(REQUESTS) as pool:
        yield from pool.map(function, items)
