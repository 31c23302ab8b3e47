"""The local engine: child processes of this one, on this machine.

    run_chunks   workers pull chunks over a socket each; the k-th result of a worker belongs to the k-th chunk it pulled
    launch       N ranks, as torchrun would start them on one machine, without its agent and its rendezvous

Price of a process: about 0.1 s to start Python, and what the function imports (torch: seconds). Workers and ranks are
in sessions of their own: Ctrl-C reaches this process alone, which stops them in order. `_processes.py` says why none
of them can be left behind.
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from queue import Empty
from typing import Any

from torchlake.engines import Engine, Worker
from torchlake.engines._crossing import ending, pack, rebuild
from torchlake.engines._machine import environment, gpus, held_port, most_processes, rank_variables, share_gpus
from torchlake.engines._processes import Child, Children
from torchlake.engines._ranks import run_ranks
from torchlake.errors import RankFailed, UsageError

MAX_DEATHS = 20  # of a chunk's processes, before the chunk ends the job
MAX_EARLY_DEATHS = 2  # of processes before the first worker is ready: it will not get better
WORKER_EXIT_S = 10.0  # for a worker that has no more chunks


class Local(Engine):
    """Processes of this machine.

    `processes` is the number for every job of this engine; None means, for chunks, one per core but no more than there
    are chunks (fewer where the job wants several threads in each), and 1 for launch. `stdout_to_stderr` sends what
    children print to this process's stderr, for callers whose own stdout is read by a program.
    """

    def __init__(self, processes: int | None = None, *, stdout_to_stderr: bool = False) -> None:
        self.processes = None if processes is None else _at_least_one(processes)
        self.stdout_to_stderr = stdout_to_stderr

    def run_chunks(
        self,
        make_worker: Callable[[], Worker],
        chunks: Iterable[Any],
        *,
        processes: int | None = None,
        gpus_per_process: int | None = 0,
        memory_per_process: int = 0,
        threads_per_process: int | None = None,
    ) -> Generator[Any, None, None]:
        todo = list(chunks)
        threads = 1 if threads_per_process is None else _at_least_one(threads_per_process, "threads_per_process")
        if processes is not None:
            wanted = _at_least_one(processes)
        else:
            wanted = self.processes or most_processes(memory_per_process, threads)
        if gpus_per_process is None:
            found = len(gpus())
            wanted, gpus_per_process = (min(wanted, found), 1) if found else (wanted, 0)
        number = max(1, min(wanted, len(todo)))
        devices = share_gpus(number, gpus_per_process)
        environments = [environment(number, devices[index] if devices else None, {}) for index in range(number)]
        return _run_chunks(pack(make_worker), todo, environments, Children(stdout_to_stderr=self.stdout_to_stderr))

    def launch(
        self,
        fn: Callable[..., Any],
        *args: Any,
        processes: int | None = None,
        gpus_per_process: int = 0,
        grace_s: float = 30.0,
    ) -> Any:
        number = self.processes or 1 if processes is None else _at_least_one(processes)
        devices = share_gpus(number, gpus_per_process)
        # All ranks see the GPUs of all, as under torchrun: there LOCAL_RANK is the number of a rank's device.
        visible = [name for share in devices for name in share] if devices else None
        payload, children = pack(fn, *args), Children(stdout_to_stderr=self.stdout_to_stderr)
        with held_port() as holder:
            port, master = holder.getsockname()[1], holder.fileno()
            environments = [environment(number, visible, rank_variables(rank, number, port)) for rank in range(number)]
            environments[0]["TORCHLAKE_MASTER_FD"] = str(master)
            return run_ranks(payload, environments, children, master=master, grace_s=grace_s)

    def map_frame(self, frame: Any, make_worker: Callable[[], Callable[[Any], Any]], schema: Any) -> Any:
        """Apply the worker to the Arrow table `frame`, in this process and at once."""
        result = make_worker()(frame)
        assert result.schema.equals(schema), f"the worker returned {result.schema}, promised {schema}"
        return result


def _at_least_one(number: int, name: str = "processes") -> int:
    if number < 1:
        raise UsageError(f"{name} is {number}; it has to be 1 or more.")
    return number


def _run_chunks(
    payload: bytes, todo: list[Any], environments: list[dict[str, str]], workers: Children
) -> Generator[Any, None, None]:
    """Hand out chunks as they are pulled; a dead worker's unfinished chunks go first to the next who asks."""
    pending = deque(range(len(todo)))
    unfinished: dict[Child, deque[int]] = {}  # pulled, result not yet here; of the running workers
    ready: set[Child] = set()
    ended: set[Child] = set()  # were told that there is no further chunk
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


def _let_go(workers: Children, running: set[Child]) -> None:
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


def _deadly_chunk(child: Child, code: int, chunks: list[Any]) -> RankFailed:
    names = " and ".join(repr(chunk)[:300] for chunk in chunks)
    return RankFailed(
        f"{MAX_DEATHS + 1} worker processes died while working on {names}; the last one (worker {child.number}) "
        f"{ending(code)}. Take these rows out, or give each process more memory.",
        rank=child.number,
        signal=-code if code < 0 else None,
    )


def _barren_worker(child: Child, code: int, times: int) -> RankFailed:
    return RankFailed(
        f"{times} worker processes died before they took a chunk; the last one (worker {child.number}) {ending(code)}. "
        "What they printed on stderr says more.",
        rank=child.number,
        signal=-code if code < 0 else None,
    )
