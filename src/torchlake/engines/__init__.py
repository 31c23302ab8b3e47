"""Engines: where Python runs. They know nothing about models and do not import torch.

Every command is a chunk job or a launch, so an engine has two main methods, and more if it has its own tables:

    run_chunks   each chunk at least once, on any process, in any order (outputs/transaction.py makes it exactly once)
    launch       one function as N ranks at the same time, with the variables that torchrun sets
    spread       one function over many items that read much data, as a chunk job if there is enough of it
    map_frame    the engine's own frame in and out (with `frame_schema` and `materialize`; their defaults are for an
                 engine whose frame is the Arrow table)

A cluster's engine does the scheduling: a chunk is (part of) a task, which runs it in a child process. Progress is the
same on all of them: `jobs/worker/task_progress.py` counts, `progress.py` shows. Read `local.py` first, then `spark.py`
or `ray.py`. The driver's side of a cluster is in `_spark_chunks.py` (bundles of chunks are tasks), `_spark_launch.py`
and `_ray_chunks.py`; what runs in its tasks is in `_spark_tasks.py`, `_spark_ranks.py` and `_ray_actor.py`.
`tests/conformance/test_engines.py` tests every file here against this contract.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from torchlake import plugins
from torchlake.config.messages import RANKS, expected
from torchlake.errors import UsageError
from torchlake.storage.spread import in_process

T = TypeVar("T")
R = TypeVar("R")
Worker = Callable[[Iterator[Any]], Iterator[Any]]
ProcessRange = int | tuple[int, int]
"A number of processes, or (minimum, maximum)."
SPREAD_BYTES = 1 << 30
"If the items read less than this, threads of this process do it in seconds, while processes would still start."
SPREAD_MEMORY = 1 << 30
"The memory in bytes of a process that hashes, sorts keys or checks parts."


def at_least_one(number: int, name: str = "processes") -> int:
    """Return `number`. Raises UsageError if it is below 1."""
    if number < 1:
        raise UsageError(f"{name} must be 1 or more, not {number}.")
    return number


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What a chunk job asks of an engine. Raises UsageError for a number below 1 of processes, devices or threads."""

    processes: int | None = None
    "The number of processes; None: the engine's own number, else as many as are useful and fit."
    gpus: int | None = 0
    "GPUs of each process. None: one, or `devices` of them, if there are any, and no more processes than GPUs."
    devices: int = 1
    "Devices that share one copy of a model in each process."
    memory: int = 0
    "Bytes of each process: as many processes start as fit into the free memory. 0: no limit."
    threads: int = 1
    """Cores of each process. OpenMP, MKL and Rayon use as many threads as a process has cores, unless the user set
    their numbers."""

    def __post_init__(self) -> None:
        if self.processes is not None:
            at_least_one(self.processes)
        at_least_one(self.devices, "devices")
        at_least_one(self.threads, "threads")


DEFAULT_RESOURCES = Resources()


class Engine(ABC):
    """Where Python runs.

    `processes` is the engine's number of processes (None: each job chooses). If `min_processes` is not None, a launch
    may use fewer ranks than `processes`, down to that number.
    """

    processes: int | None
    min_processes: int | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(processes={self.processes})"

    @abstractmethod
    def run_chunks(
        self,
        make_worker: Callable[[], Worker],
        chunks: Iterable[Any],
        *,
        resources: Resources = DEFAULT_RESOURCES,
        name: str = "chunks",
        label: Callable[[Any], str] = str,
    ) -> Generator[Any, None, None]:
        """Run every chunk at least once and yield the results as they complete, in any order.

        `make_worker()` runs once per process and returns the worker: a function from an iterator of chunks to an
        iterator of results, one per chunk, in order. Chunks are pulled, so a slow process gets fewer. The worker may
        pull one chunk ahead in another thread (`read_ahead`); a result must not wait for that pull, which returns when
        the engine has another chunk. `make_worker`, chunks and results must be picklable. The engine's user interface
        shows `name` for the job and `label` of a chunk.

        A process that dies is replaced, and its unfinished chunks run again. Closing the iterator, or an exception in
        the consuming thread, cancels the job and ends its processes: consume it inside `contextlib.closing`.

        Raises a worker's TorchlakeError as itself; RankFailed, with the traceback, for other exceptions of a worker,
        for a chunk whose processes keep dying, and if no worker can start; UsageError for more GPUs than there are.
        """

    @abstractmethod
    def launch(
        self,
        fn: Callable[..., Any],
        *args: Any,
        processes: ProcessRange | None = None,
        gpus_per_process: int | None = 0,
        grace_s: float = 30.0,
        name: str = "launch",
        stop_file: str | None = None,
    ) -> Any:
        """Run `fn(*args)` as that many ranks at the same time and return rank 0's value.

        With a range of `processes` (minimum, maximum), as many ranks start as fit now. `gpus_per_process=None` requests
        one GPU per rank if the engine's machines have any; too few GPUs are an error, because training on CPUs is a
        hundred times slower. The error of the first rank that fails is raised, and the other ranks are stopped: its
        TorchlakeError as itself, else RankFailed with its traceback or the signal that killed it. Interrupted or
        KeyboardInterrupt in the calling thread asks every rank to stop, waits up to `grace_s` seconds, and raises
        Interrupted. Ranks are asked by SIGTERM or, if an engine's tasks get no signals, by creating `stop_file`, which
        they have to check.
        """

    def spread(
        self, function: Callable[[T], R], items: Sequence[T], *, size: int, name: str
    ) -> Generator[R, None, None]:
        """Yield a `Spread`: a chunk job if the items read at least `SPREAD_BYTES`, else threads of this process."""
        if size < SPREAD_BYTES or len(items) < 2:
            yield from in_process(function, items, size=size)
            return
        waiting: dict[int, R] = {}
        results = self.run_chunks(
            partial(_make_mapper, function),
            list(enumerate(items)),
            resources=Resources(memory=SPREAD_MEMORY),
            name=name,
            label=_item_label,
        )
        with closing(results):
            for due in range(len(items)):
                while due not in waiting:
                    number, result = next(results)
                    waiting[number] = result
                yield waiting.pop(due)

    @abstractmethod
    def map_frame(self, frame: Any, make_worker: Callable[[], Callable[[Any], Any]], schema: Any) -> Any:
        """Apply `make_worker()`, a function from Arrow table to Arrow table of `schema`, to the engine's own frame.

        Lazy if the engine's frames are. The worker adds columns and keeps the rows.
        """

    def capacity(self, most: int, *, gpus_per_process: int | None = 0, running: int = 0) -> int:
        """Return the number of ranks, up to `most`, that a group can have now, including the `running` ones that it
        has."""
        return most

    def num_ranks(self, processes: ProcessRange | None, gpus_per_process: int | None = 0, *, running: int = 0) -> int:
        """Return how many ranks a group of `processes` (None: the engine's own number, else 1) gets now."""
        fewest, most = process_bounds(self.process_range or 1 if processes is None else processes)
        if fewest == most:
            return most
        return max(fewest, self.capacity(most, gpus_per_process=gpus_per_process, running=running))

    def default_ranks(self) -> int:
        """Return the number of training ranks if neither the job nor the engine sets one."""
        return 1

    @property
    def process_range(self) -> ProcessRange | None:
        """The engine's own number or range of ranks."""
        if self.min_processes is None or self.processes is None:
            return self.processes
        return self.min_processes, self.processes

    def frame_schema(self, frame: Any) -> pa.Schema | None:
        """Return the Arrow schema of the engine's own frame, computing no more than its first rows.

        None for a frame whose columns are unknown because it has no rows.
        """
        return frame.schema

    def materialize(self, frame: Any, folder: str) -> None:
        """Write the engine's own frame as Parquet files into the new folder `folder`."""
        os.mkdir(folder)
        pq.write_table(frame, os.path.join(folder, "part-00000.parquet"))


def _make_mapper(function: Callable[[T], R]) -> Callable[[Iterator[tuple[int, T]]], Iterator[tuple[int, R]]]:
    return lambda items: ((number, function(item)) for number, item in items)


def _item_label(item: tuple[int, Any]) -> str:
    return f"item {item[0]}"


def process_bounds(processes: ProcessRange) -> tuple[int, int]:
    """Return (minimum, maximum). Raises UsageError unless 1 <= minimum <= maximum."""
    bounds = tuple(processes) if isinstance(processes, list | tuple) else (processes, processes)
    if len(bounds) != 2 or not all(isinstance(one, int) and not isinstance(one, bool) for one in bounds):
        raise UsageError(f"processes: {expected(RANKS, processes)}")
    fewest, most = bounds
    if fewest > most:
        raise UsageError(f"processes is ({fewest}, {most}), but the minimum must come first.")
    return at_least_one(fewest), most


def as_engine(engine: Engine | str | None) -> Engine | None:
    """Return an engine that is given as an object or by name ("local", "spark", "ray") with its default options; None
    for None.

    Raises UsageError for an unknown name and for any other object, such as a Spark session.
    """
    if engine is None or isinstance(engine, Engine):
        return engine
    if isinstance(engine, str):
        return make_engine(engine, None)
    raise UsageError(
        f"engine is a {type(engine).__name__}. Pass a name ({', '.join(plugins.names('engines'))}), or an engine such "
        "as torchlake.Spark(session)."
    )


def make_engine(name: str, processes: ProcessRange | None, **options: Any) -> Engine:
    """Return an engine by name: the class in its file with the same name. Raises UsageError for an unknown name."""
    engine: Engine = getattr(plugins.load("engines", name), name.title())(processes=processes, **options)
    return engine
