"""The Spark engine: an Apache Spark cluster, or Spark on this machine.

    run_chunks   each chunk, or small bundle of chunks, is a Spark task (`_spark_chunks.py`)
    launch       a barrier stage: all ranks at once or none, with the variables that torchrun sets (`_spark_launch.py`)
    map_frame    mapInArrow: a lazy DataFrame of the same rows with more columns

Rows never pass through the driver: workers read and write storage, and only chunk names and counts are transferred, in
Spark's own messages. Cost: about 1 s for a job's first process, once the session runs.
"""

from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from torchlake.engines import DEFAULT_RESOURCES, Engine, ProcessRange, Resources, Worker, process_bounds
from torchlake.engines._frames import map_batches
from torchlake.engines._spark_chunks import SparkChunkJob, bundled, run_job
from torchlake.engines._spark_distributor import launch_with_torch_distributor
from torchlake.engines._spark_launch import LaunchJob, launch_on_barrier
from torchlake.engines._spark_session import Session, reason_of
from torchlake.engines._spark_tasks import ChunkTask, granted_gpus
from torchlake.engines._spark_types import arrow_schema, spark_struct
from torchlake.engines.local import Local
from torchlake.errors import TableError, UsageError
from torchlake.processes.hardware import assign_gpus, cores, gpus, max_processes, visible_devices
from torchlake.processes.remote import Driver
from torchlake.processes.serialization import pack

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Launcher = Literal["barrier", "torch_distributor"]


class Spark(Engine):
    """Processes placed by Spark.

    `session` is the running one by default, else a new one with `master` (default: this machine's cores) and `conf`.
    `processes` limits the processes of every job of this engine; None means one per task slot for chunks, and 1 for
    launch. `launcher` starts the ranks: a barrier stage, or pyspark's TorchDistributor. `local_mode` launches ranks on
    the driver's machine instead of the executors, as in TorchDistributor. `stdout_to_stderr` redirects what processes
    print to this process's stderr.
    """

    def __init__(
        self,
        session: "SparkSession | None" = None,
        processes: ProcessRange | None = None,
        *,
        master: str | None = None,
        conf: dict[str, str] | None = None,
        local_mode: bool = False,
        launcher: Launcher = "barrier",
        stdout_to_stderr: bool = False,
    ) -> None:
        self.min_processes, self.processes = (None, None) if processes is None else process_bounds(processes)
        self.local_mode, self.launcher = local_mode, launcher
        self.stdout_to_stderr = stdout_to_stderr
        self.session = Session(session, master=master, conf=conf or {}, processes=self.processes)

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
        if not todo:
            return
        session, resources = self.session, replace(resources, processes=resources.processes or self.processes)
        if session.is_connect:
            resources = replace(resources, threads=session.cores_per_slot)
        if session.on_this_machine:
            lanes, threads = _lanes_here(session, len(todo), resources)
            profile = None
        else:
            lanes = None if resources.processes is None else _lanes(min(resources.processes, len(todo)))
            threads = min(session.cores_per_executor, max(resources.threads, session.cores_per_slot))
            profile = session.profile(threads, session.gpus_needed(resources.gpus, resources.devices))
        shared = payload if session.is_connect else session.context.broadcast(payload)
        job = SparkChunkJob(
            session=session,
            task=ChunkTask(driver=Driver.here(), payload=shared, variables=session.thread_variables(threads)),
            bundles=bundled(todo, session.slots, len(lanes or [])),
            name=name,
            lanes=lanes,
            profile=profile,
        )
        try:
            yield from run_job(job)
        finally:
            if not isinstance(shared, bytes):
                shared.unpersist()

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
        number = self.num_ranks(processes, gpus_per_process)
        if self.local_mode:
            local = Local(number, stdout_to_stderr=self.stdout_to_stderr)
            return local.launch(fn, *args, gpus_per_process=gpus_per_process, grace_s=grace_s)
        session, payload = self.session, pack(fn, *args)
        needed = gpus_per_process or 0 if session.on_this_machine else session.gpus_needed(gpus_per_process)
        if not session.is_connect:
            self._need_slots(number, 0 if session.on_this_machine else needed)
        shares = assign_gpus(number, needed) if session.on_this_machine else None
        threads = max(1, cores() // number) if session.on_this_machine else session.cores_per_slot
        visible = {} if shares is None else {"CUDA_VISIBLE_DEVICES": visible_devices(shares)}
        job = LaunchJob(
            session=session,
            payload=payload,
            number=number,
            variables=session.thread_variables(threads) | visible,
            profile=session.profile(1, needed) if needed and shares is None else None,
            name=name,
            stdout_to_stderr=self.stdout_to_stderr,
        )
        if self.launcher == "torch_distributor":
            return launch_with_torch_distributor(job, needed)
        return launch_on_barrier(job, grace_s=grace_s, stop_file=stop_file)

    def _need_slots(self, number: int, gpus_each: int) -> None:
        """Raise UsageError if that many ranks cannot run at the same time."""
        if self.session.grows:
            raise UsageError(
                "Ranks have to start together, which Spark cannot do under dynamic allocation. Start the "
                "session with spark.dynamicAllocation.enabled=false and a fixed number of executors."
            )
        slots = self.session.slots_for(number, gpus_each)
        if slots < number:
            each = f", with {gpus_each} GPUs each" if gpus_each else ""
            raise UsageError(
                f"{number} ranks have to run at the same time, but Spark has {slots} task slots (executor cores / "
                f"spark.task.cpus{each}). Use fewer processes, or start the session with more executors."
            )

    def capacity(self, most: int, *, gpus_per_process: int | None = 0, running: int = 0) -> int:
        """Return the capacity, by the task slots of present executors, regardless of the session's other jobs."""
        if self.local_mode:
            return Local().capacity(most, gpus_per_process=gpus_per_process)
        session = self.session
        if session.is_connect:
            return most
        if session.on_this_machine:
            return min(most, session.slots_for(most), Local().capacity(most, gpus_per_process=gpus_per_process))
        return min(most, session.slots_for(most, session.gpus_needed(gpus_per_process)))

    def map_frame(self, frame: Any, make_worker: Callable[[], Callable[[Any], Any]], schema: Any) -> Any:
        """Apply the worker to a Spark DataFrame; return a lazy one of `schema`. Existing columns keep their types.

        The worker is made once per Python process of an executor and gets Arrow batches of up to
        spark.sql.execution.arrow.maxRecordsPerBatch rows.
        """
        from pyspark.sql.types import StructType

        names = frame.columns
        added = pa.schema([field for field in schema if field.name not in names])
        fields = StructType([*frame.schema.fields, *spark_struct(added).fields])
        session = Session(frame.sparkSession, master=None, conf={}, processes=None)  # another thread may not find it
        local = session.is_connect or session.on_this_machine
        profile = None if local else session.profile(session.cores_per_slot, session.gpus_needed(None))
        options = {} if profile is None else {"profile": profile}
        if options and "profile" not in signature(type(frame).mapInArrow).parameters:
            raise UsageError(
                "Before version 4.0, pyspark grants GPUs to a DataFrame only by the session's own tasks: start it with "
                "spark.task.resource.gpu.amount."
            )
        # mapInArrow looks columns up by their names, and would read "a.b" as a field of a struct.
        plain = frame.toDF(*(f"c{number}" for number in range(len(names))))
        return plain.mapInArrow(partial(_map_task, pack(make_worker), Driver.here(), names), fields, **options)

    def frame_schema(self, frame: Any) -> pa.Schema:
        return arrow_schema(frame)

    def materialize(self, frame: Any, folder: str) -> None:
        """Write the files from Spark's tasks: all executors must be able to access the folder.

        Raises TableError for a frame that Spark cannot write as Parquet, and for a stream.
        """
        if frame.isStreaming:
            raise TableError("a streaming DataFrame has no end. Write it as a table, and give its path.")
        try:
            frame.write.parquet(f"file://{Path(folder).absolute()}")  # Hadoop takes a percent sign as it is
        except Exception as error:  # of the query, of a column's type or name, or of the storage
            raise TableError(
                f"Spark could not write the DataFrame as Parquet: {reason_of(error)}. Select the columns that training "
                "reads, and rename or cast the one that is named."
            ) from error


def _map_task(
    payload: bytes, driver: Driver, names: list[str], batches: Iterable[pa.RecordBatch]
) -> Iterable[pa.RecordBatch]:
    """Run a task of `mapInArrow` on columns with these names, with the GPUs that Spark granted to it."""
    from pyspark import TaskContext

    named = (pa.RecordBatch.from_arrays(batch.columns, names) for batch in batches)
    return map_batches(payload, named, granted_gpus(TaskContext.get()), driver)


def _lanes(number: int) -> list[dict[str, str]]:
    return [{"TORCHLAKE_LANE": str(lane)} for lane in range(number)]


def _lanes_here(session: Session, chunks: int, resources: Resources) -> tuple[list[dict[str, str]] | None, int]:
    """Return the environments of concurrent tasks (None: one per slot) and their threads, if tasks share this machine
    and Spark grants no GPUs.

    Raises UsageError if this machine has too few GPUs.
    """
    here, given, all_cores = gpus(), resources.gpus, session.slots * session.cores_per_slot
    each = (resources.devices if here else 0) if given is None else given
    number = resources.processes or min(all_cores // resources.threads, max_processes(resources.memory))
    number = max(1, min(number, session.slots, chunks, *([len(here) // each] if given is None and each else [])))
    shares = assign_gpus(number, each)
    threads = max(1, all_cores // number)
    if shares is None and number == min(session.slots, chunks):
        return None, threads
    lanes = _lanes(number)
    for lane, share in zip(lanes, shares or [], strict=False):
        lane["CUDA_VISIBLE_DEVICES"] = ",".join(share)
    return lanes, threads
