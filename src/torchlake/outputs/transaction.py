"""Write exactly once to any target: even if processes are killed, its rows are those before or all of the job's.

    plan first -> parts, each named by a hash of its inputs and settings -> record -> one commit

Engines run a chunk at least once. A second attempt finds the first one's part under the same name; a part counts only
through the commit record; one writer at a time holds the lease. The commit has an id, made from the plan and the
settings. A target commits an id only once, and only on top of its newest version, so a retry after a lost answer, a
second writer and a writer that was suspended either find that the commit was made, or are refused. After each refusal
this module checks the lease again, whether the commit was made, and what else has changed. Cost: one file or object per
part and a few for each commit; a job that is resumed reads its parts once.
"""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from torchlake.errors import AccessError, FingerprintError, LeaseLost, OutputError, StorageError
from torchlake.failpoints import failpoint
from torchlake.outputs.compatibility import AllowedChanges, JobSpec
from torchlake.outputs.grouping import grouped
from torchlake.outputs.parts import Part, PartFolder
from torchlake.outputs.records import (
    check_inputs,
    check_parts,
    commit_record,
    position_of,
    read_record,
    write_record,
)
from torchlake.outputs.rewrite import keys_in, repeated_key, without_keys
from torchlake.outputs.staging.state import JobState
from torchlake.outputs.target import Change, CommitUnknown, Conflict, Target, as_table
from torchlake.redaction import redacted
from torchlake.storage.errors import access_advice
from torchlake.storage.folders import folder_at
from torchlake.storage.lease import LEASE_S
from torchlake.storage.spread import Spread, in_process
from torchlake.tables.plan import Chunk, ChunkPlan, samples_of
from torchlake.tables.record import sealed

ATTEMPTS, UNKNOWN = 60, 5
"Attempts to commit: in all, because others commit in between; and those that got no clear answer."
PAUSE_S = 0.5
"Maximum pause between two attempts."


@dataclass(frozen=True, kw_only=True)
class WriteRequest:
    """What to write: a plan and everything else that determines its rows."""

    plan: ChunkPlan
    fingerprint: Mapping[str, Any]
    schema: pa.Schema
    "The schema of the output."
    key: str | None = None
    commit_id: str | None = None
    "The caller's name of the commit: once it is made, the rows of another request with this name are not written."
    never_null: str | None = None
    "A column that has a value in each row, failed ones too, whatever its type says."
    deleted_keys: pa.Array | None = None
    "Keys whose rows are removed, and may be written again; None for replace-where: those of the rows to write."
    positions: Mapping[str, int] = field(default_factory=dict)
    "How far each source was read; stored with the rows."
    quarantined: Sequence[tuple[str, str]] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    allowed: AllowedChanges = field(default_factory=AllowedChanges)
    lease_s: float = LEASE_S
    spread: Spread = in_process

    @property
    def rows(self) -> pa.Schema:
        """The schema with what is known about nulls."""
        return pa.schema([one.with_nullable(False) if one.name == self.never_null else one for one in self.schema])


@dataclass(kw_only=True)
class Transaction:
    """A write in progress, or, if `complete`, an output that needs no work."""

    target: Target
    request: WriteRequest
    job: JobSpec
    id: str
    state: JobState
    parts: PartFolder
    "Where workers write the parts."
    complete: bool = False
    record: dict[str, Any] | None = None
    "The commit record, once there is one."
    pending: tuple[Chunk, ...] = ()
    "Chunks without a sound part."
    done: list[Part] = field(default_factory=list)
    "Sound parts of earlier runs."
    removed: int = 0
    "Orphan and damaged files of an interrupted write."
    discarded: tuple[str, ...] = ()
    "The ids of interrupted writes that this one replaces."
    table_id: str = ""
    "The own id of the table when the write began; empty if there was none."

    @property
    def plan(self) -> ChunkPlan:
        """The plan in effect: files that were planned before keep their stored chunks."""
        return self.job.plan

    @property
    def staging(self) -> Path:
        """A folder on this machine; workers log their attempts in its folder `journal`."""
        return self.state.folder

    @property
    def title(self) -> str:
        """A short name, for an engine's user interface."""
        return self.target.shown.rstrip("/").rpartition("/")[2]

    @property
    def committed_in(self) -> str:
        """Where the parts in the record are."""
        return self.target.root if self.target.staged else self.parts.location

    @property
    def samples(self) -> int:
        """Rows that are written for each that is read."""
        return samples_of(self.job.fingerprint)

    def commit(self, parts: Sequence[Part], provenance: Mapping[str, Any]) -> dict[str, Any]:
        """Make the rows of `parts`, one for each chunk of the plan, visible; return the commit record.

        Raises LeaseLost when another writer has taken over, FingerprintError when an input file changed meanwhile,
        OutputError when the target has changed and no longer accepts the rows, StorageError when it cannot be reached,
        the disk is full or the staging folder was removed.
        """
        parts = sorted(parts, key=lambda part: part.chunk)
        check_parts(self.job, parts)
        if not parts and self.target.staged:  # readers see the columns by the files
            empty = pa.Table.from_batches([], self.request.schema)
            parts = [self.parts.write("part-00000-empty.parquet", empty, chunk=0)]
        # Each chunk's file was checked when it was read. A file that changed since would make a commit whose rows come
        # from two versions of the table, so all files are compared once more, as late as their rows can be refused.
        check_inputs(self.plan)
        change = self._change(parts, provenance)
        failpoint("commit.ready")
        try:
            stored = self._commit(change)
        except LeaseLost:
            # A missing staging folder counts as a lost lease, because a successor removes it when it has committed.
            # Without an output there was no successor: the folder was deleted.
            if not self.target.staged or self.staging.exists() or self.target.snapshot().version:
                raise
            raise StorageError(
                f"{self.staging}: was deleted, with all finished parts; run the same command again."
            ) from None
        failpoint("commit.after_publish")
        # If an earlier attempt of this commit was made and its answer lost, that attempt's record is stored, with its
        # own provenance and files.
        self.complete, self.record = True, dict(stored or read_record(self.target, self.id) or change.record)
        if not self.target.staged:
            # Parts that were joined to larger files are deleted only now. Before the commit they are what a resumed job
            # would use; deleting by the list of this writer's own names cannot hit files of another commit.
            listed = {file.name for file in change.files}
            folder_at(self.parts.location).delete([part.name for part in parts if part.name not in listed])
        failpoint("commit.cleanup")
        # Last: while the plan is stored, the run after a crash knows that the commit was made.
        self.state.finish()
        return self.record

    def close(self) -> None:
        """Release the lease."""
        self.state.release()

    def _change(self, parts: Sequence[Part], provenance: Mapping[str, Any]) -> Change:
        """Return what the commit does, with its files and its record."""
        options, request = self.target.options, self.request
        files = grouped(
            self.parts,
            parts,
            size=options.target_file_size,
            partition_by=self.target.partition_by,
            spread=request.spread,
        )
        schema = self.parts.schema or request.schema
        record = commit_record(
            self.job, files, schema, provenance, quarantined=request.quarantined, removed=self.removed
        )
        record |= {"commit_id": request.commit_id} if request.commit_id else {}
        if not self.target.staged:
            record |= {"commit": self.id, "mode": options.mode, "output": self.target.shown}
            record |= {"positions": dict(request.positions)} if request.positions else {}
        return Change(
            id=self.id,
            files=files,
            schema=schema,
            mode=options.mode,
            record=sealed(record),
            positions=request.positions,
            discarded=self.discarded,
        )

    def _commit(self, change: Change) -> Mapping[str, Any] | None:
        """Try until the commit is made; return its record, or None if an earlier attempt was made.

        Each attempt reads the newest version, and checks the lease after that.
        """
        problem: Exception | None = None
        attempt = unknown = 0
        while attempt < ATTEMPTS and unknown < UNKNOWN:
            snapshot = self.target.snapshot()
            # Outside of the lock: it rewrites files of the table, which may take minutes, and a local lease cannot be
            # renewed while the lock is held. If the table changes meanwhile, the commit is refused and this is redone.
            change = self._replacing(snapshot, change)
            with self.state.exclusive():
                # An attempt without a clear answer may have succeeded, also that of a process that was killed.
                if self.target.has(snapshot, self.id):
                    return None
                # Other writers may have changed columns or partitions, or added the same versions of a source, since
                # the job began: each attempt must fit the version that it is made on.
                self.target.check(snapshot, change.schema, self.request.key)
                check_positions(self.target, snapshot, change.positions)
                if not self.target.staged:
                    # Before the commit, which only has the id: without a record, rows of a committed id could be
                    # neither verified nor extended. A record without a commit is harmless.
                    write_record(self.target, self.id, change.record, self.plan)
                    failpoint("commit.before_publish")
                try:
                    stored = self.target.commit(snapshot, change)
                    failpoint("commit.publish")
                    return stored
                except (Conflict, CommitUnknown) as error:
                    problem = error
            # Conflicts mean that others make progress, so many are tolerated. Unclear answers mean that the storage is
            # failing; its own client has already retried each of them.
            attempt, unknown = attempt + 1, unknown + isinstance(problem, CommitUnknown)
            # Random, because two writers that wait equally long would collide again.
            time.sleep(random.uniform(0, min(PAUSE_S, 0.01 * 2**attempt)))
        why = next((line.strip() for line in str(problem).splitlines() if line.strip()), "no reason was given")
        said = f"{self.target.shown}: {attempt} commits failed, the last one because: {redacted(why.rstrip('.'))}."
        advice = access_advice(self.target.root, str(problem))
        if advice:
            raise AccessError(f"{said} {advice} Finished work is kept.") from problem
        raise StorageError(f"{said} Run the same command again: finished work is kept.") from problem

    def _replacing(self, snapshot: Any, change: Change) -> Change:
        """Return the change; for replace-where, with the files of this version that have replaced rows.

        Raises OutputError for an increment with a key that the table keeps: a full run over the source is refused too.
        """
        key, deleted, table = self.request.key, self.request.deleted_keys, as_table(self.target)
        adds, replaces = change.mode == "append" and bool(change.positions), change.mode == "replace-where"
        if key is None or table is None or not (adds or replaces) or self.target.has(snapshot, self.id):
            return change
        kind = self.request.schema.field(key).type
        added = keys_in(self.parts, change.files, key, kind)
        try:
            live = table.live_files(snapshot)
        except OutputError:
            if replaces:
                raise
            return change  # rows that others deleted by vectors would count as present
        if replaces:
            gone = added if deleted is None else deleted.cast(kind)
            removed, kept = without_keys(live, key, gone, self.parts, self.request.spread)
            change = replace(change, removed=removed, kept=kept)
            added = added.filter(pc.invert(pc.is_in(added, value_set=gone)))
        repeated = repeated_key(live, key, added, self.request.spread)
        if repeated is not None:
            raise OutputError(
                f"{self.target.shown}: has a row whose key {key!r} is {repeated}, as has a row to add, so the key is "
                "not unique. Give another output, or correct the rows and score everything once with mode overwrite."
            )
        return change


def check_positions(target: Target, snapshot: Any, positions: Mapping[str, int]) -> None:
    """Raise FingerprintError if another writer has already added as much of a source; an overwrite starts over."""
    if target.options.mode == "overwrite":
        return
    for name, position in positions.items():
        reached = position_of(target, snapshot, name)
        if reached is not None and reached >= position:
            raise FingerprintError(
                f"{target.shown}: meanwhile another job scored the source up to version {reached}; this job ends at "
                f"{position}. Run the same command again: it scores only what is new."
            )
