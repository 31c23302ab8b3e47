"""Arrow batches through a worker, inside the process that an engine's own frames are computed in.

The worker, with its model, is made once per process and serves every task that the engine runs there. A task that was
granted GPUs has its worker in a child process instead: the engine may grant others to the next task of this process,
and CUDA reads its list of devices once. Price of that: the batches cross a socket, about 1 ms a megabyte.
"""

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import pyarrow as pa

from torchlake.processes.children import Children
from torchlake.processes.chunk_process import ChunkProcess
from torchlake.processes.remote import Driver, own_environment
from torchlake.processes.serialization import pack, rebuild, unpack

IDLE_S = 60.0  # before a child gives its GPU back
MOST_WORKERS = 2
"Models that a process keeps: a query over two of them must not load each again for every batch."
_workers: dict[tuple[bytes, Sequence[str] | None], Callable[[pa.Table], pa.Table]] = {}

MakeWorker = Callable[[], Callable[[pa.Table], pa.Table]]


def worker_of(
    payload: bytes, gpus: Sequence[str] | None = None, driver: Driver | None = None
) -> Callable[[pa.Table], pa.Table]:
    """The worker that the packed `make_worker` makes; the same one for the same bytes and GPUs."""
    key = (payload, gpus)
    if key not in _workers:
        (make_worker,) = pickle.loads(payload)
        while len(_workers) >= MOST_WORKERS:
            old = _workers.pop(next(iter(_workers)))
            if isinstance(old, _ChildWorker):
                old.process.__exit__()
        _workers[key] = _ChildWorker(make_worker, gpus, driver) if gpus and driver is not None else make_worker()
    worker = _workers.pop(key)
    _workers[key] = worker  # the newest is last
    return worker


def map_batches(
    payload: bytes, batches: Iterable[pa.RecordBatch], gpus: Sequence[str] | None, driver: Driver
) -> Iterator[pa.RecordBatch]:
    """The batches with what the worker adds to them; without batches no worker is made."""
    for batch in batches:
        yield from worker_of(payload, gpus, driver)(pa.Table.from_batches([batch])).to_batches()


def map_table(payload: bytes, batch: pa.Table) -> pa.Table:
    """The table with what the worker adds to it."""
    return worker_of(payload)(batch)


class BatchMapper:
    """`worker_of` as the kind of class that Ray Data makes once in every process: a table in, a table out."""

    def __init__(self, payload: bytes) -> None:
        self._worker = worker_of(payload)

    def __call__(self, batch: pa.Table) -> pa.Table:
        return self._worker(batch)


class _ChildWorker:
    """A worker in a child process that sees the granted GPUs only."""

    def __init__(self, make_worker: MakeWorker, gpus: Sequence[str], driver: Driver) -> None:
        children = Children(**driver.setting())
        payload = pack(partial(_make_chunk_worker, make_worker))
        self.process = ChunkProcess(payload, own_environment({}, gpus), children, idle_s=IDLE_S).__enter__()

    def __call__(self, table: pa.Table) -> pa.Table:
        ((kind, value),) = self.process.run([table])
        if kind == "failed":
            raise rebuild(value, rank=0, who="worker")
        return unpack(value)


def _make_chunk_worker(make_worker: MakeWorker) -> Callable[[Iterator[pa.Table]], Iterator[pa.Table]]:
    worker = make_worker()
    return lambda tables: map(worker, tables)
