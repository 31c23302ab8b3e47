"""The driver's side of ranks on Spark: a barrier stage, so that all ranks start at once or none does.

`_spark_ranks.py` runs in its tasks.
"""

import pickle
import re
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from torchlake.engines._spark_jobs import TaggedJobs
from torchlake.engines._spark_ranks import (
    FOLLOW_S,
    GRACE_S,
    RankEnd,
    RankTask,
    failure_in,
    run_rank_batches,
    run_rank_task,
)
from torchlake.engines._spark_session import Session, reason_of
from torchlake.errors import Interrupted, RankFailed, TorchlakeError
from torchlake.processes.ranks import to_interrupted
from torchlake.processes.remote import Driver, print_output
from torchlake.processes.serialization import to_exception, unpack


@dataclass(frozen=True, kw_only=True)
class LaunchJob:
    """The parameters of a launch, and the session that runs it."""

    session: Session
    payload: bytes
    number: int
    variables: Mapping[str, str]
    "Thread counts for each rank's environment and, if Spark grants no GPUs, the devices of all ranks."
    profile: Any = None
    name: str = "launch"
    stdout_to_stderr: bool = False


def launch_on_barrier(job: LaunchJob, *, grace_s: float, stop_file: str | None) -> Any:
    """Run the ranks and return rank 0's value. Raises the errors of `Engine.launch`."""
    with _shared_folder(job.stdout_to_stderr) as folder:
        task = RankTask(
            driver=Driver.here(),
            payload=job.payload,
            variables=job.variables,
            here="127.0.0.1" if job.session.on_this_machine else None,
            folder=str(folder),
        )
        with submitted(job, partial(_run_stage, job, task)) as outcome:
            try:
                ends = outcome.get()
            except (KeyboardInterrupt, Interrupted) as stop:
                raise _stopped(outcome, folder, stop_file, grace_s, stop) from stop
    return _value_of(ends, job)


def _run_stage(job: LaunchJob, task: RankTask) -> list[RankEnd]:
    if job.session.is_connect:
        frame = job.session.get().range(0, job.number, 1, job.number)
        rows = frame.mapInArrow(partial(run_rank_batches, task), "end binary", barrier=True).collect()
        return [pickle.loads(bytes(row["end"])) for row in rows]
    places = job.session.context.parallelize(range(job.number), job.number).barrier()
    ranks = places.mapPartitions(partial(run_rank_task, task))
    ends: list[RankEnd] = (ranks if job.profile is None else ranks.withResources(job.profile)).collect()
    return ends


def _value_of(ends: list[RankEnd] | Exception, job: LaunchJob) -> Any:
    """Return rank 0's value. Raises the failure of the first failed rank, or Spark's."""
    if isinstance(ends, Exception):
        raise _error_of(ends, job)
    for end in sorted(ends, key=lambda one: one.rank):
        for stream, lines in end.output:
            print_output(stream, lines, stdout_to_stderr=job.stdout_to_stderr)
    return unpack(next(end.value for end in ends if end.rank == 0))


def _stopped(
    outcome: "SimpleQueue[Any]",
    folder: Path,
    stop_file: str | None,
    grace_s: float,
    stop: KeyboardInterrupt | Interrupted,
) -> Interrupted:
    """Ask the ranks to stop and wait for `grace_s`; return the Interrupted to raise, with a rank's message."""
    message: str | None = None
    (folder / "stop").touch()
    if stop_file is not None:
        Path(stop_file).touch()
    try:
        if stop_file is not None or list(folder.glob("seen-*")):  # else no rank can be notified
            error = outcome.get(timeout=grace_s)
            found = failure_in(str(error)) if isinstance(error, Exception) else None
            if found is not None and found[1].kind == "Interrupted":
                message = found[1].message
    except Empty:
        pass
    finally:
        if stop_file is not None:
            Path(stop_file).unlink(missing_ok=True)
    return to_interrupted(stop, message)


def _error_of(error: Exception, job: LaunchJob) -> TorchlakeError:
    reason = reason_of(error)
    found = failure_in(str(error)) or failure_in(reason)
    if found is not None:
        rank, failure, output = found
        for stream, lines in output:
            print_output(stream, lines.encode(), stdout_to_stderr=job.stdout_to_stderr)
        return to_exception(failure, rank=rank, who="rank")
    place = re.search(r"ResultTask\(\d+, (\d+)\)", reason)
    rank = int(place[1]) if place else 0
    if "ExecutorLostFailure" in reason:
        return RankFailed(f"rank {rank} was lost with its executor: {reason[:1000]}", rank=rank)
    return RankFailed(f"Spark ended the ranks of {job.name}: {reason}", rank=rank)


@contextmanager
def _shared_folder(stdout_to_stderr: bool) -> Iterator[Path]:
    """Yield a folder of the driver. If tasks can access it, the output that they write there is printed immediately."""
    folder, over, read = Path(tempfile.mkdtemp(prefix="torchlake-launch-")), threading.Event(), dict[Path, int]()

    def show_new() -> None:
        for path in sorted(folder.glob("printed-*")):
            with open(path, "rb") as file:
                file.seek(read.get(path, 0))
                lines = file.read()
            read[path] = read.get(path, 0) + len(lines)
            if lines:
                print_output(int(path.name.rpartition("-")[2]), lines, stdout_to_stderr=stdout_to_stderr)

    def follow() -> None:
        while not over.wait(FOLLOW_S):
            show_new()
        show_new()

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    try:
        yield folder
    finally:
        over.set()
        follower.join()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def submitted(job: LaunchJob, run: Callable[[], Any]) -> Iterator["SimpleQueue[Any]"]:
    """Run a Spark job in another thread and yield a queue that receives its value or its exception.

    A job that is still running on exit is canceled. PySpark's own Ctrl-C handler, which would cancel all jobs of the
    session at once, is replaced in the meantime, so that ranks have time to save.
    """
    outcome: SimpleQueue[Any] = SimpleQueue()
    jobs = TaggedJobs(job.session, f"torchlake {job.name}: {job.number} ranks")

    def ended(error: Exception | None) -> None:
        if error is not None:
            outcome.put(error)

    handler = signal.getsignal(signal.SIGINT)
    in_main_thread = threading.current_thread() is threading.main_thread()
    replaced = in_main_thread and str(getattr(handler, "__module__", "")).startswith("pyspark.")
    if replaced:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        jobs.start(lambda: outcome.put(run()), ended)
        yield outcome
    finally:
        jobs.close(GRACE_S)
        if replaced:
            signal.signal(signal.SIGINT, handler)
