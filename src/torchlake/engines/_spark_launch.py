"""The driver's side of ranks on Spark: a barrier stage, so that all ranks run at once or none does.

`_spark_ranks.py` is what its tasks run.
"""

import pickle
import re
import secrets
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

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
from torchlake.processes.ranks import interrupted
from torchlake.processes.remote import Driver, show
from torchlake.processes.serialization import rebuild, unpack


@dataclass(frozen=True, kw_only=True)
class LaunchJob:
    """What every rank's task has to know, and the session that runs them."""

    session: Session
    payload: bytes
    number: int
    variables: Mapping[str, str]
    "Of each rank's environment: its thread counts and, where Spark grants no GPUs, the devices of all ranks."
    profile: Any = None
    name: str = "launch"
    stdout_to_stderr: bool = False


def launch_on_barrier(job: LaunchJob, *, grace_s: float, stop_file: str | None) -> Any:
    """Rank 0's value. `Engine.launch` says what this raises."""
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
    """Rank 0's value; raises the first rank's failure, or Spark's reason."""
    if isinstance(ends, Exception):
        raise _error_of(ends, job)
    for end in sorted(ends, key=lambda one: one.rank):
        for stream, lines in end.output:
            show(stream, lines, stdout_to_stderr=job.stdout_to_stderr)
    return unpack(next(end.value for end in ends if end.rank == 0))


def _stopped(
    outcome: "SimpleQueue[Any]",
    folder: Path,
    stop_file: str | None,
    grace_s: float,
    stop: KeyboardInterrupt | Interrupted,
) -> Interrupted:
    """Ask the ranks to stop and leave them their time; the signal that stopped this process, in a rank's words."""
    said: str | None = None
    (folder / "stop").touch()
    if stop_file is not None:
        Path(stop_file).touch()
    try:
        if stop_file is not None or list(folder.glob("seen-*")):  # else no rank hears of it until Spark kills its task
            error = outcome.get(timeout=grace_s)
            found = failure_in(str(error)) if isinstance(error, Exception) else None
            if found is not None and found[1].kind == "Interrupted":
                said = found[1].message
    except Empty:
        pass
    finally:
        if stop_file is not None:
            Path(stop_file).unlink(missing_ok=True)
    return interrupted(stop, said)


def _error_of(error: Exception, job: LaunchJob) -> TorchlakeError:
    reason = reason_of(error)
    found = failure_in(str(error)) or failure_in(reason)
    if found is not None:
        rank, failure, output = found
        for stream, lines in output:
            show(stream, lines.encode(), stdout_to_stderr=job.stdout_to_stderr)
        return rebuild(failure, rank=rank, who="rank")
    place = re.search(r"ResultTask\(\d+, (\d+)\)", reason)
    rank = int(place[1]) if place else 0
    if "ExecutorLostFailure" in reason:
        return RankFailed(f"rank {rank} was lost with its executor: {reason[:1000]}", rank=rank)
    return RankFailed(f"Spark ended the ranks of {job.name}: {reason}", rank=rank)


@contextmanager
def _shared_folder(stdout_to_stderr: bool) -> Iterator[Path]:
    """A folder of the driver's; what tasks that see it write into its files is printed as it comes."""
    folder, over, read = Path(tempfile.mkdtemp(prefix="torchlake-launch-")), threading.Event(), dict[Path, int]()

    def show_new() -> None:
        for path in sorted(folder.glob("printed-*")):
            with open(path, "rb") as file:
                file.seek(read.get(path, 0))
                lines = file.read()
            read[path] = read.get(path, 0) + len(lines)
            if lines:
                show(int(path.name.rpartition("-")[2]), lines, stdout_to_stderr=stdout_to_stderr)

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
    """Run a Spark job beside this thread: its value, or the exception that it raised, comes through the queue.

    It is cancelled where it still runs at the end. PySpark's own handler of Ctrl-C cancels every job of the session
    before anything else can be done; here ranks get their time to save instead.
    """
    session, tag = job.session, f"torchlake-{secrets.token_hex(6)}"
    outcome: SimpleQueue[Any] = SimpleQueue()

    def run_described() -> None:
        try:
            session.describe(tag, f"torchlake {job.name}: {job.number} ranks")
            outcome.put(run())
        except Exception as error:
            outcome.put(error)

    thread = session.thread(run_described)
    handler = signal.getsignal(signal.SIGINT)
    replaced = _in_main_thread() and str(getattr(handler, "__module__", "")).startswith("pyspark.")
    if replaced:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    thread.start()
    try:
        yield outcome
    finally:
        if thread.is_alive():
            with suppress(Exception):  # a session that has been stopped runs nothing
                session.cancel(tag)
            thread.join(GRACE_S)
        if replaced:
            signal.signal(signal.SIGINT, handler)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
