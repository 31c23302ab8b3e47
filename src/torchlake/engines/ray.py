"""The Ray engine: processes on the nodes of a Ray cluster, or on this machine with a local Ray.

    run_chunks   a pool of actors; each bundle of chunks is a named call of an actor (`_ray_chunks.py`)
    launch       a placement group with an actor for each rank (`_ray_launch.py`), or Ray Train's TorchTrainer
    map_frame    Dataset.map_batches: a lazy Dataset of the same rows with more columns

In each actor a child process does the work, so that a row that crashes it does not cost the actor. Rows never pass
through the driver or the object store: workers read and write storage, and only chunk names and counts are
transferred. A process reserves as many CPUs of Ray as it has threads.
Cost: about 1 s for a job's first process, once Ray runs.
"""

import logging
import os
import re
import warnings
from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any, Literal

import pyarrow as pa
import ray
import ray.data

from torchlake.engines import DEFAULT_RESOURCES, Engine, ProcessRange, Resources, Worker, process_bounds
from torchlake.engines._frames import BatchMapper, map_table
from torchlake.engines._ray_chunks import Demand, RayChunkJob
from torchlake.engines._ray_cluster import (
    RELEASE_S,
    ProcessResources,
    free_capacity,
    free_nodes,
    join,
    missing_resources,
    total_nodes,
    with_most_cpus,
)
from torchlake.engines._ray_launch import ActorRanks, RankJob
from torchlake.engines._ray_train import launch_with_torch_trainer
from torchlake.errors import TableError, UsageError
from torchlake.processes.environment import thread_variables
from torchlake.processes.hardware import max_processes
from torchlake.processes.ranks import run_ranks
from torchlake.processes.serialization import pack
from torchlake.storage.errors import first_line
from torchlake.tables.sources.frames import check_names

log = logging.getLogger(__name__)

CHUNK_STRATEGIES = ("DEFAULT", "SPREAD")
LAUNCH_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
LAUNCHERS = ("placement_group", "torch_trainer")

SEEN_ROWS = 20
"Rows that show the types of Python objects in pandas blocks."
TASK_RETRIES = 4
"Actors that a batch of a Dataset may end; Ray Data's own default is without a limit."
_BATCHES: dict[str, Any] = {"batch_format": "pyarrow", "batch_size": 4096, "zero_copy_batch": True}


class Ray(Engine):
    """Processes placed by Ray.

    `address` is a running cluster ("auto": the one of this machine). The default is the cluster that this process has
    joined, or RAY_ADDRESS; otherwise Ray is started on this machine, reachable only from it. `processes` is the number
    for every job of this engine. None means 1 for launch and, for chunks, as many as fit on the cluster as it grows,
    but no more than there are chunks.

    Each process reserves `gpus_per_process` unless the job sets it (for chunks also a fraction, such as 0.5);
    `cpus_per_process`, also its number of threads (None: what the job needs or, for a given number of processes, an
    equal part of the cluster); `memory` in bytes; and custom `resources`. `placement_strategy` is DEFAULT or SPREAD for
    chunks, and PACK, SPREAD, STRICT_PACK or STRICT_SPREAD for ranks. `launcher` starts the ranks: a placement group, or
    Ray Train's TorchTrainer with fewer features (`_ray_train.UNSUPPORTED`). `autoscaling` are settings of Ray Serve for
    the replicas of `serve`, such as `{"max_replicas": 4}`. `stdout_to_stderr` redirects what ranks
    print to this process's stderr.
    """

    def __init__(
        self,
        address: str | None = None,
        processes: ProcessRange | None = None,
        *,
        gpus_per_process: float | None = None,
        cpus_per_process: float | None = None,
        memory: int | None = None,
        resources: dict[str, float] | None = None,
        placement_strategy: str | None = None,
        launcher: Literal["placement_group", "torch_trainer"] = "placement_group",
        autoscaling: dict[str, Any] | None = None,
        stdout_to_stderr: bool = False,
    ) -> None:
        self.address = address
        self.min_processes, self.processes = (None, None) if processes is None else process_bounds(processes)
        self.gpus_per_process, self.cpus_per_process = gpus_per_process, cpus_per_process
        self.memory, self.resources = memory, resources or {}
        self.placement_strategy = _one_of(placement_strategy, {*CHUNK_STRATEGIES, *LAUNCH_STRATEGIES})
        self.launcher = _one_of(launcher, LAUNCHERS)
        self.autoscaling = autoscaling or {}
        self.stdout_to_stderr = stdout_to_stderr
        self._placing = False  # whether ranks are waiting for placement

    def run_chunks(
        self,
        make_worker: Callable[[], Worker],
        chunks: Iterable[Any],
        *,
        resources: Resources = DEFAULT_RESOURCES,
        name: str = "chunks",
        label: Callable[[Any], str] = str,
    ) -> Generator[Any, None, None]:
        todo, payload = list(chunks), pack(make_worker)
        number = resources.processes or self.processes
        strategy = _one_of(self.placement_strategy, CHUNK_STRATEGIES, "chunks run as") or "DEFAULT"
        if not todo:
            return (chunk for chunk in todo)  # empty, without starting Ray
        started = self.join()
        share, nodes = self._share(self._gpus(resources.gpus, resources.devices)), total_nodes()
        self._need_room(share, nodes, started=started)
        if number is None:
            share = replace(
                share, cpus=self.cpus_per_process or min(resources.threads, with_most_cpus(share, 1, nodes).cpus)
            )
            at_once = max(1, share.count_on(nodes))
        if number is None and started:
            number = max(1, min(at_once, max_processes(resources.memory), len(todo)))
        if number is not None:
            share, at_once = self._even(share, number), number
        demand = Demand(share=share, most=number or len(todo), at_once=at_once, strategy=strategy)
        return RayChunkJob(payload, todo, demand, name, label).run()

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
        payload = pack(fn, *args)
        fewest, most = process_bounds(self.process_range or 1 if processes is None else processes)
        started = self.join()
        gpus = self._gpus(gpus_per_process)
        if gpus != int(gpus):
            raise UsageError(f"gpus_per_process is {gpus}, but a rank needs whole GPUs.")
        number = self.num_ranks((fewest, most), int(gpus))
        if self.min_processes != self.processes:  # leave capacity for the rest of the engine's range
            most = max(most, self.processes or 1)
        job = RankJob(
            payload=payload,
            number=number,
            share=self._even(self._share(gpus), number, most),
            strategy=_one_of(self.placement_strategy, LAUNCH_STRATEGIES, "ranks are placed by") or "PACK",
            name=name,
            stdout_to_stderr=self.stdout_to_stderr,
        )
        if started and (shortage := job.shortage()):
            raise UsageError(f"{shortage} Use fewer processes, or start a larger cluster.")
        if self.launcher == "torch_trainer":
            self._placing = False
            return launch_with_torch_trainer(job)
        ranks = ActorRanks(job)

        def start() -> None:
            ranks.start()
            self._placing = False

        return run_ranks(start, number, ranks, grace_s=grace_s)

    def capacity(self, most: int, *, gpus_per_process: int | None = 0, running: int = 0) -> int:
        """Return the capacity, by the nodes' free CPUs and GPUs.

        Without `running` ranks it waits some seconds for `most`, because Ray releases a group's resources with a delay.
        """
        self.join()
        if running and self._placing:
            return running  # they will take what is free now
        share = self._share(self._gpus(gpus_per_process))
        return free_capacity(most, share, running=running, wait_s=0.0 if running else RELEASE_S)

    def map_frame(self, frame: Any, make_worker: Callable[[], Callable[[Any], Any]], schema: Any) -> Any:
        """Apply the worker to a Ray Dataset; return a lazy Dataset in Ray Data's order.

        Up to `processes` actors (default: as many as fit now) hold the worker, with one GPU each if there are any, and
        get batches of up to 4,096 rows. A Dataset of one block, such as one of small files, uses one actor only:
        `repartition` it.
        """
        started = self.join()
        share, nodes = self._share(self._gpus(None)), total_nodes()
        self._need_room(share, nodes, started=started)
        most = self.processes or max(1, share.count_on(nodes))
        options: dict[str, Any] = {**share.options, **_BATCHES}
        if any(one.kind is one.VAR_KEYWORD for one in signature(frame.map_batches).parameters.values()):
            options["max_task_retries"] = TASK_RETRIES
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="`ray_remote_args`")  # the only way to limit the retries
            return frame.map_batches(
                BatchMapper,
                fn_constructor_args=(pack(partial(_with_threads, share.variables, make_worker)),),
                compute=ray.data.ActorPoolStrategy(min_size=1, max_size=most),
                **options,
            )

    def map_in_tasks(self, frame: Any, make_worker: Callable[[], Callable[[Any], Any]]) -> Any:
        """Apply the worker like `map_frame`, in Ray tasks with one CPU each, for a worker that is quick to make."""
        self.join()
        return frame.map_batches(
            partial(map_table, pack(partial(_with_threads, thread_variables(1), make_worker))), **_BATCHES
        )

    def frame_schema(self, frame: Any) -> pa.Schema | None:
        """Return the columns of the Dataset, or None if it has no rows that would show them."""
        self.join()
        schema = frame.schema()
        if schema is None or not schema.names:
            return None
        check_names(list(schema.names), "the Dataset")
        types = dict(zip(schema.names, schema.types, strict=True))
        if not all(isinstance(kind, pa.DataType) for kind in types.values()):  # Python objects in pandas blocks
            first = frame.limit(SEEN_ROWS).materialize()
            seen = first.take_batch(SEEN_ROWS, batch_format="pyarrow").schema if first.count() else pa.schema([])
            found = {field.name: field.type for field in seen}
            types = {name: found.get(name, pa.null()) for name in types}
        return pa.schema(list(types.items()))

    def materialize(self, frame: Any, folder: str) -> None:
        """Write the files from Ray's tasks: all nodes must be able to access the folder.

        Raises TableError for a Dataset without rows, and for one that Ray cannot compute or write as Parquet.
        """
        self.join()
        try:
            frame.write_parquet(os.path.abspath(folder))
        except Exception as error:  # of the pipeline, of a column's type, or of the storage
            causes = re.findall(r"^[\w.]*(?:Error|Exception): .*", str(error), re.MULTILINE)
            why = causes[0] if causes else first_line(error)  # a traceback begins with the first cause
            raise TableError(
                f"Ray could not write the Dataset as Parquet: {why}. Select the columns that training reads, and check "
                "the step that failed."
            ) from error
        if not os.path.isdir(folder) or not any(name.endswith(".parquet") for name in os.listdir(folder)):
            raise TableError("the Dataset has no rows.")

    def serve(self, build: Callable[[], Any], *, name: str, address: tuple[str, int], most: int, drain_s: float) -> Any:
        """Run the ASGI app of `build` on `processes` replicas, or on one; return a function that ends them."""
        from torchlake.engines._ray_serve import deploy

        self.join()
        number, share = self.processes or 1, self._share(self._gpus(None))
        return deploy(
            build,
            name=name,
            share=share if self.autoscaling else self._even(share, number),
            replicas=number,
            autoscaling=self.autoscaling,
            address=address,
            most=most,
            drain_s=drain_s,
        )

    def join(self) -> bool:
        """Join the cluster or start one; return whether this process started it."""
        return join(self.address, self.processes)

    def _gpus(self, wanted: int | None, several: int = 1) -> float:
        """Return the GPUs per process: the job's number, else the engine's, else (`wanted` is None) one if there are
        any.

        With `several` devices per process, which share a model, that number instead of the engine's number or one.
        """
        if wanted:
            return float(wanted)
        if self.gpus_per_process is not None and several == 1:
            return self.gpus_per_process
        return float(several) if wanted is None and ray.cluster_resources().get("GPU", 0) else 0.0

    def _need_room(self, share: ProcessResources, nodes: list[dict[str, float]], *, started: bool) -> None:
        """Raise UsageError if no process fits on a cluster that was started here; warn if one that may grow is too
        small."""
        if share.count_on(nodes):
            return
        missing = missing_resources(share, 1, nodes)
        if started:
            raise UsageError(
                f"No process fits on this machine's Ray. {missing} Ask for less, or start a larger cluster."
            )
        log.warning("No process fits on the Ray cluster yet. %s Waiting for it to grow.", missing)

    def _share(self, gpus: float) -> ProcessResources:
        return ProcessResources(
            cpus=self.cpus_per_process or 1.0, gpus=gpus, memory=self.memory, resources=self.resources
        )

    def _even(self, share: ProcessResources, number: int, most: int | None = None) -> ProcessResources:
        """Divide the cluster's CPUs among `most` processes, or its free ones among `number` if those do not fit."""
        nodes = total_nodes()
        if self.cpus_per_process is not None or share.count_on(nodes) < number:
            return share
        even = with_most_cpus(share, most or number, nodes)
        return even if free_capacity(number, even) == number else with_most_cpus(share, number, free_nodes())


def _with_threads(variables: dict[str, str], make_worker: Callable[[], Any]) -> Any:
    """Make the worker after setting the thread counts in the environment."""
    os.environ.update(variables)
    return make_worker()


def _one_of(given: str | None, known: Iterable[str], what: str = "there are") -> str | None:
    if given is not None and given not in known:
        raise UsageError(f"{given!r}: {what} {', '.join(sorted(known))}.")
    return given
