"""Arrow batches through a worker, inside the process that an engine's own frames are computed in.

The worker, with its model, is made once per process and serves every task that the engine runs there.
"""

import pickle
from collections.abc import Callable, Iterable, Iterator

import pyarrow as pa

MOST_WORKERS = 2
"Models that a process keeps: a query over two of them must not load each again for every batch."
_workers: dict[bytes, Callable[[pa.Table], pa.Table]] = {}


def worker_of(payload: bytes) -> Callable[[pa.Table], pa.Table]:
    """The worker that the packed `make_worker` makes; the same one for the same bytes."""
    if payload not in _workers:
        (make_worker,) = pickle.loads(payload)
        while len(_workers) >= MOST_WORKERS:
            del _workers[next(iter(_workers))]
        _workers[payload] = make_worker()
    worker = _workers.pop(payload)
    _workers[payload] = worker  # the newest is last
    return worker


def map_batches(payload: bytes, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The batches with what the worker adds to them; without batches no worker is made."""
    for batch in batches:
        yield from worker_of(payload)(pa.Table.from_batches([batch])).to_batches()


def map_table(payload: bytes, batch: pa.Table) -> pa.Table:
    """The table with what the worker adds to it."""
    return worker_of(payload)(batch)


class BatchMapper:
    """`worker_of` as the kind of class that Ray Data makes once in every process: a table in, a table out."""

    def __init__(self, payload: bytes) -> None:
        self._worker = worker_of(payload)

    def __call__(self, batch: pa.Table) -> pa.Table:
        return self._worker(batch)
