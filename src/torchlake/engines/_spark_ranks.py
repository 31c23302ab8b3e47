"""What runs inside the tasks of a barrier stage: a rank, as a child process of its task.

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
from torchlake.processes.ranks import CAUSES, death
from torchlake.processes.remote import Driver, captured, group_variables, held_node, rank_environment
from torchlake.processes.serialization import Failure, describe, unpack

GRACE_S = 5.0  # for ranks whose task Spark has killed
SETTLE_S = 2.0  # after a failure, for peers to report one that came earlier
CAUSE_S = 0.3  # the same after a death that no peer's leaving can cause
EXIT_S = 60.0  # for a rank that has handed in its value: exit handlers may have something to upload
MOST_OUTPUT = 1 << 20  # bytes of each rank that come back when it ends
FOLLOW_S = 0.1  # between two looks at files that grow
LAST_LINES = 50  # pieces of output that come with a failure
_MARK = "torchlake-failure:"


@dataclass(frozen=True, kw_only=True)
class RankTask:
    """What every task of the stage has to know."""

    driver: Driver
    payload: bytes
    variables: Mapping[str, str]
    here: str | None
    "The driver's address where all tasks run on its machine."
    folder: str
    "The driver's; tasks that see it write what ranks print into it, and look there for `stop`."


@dataclass(kw_only=True)
class RankEnd:
    """How a rank ended."""

    rank: int
    value: bytes = b""
    failure: Failure | None = None
    cause: bool = False
    "A death that no other rank's failure explains."
    output: list[tuple[int, bytes]] = field(default_factory=list)


def run_rank_batches(task: RankTask, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for end in run_rank_task(task, batches):
        yield pa.RecordBatch.from_pydict({"end": [pickle.dumps(end)]})


def run_rank_task(task: RankTask, rows: Iterator[Any]) -> Iterator[RankEnd]:
    """A task of the stage. Raises an error that carries the first rank's failure in its message."""
    for _ in rows:
        pass
    context = BarrierTaskContext.get()
    try:
        end, ends = _run_in_group(task, context)
    except TorchlakeError as error:
        end = RankEnd(rank=context.partitionId(), failure=describe(error))
        ends = [end]
    failed = [(not one.cause, one.failure.when, one) for one in ends if one.failure is not None]
    if failed:
        raise RuntimeError(_message_of(min(failed, key=lambda one: one[:2])[2]))
    yield end


def _run_in_group(task: RankTask, context: BarrierTaskContext) -> tuple[RankEnd, list[RankEnd]]:
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


def _run_rank(task: RankTask, rank: int, environment: dict[str, str], descriptors: tuple[int, ...]) -> RankEnd:
    """Run the rank to its end, printing what it prints."""
    folder = Path(task.folder) if os.path.isdir(task.folder) else None
    end = RankEnd(rank=rank)
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


def _listen(children: Children, end: RankEnd, folder: Path | None) -> None:
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


def _all_ends(context: BarrierTaskContext, own: RankEnd) -> list[RankEnd]:
    """How all ranks ended; only this one's end where it failed and others are still running a moment later."""
    ends: list[RankEnd] = []
    output = own.output if own.failure is not None else []
    shared = replace(own, value=b"", output=output[-LAST_LINES:])

    def gather() -> None:
        ends.extend(pickle.loads(base64.b64decode(text)) for text in context.allGather(_text(shared)))

    waiting = threading.Thread(target=gather, daemon=True)
    waiting.start()
    waiting.join(None if own.failure is None else CAUSE_S if own.cause else SETTLE_S)
    return ends if len(ends) > 0 else [own]


def _text(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def _message_of(end: RankEnd) -> str:
    """The failure for people, and once more for the driver."""
    assert end.failure is not None
    output = [(stream, lines.decode(errors="replace")) for stream, lines in end.output[-LAST_LINES:]]
    content = base64.b64encode(json.dumps([end.rank, asdict(end.failure), output]).encode()).decode()
    return f"rank {end.rank}: {end.failure.kind}: {end.failure.message}\n{_MARK}{content}:"


def failure_in(text: str) -> tuple[int, Failure, list[tuple[int, str]]] | None:
    """What `_message_of` wrote, out of Spark's account of it."""
    found = re.search(re.escape(_MARK) + r"([A-Za-z0-9+/=]+):", text)
    if found is None:
        return None
    rank, failure, output = json.loads(base64.b64decode(found[1]))
    return rank, Failure(**failure), output
