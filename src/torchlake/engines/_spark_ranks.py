"""Ranks inside the tasks of a barrier stage, each as a child process of its task.

The tasks exchange their addresses by `allGather`, and later how their ranks ended. A failed rank fails its task after a
moment in which peers may report an earlier failure; Spark then kills the other tasks, whose children get SIGTERM and
`GRACE_S` seconds. If tasks share the driver's file system, output arrives line by line and signals go through a folder
of the driver; otherwise output is in the executors' logs and arrives when ranks end.
"""

import base64
import json
import os
import pickle
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from queue import Empty
from typing import Any

import pyarrow as pa
from pyspark import BarrierTaskContext

from torchlake.engines._spark_tasks import granted_gpus
from torchlake.errors import TorchlakeError
from torchlake.processes.children import Children
from torchlake.processes.ranks import exit_failure, is_crash
from torchlake.processes.remote import Driver, capture_output, group_variables, rank_environment, reserve_node
from torchlake.processes.serialization import Failure, to_failure, unpack

GRACE_S = 5.0  # for ranks whose task Spark killed
SETTLE_S = 2.0  # after a failure, for peers to report an earlier one
CRASH_SETTLE_S = 0.3  # the same after a crash, which cannot be the consequence of another failure
EXIT_S = 60.0  # for a rank that has returned: exit handlers may upload something
MAX_OUTPUT_BYTES = 1 << 20  # of each rank, returned when it ends
FOLLOW_S = 0.1  # between polls of the shared folder
MAX_FAILURE_OUTPUTS = 50  # pieces of output returned with a failure
_MARK = "torchlake-failure:"


@dataclass(frozen=True, kw_only=True)
class RankTask:
    """The parameters of the stage's tasks."""

    driver: Driver
    payload: bytes
    variables: Mapping[str, str]
    here: str | None
    "The driver's address if all tasks run on its machine."
    folder: str
    "A folder of the driver, for ranks' output and the file `stop`, if tasks can access it."


@dataclass(kw_only=True)
class RankEnd:
    """How a rank ended."""

    rank: int
    value: bytes = b""
    failure: Failure | None = None
    crashed: bool = False
    "See `processes.ranks.is_crash`."
    output: list[tuple[int, bytes]] = field(default_factory=list)


def run_rank_batches(task: RankTask, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for end in run_rank_task(task, batches):
        yield pa.RecordBatch.from_pydict({"end": [pickle.dumps(end)]})


def run_rank_task(task: RankTask, rows: Iterator[Any]) -> Iterator[RankEnd]:
    """Run a task of the stage. Raises an error whose message contains the failure of the first failed rank."""
    for _ in rows:
        pass
    context = BarrierTaskContext.get()
    try:
        end, ends = _run_in_group(task, context)
    except TorchlakeError as error:
        end = RankEnd(rank=context.partitionId(), failure=to_failure(error))
        ends = [end]
    # Crashes sort before errors, then the earliest: when a rank dies, its peers fail too, with errors about the
    # network.
    failed = [(not one.crashed, one.failure.when, one) for one in ends if one.failure is not None]
    if failed:
        raise RuntimeError(_message_of(min(failed, key=lambda one: one[:2])[2]))
    yield end


def _run_in_group(task: RankTask, context: BarrierTaskContext) -> tuple[RankEnd, list[RankEnd]]:
    """Run this rank in its group; return its end, and all ends that are known a moment later."""
    task.driver.check_versions()
    place = context.partitionId()
    # Spark's address of this executor is one that the others reach; a machine's own name may resolve to a loopback.
    address = task.here or context.getTaskInfos()[place].address.rpartition(":")[0].strip("[]")
    # The port stays reserved while `allGather` waits for the slowest task: another program could bind it in the
    # meantime.
    with reserve_node(address, granted_gpus(context)) as (own, holder):
        # In the order of the partitions on every task, so all compute the same numbering without a coordinator.
        nodes = [pickle.loads(base64.b64decode(text)) for text in context.allGather(_text(own))]
        order, variables = group_variables(nodes, 1)
        rank = order.index(place)
        end = _run_rank(task, rank, *rank_environment(variables[rank] | dict(task.variables), holder))
        return end, _all_ends(context, end)


def _run_rank(task: RankTask, rank: int, environment: dict[str, str], descriptors: tuple[int, ...]) -> RankEnd:
    """Run the rank to its end and forward its output."""
    folder = Path(task.folder) if os.path.isdir(task.folder) else None
    end = RankEnd(rank=rank)
    if folder is not None:
        try:
            # A write, not a check: an executor elsewhere may have a folder of this name. The driver signals ranks only
            # if it sees these files.
            (folder / f"seen-{rank}").touch()
        except OSError:  # another user's, or a folder of the same name on another machine
            folder = None

    def send(stream: int, lines: bytes) -> None:
        if folder is not None:
            with suppress(OSError), open(folder / f"printed-{rank:05d}-{stream}", "ab", buffering=0) as file:
                file.write(lines)
            return
        os.write(2, lines)  # the executor's log
        end.output.append((stream, lines))
        # The oldest output goes first: the end, with the traceback, is what explains a failure.
        while sum(len(kept) for _, kept in end.output) > MAX_OUTPUT_BYTES:
            del end.output[0]

    with (
        capture_output(send) as streams,
        Children(output=streams, grace_s=GRACE_S, **task.driver.child_options()) as children,
    ):
        children.start(rank, "rank", task.payload, environment, descriptors)
        _listen(children, end, folder)
    return end


def _listen(children: Children, end: RankEnd, folder: Path | None) -> None:
    """Wait until the rank ends, and send it SIGTERM if the driver creates the file `stop`."""
    signaled, deadline = False, float("inf")
    while time.monotonic() < deadline:
        try:
            _, kind, value = children.events.get(timeout=FOLLOW_S)
        except Empty:
            if folder is not None and not signaled and (folder / "stop").exists():
                children.signal(signal.SIGTERM)
                signaled = True
            continue
        if kind == "value":
            # The value counts, whatever happens at exit: a hanging exit handler must not fail a training that is
            # complete.
            end.value, deadline = value, time.monotonic() + EXIT_S
        elif kind == "error":
            end.failure, deadline = unpack(value), time.monotonic() + GRACE_S
        elif kind == "exit":
            # An exit status after an error or a value is its consequence, and says less.
            if end.failure is None and not end.value:
                end.failure, end.crashed = exit_failure(end.rank, value), is_crash(value)
            return


def _all_ends(context: BarrierTaskContext, own: RankEnd) -> list[RankEnd]:
    """Return the ends of all ranks, or only this one if it failed and others are still running a moment later."""
    ends: list[RankEnd] = []
    output = own.output if own.failure is not None else []
    shared = replace(own, value=b"", output=output[-MAX_FAILURE_OUTPUTS:])

    def gather() -> None:
        ends.extend(pickle.loads(base64.b64decode(text)) for text in context.allGather(_text(shared)))

    # In a thread, because `allGather` has no timeout: with a failed rank it may wait for peers that hang in a
    # collective.
    waiting = threading.Thread(target=gather, daemon=True)
    waiting.start()
    waiting.join(None if own.failure is None else CRASH_SETTLE_S if own.crashed else SETTLE_S)
    return ends if len(ends) > 0 else [own]


def _text(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def _message_of(end: RankEnd) -> str:
    """Return the failure as readable text, followed by an encoded form for the driver."""
    assert end.failure is not None
    output = [(stream, lines.decode(errors="replace")) for stream, lines in end.output[-MAX_FAILURE_OUTPUTS:]]
    content = base64.b64encode(json.dumps([end.rank, asdict(end.failure), output]).encode()).decode()
    return f"rank {end.rank}: {end.failure.kind}: {end.failure.message}\n{_MARK}{content}:"


def failure_in(text: str) -> tuple[int, Failure, list[tuple[int, str]]] | None:
    """Return the failure that `_message_of` encoded, from Spark's error text; None if there is none."""
    found = re.search(re.escape(_MARK) + r"([A-Za-z0-9+/=]+):", text)
    if found is None:
        return None
    rank, failure, output = json.loads(base64.b64decode(found[1]))
    return rank, Failure(**failure), output
