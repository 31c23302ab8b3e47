"""Chunks inside Spark's tasks: a child process is kept from task to task, with the task's GPUs.

Spark reuses its Python workers, so each loads the model once. The child exits after `IDLE_S` seconds without a chunk,
and with the Python worker when Spark kills the task. The task's progress is in the worker's attempt log, which the
driver reads (`jobs/worker/task_progress.py`).
"""

import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark import TaskContext

from torchlake.engines._frames import recently_used
from torchlake.processes.chunk_process import ChunkProcess
from torchlake.processes.remote import Driver
from torchlake.processes.serialization import Failure, to_failure

IDLE_S = 10.0
MAX_CHILDREN = 2
"Children per Python worker, so that two concurrent jobs do not load their models again for every chunk."
_children: dict[Any, ChunkProcess] = {}

Result = tuple[int, list[tuple[str, Any]]]
"""A bundle's number and, for each chunk, ("result", packed value); the last may be ("failed", Failure)."""


@dataclass(frozen=True, kw_only=True)
class ChunkTask:
    """The parameters of a chunk job's tasks; `payload` is the packed `make_worker`, or a broadcast of it."""

    driver: Driver
    payload: Any
    variables: Mapping[str, str]
    "Thread counts for the child's environment."


def run_bundle(task: ChunkTask, index: int, chunks: bytes) -> Result:
    """Run a bundle of chunks. A worker's exception is a result, so that Spark does not retry it."""
    try:
        # Before a child starts: with other versions the worker may not unpickle, or may compute something else.
        task.driver.check_versions()
        gpus = granted_gpus(TaskContext.get())
        return index, list(_child(task, gpus).run(pickle.loads(chunks)))
    # Every error, also of starting the child: Spark retries a task that raises, and the driver would see only its text.
    except Exception as error:
        return index, [("failed", to_failure(error))]


def run_batches(task: ChunkTask, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Run `run_bundle` for `mapInArrow`: rows of (index, chunks) in, rows of (index, packed results) out."""
    for batch in batches:
        for row in batch.to_pylist():
            index, results = run_bundle(task, row["index"], row["chunks"])
            yield pa.RecordBatch.from_pydict({"index": [index], "results": [pickle.dumps(results)]})


def granted_gpus(context: Any) -> tuple[str, ...] | None:
    """Return the GPUs that Spark granted to a task, as in CUDA_VISIBLE_DEVICES; None if it grants none.

    Spark's addresses are indexes into the devices that the executor sees.
    """
    granted = None if context is None else context.resources().get("gpu")
    if granted is None:
        return None
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    # Then the executor sees all devices, and Spark's addresses are their numbers.
    if not visible:
        return tuple(granted.addresses)
    return tuple(
        visible[int(address)] if address.isdigit() and int(address) < len(visible) else address
        for address in granted.addresses
    )


def _child(task: ChunkTask, gpus: Sequence[str] | None) -> ChunkProcess:
    """Return this Python worker's child process for that job and those GPUs."""
    # A broadcast reaches each executor once, instead of with every task.
    payload = task.payload if isinstance(task.payload, bytes) else task.payload.value

    def start() -> ChunkProcess:
        return task.driver.chunk_process(payload, task.variables, gpus, idle_s=IDLE_S, output=(2, 2))

    # GPUs are part of the key: CUDA reads its device list once, so a child cannot move to those of another task.
    key = (payload, tuple(task.variables.items()), gpus)
    return recently_used(_children, key, start, most=MAX_CHILDREN, close=ChunkProcess.__exit__)


def failure_of(results: Sequence[tuple[str, Any]]) -> Failure | None:
    """Return the failure that ended a bundle, or None."""
    return next((value for kind, value in results if kind == "failed"), None)
