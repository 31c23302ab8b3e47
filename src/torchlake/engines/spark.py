"""The Spark engine: processes on the executors of an Apache Spark cluster, or on this machine's cores by Spark.

    run_chunks   one task per process; what runs in it pulls chunks from the driver, as on the local engine
    launch       a barrier stage: all ranks at once or none, with the variables that torchrun sets
    map_frame    mapInArrow: a lazy DataFrame of the same rows with more columns

Rows never pass through the driver: workers read and write storage, and only chunk names and counts cross. What crosses
goes over one connection per process from the executor to the driver (`_seats.py`), so a lost executor is a lost
process: its chunk runs again, and Spark's own retries and speculative twins refill its seat.
Price: about 1 s for a job's first process, once the session runs.
"""

import secrets
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext

from torchlake.engines import Engine, Span, Worker, at_least_one, bounds
from torchlake.engines._chunks import hand_out, nothing
from torchlake.engines._crossing import pack
from torchlake.engines._frames import map_batches
from torchlake.engines._machine import most_processes, thread_variables
from torchlake.engines._ranks import run_ranks
from torchlake.engines._seats import Seats, group_variables
from torchlake.engines._shell import Address, sit
from torchlake.engines._spark_session import Session
from torchlake.engines.local import Local
from torchlake.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SEATS_S = 600.0  # for a busy cluster to give all ranks their places


class Spark(Engine):
    """Processes placed by Spark.

    `session` is the running one by default; where there is none, one is made with `master` (default: this machine's
    cores) and `conf`. `processes` is the number for every job of this engine; None means, for chunks, one per task slot
    but no more than there are chunks, and 1 for launch. `local_mode` launches ranks on the driver's machine instead of
    the executors, as TorchDistributor's does. `stdout_to_stderr` sends what processes print to this one's stderr.
    """

    def __init__(
        self,
        session: "SparkSession | None" = None,
        processes: Span | None = None,
        *,
        master: str | None = None,
        conf: dict[str, str] | None = None,
        local_mode: bool = False,
        stdout_to_stderr: bool = False,
    ) -> None:
        self.fewest, self.processes = (None, None) if processes is None else bounds(processes)
        self.local_mode = local_mode
        self.stdout_to_stderr = stdout_to_stderr
        self.session = Session(session, master=master, conf=conf or {}, processes=self.processes)

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
        session = self.session
        slots = max(1, session.slots(wanted))
        if wanted is None:
            wanted = max(1, slots * session.cores_per_slot // threads)
            if session.on_this_machine:
                wanted = min(wanted, most_processes(memory_per_process))
        shares = session.gpu_shares(min(wanted, slots, len(todo)), gpus_per_process)
        counts = thread_variables(session.threads(len(shares), slots))
        environments = [
            counts if gpus is None else counts | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} for gpus in shares
        ]
        return hand_out(payload, todo, environments, self._seats(len(shares), together=False))

    def launch(
        self,
        fn: Callable[..., Any],
        *args: Any,
        processes: Span | None = None,
        gpus_per_process: int = 0,
        grace_s: float = 30.0,
    ) -> Any:
        number = self.ranks(processes, gpus_per_process)
        if self.local_mode:
            local = Local(number, stdout_to_stderr=self.stdout_to_stderr)
            return local.launch(fn, *args, gpus_per_process=gpus_per_process, grace_s=grace_s)
        payload, session = pack(fn, *args), self.session
        slots = session.slots(number)
        if session.grows:
            raise UsageError(
                "Ranks have to start together, and Spark starts no such stage under dynamic allocation: start the "
                "session with spark.dynamicAllocation.enabled=false and a fixed number of executors."
            )
        if slots < number:
            raise UsageError(
                f"{number} ranks have to run at the same time, and Spark has {slots} task slots (executor cores / "
                "spark.task.cpus). Ask for fewer processes, or start the session with more executors."
            )
        shares = session.gpu_shares(number, gpus_per_process)
        visible = None if shares[0] is None else ",".join(name for share in shares if share for name in share)
        seats = self._seats(number, together=True)

        def start() -> None:
            environments = group_variables(seats.taken(SEATS_S), session.threads(number, slots))
            for rank, variables in enumerate(environments):
                if visible is not None:
                    variables["CUDA_VISIBLE_DEVICES"] = visible
                seats.start(rank, "rank", payload, variables)

        return run_ranks(start, number, seats, grace_s=grace_s)

    def room(self, most: int, *, gpus_per_process: int = 0, held: int = 0) -> int:
        """A rank for each task slot of the executors that are there; other jobs in the session do not count."""
        if self.local_mode:
            return Local().room(most, gpus_per_process=gpus_per_process)
        return min(most, self.session.slots(most))

    def map_frame(self, frame: Any, make_worker: Callable[[], Callable[[Any], Any]], schema: Any) -> Any:
        """Apply the worker to a Spark DataFrame: a lazy one, of `schema`; the frame's own columns keep their types.

        The worker sees Arrow batches of up to spark.sql.execution.arrow.maxRecordsPerBatch rows; it is made once per
        Python process of an executor.
        """
        from pyspark.sql.pandas.types import from_arrow_schema
        from pyspark.sql.types import StructType

        own = {field.name: field for field in frame.schema.fields}
        fields = [own.get(field.name, field) for field in from_arrow_schema(schema).fields]
        return frame.mapInArrow(partial(map_batches, pack(make_worker)), StructType(fields))

    def frame_schema(self, frame: Any) -> pa.Schema:
        from pyspark.sql.pandas.types import to_arrow_schema

        return to_arrow_schema(frame.schema)

    def spool(self, frame: Any, folder: str) -> None:
        """Spark's tasks write the files: the folder has to be one that all executors reach, as a file system's."""
        frame.write.parquet(Path(folder).absolute().as_uri())

    def _seats(self, number: int, *, together: bool) -> Seats:
        return Seats(
            _Tasks(self.session, number, together=together),
            host=self.session.host,
            listen_on=self.session.listen_on,
            stdout_to_stderr=self.stdout_to_stderr,
        )


class _Tasks:
    """Seats as the tasks of one Spark stage, a barrier stage when they have to be taken together."""

    def __init__(self, session: Session, seats: int, *, together: bool) -> None:
        self.seats, self.together = seats, together
        self._context = session.context
        self._group = f"torchlake-{secrets.token_hex(8)}"

    def run(self, address: Address, key: bytes) -> None:
        self._context.setJobGroup(self._group, f"torchlake: {self.seats} processes", interruptOnCancel=False)
        tasks = self._context.parallelize(range(self.seats), self.seats)
        (tasks.barrier() if self.together else tasks).mapPartitions(partial(_sit, address, key)).count()

    def cancel(self) -> None:
        self._context.cancelJobGroup(self._group)


def _sit(address: Address, key: bytes, seats: Iterator[int]) -> Iterator[int]:
    """A Spark task: the shell of one seat, with the GPUs that Spark gave the task."""
    context = TaskContext.get()
    gpus = None if context is None else context.resources().get("gpu")
    for seat in seats:
        sit(address, key, seat, None if gpus is None else gpus.addresses)
        yield seat
