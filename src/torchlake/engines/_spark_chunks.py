"""Chunk jobs on Spark: bundles of chunks as tasks of one Spark job, scheduled, retried and displayed by Spark.

The results of a task reach the driver when it ends, through an accumulator (with Spark Connect: as rows of a
DataFrame). After `spark.task.maxFailures` the driver resubmits what is missing, which is safe because parts are
idempotent. Cost: about 20 ms per task, so many small chunks travel in bundles.
"""

import pickle
import threading
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import pyarrow as pa
from pyspark.accumulators import AccumulatorParam

from torchlake.engines._spark_jobs import TaggedJobs
from torchlake.engines._spark_session import Session, reason_of
from torchlake.engines._spark_tasks import ChunkTask, Result, failure_of, run_batches, run_bundle
from torchlake.errors import RankFailed
from torchlake.processes.serialization import pack, to_exception, unpack

MAX_BUNDLE_CHUNKS = 64
TASKS_PER_SLOT = 16  # before chunks are bundled: enough to balance slow ones
TASKS_PER_LANE = 4  # the same with a limited number of lanes
MAX_STALLS = 3  # consecutive submissions without a result
CANCEL_S = 30.0


@dataclass(frozen=True, kw_only=True)
class SparkChunkJob:
    """The tasks of a chunk job, and how many run at the same time."""

    session: Session
    task: ChunkTask
    bundles: dict[int, bytes]
    name: str
    lanes: Sequence[Mapping[str, str]] | None = None
    "The environments of the tasks that may run at the same time; None: as many as Spark has slots."
    profile: Any = None
    "The ResourceProfile of the tasks."


def bundled(todo: Sequence[Any], slots: int, lanes: int) -> dict[int, bytes]:
    """Return the chunks in numbered, packed bundles.

    With `lanes` (a limit on concurrent tasks) bundles are larger, because a task may run where no model is loaded yet.
    """
    size = len(todo) // (lanes * TASKS_PER_LANE if lanes else slots * TASKS_PER_SLOT)
    # Capped without lanes: results reach the driver when a task ends, and a lost task repeats its whole bundle.
    size = max(1, size if lanes else min(MAX_BUNDLE_CHUNKS, size))
    return {number: pack(*todo[first : first + size]) for number, first in enumerate(range(0, len(todo), size))}


def run_job(job: SparkChunkJob) -> Generator[Any, None, None]:
    """Yield the results of all chunks, as their tasks end."""
    missing, stalls = dict(job.bundles), 0
    while missing:
        before = len(missing)
        submission = _Submission(job, missing)
        try:
            for index, results in submission.results():
                if index not in missing:
                    continue  # Spark ran the task twice
                failure = failure_of(results)
                # Raised here, not in the task: Spark would retry the task, and report the error only after the last
                # attempt.
                if failure is not None:
                    raise to_exception(failure, rank=index, who="the worker of task")
                del missing[index]
                for _, value in results:
                    yield unpack(value)
        finally:
            submission.close()
        if not missing:
            return
        reason = submission.reason or "Spark ended the job without all results"
        # Progress resets the count: a long job on preemptible machines may lose executors for days.
        stalls = 0 if len(missing) < before else stalls + 1
        if stalls == MAX_STALLS or submission.canceled:
            raise RankFailed(f"{len(missing)} of {len(job.bundles)} tasks of {job.name} did not end: {reason}", rank=0)


class _Submission:
    """Bundles submitted as one Spark job, or, with a limited number of lanes, as consecutive jobs in each lane."""

    def __init__(self, job: SparkChunkJob, bundles: dict[int, bytes]) -> None:
        self.reason: str | None = None
        self._job, self._session = job, job.session
        self._inbox: SimpleQueue[Result | None] = SimpleQueue()
        self._left = deque(bundles.items())
        self._building = threading.Lock()  # guards the context's environment
        self._jobs = TaggedJobs(self._session, f"torchlake {job.name}")
        self._running = 0
        for environment in job.lanes or [{}]:
            self._jobs.start(partial(self._run_lane, environment), self._lane_ended)
            self._running += 1

    @property
    def canceled(self) -> bool:
        """Whether the job was canceled, for example in Spark's user interface."""
        return self.reason is not None and "cancelled" in self.reason.lower()

    def results(self) -> Iterator[Result]:
        """Yield the results of bundles until Spark's jobs have ended."""
        while self._running:
            result = self._inbox.get()
            if result is None:
                self._running -= 1
            else:
                yield result

    def close(self) -> None:
        """Cancel what is still running, and wait for it to end."""
        # Before the jobs are canceled: a lane whose job ends would otherwise submit the next bundle.
        self._left.clear()
        self._jobs.close(CANCEL_S)

    def _run_lane(self, environment: Mapping[str, str]) -> None:
        run = self._run_connect if self._session.is_connect else partial(self._run, environment)
        while self.reason is None and (bundles := self._next()):
            run(bundles)

    def _lane_ended(self, error: Exception | None) -> None:
        if error is not None:
            # The other lanes see it and take no more bundles; `run_job` submits what is missing.
            self.reason = reason_of(error)
        # One mark for each lane: `results` counts them.
        self._inbox.put(None)

    def _next(self) -> list[tuple[int, bytes]]:
        """Return all bundles, or one of them if lanes limit the concurrent tasks."""
        bundles = []
        # `popleft` instead of a check of the length: lanes take bundles from several threads at once.
        with suppress(IndexError):
            while True:
                bundles.append(self._left.popleft())
                if self._job.lanes is not None:
                    break
        return bundles

    def _run(self, environment: Mapping[str, str], bundles: list[tuple[int, bytes]]) -> None:
        context = self._session.context
        results = context.accumulator([], _Inbox(self._inbox))
        tasks = context.parallelize(bundles, len(bundles)).mapPartitions(partial(_report, self._job.task, results))
        if self._job.profile is not None:
            tasks = tasks.withResources(self._job.profile)
        # Spark keeps separate Python workers per environment, so the model of a lane stays loaded.
        # `tasks.id()` copies the environment of the context, which all lanes share, into the job.
        with self._building, _added(context.environment, environment):
            tasks.id()
        tasks.collect()

    def _run_connect(self, bundles: list[tuple[int, bytes]]) -> None:
        rows = pa.table({"index": [index for index, _ in bundles], "chunks": [chunks for _, chunks in bundles]})
        # From one partition `repartition` deals rows round robin, one bundle to each task; from several partitions two
        # bundles could meet in one task.
        frame = self._session.get().createDataFrame(rows).coalesce(1).repartition(len(bundles))
        for row in frame.mapInArrow(partial(run_batches, self._job.task), _RESULTS).toLocalIterator():
            self._inbox.put((row["index"], pickle.loads(bytes(row["results"]))))


_RESULTS = "index long, results binary"


def _report(task: ChunkTask, results: Any, bundles: Iterator[tuple[int, bytes]]) -> Iterator[int]:
    """Run a Spark task; the driver gets the accumulated results when the task has ended."""
    for index, chunks in bundles:
        # `collect` returns the task's rows only when all tasks have ended; the accumulator arrives with the end of this
        # one.
        results.add([run_bundle(task, index, chunks)])
        yield index


@contextmanager
def _added(environment: dict[str, str], variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(environment)
    environment.update(variables)
    try:
        yield
    finally:
        environment.clear()
        environment.update(before)


class _Inbox(AccumulatorParam[list[Result]]):
    """A list in the tasks; in the driver a task's results go directly into the queue."""

    def __init__(self, queue: "SimpleQueue[Result | None] | None" = None) -> None:
        self._queue = queue

    def __reduce__(self) -> tuple[Any, ...]:
        return _Inbox, ()

    def zero(self, value: list[Result]) -> list[Result]:
        return []

    def addInPlace(self, value1: list[Result], value2: list[Result]) -> list[Result]:  # Spark's name
        # `__reduce__` drops the queue: in a task, results are collected, and travel with its end.
        if self._queue is None:
            return value1 + value2
        for result in value2:
            self._queue.put(result)
        return []
