"""The Ray engine: processes on the nodes of a Ray cluster, or on this machine's cores by Ray.

    run_chunks   one Ray task per process; what runs in it pulls chunks from the driver, as on the local engine
    launch       a placement group: all ranks at once or none, with the variables that torchrun sets
    map_frame    Dataset.map_batches: a lazy Dataset of the same rows with more columns

Rows never pass through the driver or the object store: workers read and write storage, and only chunk names and counts
cross, over one connection per process to the driver (`_seats.py`). A process that Ray lost comes back as Ray's own
retry of its task, and takes its seat again. Tasks, not actors: nobody but the driver asks a seat for anything.
Price: about 1 s for a job's first process, once Ray runs.
"""

import math
import os
import socket
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pyarrow as pa
import ray
import ray.data
import ray.util.client
from ray._private import ray_constants
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from torchlake.engines import Engine, Span, Worker, at_least_one, bounds
from torchlake.engines._chunks import hand_out, nothing
from torchlake.engines._crossing import pack
from torchlake.engines._frames import BatchMapper, map_table
from torchlake.engines._machine import cores, most_processes, thread_variables
from torchlake.engines._ranks import run_ranks
from torchlake.engines._seats import Seats, group_variables
from torchlake.engines._shell import Address, sit
from torchlake.errors import UsageError

SEATS_S = 600.0  # for a busy cluster to give all ranks their places
FREED_S = 5.0  # for Ray to free what a group held that has just ended
GROW_S = 60.0  # for a cluster that grows by itself to have room for all ranks

_BATCHES: dict[str, Any] = {"batch_format": "pyarrow", "batch_size": 4096, "zero_copy_batch": True}


class Ray(Engine):
    """Processes placed by Ray.

    `address` is that of a running cluster ("auto": the one of this machine); by default the one that this process has
    joined already or that RAY_ADDRESS names, else Ray is started on this machine's cores, reached from this machine
    alone. `processes` is the number for every job of this engine; None means, for chunks, one per CPU but no more than
    there are chunks, and 1 for launch. `gpus_per_process` is what each process of a job gets where the job does not
    say, also a part of a GPU (0.5) for chunks. `stdout_to_stderr` sends what processes print to this one's stderr.
    """

    def __init__(
        self,
        address: str | None = None,
        processes: Span | None = None,
        *,
        gpus_per_process: float | None = None,
        stdout_to_stderr: bool = False,
    ) -> None:
        self.address = address
        self.fewest, self.processes = (None, None) if processes is None else bounds(processes)
        self.gpus_per_process = gpus_per_process
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
        todo, payload = list(chunks), pack(make_worker)
        threads = 1 if threads_per_process is None else at_least_one(threads_per_process, "threads_per_process")
        wanted = self.processes if processes is None else at_least_one(processes)
        if not todo:
            return nothing()
        started = self.join()
        resources = ray.cluster_resources()
        share = self._gpu_share(gpus_per_process, resources)
        slots = max(1, int(resources.get("CPU", 1)))
        if wanted is None:
            wanted = max(1, slots // threads)
            if started:
                wanted = min(wanted, most_processes(memory_per_process))
        if share:
            wanted = min(wanted, max(1, int(resources.get("GPU", 0) / share)))
        number = min(wanted, len(todo))
        environments = [thread_variables(_threads(number, slots))] * number
        return hand_out(payload, todo, environments, self._seats(number, share, together=False))

    def launch(
        self,
        fn: Callable[..., Any],
        *args: Any,
        processes: Span | None = None,
        gpus_per_process: int = 0,
        grace_s: float = 30.0,
    ) -> Any:
        payload = pack(fn, *args)
        number = self.ranks(processes, gpus_per_process)
        share = self._gpu_share(gpus_per_process, None)
        if share != int(share):
            raise UsageError(f"gpus_per_process is {share}; a rank needs whole GPUs.")
        wait_s = 0.0 if self.join() else GROW_S
        _need_room({"CPU": number, "GPU": number * share}, number, wait_s)
        seats = self._seats(number, share, together=True)

        def start() -> None:
            slots = int(ray.cluster_resources().get("CPU", 1))
            for rank, variables in enumerate(group_variables(seats.taken(SEATS_S), _threads(number, slots))):
                seats.start(rank, "rank", payload, variables)

        return run_ranks(start, number, seats, grace_s=grace_s)

    def room(self, most: int, *, gpus_per_process: int = 0, held: int = 0) -> int:
        """Ranks that the nodes have free CPUs and GPUs for, besides the `held` ones.

        Waits some seconds before it says fewer than `most`, since what a group leaves behind is freed after its end.
        """
        self.join()
        share = self._gpu_share(gpus_per_process, None)
        deadline = time.monotonic() + (0.0 if held else FREED_S)
        while True:
            found = held + sum(_fitting(free, share) for free in _free_nodes())
            if found >= most or time.monotonic() >= deadline:
                return min(most, found)
            time.sleep(0.2)

    def map_frame(self, frame: Any, make_worker: Callable[[], Callable[[Any], Any]], schema: Any) -> Any:
        """Apply the worker to a Ray Dataset: a lazy one, in the order that Ray Data gives.

        Actors, up to `processes` (default: one per CPU), keep the worker; a batch is what Ray Data makes of 4,096 rows.
        A Dataset of one block keeps one actor busy, and Ray reads small files into one: `repartition` such a one.
        """
        self.join()
        most = self.processes or max(1, int(ray.cluster_resources().get("CPU", 1)))
        return frame.map_batches(
            BatchMapper,
            fn_constructor_args=(pack(make_worker),),
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=most),
            num_gpus=self.gpus_per_process or None,
            **_BATCHES,
        )

    def map_in_tasks(self, frame: Any, make_worker: Callable[[], Callable[[Any], Any]]) -> Any:
        """The same in Ray tasks, as many as there is room for, for a worker that is quick to make."""
        self.join()
        return frame.map_batches(partial(map_table, pack(make_worker)), **_BATCHES)

    def frame_schema(self, frame: Any) -> pa.Schema:
        self.join()
        schema = frame.schema()
        return pa.schema(list(zip(schema.names, schema.types, strict=True)))

    def spool(self, frame: Any, folder: str) -> None:
        """Ray's tasks write the files: the folder has to be one that all nodes reach."""
        self.join()
        frame.write_parquet(os.path.abspath(folder))

    def join(self) -> bool:
        """Join the cluster, or start one; whether it is this machine alone."""
        address = self.address or os.environ.get("RAY_ADDRESS")  # Ray sets it for what `ray job submit` runs
        if not ray.is_initialized():
            if address is not None:
                ray.init(address=address, log_to_driver=False)
            else:
                _start_here(max(cores(), self.processes or 1))
        if ray.util.client.ray.is_connected():
            raise UsageError(
                "This is a Ray Client connection (ray://), which workers cannot answer. Run the job on the cluster: "
                "as a Ray job (ray job submit), or from a notebook on its head node with address='auto'."
            )
        return address is None and len(ray.nodes()) == 1

    def _gpu_share(self, asked: int | None, resources: dict[str, float] | None) -> float:
        """GPUs of each process: the job's number, else the engine's, else one where there are any (asked is None)."""
        if asked:
            return float(asked)
        if self.gpus_per_process is not None:
            return self.gpus_per_process
        return 1.0 if asked is None and resources and resources.get("GPU") else 0.0

    def _seats(self, number: int, gpus: float, *, together: bool) -> Seats:
        placement = _Tasks(number, gpus, together=together)
        host = ray.util.get_node_ip_address()
        return Seats(placement, host=host, stdout_to_stderr=self.stdout_to_stderr)


class _Tasks:
    """Seats as Ray tasks of one CPU each, in a placement group when they have to be taken together."""

    def __init__(self, seats: int, gpus: float, *, together: bool) -> None:
        self.seats, self.together = seats, together
        self._gpus = gpus
        self._refs: list[Any] = []

    def run(self, address: Address, key: bytes) -> None:
        task, needs = ray.remote(_sit), {"num_cpus": 1, "num_gpus": self._gpus}
        if not self.together:
            self._refs = [task.options(**needs, max_retries=-1).remote(address, key, n) for n in range(self.seats)]
            ray.get(self._refs)
            return
        group: PlacementGroup = placement_group([{"CPU": 1, "GPU": self._gpus}] * self.seats, strategy="PACK")
        try:
            if not group.wait(SEATS_S):
                raise TimeoutError(f"Ray had no room for {self.seats} processes within {SEATS_S:.0f} s")
            self._refs = [
                task.options(
                    **needs,
                    max_retries=0,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=n),
                ).remote(address, key, n)
                for n in range(self.seats)
            ]
            ray.get(self._refs)
        finally:
            remove_placement_group(group)

    def cancel(self) -> None:
        for ref in self._refs:
            ray.cancel(ref, force=True)


def _start_here(cpus: int) -> None:
    """Start Ray on this machine, listening to nobody else.

    That takes the switch by which Ray keeps to itself on laptops with macOS and Windows; on Linux its processes listen
    to the whole network, whatever address `ray.init` is given.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        ray.init(
            "local",  # not one that somebody else started on this machine
            num_cpus=cpus,
            include_dashboard=False,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
            _system_config={"worker_niceness": 0},  # 15 by default: the job would yield to everything else
        )
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _sit(address: Address, key: bytes, seat: int) -> None:
    """A Ray task: the shell of one seat, with the GPUs that Ray gave the task."""
    granted = os.environ.get("CUDA_VISIBLE_DEVICES") if ray.get_gpu_ids() else None
    sit(address, key, seat, None if granted is None else granted.split(","))


def _threads(processes: int, cpus: int) -> int:
    """Cores for each of `processes` that share the cluster, no more than its largest node has."""
    largest = max((int(node["Resources"].get("CPU", 1)) for node in ray.nodes() if node["Alive"]), default=1)
    return max(1, min(cpus // processes, largest))


def _free_nodes() -> Iterator[dict[str, float]]:
    """What is free on each node that answers. Ray counts a node that is lost for half a minute longer."""
    free = available_resources_per_node()
    for node in ray.nodes():
        if node["Alive"] and node["NodeID"] in free:
            with suppress(OSError), socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), 2):
                yield free[node["NodeID"]]


def _fitting(free: dict[str, float], gpus: float) -> int:
    """Ranks of one CPU and so many GPUs that fit into what is free."""
    return int(min(free.get("CPU", 0.0), free.get("GPU", 0.0) / gpus if gpus else math.inf))


def _need_room(wanted: dict[str, float], number: int, wait_s: float) -> None:
    """Wait that long for a cluster that holds `wanted`; raises UsageError when there is none."""
    deadline = time.monotonic() + wait_s
    while True:
        found = ray.cluster_resources()
        lacking = [name for name, amount in wanted.items() if amount > found.get(name, 0)]
        if not lacking:
            return
        if time.monotonic() >= deadline:
            name = lacking[0]
            raise UsageError(
                f"{number} ranks have to run at the same time and need {wanted[name]:g} {name}s; Ray has "
                f"{found.get(name, 0):g}. Ask for fewer processes, or start a larger cluster."
            )
        time.sleep(0.5)
