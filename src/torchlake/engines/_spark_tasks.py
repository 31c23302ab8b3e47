"""What runs inside Spark's tasks: chunks in a child process that is kept from task to task, with the task's GPUs.

Spark reuses its Python workers, so a worker loads the model once. The child ends when the worker has had no chunk for
`IDLE_S` seconds, and with the worker: a task that Spark kills takes its child along.
"""

import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark import TaskContext

from torchlake.processes.children import Children
from torchlake.processes.chunk_process import ChunkProcess
from torchlake.processes.remote import Driver, own_environment
from torchlake.processes.serialization import Failure, describe

IDLE_S = 10.0
MOST_KEPT = 2
"Children that a worker keeps: two jobs at the same time must not load their models again for every chunk."
_kept: dict[tuple[Any, ...], ChunkProcess] = {}

Result = tuple[int, list[tuple[str, Any]]]
"""A bundle's number and, for each of its chunks, ("result", packed value); ("failed", Failure) is the last."""


@dataclass(frozen=True, kw_only=True)
class ChunkTask:
    """What every task of a chunk job has to know; `payload` is the packed `make_worker`, or a broadcast of it."""

    driver: Driver
    payload: Any
    variables: Mapping[str, str]
    "Of the child's environment: its thread counts."


def run_bundle(task: ChunkTask, index: int, chunks: bytes) -> Result:
    """Run a bundle of chunks. An exception of the worker is a result, so that Spark does not try again in vain."""
    try:
        task.driver.check()
        gpus = granted_gpus(TaskContext.get())
        return index, list(_child(task, gpus).run(pickle.loads(chunks)))
    except Exception as error:
        return index, [("failed", describe(error))]


def run_batches(task: ChunkTask, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same for `mapInArrow`: rows of `index`, `chunks` in, rows of `index`, packed `results` out."""
    for batch in batches:
        for row in batch.to_pylist():
            index, results = run_bundle(task, row["index"], row["chunks"])
            yield pa.RecordBatch.from_pydict({"index": [index], "results": [pickle.dumps(results)]})


def granted_gpus(context: Any) -> tuple[str, ...] | None:
    """The GPUs that Spark granted to a task, in CUDA's words; None where it grants none.

    Spark's addresses are numbers among the devices that its executor sees.
    """
    granted = None if context is None else context.resources().get("gpu")
    if granted is None:
        return None
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if not visible:
        return tuple(granted.addresses)
    return tuple(
        visible[int(address)] if address.isdigit() and int(address) < len(visible) else address
        for address in granted.addresses
    )


def _child(task: ChunkTask, gpus: Sequence[str] | None) -> ChunkProcess:
    """This Python worker's child for that job and those GPUs."""
    payload = task.payload if isinstance(task.payload, bytes) else task.payload.value
    key = (payload, tuple(task.variables.items()), gpus)
    if key not in _kept:
        while len(_kept) >= MOST_KEPT:
            _kept.pop(next(iter(_kept))).__exit__()
        environment = own_environment(task.variables, gpus)
        children = Children(output=(2, 2), **task.driver.setting())
        _kept[key] = ChunkProcess(payload, environment, children, idle_s=IDLE_S).__enter__()
    _kept[key] = _kept.pop(key)  # the newest is last
    return _kept[key]


def failure_of(results: Sequence[tuple[str, Any]]) -> Failure | None:
    """The failure that ended a bundle, if one did."""
    return next((value for kind, value in results if kind == "failed"), None)
