"""Engines: where Python runs. They know nothing about models; none of them imports torch.

Every command is a chunk job or a launch, so an engine has two duties, and more for those whose tables live inside it:

    run_chunks   each chunk at least once, on any process, in any order (tables/output/commit.py makes it exactly once)
    launch       one function as N ranks at the same time, with the variables that torchrun sets
    map_frame    the engine's own frame in, the engine's own frame out (and `frame_schema`, `spool`; by default they
                 are for an engine whose own frame is the Arrow table)

A cluster's engine schedules: a chunk is (part of) a task of its own, which runs the chunk in a child process.
`tests/conformance/test_engines.py` holds every file here to the same contract.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from torchlake import plugins
from torchlake.errors import UsageError

Worker = Callable[[Iterator[Any]], Iterator[Any]]
Span = int | tuple[int, int]
"A number of processes, or the fewest and the most of them."


class Engine(ABC):
    """Where Python runs.

    `processes` is the engine's own number of processes, None where a job may choose; `fewest`, where it is not None,
    are the ranks that a launch can do with when there is no room for `processes`.
    """

    processes: int | None
    fewest: int | None = None

    @abstractmethod
    def run_chunks(
        self,
        make_worker: Callable[[], Worker],
        chunks: Iterable[Any],
        *,
        processes: int | None = None,
        gpus_per_process: int | None = 0,
        memory_per_process: int = 0,
        threads_per_process: int | None = None,
        name: str = "chunks",
        label: Callable[[Any], str] = str,
    ) -> Generator[Any, None, None]:
        """Run every chunk at least once and yield the results as they complete, in any order.

        `make_worker()` runs once per process and returns the worker: a function from an iterator of chunks to an
        iterator of results, one result per chunk, in the chunks' order. A chunk is given when the worker asks for it,
        so a slow process gets fewer. The worker may ask for one chunk ahead from a thread of its own (`read_ahead`); a
        result must not wait for that answer, which comes when the engine has another chunk. `make_worker`, chunks and
        results must be picklable. `name` is the job's in the engine's user interface, `label` says which chunk it is.

        `gpus_per_process=None` gives each process one GPU while there are any, and starts no more processes than GPUs.
        An engine that chooses the number of processes itself starts no more of them than fit into the machine's free
        memory at `memory_per_process` bytes each, and no more than leave each `threads_per_process` cores (None: one).
        Each begins with the thread counts of OpenMP, MKL and Rayon at the cores that it has to itself, 1 at least,
        unless the user set them.

        A process that dies is replaced and its unfinished chunks run again. Closing the iterator, or an exception in
        the thread that consumes it, cancels the job and ends its processes: consume it inside `contextlib.closing`.

        Raises the TorchlakeError that a worker raised as itself; RankFailed, with the traceback, for any other
        exception of a worker, for a chunk whose processes keep dying, and when no worker can be started; UsageError
        for impossible numbers of processes, GPUs or threads.
        """

    @abstractmethod
    def launch(
        self,
        fn: Callable[..., Any],
        *args: Any,
        processes: Span | None = None,
        gpus_per_process: int | None = 0,
        grace_s: float = 30.0,
        name: str = "launch",
        stop_file: str | None = None,
    ) -> Any:
        """Run `fn(*args)` as that many ranks at the same time and return rank 0's value.

        Of a range of `processes` (fewest, most) as many start as there is room for now, never fewer than the fewest.
        `gpus_per_process=None` asks the engine for one GPU for each rank where its machines have any; ranks for which
        there are too few are refused, as CPUs would train a hundred times slower.
        The first rank to fail (in time) is the error: the TorchlakeError it raised as itself, else RankFailed with its
        traceback or the signal that killed it; the other ranks are stopped. Interrupted or KeyboardInterrupt in the
        calling thread asks every rank to stop, leaves them `grace_s` seconds to finish, and raises Interrupted. It
        asks by SIGTERM; by creating `stop_file`, which ranks that are given one look for, where an engine's tasks
        take no signals.
        """

    @abstractmethod
    def map_frame(self, frame: Any, make_worker: Callable[[], Callable[[Any], Any]], schema: Any) -> Any:
        """Apply `make_worker()`, a function from Arrow table to Arrow table of `schema`, to the engine's own frame.

        Lazy where the engine's frames are. The worker adds columns and rows stay as they are.
        """

    def room(self, most: int, *, gpus_per_process: int | None = 0, held: int = 0) -> int:
        """Ranks, up to `most`, that a group can have now; `held` of them are its own already. 0 where there are none.

        By default there is room for all.
        """
        return most

    def ranks(self, processes: Span | None, gpus_per_process: int | None = 0, *, held: int = 0) -> int:
        """How many ranks a group of so many `processes` (None: the engine's own number, else 1) gets now."""
        fewest, most = bounds(self.span or 1 if processes is None else processes)
        return most if fewest == most else max(fewest, self.room(most, gpus_per_process=gpus_per_process, held=held))

    def usual_ranks(self) -> int:
        """Ranks of a training for which neither the job nor the engine names a number."""
        return 1

    @property
    def span(self) -> Span | None:
        """The engine's own number of ranks."""
        return self.processes if self.fewest is None or self.processes is None else (self.fewest, self.processes)

    def frame_schema(self, frame: Any) -> pa.Schema:
        """The Arrow schema of the engine's own frame; its rows are not computed."""
        return frame.schema

    def spool(self, frame: Any, folder: str) -> None:
        """Write the engine's own frame as Parquet files into `folder`, which does not exist yet."""
        os.mkdir(folder)
        pq.write_table(frame, os.path.join(folder, "part-00000.parquet"))


def at_least_one(number: int, name: str = "processes") -> int:
    """`number`; raises UsageError naming it when it is below one."""
    if number < 1:
        raise UsageError(f"{name} is {number}; it has to be 1 or more.")
    return number


def bounds(processes: Span) -> tuple[int, int]:
    """The fewest and the most; raises UsageError unless 1 <= fewest <= most."""
    fewest, most = (processes, processes) if isinstance(processes, int) else processes
    if fewest > most:
        raise UsageError(f"processes is ({fewest}, {most}); the fewest come first.")
    return at_least_one(fewest), most


def make_engine(name: str, processes: Span | None, **options: Any) -> Engine:
    """The engine of that name: the class that its file calls like itself. Raises UsageError for a name there is not."""
    engine: Engine = getattr(plugins.load("engines", name), name.title())(processes=processes, **options)
    return engine
