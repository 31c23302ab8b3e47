"""The local engine: child processes on this machine.

    run_chunks   each chunk goes to the next worker that pulls
    launch       N ranks, as torchrun starts them on one machine, without its agent and rendezvous

Workers and ranks run in their own sessions: Ctrl-C reaches only this process, which stops them.
Cost of a process: about 0.1 s to start Python, and the function's imports (torch: seconds).
"""

from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import Any

from torchlake.engines import DEFAULT_RESOURCES, Engine, ProcessRange, Resources, Worker, process_bounds
from torchlake.processes.children import Children
from torchlake.processes.chunk_process import run_chunks_locally
from torchlake.processes.environment import (
    MASTER_FD,
    interface_of,
    local_environment,
    rank_variables,
    reserve_port,
)
from torchlake.processes.hardware import assign_gpus, cores, gpus, max_processes, visible_devices
from torchlake.processes.ranks import run_ranks
from torchlake.processes.serialization import pack


class Local(Engine):
    """Processes of this machine.

    `processes` is the number for every job of this engine. None means 1 for launch and, for chunks, one per core (fewer
    if the job needs several threads in each), but no more than there are chunks. `stdout_to_stderr` redirects what
    children print to this process's stderr.
    """

    def __init__(self, processes: ProcessRange | None = None, *, stdout_to_stderr: bool = False) -> None:
        self.min_processes, self.processes = (None, None) if processes is None else process_bounds(processes)
        self.stdout_to_stderr = stdout_to_stderr

    def run_chunks(
        self,
        make_worker: Callable[[], Worker],
        chunks: Iterable[Any],
        *,
        resources: Resources = DEFAULT_RESOURCES,
        name: str = "chunks",
        label: Callable[[Any], str] = str,
    ) -> Generator[Any, None, None]:
        todo, each = list(chunks), resources.gpus
        wanted = resources.processes or self.processes or max_processes(resources.memory, resources.threads)
        if each is None:
            found = len(gpus())
            each = resources.devices if found else 0
            wanted = max(1, min(wanted, found // each)) if found else wanted
        number = max(1, min(wanted, len(todo)))
        devices = assign_gpus(number, each)
        environments = [local_environment(number, devices[index] if devices else None) for index in range(number)]
        children = partial(Children, stdout_to_stderr=self.stdout_to_stderr)
        return run_chunks_locally(pack(make_worker), todo, environments, children)

    def launch(
        self,
        fn: Callable[..., Any],
        *args: Any,
        processes: ProcessRange | None = None,
        gpus_per_process: int | None = 0,
        grace_s: float = 30.0,
        name: str = "launch",
        stop_file: str | None = None,
    ) -> Any:
        # Without assignment, ranks see the same devices as this process, and LOCAL_RANK is the index of each rank's
        # device.
        gpus_per_process = gpus_per_process or 0
        number = self.num_ranks(processes, gpus_per_process)
        devices = assign_gpus(number, gpus_per_process)
        visible = visible_devices(devices).split(",") if devices else None
        payload, children = pack(fn, *args), Children(stdout_to_stderr=self.stdout_to_stderr)
        host = "127.0.0.1"
        interface = interface_of(host)
        with reserve_port(host) as holder:
            port, descriptor = holder.getsockname()[1], holder.fileno()

            def start() -> None:
                for rank in range(number):
                    ranks = rank_variables(rank, machines=[0] * number, master=host, port=port, interface=interface)
                    descriptors = (descriptor,) if rank == 0 else ()
                    if descriptors:
                        ranks[MASTER_FD] = str(descriptor)
                    children.start(rank, "rank", payload, local_environment(number, visible, ranks), descriptors)

            return run_ranks(start, number, children, grace_s=grace_s)

    def capacity(self, most: int, *, gpus_per_process: int | None = 0, running: int = 0) -> int:
        """Return the capacity, by cores and GPUs, regardless of other load on this machine."""
        each = min(1, len(gpus())) if gpus_per_process is None else gpus_per_process
        return min(most, cores(), *([len(gpus()) // each] if each else []))

    def default_ranks(self) -> int:
        """Return one per GPU of this machine, at least one."""
        return max(1, len(gpus()))

    def map_frame(self, frame: Any, make_worker: Callable[[], Callable[[Any], Any]], schema: Any) -> Any:
        """Apply the worker to the Arrow table `frame`, immediately and in this process."""
        result = make_worker()(frame)
        assert result.schema.equals(schema), f"the worker returned {result.schema}, promised {schema}"
        return result
