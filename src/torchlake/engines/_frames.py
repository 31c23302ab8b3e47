"""Apply a worker to Arrow batches of an engine's own frames, inside the engine's processes.

The worker, with its model, is made once per process and used by all tasks in it. A task with granted GPUs runs its
worker in a child process, because the engine may grant other GPUs to the next task of this process, and CUDA reads its
device list only once. Cost of the child: batches cross a socket, about 1 ms per megabyte.
"""

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa

from torchlake.processes.remote import Driver
from torchlake.processes.serialization import pack, to_exception, unpack

IDLE_S = 60.0  # before a child exits and releases its GPU
MAX_WORKERS = 2
"Workers per process, so that a query over two models does not load both again for every batch."

Transform = Callable[[pa.Table], pa.Table]
Value = TypeVar("Value")
_workers: dict[Any, Transform] = {}


def recently_used(
    cache: dict[Any, Value], key: Any, make: Callable[[], Value], *, most: int, close: Callable[[Value], Any]
) -> Value:
    """Return `cache[key]`, made if missing; the cache keeps the `most` recently used values and closes the others."""
    if key not in cache:
        while len(cache) >= most:
            close(cache.pop(next(iter(cache))))
        cache[key] = make()
    cache[key] = cache.pop(key)  # the most recent is last
    return cache[key]


def cached_worker(payload: bytes, gpus: Sequence[str] | None = None, driver: Driver | None = None) -> Transform:
    """Return the worker of the packed `make_worker`; the same one for the same payload and GPUs."""

    def make() -> Transform:
        (make_worker,) = pickle.loads(payload)
        return _ChildWorker(make_worker, gpus, driver) if gpus and driver is not None else make_worker()

    def close(worker: Transform) -> None:
        if isinstance(worker, _ChildWorker):
            worker.process.__exit__()

    return recently_used(_workers, (payload, gpus), make, most=MAX_WORKERS, close=close)


def map_batches(
    payload: bytes, batches: Iterable[pa.RecordBatch], gpus: Sequence[str] | None, driver: Driver
) -> Iterator[pa.RecordBatch]:
    """Apply the worker to each batch; make no worker if there are no batches."""
    for batch in batches:
        yield from cached_worker(payload, gpus, driver)(pa.Table.from_batches([batch])).to_batches()


def map_table(payload: bytes, batch: pa.Table) -> pa.Table:
    """Apply the worker to a table."""
    return cached_worker(payload)(batch)


class BatchMapper:
    """A callable class for Ray Data, which makes one in every actor: table in, table out."""

    def __init__(self, payload: bytes) -> None:
        self._worker = cached_worker(payload)

    def __call__(self, batch: pa.Table) -> pa.Table:
        return self._worker(batch)


class _ChildWorker:
    """A worker in a child process that sees only the granted GPUs."""

    def __init__(self, make_worker: Callable[[], Transform], gpus: Sequence[str], driver: Driver) -> None:
        payload = pack(partial(_make_chunk_worker, make_worker))
        self.process = driver.chunk_process(payload, {}, gpus, idle_s=IDLE_S)

    def __call__(self, table: pa.Table) -> pa.Table:
        ((kind, value),) = self.process.run([table])
        if kind == "failed":
            raise to_exception(value, rank=0, who="worker")
        return unpack(value)


def _make_chunk_worker(make_worker: Callable[[], Transform]) -> Callable[[Iterator[pa.Table]], Iterator[pa.Table]]:
    worker = make_worker()
    return lambda tables: map(worker, tables)
