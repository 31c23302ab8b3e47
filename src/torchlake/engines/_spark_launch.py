"""Ranks as the tasks of a barrier stage: all at once or none, each in a child process of its task.

The tasks exchange addresses by `allGather`, and once more how their ranks ended. A rank that fails makes its task fail
after a moment in which its peers may report an earlier failure; Spark then kills the other tasks, and the children of a
killed task get SIGTERM and `GRACE_S` seconds. Where tasks share the driver's file system, output comes line by line and
signals go through a folder of the driver's; elsewhere output is in the executors' logs and comes when ranks end.
"""

import base64
import json
import os
import pickle
import re
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import pyarrow as pa
from pyspark import BarrierTaskContext
from pyspark.util import InheritableThread

from torchlake.engines._output import captured, show
from torchlake.engines._ranks import CAUSES, death, interrupted
from torchlake.engines._remote import Driver, group_variables, held_node, rank_environment
from torchlake.engines._spark_session import Session, reason_of
from torchlake.engines._spark_tasks import granted_gpus
from torchlake.errors import Interrupted, RankFailed, TorchlakeError
from torchlake.processes.children import Children
from torchlake.processes.serialization import Failure, describe, rebuild, unpack

GRACE_S = 5.0  # for ranks whose task Spark has killed
SETTLE_S = 2.0  # after a failure, for peers to report one that came earlier
CAUSE_S = 0.3  # the same after a death that no peer's leaving can cause
EXIT_S = 60.0  # for a rank that has handed in its value: exit handlers may have something to upload
MOST_OUTPUT = 1 << 20  # bytes of each rank that come back when it ends
FOLLOW_S = 0.1  # between two looks at files that grow
LAST_LINES = 50  # pieces of output that come with a failure
_MARK = "torchlake-failure:"
_UNSAID = "TorchDistributor says that a process failed, not how; its output has the traceback"
NEVER = {
    "the_first_rank_to_fail_is_the_error": _UNSAID,
    "a_rank_that_fails_stops_those_that_wait_for_it": _UNSAID,
    "a_killed_rank_is_named_with_its_signal": _UNSAID,
    "an_error_of_ours_in_a_rank_comes_back_as_itself": _UNSAID,
    "grace": "TorchDistributor's tasks are killed by Spark, and ranks are not asked to stop before",
    "threads": "torchrun sets OMP_NUM_THREADS of its ranks",
}
"What the launcher torch_distributor does not keep of the engines' contract, by its test, and why."


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


@dataclass(frozen=True, kw_only=True)
class _Task:
    driver: Driver
    payload: bytes
    variables: Mapping[str, str]
    here: str | None
    "The driver's address where all tasks run on its machine."
    folder: str
    "The driver's; tasks that see it write what ranks print into it, and look there for `stop`."


@dataclass(kw_only=True)
class _End:
    """How a rank ended."""

    rank: int
    value: bytes = b""
    failure: Failure | None = None
    cause: bool = False
    "A death that no other rank's failure explains."
    output: list[tuple[int, bytes]] = field(default_factory=list)


def launch_on_barrier(job: LaunchJob, *, grace_s: float, stop_file: str | None) -> Any:
    """Rank 0's value. `Engine.launch` says what this raises."""
    session, tag = job.session, f"torchlake-{secrets.token_hex(6)}"
    ends: SimpleQueue[Any] = SimpleQueue()
    with _shared_folder(job.stdout_to_stderr) as folder:
        task = _Task(
            driver=Driver.here(),
            payload=job.payload,
            variables=job.variables,
            here="127.0.0.1" if session.on_this_machine else None,
            folder=str(folder),
        )
        with _in_thread(partial(_run_stage, job, task, tag, ends), session, tag):
            try:
                end = ends.get()
            except (KeyboardInterrupt, Interrupted) as stop:
                raise _stopped(ends, folder, stop_file, grace_s, stop) from stop
    return _value_of(end, job)


def _run_stage(job: LaunchJob, task: _Task, tag: str, ends: "SimpleQueue[Any]") -> None:
    try:
        job.session.describe(tag, f"torchlake {job.name}: {job.number} ranks")
        if job.session.is_connect:
            frame = job.session.get().range(0, job.number, 1, job.number)
            rows = frame.mapInArrow(partial(_rank_batches, task), "end binary", barrier=True).collect()
            ends.put([pickle.loads(bytes(row["end"])) for row in rows])
            return
        places = job.session.context.parallelize(range(job.number), job.number).barrier()
        ranks = places.mapPartitions(partial(_rank_task, task))
        ends.put((ranks if job.profile is None else ranks.withResources(job.profile)).collect())
    except Exception as error:
        ends.put(error)


def _value_of(ends: "list[_End] | Exception", job: LaunchJob) -> Any:
    """Rank 0's value; raises the first rank's failure, or Spark's reason."""
    if isinstance(ends, Exception):
        raise _error_of(ends, job)
    for end in sorted(ends, key=lambda one: one.rank):
        for stream, lines in end.output:
            show(stream, lines, stdout_to_stderr=job.stdout_to_stderr)
    return unpack(next(end.value for end in ends if end.rank == 0))


def _stopped(
    ends: "SimpleQueue[Any]", folder: Path, stop_file: str | None, grace_s: float, stop: KeyboardInterrupt | Interrupted
) -> Interrupted:
    """Ask the ranks to stop and leave them their time; the signal that stopped this process, in a rank's words."""
    said: str | None = None
    (folder / "stop").touch()
    if stop_file is not None:
        Path(stop_file).touch()
    try:
        if stop_file is not None or list(folder.glob("seen-*")):  # else no rank hears of it until Spark kills its task
            end = ends.get(timeout=grace_s)
            found = _failure_in(str(end)) if isinstance(end, Exception) else None
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
    found = _failure_in(str(error)) or _failure_in(reason)
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


def _rank_batches(task: _Task, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for end in _rank_task(task, batches):
        yield pa.RecordBatch.from_pydict({"end": [pickle.dumps(end)]})


def _rank_task(task: _Task, rows: Iterator[Any]) -> Iterator[_End]:
    """A task of the stage. Raises an error that carries the first rank's failure in its message."""
    for _ in rows:
        pass
    context = BarrierTaskContext.get()
    try:
        end, ends = _run_in_group(task, context)
    except TorchlakeError as error:
        end = _End(rank=context.partitionId(), failure=describe(error))
        ends = [end]
    failed = [(not one.cause, one.failure.when, one) for one in ends if one.failure is not None]
    if failed:
        raise RuntimeError(_message_of(min(failed, key=lambda one: one[:2])[2]))
    yield end


def _run_in_group(task: _Task, context: BarrierTaskContext) -> tuple[_End, list[_End]]:
    """Meet the other ranks and run this one: its end, and all ends that are known a moment later."""
    task.driver.check()
    place = context.partitionId()
    address = task.here or context.getTaskInfos()[place].address.rpartition(":")[0].strip("[]")
    with held_node(address, granted_gpus(context)) as (own, holder):
        nodes = [pickle.loads(base64.b64decode(text)) for text in context.allGather(_text(own))]
        machines = list(dict.fromkeys(node.address for node in nodes))
        order = sorted(range(len(nodes)), key=lambda one: (machines.index(nodes[one].address), one))
        rank = order.index(place)
        variables = group_variables([nodes[one] for one in order], 1)[rank] | dict(task.variables)
        end = _run_rank(task, rank, *rank_environment(variables, holder))
        return end, _all_ends(context, end)


def _run_rank(task: _Task, rank: int, environment: dict[str, str], descriptors: tuple[int, ...]) -> _End:
    """Run the rank to its end, printing what it prints."""
    folder = Path(task.folder) if os.path.isdir(task.folder) else None
    end = _End(rank=rank)
    if folder is not None:
        try:
            (folder / f"seen-{rank}").touch()
        except OSError:  # of another user, or of another machine that has one of the same name
            folder = None

    def send(stream: int, lines: bytes) -> None:
        if folder is not None:
            with suppress(OSError), open(folder / f"printed-{rank:05d}-{stream}", "ab", buffering=0) as file:
                file.write(lines)
            return
        os.write(2, lines)  # the executor's log
        end.output.append((stream, lines))
        while sum(len(kept) for _, kept in end.output) > MOST_OUTPUT:
            del end.output[0]

    with (
        captured(send) as streams,
        Children(output=streams, grace_s=GRACE_S, **task.driver.setting()) as children,
    ):
        children.start(rank, "rank", task.payload, environment, descriptors)
        _listen(children, end, folder)
    return end


def _listen(children: Children, end: _End, folder: Path | None) -> None:
    """Take in how the rank ends, and send it SIGTERM once the driver's folder says so."""
    asked, deadline = False, float("inf")
    while time.monotonic() < deadline:
        try:
            _, kind, value = children.events.get(timeout=FOLLOW_S)
        except Empty:
            if folder is not None and not asked and (folder / "stop").exists():
                children.signal(signal.SIGTERM)
                asked = True
            continue
        if kind == "value":
            end.value, deadline = value, time.monotonic() + EXIT_S
        elif kind == "error":
            end.failure, deadline = unpack(value), time.monotonic() + GRACE_S
        elif kind == "exit":
            if end.failure is None and not end.value:
                end.failure, end.cause = death(end.rank, value), -value in CAUSES
            return


def _all_ends(context: BarrierTaskContext, own: _End) -> list[_End]:
    """How all ranks ended; only this one's end where it failed and others are still running a moment later."""
    ends: list[_End] = []
    output = own.output if own.failure is not None else []
    told = replace(own, value=b"", output=output[-LAST_LINES:])

    def gather() -> None:
        ends.extend(pickle.loads(base64.b64decode(text)) for text in context.allGather(_text(told)))

    waiting = threading.Thread(target=gather, daemon=True)
    waiting.start()
    waiting.join(None if own.failure is None else CAUSE_S if own.cause else SETTLE_S)
    return ends if len(ends) > 0 else [own]


def _text(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def _message_of(end: _End) -> str:
    """The failure for people, and once more for the driver."""
    assert end.failure is not None
    output = [(stream, lines.decode(errors="replace")) for stream, lines in end.output[-LAST_LINES:]]
    content = base64.b64encode(json.dumps([end.rank, asdict(end.failure), output]).encode()).decode()
    return f"rank {end.rank}: {end.failure.kind}: {end.failure.message}\n{_MARK}{content}:"


def _failure_in(text: str) -> tuple[int, Failure, list[tuple[int, str]]] | None:
    """What `_message_of` wrote, out of Spark's account of it."""
    found = re.search(re.escape(_MARK) + r"([A-Za-z0-9+/=]+):", text)
    if found is None:
        return None
    rank, failure, output = json.loads(base64.b64decode(found[1]))
    return rank, Failure(**failure), output


def launch_with_torch_distributor(job: LaunchJob, gpus_per_process: int) -> Any:
    """Rank 0's value, by pyspark's own launcher; `NEVER` says what is missing."""
    session, tag = job.session, f"torchlake-{secrets.token_hex(6)}"
    ends: SimpleQueue[Any] = SimpleQueue()

    def run() -> None:
        from pyspark.ml.torch.distributor import TorchDistributor

        try:
            session.describe(tag, f"torchlake {job.name}: {job.number} ranks")
            distributor = TorchDistributor(job.number, local_mode=False, use_gpu=gpus_per_process > 0)
            ends.put((distributor.run(_call_packed, Driver.here(), job.payload), None))
        except Exception as error:
            ends.put((None, error))

    with _in_thread(run, session, tag):
        try:
            value, error = ends.get()
        except (KeyboardInterrupt, Interrupted) as stop:
            raise interrupted(stop) from stop
    if error is not None:
        raise RankFailed(f"TorchDistributor: {reason_of(error)}", rank=0) from error
    return value


@contextmanager
def _in_thread(run: Callable[[], None], session: Session, tag: str) -> Iterator[None]:
    """Run Spark's job beside this thread, which may be interrupted; the job is cancelled where it still runs then."""
    thread = InheritableThread(run, session=session.get())
    thread.daemon = True
    thread.start()
    try:
        yield
    finally:
        if thread.is_alive():
            with suppress(Exception):  # a session that has been stopped runs nothing
                session.cancel(tag)
            thread.join(GRACE_S)


def _call_packed(driver: Driver, payload: bytes) -> Any:
    driver.check()
    sys.path[:] = driver.setting()["path"]
    function, *args = pickle.loads(payload)
    return function(*args)
