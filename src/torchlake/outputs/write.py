"""Write exactly once to a target that is not a local folder: a table with a log, or a folder in an object store.

    plan first -> parts, in a folder that no reader lists -> record -> one conditional commit

The commit has an id, made from the plan and the settings. A target commits an id only once, and only on top of its
newest version, so a retry after a lost answer, a second writer and a writer that was suspended either find that the
commit was made, or are refused. After each refusal this module checks the lease again, whether the commit was made, and
what else has changed. Cost: one object per part and a few for each commit; a job that is resumed reads its parts once.
"""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from torchlake.errors import AccessError, FingerprintError, StorageError
from torchlake.failpoints import failpoint
from torchlake.outputs.compatibility import AllowedChanges, JobSpec
from torchlake.outputs.grouping import grouped
from torchlake.outputs.parts import Part, PartFolder
from torchlake.outputs.records import check_inputs, check_parts, commit_record, read_record, write_record
from torchlake.outputs.rewrite import keys_in, without_keys
from torchlake.outputs.staging.state import JobState
from torchlake.outputs.target import Change, CommitUnknown, Conflict, SinkOptions, Target
from torchlake.redaction import redacted
from torchlake.storage.folders import folder_at
from torchlake.storage.objects import access_advice
from torchlake.storage.spread import Spread, in_process
from torchlake.tables.plan import Chunk, Plan, plan_to_json

ATTEMPTS, UNKNOWN = 60, 5
"Attempts to commit: in all, because others commit in between; and those that got no clear answer."
PAUSE_S = 0.5
"Maximum pause between two attempts."


@dataclass(frozen=True, kw_only=True)
class WriteRequest:
    """What to write: a plan and everything else that determines its rows."""

    plan: Plan
    fingerprint: Mapping[str, Any]
    schema: pa.Schema
    "The schema of the output."
    key: str | None = None
    deleted_keys: pa.Array | None = None
    "Keys whose rows are removed, besides those that are replaced."
    positions: Mapping[str, int] = field(default_factory=dict)
    "How far each source was read; stored with the rows."
    quarantined: Sequence[tuple[str, str]] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    allowed: AllowedChanges = field(default_factory=AllowedChanges)
    lease_s: float = 60.0
    spread: Spread = in_process


@dataclass(kw_only=True)
class TableWrite:
    """A write in progress, or, if `complete`, an output that needs no work."""

    target: Target
    options: SinkOptions
    request: WriteRequest
    job: JobSpec
    id: str
    state: JobState
    parts: PartFolder
    complete: bool = False
    record: dict[str, Any] | None = None
    pending: tuple[Chunk, ...] = ()
    done: list[Part] = field(default_factory=list)
    removed: int = 0
    discarded: tuple[str, ...] = ()
    "The ids of interrupted writes that this one replaces."

    @property
    def plan(self) -> Plan:
        """The plan in effect."""
        return self.job.plan

    @property
    def staging(self) -> Path:
        """A folder on this machine for the logs of attempts."""
        return self.state.folder

    @property
    def title(self) -> str:
        """A short name, for an engine's user interface."""
        return self.target.shown.rstrip("/").rpartition("/")[2]

    @property
    def committed_in(self) -> str:
        """Where the parts in the record are."""
        return self.parts.location

    def commit(self, parts: Sequence[Part], provenance: Mapping[str, Any]) -> dict[str, Any]:
        """Make the rows of `parts`, one for each chunk of the plan, visible; return the commit record.

        Raises LeaseLost when another writer has taken over, FingerprintError when an input file changed meanwhile,
        OutputError when the target has changed and no longer accepts the rows, StorageError when it cannot be reached.
        """
        parts = sorted(parts, key=lambda part: part.chunk)
        check_parts(self.plan, parts)
        # A file that changed after its chunks were read would make a commit with rows of two versions.
        check_inputs(self.plan)
        files = grouped(
            self.parts,
            parts,
            size=self.options.target_file_size,
            partition_by=self.target.partition_by,
            spread=self.request.spread,
        )
        schema = self.parts.schema or self.request.schema
        record = commit_record(
            self.job, files, schema, provenance, quarantined=self.request.quarantined, removed=self.removed
        )
        record |= {"commit": self.id, "mode": self.options.mode, "output": self.target.shown}
        record |= {"positions": dict(self.request.positions)} if self.request.positions else {}
        change = Change(
            id=self.id,
            files=files,
            schema=schema,
            mode=self.options.mode,
            record=record,
            positions=self.request.positions,
            discarded=self.discarded,
        )
        failpoint("commit.ready")
        self._commit(change)
        failpoint("commit.after_publish")
        # The stored record is the one that counts: if an earlier attempt of this commit was made and its answer lost,
        # that attempt's record is stored, with its own provenance and files.
        self.complete, self.record = True, read_record(self.target, self.id) or record
        # Parts that were joined to larger files are deleted only now. Before the commit they are what a resumed job
        # would use; deleting by the list of this writer's own names cannot hit files of another commit.
        listed = {file.name for file in files}
        folder_at(self.parts.location).delete([part.name for part in parts if part.name not in listed])
        failpoint("commit.cleanup")
        # Last: while the plan is stored, the run after a crash knows the id of this commit, and finds it made.
        self.state.finish()
        return self.record

    def close(self) -> None:
        """Release the lease."""
        self.state.release()

    def _commit(self, change: Change) -> None:
        """Try until the commit is made. Each attempt reads the newest version, and checks the lease after that."""
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
                    return
                # Other writers may have changed columns or partitions, or added the same versions of a source, since
                # the job began: each attempt must fit the version that it is made on.
                self.target.check(snapshot, change.schema, self.request.key)
                check_positions(self.target, snapshot, self.options, change.positions)
                # Before the commit, which only has the id: without a record, rows of a committed id could be neither
                # verified nor extended. A record without a commit is harmless.
                write_record(self.target, self.id, change.record, plan_to_json(self.plan))
                failpoint("commit.before_publish")
                try:
                    self.target.commit(snapshot, change)
                    failpoint("commit.publish")
                    return
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
        """Return the change; for replace-where, with the files of this version that have replaced rows."""
        key, deleted = self.request.key, self.request.deleted_keys
        if change.mode != "replace-where":
            return change
        assert key is not None, "replace-where has a key"
        values = keys_in(self.parts, change.files, key)
        chunks = [*values.chunks, *([deleted.cast(values.type)] if deleted is not None else [])]
        live = self.target.live_files(snapshot)
        merged = pa.chunked_array(chunks, values.type).combine_chunks()
        removed, kept = without_keys(live, key, merged, self.parts, self.request.spread)
        return replace(change, removed=removed, kept=kept)


def check_positions(target: Target, snapshot: Any, options: SinkOptions, positions: Mapping[str, int]) -> None:
    """Raise FingerprintError if another writer has already added as much of a source; an overwrite starts over."""
    if options.mode == "overwrite":
        return
    for name, position in positions.items():
        reached = target.position(snapshot, name)
        if reached is not None and reached >= position:
            raise FingerprintError(
                f"{target.shown}: meanwhile another job scored the source up to version {reached}; this job ends at "
                f"{position}. Run the same command again: it scores only what is new."
            )
