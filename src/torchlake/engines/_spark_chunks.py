"""Chunk jobs on Spark: bundles of chunks as tasks of one Spark job, scheduled, retried and shown by Spark.

A task's results reach the driver when it ends, through an accumulator (on Spark Connect as rows of a DataFrame). After
`spark.task.maxFailures` the driver submits what is missing again: parts are idempotent. The job carries a tag, by which
it is cancelled; the caller's scheduler pool, tags and description are kept.
Price: about 20 ms a task, so many small chunks travel in bundles.
"""

import pickle
import secrets
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

from torchlake.engines._spark_session import Session, reason_of
from torchlake.engines._spark_tasks import ChunkTask, Result, failure_of, run_batches, run_bundle
from torchlake.errors import RankFailed
from torchlake.processes.serialization import pack, rebuild, unpack

MOST_BUNDLED = 64
TASKS_PER_SLOT = 16  # before chunks are bundled: enough to even out slow ones
TASKS_PER_LANE = 4  # the same where only so many tasks run at a time
MOST_STALLS = 3  # submissions in a row without a single result
CANCEL_S = 30.0


@dataclass(frozen=True, kw_only=True)
class ChunkJob:
    """What is to run, and how much of it at the same time."""

    session: Session
    task: ChunkTask
    bundles: dict[int, bytes]
    name: str
    lanes: Sequence[Mapping[str, str]] | None = None
    "The environment of each task that may run at the same time; None: all that Spark has slots for."
    profile: Any = None
    "The ResourceProfile of the tasks."


def bundled(todo: Sequence[Any], slots: int, lanes: int) -> dict[int, bytes]:
    """The chunks in packed bundles, numbered.

    With `lanes`, so many tasks at the same time, each may start in a place where the model is not loaded yet: bundles
    are larger then.
    """
    size = len(todo) // (lanes * TASKS_PER_LANE if lanes else slots * TASKS_PER_SLOT)
    size = max(1, size if lanes else min(MOST_BUNDLED, size))
    return {number: pack(*todo[first : first + size]) for number, first in enumerate(range(0, len(todo), size))}


def run_job(job: ChunkJob) -> Generator[Any, None, None]:
    """The results of all chunks, as their tasks end."""
    missing, stalls = dict(job.bundles), 0
    while missing:
        before = len(missing)
        submitted = _Submission(job, missing)
        try:
            for index, results in submitted.results():
                if index not in missing:
                    continue  # a task that Spark ran twice
                failure = failure_of(results)
                if failure is not None:
                    raise rebuild(failure, rank=index, who="the worker of task")
                del missing[index]
                for _, value in results:
                    yield unpack(value)
        finally:
            submitted.close()
        if not missing:
            return
        reason = submitted.reason or "Spark ended the job without all results"
        stalls = 0 if len(missing) < before else stalls + 1
        if stalls == MOST_STALLS or submitted.cancelled:
            raise RankFailed(f"{len(missing)} of {len(job.bundles)} tasks of {job.name} did not end: {reason}", rank=0)


class _Submission:
    """Bundles as a Spark job (or, of a limited number of lanes, as one after the other in each)."""

    def __init__(self, job: ChunkJob, bundles: dict[int, bytes]) -> None:
        self.reason: str | None = None
        self._job, self._session = job, job.session
        self._tag = f"torchlake-{secrets.token_hex(6)}"
        self._inbox: SimpleQueue[Result | None] = SimpleQueue()
        self._left = deque(bundles.items())
        self._building = threading.Lock()  # over the context's environment
        self._lanes = [self._session.thread(partial(self._lane, environment)) for environment in job.lanes or [{}]]
        for lane in self._lanes:
            lane.start()

    @property
    def cancelled(self) -> bool:
        """Whether somebody cancelled the job, in Spark's user interface for example."""
        return self.reason is not None and "cancelled" in self.reason.lower()

    def results(self) -> Iterator[Result]:
        """The bundles' results until Spark's jobs have ended."""
        running = len(self._lanes)
        while running:
            result = self._inbox.get()
            if result is None:
                running -= 1
            else:
                yield result

    def close(self) -> None:
        """Cancel what still runs, and wait for Spark to say so."""
        self._left.clear()
        if any(lane.is_alive() for lane in self._lanes):
            with suppress(Exception):  # a session that has been stopped runs nothing
                self._session.cancel(self._tag)
        for lane in self._lanes:
            lane.join(CANCEL_S)

    def _lane(self, environment: Mapping[str, str]) -> None:
        run = self._run_connect if self._session.is_connect else partial(self._run, environment)
        try:
            self._session.describe(self._tag, f"torchlake {self._job.name}")
            while self.reason is None and (bundles := self._next()):
                run(bundles)
        except Exception as error:
            self.reason = reason_of(error)
        finally:
            self._inbox.put(None)

    def _next(self) -> list[tuple[int, bytes]]:
        """All bundles, or one where only so many run at the same time."""
        bundles = []
        with suppress(IndexError):
            while True:
                bundles.append(self._left.popleft())
                if self._job.lanes is not None:
                    break
        return bundles

    def _run(self, environment: Mapping[str, str], bundles: list[tuple[int, bytes]]) -> None:
        context = self._session.context
        heard = context.accumulator([], _Inbox(self._inbox))
        tasks = context.parallelize(bundles, len(bundles)).mapPartitions(partial(_report, self._job.task, heard))
        if self._job.profile is not None:
            tasks = tasks.withResources(self._job.profile)
        # Spark keeps the Python workers of each environment apart: a lane has its own, and its model stays loaded.
        with self._building, _added(context.environment, environment):
            tasks.id()
        tasks.collect()

    def _run_connect(self, bundles: list[tuple[int, bytes]]) -> None:
        rows = pa.table({"index": [index for index, _ in bundles], "chunks": [chunks for _, chunks in bundles]})
        frame = self._session.get().createDataFrame(rows).coalesce(1).repartition(len(bundles))
        for row in frame.mapInArrow(partial(run_batches, self._job.task), _RESULTS).toLocalIterator():
            self._inbox.put((row["index"], pickle.loads(bytes(row["results"]))))


_RESULTS = "index long, results binary"


def _report(task: ChunkTask, heard: Any, bundles: Iterator[tuple[int, bytes]]) -> Iterator[int]:
    """A Spark task; its results go into the accumulator, which reaches the driver when the task has ended."""
    for index, chunks in bundles:
        heard.add([run_bundle(task, index, chunks)])
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
    """A list in the tasks; in the driver what tasks added goes into the queue at once."""

    def __init__(self, queue: "SimpleQueue[Result | None] | None" = None) -> None:
        self._queue = queue

    def __reduce__(self) -> tuple[Any, ...]:
        return _Inbox, ()

    def zero(self, value: list[Result]) -> list[Result]:
        return []

    def addInPlace(self, value1: list[Result], value2: list[Result]) -> list[Result]:  # Spark's name
        if self._queue is None:
            return value1 + value2
        for result in value2:
            self._queue.put(result)
        return []
