"""The local engine: child processes of this one, on this machine.

    run_chunks   a chunk goes to the next worker that asks for one
    launch       N ranks, as torchrun would start them on one machine, without its agent and its rendezvous

Price of a process: about 0.1 s to start Python, and what the function imports (torch: seconds). Workers and ranks are
in sessions of their own: Ctrl-C reaches this process alone, which stops them in order. `processes/children.py` says why
none of them is left behind.
"""

from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import Any

from torchlake.engines import Engine, Span, Worker, at_least_one, bounds
from torchlake.processes.children import Children
from torchlake.processes.chunk_process import run_here
from torchlake.processes.environment import (
    MASTER_FD,
    environment,
    held_port,
    interface_of,
    rank_variables,
    share_gpus,
    visible_to_all,
)
from torchlake.processes.hardware import cores, gpus, most_processes
from torchlake.processes.ranks import run_ranks
from torchlake.processes.serialization import pack


class Local(Engine):
    """Processes of this machine.

    `processes` is the number for every job of this engine; None means, for chunks, one per core but no more than there
    are chunks (fewer where the job wants several threads in each), and 1 for launch. `stdout_to_stderr` sends what
    children print to this process's stderr, for callers whose own stdout is read by a program.
    """

    def __init__(self, processes: Span | None = None, *, stdout_to_stderr: bool = False) -> None:
        self.fewest, self.processes = (None, None) if processes is None else bounds(processes)
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
        name: str = "chunks",
        label: Callable[[Any], str] = str,
    ) -> Generator[Any, None, None]:
        todo = list(chunks)
        threads = 1 if threads_per_process is None else at_least_one(threads_per_process, "threads_per_process")
        if processes is not None:
            wanted = at_least_one(processes)
        else:
            wanted = self.processes or most_processes(memory_per_process, threads)
        if gpus_per_process is None:
            found = len(gpus())
            wanted, gpus_per_process = (min(wanted, found), 1) if found else (wanted, 0)
        number = max(1, min(wanted, len(todo)))
        devices = share_gpus(number, gpus_per_process)
        environments = [environment(number, devices[index] if devices else None, {}) for index in range(number)]
        children = partial(Children, stdout_to_stderr=self.stdout_to_stderr)
        return run_here(pack(make_worker), todo, environments, children)

    def launch(
        self,
        fn: Callable[..., Any],
        *args: Any,
        processes: Span | None = None,
        gpus_per_process: int | None = 0,
        grace_s: float = 30.0,
        name: str = "launch",
        stop_file: str | None = None,
    ) -> Any:
        # Without a number ranks see what this process sees, and LOCAL_RANK is the number of each one's device.
        gpus_per_process = gpus_per_process or 0
        number = self.ranks(processes, gpus_per_process)
        devices = share_gpus(number, gpus_per_process)
        visible = visible_to_all(devices).split(",") if devices else None
        payload, children = pack(fn, *args), Children(stdout_to_stderr=self.stdout_to_stderr)
        with held_port("127.0.0.1") as holder:
            port, master = holder.getsockname()[1], holder.fileno()

            def start() -> None:
                for rank in range(number):
                    ranks = rank_variables(
                        rank, machines=[0] * number, master="127.0.0.1", port=port, interface=interface_of("127.0.0.1")
                    )
                    variables = environment(number, visible, ranks)
                    if rank == 0:
                        variables[MASTER_FD] = str(master)
                    children.start(rank, "rank", payload, variables, descriptors=(master,) if rank == 0 else ())

            return run_ranks(start, number, children, grace_s=grace_s)

    def room(self, most: int, *, gpus_per_process: int | None = 0, held: int = 0) -> int:
        """A rank for each core and, where it has some, for each so many GPUs, whatever else this machine does."""
        each = min(1, len(gpus())) if gpus_per_process is None else gpus_per_process
        return min(most, cores(), *([len(gpus()) // each] if each else []))

    def usual_ranks(self) -> int:
        """One for each GPU of this machine; one where it has none."""
        return max(1, len(gpus()))

    def map_frame(self, frame: Any, make_worker: Callable[[], Callable[[Any], Any]], schema: Any) -> Any:
        """Apply the worker to the Arrow table `frame`, in this process and at once."""
        result = make_worker()(frame)
        assert result.schema.equals(schema), f"the worker returned {result.schema}, promised {schema}"
        return result
