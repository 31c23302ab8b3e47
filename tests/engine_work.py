"""What the tests of engines run in other processes, in a module that is quick to import there.

A process that an engine starts imports the module of the function it gets. The tests' own modules need one to seven
seconds for it, with pytest, Ray, PySpark and transformers.
"""

import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pids import wait_for
from torchlake.errors import TooManyErrors

Chunks = Iterator[Any]


def squares() -> Callable[[Chunks], Iterator[int]]:
    return lambda chunks: (chunk * chunk for chunk in chunks)


def holding(lock: Any) -> Callable[[Chunks], Iterator[int]]:
    raise AssertionError("a lock cannot travel")


def no_worker() -> Callable[[Chunks], Iterator[int]]:
    raise AssertionError("without chunks no worker is needed")


def counting(folder: Path) -> Callable[[Chunks], Iterator[tuple[int, int]]]:
    (folder / f"{os.getpid()}-{time.monotonic_ns()}").touch()
    made = len(list(folder.glob(f"{os.getpid()}-*")))
    return lambda chunks: ((os.getpid(), made) for _ in chunks)


def threads() -> Callable[[Chunks], Iterator[tuple[int, str]]]:
    return lambda chunks: ((os.getpid(), os.environ["OMP_NUM_THREADS"]) for _ in chunks)


def last_is_zero(folder: Path, number: int) -> Callable[[Chunks], Iterator[int]]:
    def worker(chunks: Chunks) -> Iterator[int]:
        for chunk in chunks:
            if chunk == 0:
                wait_for(lambda: len(list(folder.iterdir())) == number - 1)
            else:
                (folder / str(chunk)).touch()
            yield chunk

    return worker


def one_after_seen(seen: Path) -> Callable[[Chunks], Iterator[int]]:
    def worker(chunks: Chunks) -> Iterator[int]:
        for chunk in chunks:
            if chunk == 1:
                wait_for(seen.exists)
            yield chunk

    return worker


def prefetching() -> Callable[[Chunks], Iterator[int]]:
    def worker(chunks: Chunks) -> Iterator[int]:
        ahead: queue.Queue[Any] = queue.Queue(maxsize=1)

        def pull() -> None:
            for chunk in chunks:
                ahead.put((chunk,))
            ahead.put(None)

        thread = threading.Thread(target=pull)
        thread.start()
        while (item := ahead.get()) is not None:
            yield item[0] * item[0]
        thread.join()

    return worker


def with_an_end(folder: Path) -> Callable[[Chunks], Iterator[int]]:
    def worker(chunks: Chunks) -> Iterator[int]:
        yield from chunks
        (folder / "ended").touch()

    return worker


def dies_once_each(folder: Path, deadly: set[int]) -> Callable[[Chunks], Iterator[int]]:
    def worker(chunks: Chunks) -> Iterator[int]:
        for chunk in chunks:
            if chunk in deadly and not (folder / str(chunk)).exists():
                (folder / str(chunk)).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield chunk

    return worker


def poisoned() -> Callable[[Chunks], Iterator[str]]:
    def worker(chunks: Chunks) -> Iterator[str]:
        for chunk in chunks:
            if chunk == "poison":
                os.kill(os.getpid(), signal.SIGKILL)
            yield chunk

    return worker


def dies_at_start() -> Callable[[Chunks], Iterator[int]]:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("dead by now")


def dividing() -> Callable[[Chunks], Iterator[float]]:
    def _dividing_worker(chunks: Chunks) -> Iterator[float]:
        for chunk in chunks:
            yield 1 / chunk

    return _dividing_worker


def gives_up() -> Callable[[Chunks], Iterator[int]]:
    def worker(chunks: Chunks) -> Iterator[int]:
        for chunk in chunks:
            if chunk == 0:
                raise TooManyErrors("9 of 10 rows")
            yield chunk

    return worker


def fails_to_make(folder: Path) -> Callable[[Chunks], Iterator[int]]:
    (folder / str(time.monotonic_ns())).touch()
    raise FileNotFoundError("no model here")


def miscounting(spoil: str) -> Callable[[Chunks], Iterator[int]]:
    def worker(chunks: Chunks) -> Iterator[int]:
        for chunk in chunks:
            if spoil != "few" or chunk != 1:
                yield chunk
            if spoil == "many":
                yield chunk
            if spoil == "early":
                return

    return worker


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def write_environment(folder: Path) -> None:
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(dict(os.environ)))


def meet(folder: Path) -> str:
    (folder / os.environ["RANK"]).touch()
    wait_for(lambda: {path.name for path in folder.iterdir()} == {"0", "1"})
    return "met"


def rank_1_fails_first(folder: Path) -> None:
    if os.environ["RANK"] == "1":
        (folder / "failing").touch()
        raise KeyError("the cause")
    wait_for((folder / "failing").exists)
    time.sleep(0.05)  # as a peer does, it fails a moment later
    raise RuntimeError("connection closed by peer")


def rank_0_fails() -> None:
    if os.environ["RANK"] == "0":
        raise ValueError("first")
    threading.Event().wait()


def rank_1_is_killed() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


def raises(error: Exception) -> None:
    raise error


def own_pid() -> Callable[[Iterator[int]], Iterator[int]]:
    return lambda chunks: (os.getpid() for _ in chunks)


def print_bytes() -> str:
    """Print a line that is no text, and last words without an end; the rank comes back."""
    rank = os.environ["RANK"]
    sys.stdout.buffer.write(f"rank {rank} ".encode() + b"\xff\xfe\n")
    sys.stdout.flush()
    os.write(2, b"last words without an end")
    return rank


def same() -> Callable[[Chunks], Iterator[int]]:
    return lambda chunks: (chunk for chunk in chunks)


def meeting_ahead(folder: Path) -> Callable[[Chunks], Iterator[int]]:
    def worker(chunks: Iterator[int]) -> Iterator[int]:
        ahead: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        threading.Thread(target=lambda: [ahead.put(chunk) for chunk in chunks] + [ahead.put(None)]).start()
        while (chunk := ahead.get()) is not None:
            (folder / str(chunk)).touch()
            wait_for(lambda: len(list(folder.iterdir())) == 2)
            yield chunk

    return worker


def process_of(item: int) -> tuple[int, int]:
    """The item and the process that it was given to."""
    return item, os.getpid()
