"""Checkpoints written beside the training: the loop pays for a copy of its tensors, a thread does the rest.

    loop    copy | step | step | step ("mine is written": 1 + 1 of 2) | step ...
    thread       write, fsync, sha256 .................................| rank 0: manifest, rename, read back, prune

Every rank writes its own share. Whether all have is told by a number in the vector that ranks exchange at each step
anyway, so no thread waits for another process, and no collective runs outside the loop. A checkpoint that is asked for
while two are unfinished waits for the older. What a thread meets, a full disk for one, is raised in the loop at the
next step, on the rank that met it.

Price: the copy, in main memory, until the checkpoint is complete: this rank's share of weights and moments.
"""

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torchlake import distributed
from torchlake.checkpoints import format
from torchlake.checkpoints.shards import Pieces
from torchlake.checkpoints.store import Draft

UNFINISHED = 2


@dataclass(kw_only=True)
class _Job:
    draft: Draft
    kinds: Mapping[str, Pieces]
    publish: Callable[[], None]
    shard_written: threading.Event = field(default_factory=threading.Event)
    by_all: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)


class CheckpointWriter:
    """The checkpoints of one rank in the making. Made by `writing`; every rank calls the same methods in one order."""

    def __init__(self, group: distributed.Group, fenced: Callable[[], AbstractContextManager[None]]) -> None:
        self._group, self._fenced = group, fenced
        self._newest: _Job | None = None
        self._unfinished: list[_Job] = []
        self._waiting: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="checkpoint", daemon=True)
        self._thread.start()

    def begin(
        self,
        draft: Draft,
        kinds: Mapping[str, Pieces],
        *,
        background: bool,
        keep: int | None = None,
        **publish: Any,
    ) -> None:
        """Copy this rank's pieces and write them beside the training or, not in the `background`, write them at once.

        `publish` goes to `checkpoint.publish`. With `keep`, older checkpoints are deleted once this one is complete.
        Raises StorageError and LeaseLost, in the background of an earlier one.
        """
        if len(self._unfinished) >= UNFINISHED:
            self._finish(self._unfinished[0])

        def make_visible() -> None:
            with self._fenced():
                format.publish(draft, **publish)
                if keep is not None:
                    format.prune(draft.store, keep)

        if background:
            kinds = {kind: {name: piece.copied() for name, piece in pieces.items()} for kind, pieces in kinds.items()}
        job = _Job(draft=draft, kinds=kinds, publish=make_visible)
        self._newest = job
        self._unfinished.append(job)
        self._waiting.put(job)
        if not background:
            self.finish()

    def shard_written(self) -> bool:
        """Whether this rank has written its share of the oldest unfinished checkpoint; raises what the thread met."""
        self._raise_failure()
        return bool(self._unfinished) and self._unfinished[0].shard_written.is_set()

    def commit_oldest(self) -> None:
        """Every rank has said `written`: the oldest unfinished checkpoint may be made visible."""
        self._unfinished.pop(0).by_all.set()

    def finish(self) -> None:
        """Wait until every checkpoint is complete, on all ranks. Raises StorageError, LeaseLost."""
        while self._unfinished:
            self._finish(self._unfinished[0])
        if self._newest is not None:
            self._newest.done.wait()
        self._raise_failure()
        distributed.barrier(self._group, "waiting for the last checkpoint to be complete")

    def close(self) -> None:
        """End the thread; a checkpoint that is not complete is abandoned."""
        self._closed = True
        for job in self._unfinished:
            job.by_all.set()
        self._waiting.put(None)
        self._thread.join()

    def _finish(self, job: _Job) -> None:
        """Wait until every rank has written its share of the oldest."""
        job.shard_written.wait()
        self._raise_failure()
        distributed.barrier(self._group, "waiting for the other ranks' shares of a checkpoint")
        self.commit_oldest()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _work(self) -> None:
        while (job := self._waiting.get()) is not None:
            try:
                if self._failure is None and not self._closed:
                    self._write(job)
            except BaseException as error:
                self._failure = error
                format.abandon(job.draft)
            finally:
                job.shard_written.set()
                job.done.set()

    def _write(self, job: _Job) -> None:
        format.write_shard(job.draft, job.kinds)
        job.kinds = {}
        job.shard_written.set()
        job.by_all.wait()
        if self._closed:
            format.abandon(job.draft)
        elif self._group.rank == 0:
            job.publish()


@contextmanager
def checkpoint_writer(
    group: distributed.Group, fenced: Callable[[], AbstractContextManager[None]]
) -> Iterator[CheckpointWriter]:
    """A writer for the ranks of `group`; `fenced` is held while a checkpoint is made visible.

    What is unfinished when the block is left by an error is abandoned.
    """
    writer = CheckpointWriter(group, fenced)
    try:
        yield writer
    finally:
        writer.close()
