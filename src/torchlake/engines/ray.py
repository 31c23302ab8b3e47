"""The Ray engine: processes on the nodes of a Ray cluster, or on this machine's cores by Ray.

    run_chunks   a pool of actors, and a named call of one of them for every bundle of chunks (`_ray_chunks.py`)
    launch       a placement group with an actor for each rank (`_ray_launch.py`), or Ray Train's own launcher
    map_frame    Dataset.map_batches: a lazy Dataset of the same rows with more columns

Ray places, counts and shows everything; in an actor a child process does the work, so that a row that kills costs no
actor. Rows never pass through the driver or the object store: workers read and write storage, and only chunk names and
counts cross. A process takes as many CPUs of Ray's count as it has threads.
Price: about 1 s for a job's first process, once Ray runs.
"""

import os
from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import pyarrow as pa
import ray
import ray.data

from torchlake.engines import Engine, Span, Worker, at_least_one, bounds
from torchlake.engines._frames import BatchMapper, map_table
from torchlake.engines._ray_chunks import ChunkJob, Demand
from torchlake.engines._ray_cluster import FREED_S, Share, free_for, free_nodes, join, total_nodes, widest
from torchlake.engines._ray_launch import ActorRanks, RankJob
from torchlake.engines._ray_train import launch_with_torch_trainer
from torchlake.errors import UsageError
from torchlake.processes.environment import thread_variables
from torchlake.processes.hardware import most_processes
from torchlake.processes.ranks import run_ranks
from torchlake.processes.serialization import pack

CHUNK_STRATEGIES = ("DEFAULT", "SPREAD")
LAUNCH_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
LAUNCHERS = ("placement_group", "torch_trainer")

_BATCHES: dict[str, Any] = {"batch_format": "pyarrow", "batch_size": 4096, "zero_copy_batch": True}


class Ray(Engine):
    """Processes placed by Ray.

    `address` is that of a running cluster ("auto": the one of this machine); by default the one that this process has
    joined already or that RAY_ADDRESS names, else Ray is started on this machine's cores, reached from this machine
    alone. `processes` is the number for every job of this engine; None means, for chunks, as many as Ray has room for
    and comes to have, but no more than there are chunks, and 1 for launch.

    Each process reserves `gpus_per_process` where the job does not say, also a part of a GPU (0.5) for chunks;
    `cpus_per_process`, which are its threads too (None: what the job asks for, or its part of the cluster where the
    number of processes is given); `memory` in bytes and custom `resources` where they are given. `placement_strategy`
    is DEFAULT or SPREAD for chunks, PACK, SPREAD, STRICT_PACK or STRICT_SPREAD for ranks. `launcher` starts the ranks:
    a placement group, or TorchTrainer of Ray Train, which cannot do all of it (`_ray_train.NEVER`).
    `stdout_to_stderr` sends what ranks print to this process's stderr.
    """

    def __init__(
        self,
        address: str | None = None,
        processes: Span | None = None,
        *,
        gpus_per_process: float | None = None,
        cpus_per_process: float | None = None,
        memory: int | None = None,
        resources: dict[str, float] | None = None,
        placement_strategy: str | None = None,
        launcher: Literal["placement_group", "torch_trainer"] = "placement_group",
        stdout_to_stderr: bool = False,
    ) -> None:
        self.address = address
        self.fewest, self.processes = (None, None) if processes is None else bounds(processes)
        self.gpus_per_process, self.cpus_per_process = gpus_per_process, cpus_per_process
        self.memory, self.resources = memory, resources or {}
        self.placement_strategy = _one_of(placement_strategy, {*CHUNK_STRATEGIES, *LAUNCH_STRATEGIES})
        self.launcher = _one_of(launcher, LAUNCHERS)
        self.stdout_to_stderr = stdout_to_stderr
        self._placing = False  # ranks that have no places yet

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
        todo, payload = list(chunks), pack(make_worker)
        threads = 1 if threads_per_process is None else at_least_one(threads_per_process, "threads_per_process")
        number = self.processes if processes is None else at_least_one(processes)
        strategy = _one_of(self.placement_strategy, CHUNK_STRATEGIES, "chunks run as") or "DEFAULT"
        if not todo:
            return (chunk for chunk in todo)  # none: Ray is not needed
        started = self.join()
        share, nodes = self._share(self._gpus(gpus_per_process)), total_nodes()
        if number is None:
            share = replace(share, cpus=self.cpus_per_process or min(threads, widest(share, 1, nodes).cpus))
            at_once = max(1, share.times(nodes))
        if number is None and started:
            number = max(1, min(at_once, most_processes(memory_per_process), len(todo)))
        if number is not None:
            share, at_once = self._even(share, number), number
        demand = Demand(share=share, most=number or len(todo), at_once=at_once, strategy=strategy)
        return ChunkJob(payload, todo, demand, name, label).run()

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
        payload = pack(fn, *args)
        fewest, most = bounds(self.span or 1 if processes is None else processes)
        started = self.join()
        gpus = self._gpus(gpus_per_process)
        if gpus != int(gpus):
            raise UsageError(f"gpus_per_process is {gpus}; a rank needs whole GPUs.")
        number = self.ranks((fewest, most), int(gpus))
        if self.fewest != self.processes:  # a group of some of the engine's range leaves room for more ranks
            most = max(most, self.processes or 1)
        job = RankJob(
            payload=payload,
            number=number,
            share=self._even(self._share(gpus), number, most),
            strategy=_one_of(self.placement_strategy, LAUNCH_STRATEGIES, "ranks are placed by") or "PACK",
            name=name,
            stdout_to_stderr=self.stdout_to_stderr,
        )
        if started and (lacking := job.lacking()):
            raise UsageError(f"{lacking} Ask for fewer processes, or start a larger cluster.")
        if self.launcher == "torch_trainer":
            self._placing = False
            return launch_with_torch_trainer(job)
        ranks = ActorRanks(job)

        def start() -> None:
            ranks.start()
            self._placing = False

        return run_ranks(start, number, ranks, grace_s=grace_s)

    def room(self, most: int, *, gpus_per_process: int | None = 0, held: int = 0) -> int:
        """Ranks that the nodes have free CPUs and GPUs for, besides the `held` ones.

        Waits some seconds before it says fewer than `most`, since what a group leaves behind is freed after its end.
        """
        self.join()
        if held and self._placing:
            return held  # what is free now is for them
        share = self._share(self._gpus(gpus_per_process))
        return free_for(most, share, held=held, wait_s=0.0 if held else FREED_S)

    def map_frame(self, frame: Any, make_worker: Callable[[], Callable[[Any], Any]], schema: Any) -> Any:
        """Apply the worker to a Ray Dataset: a lazy one, in the order that Ray Data gives.

        Actors, up to `processes` (default: as many as there is room for now), keep the worker, with one GPU each where
        there are any; a batch is what Ray Data makes of 4,096 rows. A Dataset of one block keeps one actor busy, and
        Ray reads small files into one: `repartition` such a one.
        """
        self.join()
        share = self._share(self._gpus(None))
        most = self.processes or max(1, share.times(total_nodes()))
        return frame.map_batches(
            BatchMapper,
            fn_constructor_args=(pack(partial(_with_threads, share.variables, make_worker)),),
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=most),
            **share.options,
            **_BATCHES,
        )

    def map_in_tasks(self, frame: Any, make_worker: Callable[[], Callable[[Any], Any]]) -> Any:
        """The same in Ray tasks of one CPU, as many as there is room for, for a worker that is quick to make."""
        self.join()
        return frame.map_batches(
            partial(map_table, pack(partial(_with_threads, thread_variables(1), make_worker))), **_BATCHES
        )

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
        return join(self.address, self.processes)

    def _gpus(self, asked: int | None) -> float:
        """GPUs of each process: the job's number, else the engine's, else (asked is None) one where there are any."""
        if asked:
            return float(asked)
        if self.gpus_per_process is not None:
            return self.gpus_per_process
        return 1.0 if asked is None and ray.cluster_resources().get("GPU", 0) else 0.0

    def _share(self, gpus: float) -> Share:
        return Share(cpus=self.cpus_per_process or 1.0, gpus=gpus, memory=self.memory, resources=self.resources)

    def _even(self, share: Share, number: int, most: int | None = None) -> Share:
        """What each of `number` processes gets of a cluster that holds `most`; less where others hold some of it."""
        nodes = total_nodes()
        if self.cpus_per_process is not None or share.times(nodes) < number:
            return share
        even = widest(share, most or number, nodes)
        return even if free_for(number, even) == number else widest(share, number, free_nodes())


def _with_threads(variables: dict[str, str], make_worker: Callable[[], Any]) -> Any:
    """The worker, in a process whose libraries start no more threads than it has CPUs."""
    os.environ.update(variables)
    return make_worker()


def _one_of(given: str | None, known: Iterable[str], what: str = "there are") -> str | None:
    if given is not None and given not in known:
        raise UsageError(f"{given!r}: {what} {', '.join(sorted(known))}.")
    return given
