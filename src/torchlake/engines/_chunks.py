"""Chunks handed out to worker processes as they are pulled, whatever engine placed the processes.

The k-th result of a worker belongs to the k-th chunk that it pulled. A worker that dies is replaced, and its unfinished
chunks go first to the next who asks. Price: one small message each way per chunk, through this one process.
"""

import time
from collections import deque
from collections.abc import Generator
from queue import Empty
from typing import Any

from torchlake.engines._crossing import ending, rebuild, signal_of
from torchlake.engines._processes import AnyChild, ChildSet
from torchlake.errors import RankFailed

MAX_DEATHS = 20  # of a chunk's processes, before the chunk ends the job
MAX_EARLY_DEATHS = 2  # of processes before the first worker is ready: it will not get better
WORKER_EXIT_S = 10.0  # for a worker that has no more chunks


def hand_out(
    payload: bytes, todo: list[Any], environments: list[dict[str, str]], workers: ChildSet
) -> Generator[Any, None, None]:
    """Hand out chunks as they are pulled; a dead worker's unfinished chunks go first to the next who asks."""
    pending = deque(range(len(todo)))
    unfinished: dict[AnyChild, deque[int]] = {}  # pulled, result not yet here; of the running workers
    ready: set[AnyChild] = set()
    ended: set[AnyChild] = set()  # were told that there is no further chunk
    deaths = [0] * len(todo)
    barren = 0  # deaths in a row of workers that held no chunk
    left = len(todo)
    if not todo:
        return
    with workers:
        for number, variables in enumerate(environments):
            unfinished[workers.start(number, "worker", payload, variables)] = deque()
        while left:
            child, kind, value = workers.events.get()
            if kind == "ready":
                ready.add(child)
            elif kind == "pull" and pending:
                index = pending.popleft()
                unfinished[child].append(index)
                child.send(todo[index])
            elif kind == "pull":
                ended.add(child)
                child.send()
            elif kind == "result":
                unfinished[child].popleft()
                left -= 1
                barren = 0
                yield value
            elif kind == "error":
                raise rebuild(value, rank=child.number, who="worker")
            elif kind == "exit":
                lost = unfinished.pop(child)
                pending.extendleft(reversed(lost))
                if lost:
                    deaths[lost[0]] += 1  # results come in order: the first is the one that was being worked on
                    if deaths[lost[0]] > MAX_DEATHS:
                        raise _deadly_chunk(child, value, [todo[index] for index in lost])
                elif child in ended:
                    continue
                elif pending:
                    barren += 1
                    if barren >= (MAX_DEATHS if ready else MAX_EARLY_DEATHS):
                        raise _barren_worker(child, value, barren)
                if pending:
                    number = child.number
                    unfinished[workers.start(number, "worker", payload, environments[number])] = deque()
        _let_go(workers, ready & unfinished.keys())


def nothing() -> Generator[Any, None, None]:
    """The results of no chunks."""
    yield from ()


def _let_go(workers: ChildSet, running: set[AnyChild]) -> None:
    """Wait for workers without chunks to end their generators; their set kills those that take too long."""
    deadline = time.monotonic() + WORKER_EXIT_S
    while running:
        try:
            child, kind, value = workers.events.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            return
        if kind == "pull":
            child.send()
        elif kind == "error" and child in running:
            raise rebuild(value, rank=child.number, who="worker")
        elif kind == "exit":
            running.discard(child)


def _deadly_chunk(child: AnyChild, code: int, chunks: list[Any]) -> RankFailed:
    names = " and ".join(repr(chunk)[:300] for chunk in chunks)
    return RankFailed(
        f"{MAX_DEATHS + 1} worker processes died while working on {names}; the last one (worker {child.number}) "
        f"{ending(code)}. Take these rows out, or give each process more memory.",
        rank=child.number,
        signal=signal_of(code),
    )


def _barren_worker(child: AnyChild, code: int, times: int) -> RankFailed:
    return RankFailed(
        f"{times} worker processes died before they took a chunk; the last one (worker {child.number}) {ending(code)}. "
        "What they printed on stderr says more.",
        rank=child.number,
        signal=signal_of(code),
    )
