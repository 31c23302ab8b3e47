"""Write checkpoints in the background: the loop only starts copies of its tensors, and a thread does the rest.

    loop    copy | step | step | step ("mine is written": 1 + 1 of 2) | step ...
    thread       write, fsync, sha256 .................................| rank 0: manifest, rename, read back, prune

Every rank writes its shard. Ranks learn that all have written from the vector they reduce at each step anyway, so no
thread waits for another process, and no collective runs outside the loop. A new checkpoint waits while two are
unfinished. An error of the thread, such as a full disk, is raised in the loop at the next step of that rank.

Cost: a copy of this rank's shard of weights and moments, in main memory, until the checkpoint is complete.
"""

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torchlake import distributed
from torchlake.checkpoints import format, retention, snapshot
from torchlake.checkpoints.shards import Pieces
from torchlake.checkpoints.snapshot import StateCopy
from torchlake.checkpoints.store import Draft

UNFINISHED = 2


@dataclass(kw_only=True)
class _Job:
    draft: Draft
    snapshot: StateCopy
    publish: Callable[[], None]
    shard_written: threading.Event = field(default_factory=threading.Event)
    by_all: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)


class CheckpointWriter:
    """One rank's unfinished checkpoints, made by `checkpoint_writer`; all ranks call its methods in the same order."""

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
        self, draft: Draft, kinds: Mapping[str, Pieces], *, background: bool, keep: int | None = None, **publish: Any
    ) -> None:
        """Copy this rank's pieces, and write them in the background or, without `background`, before returning.

        `publish` are arguments of `format.publish`. With `keep`, older checkpoints are deleted once this one is
        complete. Raises StorageError and LeaseLost, in the background those of an earlier checkpoint.
        """
        # A limit, because each unfinished checkpoint holds a copy of the shard in memory. It is the same on all ranks,
        # as `_finish` is a collective and all ranks have the same unfinished checkpoints.
        if len(self._unfinished) >= UNFINISHED:
            self._finish(self._unfinished[0])

        def make_visible() -> None:
            with self._fenced():
                format.publish(draft, **publish)
                if keep is not None:
                    retention.prune(draft.store, keep, draft.attempt)

        taken = snapshot.take(kinds) if background else StateCopy(kinds=kinds, copied=None)
        job = _Job(draft=draft, snapshot=taken, publish=make_visible)
        self._newest = job
        self._unfinished.append(job)
        self._waiting.put(job)
        if not background:
            self.finish()

    def hold_updates(self) -> None:
        """Let the next update of the tensors wait for their copies, on the device; call it before each update."""
        for job in self._unfinished:
            job.snapshot.hold_updates()

    def shard_written(self) -> bool:
        """Return whether this rank has written its shard of the oldest unfinished checkpoint. Raises thread errors."""
        self._raise_failure()
        return bool(self._unfinished) and self._unfinished[0].shard_written.is_set()

    def oldest(self) -> Draft | None:
        """Return the oldest unfinished checkpoint: the one that `shard_written` is about."""
        return self._unfinished[0].draft if self._unfinished else None

    def commit(self, draft: Draft | None) -> None:
        """Make `draft`, for which all ranks have reported `shard_written`, visible unless it is already.

        Ranks read the reports one step late, so they may have reported twice.
        """
        if draft is not None and draft is self.oldest():
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
        """Stop the thread; an incomplete checkpoint is abandoned."""
        self._closed = True
        for job in self._unfinished:
            job.by_all.set()
        self._waiting.put(None)
        self._thread.join()

    def _finish(self, job: _Job) -> None:
        """Wait until every rank has written its shard of the oldest checkpoint."""
        job.shard_written.wait()
        self._raise_failure()
        distributed.barrier(self._group, "waiting for the other ranks' shares of a checkpoint")
        self.commit(job.draft)

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
                # The loop raises it at its next step: raised here, it would end the thread without anyone noticing,
                # and training would go on without checkpoints.
                self._failure = error
                format.abandon(job.draft)
            finally:
                # Even after an error, because the loop may be waiting for them. It looks for the error after that,
                # before it reports the shard as written.
                job.shard_written.set()
                job.done.set()

    def _write(self, job: _Job) -> None:
        job.snapshot.wait()
        format.write_shard(job.draft, job.snapshot.kinds)
        job.snapshot = StateCopy(kinds={}, copied=None)  # frees the copy before the wait for the other ranks
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
    """Yield a writer for the ranks of `group`; `fenced` is held while a checkpoint is made visible.

    Incomplete checkpoints are abandoned when the block ends with an error.
    """
    writer = CheckpointWriter(group, fenced)
    try:
        yield writer
    finally:
        writer.close()
