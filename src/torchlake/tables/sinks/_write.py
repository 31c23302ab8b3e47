"""Exactly once into a target that is no local folder: a table with a log, or a folder in an object store.

    plan first -> parts, in a folder that no reader lists -> record -> one conditional commit

The commit has an id, made from the plan and the settings. A target commits an id once and only on top of its newest
version, so a retry after a lost answer, a second writer and one that was suspended find the commit made, or are
refused. After each refusal this module looks again: at the lease, whether the commit is made, and what else has
changed. Cost: one object per part and a few for each commit; a job that is resumed reads its parts once.
"""

import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from torchlake import atomic_io
from torchlake.config.redaction import redacted
from torchlake.errors import FingerprintError, OutputError, StorageError
from torchlake.failpoints import failpoint
from torchlake.tables.output.compatibility import (
    AllowedChanges,
    JobSpec,
    differences,
    input_changes,
    merge,
    refuse_differences,
)
from torchlake.tables.output.contents import check_inputs, check_parts, commit_record
from torchlake.tables.output.grouping import grouped
from torchlake.tables.output.parts import Part, PartFolder, part_name, part_of_entry
from torchlake.tables.plan import Chunk, InputFile, Plan, plan_from_json, plan_to_json
from torchlake.tables.sinks._interface import Change, CommitUnknown, Conflict, SinkOptions, Target
from torchlake.tables.sinks._records import read_record, write_record
from torchlake.tables.sinks._rewrite import keys_in, without_keys
from torchlake.tables.sinks._state import JobState, state_of
from torchlake.tables.storage.folders import folder_at
from torchlake.tables.storage.spread import Spread, in_process

ATTEMPTS, UNKNOWN = 60, 5
"At a commit: all of them, as others commit in between, and those without a clear answer."
PAUSE_S = 0.5
"At most, between two attempts."


@dataclass(frozen=True, kw_only=True)
class WriteRequest:
    """What is to be written: a plan and everything else that determines its rows."""

    plan: Plan
    fingerprint: Mapping[str, Any]
    schema: pa.Schema
    "Of the output."
    key: str | None = None
    deleted_keys: pa.Array | None = None
    "Values of the key whose rows are removed, besides those that are replaced."
    positions: Mapping[str, int] = field(default_factory=dict)
    "How far each source was read, kept with the rows."
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
        """A folder of this machine for the logs of attempts."""
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
        """Make the rows of `parts`, one for each chunk of the plan, visible; returns the commit record.

        Raises LeaseLost when another writer has taken over, FingerprintError when an input file changed meanwhile,
        OutputError when the target changed so that it no longer takes the rows, StorageError when it cannot be reached.
        """
        parts = sorted(parts, key=lambda part: part.chunk)
        check_parts(self.plan, parts)
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
        self.complete, self.record = True, read_record(self.target, self.id) or record
        listed = {file.name for file in files}
        folder_at(self.parts.location).delete([part.name for part in parts if part.name not in listed])
        failpoint("commit.cleanup")
        self.state.finish()
        return self.record

    def close(self) -> None:
        """Release the lease."""
        self.state.release()

    def _commit(self, change: Change) -> None:
        """Try until the commit is made. Each attempt looks at the newest version, with the lease checked after that."""
        problem: Exception | None = None
        attempt = unknown = 0
        while attempt < ATTEMPTS and unknown < UNKNOWN:
            snapshot = self.target.snapshot()
            change = self._replacing(snapshot, change)
            with self.state.exclusive():
                if self.target.has(snapshot, self.id):
                    return
                self.target.check(snapshot, change.schema, self.request.key)
                _check_positions(self.target, snapshot, self.options, change.positions)
                write_record(self.target, self.id, change.record, plan_to_json(self.plan))
                failpoint("commit.before_publish")
                try:
                    self.target.commit(snapshot, change)
                    failpoint("commit.publish")
                    return
                except (Conflict, CommitUnknown) as error:
                    problem = error
            attempt, unknown = attempt + 1, unknown + isinstance(problem, CommitUnknown)
            time.sleep(random.uniform(0, min(PAUSE_S, 0.01 * 2**attempt)))
        why = next((line.strip() for line in str(problem).splitlines() if line.strip()), "no reason was given")
        raise StorageError(
            f"{self.target.shown}: {attempt} commits failed, the last one because: {redacted(why.rstrip('.'))}. Run "
            "the same command again: finished work is kept."
        ) from problem

    def _replacing(self, snapshot: Any, change: Change) -> Change:
        """The change with the files of this version that have replaced rows, if rows are replaced."""
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


def commit_id(job: JobSpec, basis: str = "") -> str:
    """The id of a job's commit: the same for the same rows. `basis` tells repeated overwrites apart."""
    return atomic_io.fingerprint([job.plan.id, job.fingerprint, *([basis] if basis else [])])[:32]


class Earlier(NamedTuple):
    """What is known of an earlier write to an output."""

    fingerprint: Mapping[str, Any]
    "Its settings; empty if there was none."
    inputs: Sequence[InputFile]
    "Its files: `plan_chunks` reuses the sha256 of unchanged ones."
    positions: Mapping[str, int] = {}
    "Of an interrupted write, how far it reads its sources."


def earlier_write(target: Target) -> Earlier:
    """The interrupted write to a target, or torchlake's last commit there."""
    if not target.root:
        return Earlier({}, ())
    stored = state_of(target.root).read_plan()
    if stored is not None:
        return Earlier(stored["fingerprint"], plan_from_json(stored).inputs, stored.get("positions", {}))
    name = target.latest(target.snapshot())
    record = None if name is None else read_record(target, name)
    plan = None if name is None else read_record(target, name, plan=True)
    if record is None or plan is None:
        return Earlier({}, ())
    return Earlier(record["fingerprint"], plan_from_json(plan).inputs)


@contextmanager
def table_transaction(target: Target, options: SinkOptions, request: WriteRequest) -> Iterator[TableWrite]:
    """Write the result of a plan to a target: as `write_transaction` does for a local folder.

    Raises before any work: OutputError (the target does not take such rows, or holds others), FingerprintError (an
    interrupted write belongs to another job), Locked (another writer is active).
    """
    given = JobSpec(request.plan, json.loads(json.dumps(dict(request.fingerprint))), None, [dict(request.environment)])
    write = _begin(target, options, request, given)
    try:
        yield write
    finally:
        write.close()


def _begin(target: Target, options: SinkOptions, request: WriteRequest, job: JobSpec) -> TableWrite:
    snapshot = target.snapshot()
    made = partial(_write, target, options, request)
    finished = _finished(target, snapshot, options, job)
    if finished is not None:
        return made(job=job, id=finished["commit"], state=state_of(target.root), complete=True, record=finished)
    target.check(snapshot, request.schema, request.key)
    _check_positions(target, snapshot, options, request.positions)
    target.prepare(request.schema)
    state = state_of(target.root)
    try:
        state.acquire(request.lease_s, target.shown)
    except StorageError as error:
        raise OutputError(f"{target.shown}: cannot be written: {error}") from error
    try:
        snapshot = target.snapshot()  # now that no other writer of torchlake can commit
        finished = _finished(target, snapshot, options, job)
        if finished is not None:
            state.finish()
            return made(job=job, id=finished["commit"], state=state, complete=True, record=finished)
        target.check(snapshot, request.schema, request.key)
        job, name, discarded = _resumed(target, snapshot, state, options, request, job)
        write = made(job=job, id=name, state=state, discarded=discarded)
        _store_plan(write)
        _keep_sound_parts(write, snapshot)
    except BaseException:
        state.release()
        raise
    return write


def _write(target: Target, options: SinkOptions, request: WriteRequest, *, id: str, **fields: Any) -> TableWrite:
    folder = target.part_folder(id, request.schema)
    return TableWrite(target=target, options=options, request=request, id=id, parts=folder, **fields)


def _finished(target: Target, snapshot: Any, options: SinkOptions, job: JobSpec) -> dict[str, Any] | None:
    """The record of this job's commit if nothing is left to do."""
    names = [commit_id(job)] if options.mode != "overwrite" else []
    for name in dict.fromkeys([*names, target.latest(snapshot)]):
        record = read_record(target, name) if name is not None and target.has(snapshot, name) else None
        if record is None or record["plan"] != job.plan.id or record["fingerprint"] != job.fingerprint:
            continue
        if not (target.reusable or options.mode == "overwrite") or target.is_whole(snapshot, record):
            return record
    return None


class _Resumed(NamedTuple):
    """How a job goes on."""

    job: JobSpec
    "With the chunks of the interrupted write or earlier commit that it continues."
    id: str
    "Of its commit."
    discarded: tuple[str, ...] = ()


def _resumed(
    target: Target, snapshot: Any, state: JobState, options: SinkOptions, request: WriteRequest, job: JobSpec
) -> _Resumed:
    allowed = replace(request.allowed, overwrite=request.allowed.overwrite or options.mode == "overwrite")
    basis = snapshot.version if options.mode == "overwrite" or target.reusable else ""
    stored = state.read_plan()
    discarded: tuple[str, ...] = ()
    if stored is not None:
        earlier = JobSpec(plan_from_json(stored), stored["fingerprint"], None, stored.get("environments", []))
        discarded = tuple(stored.get("discarded", ()))
        if target.has(snapshot, stored["commit"]):
            state.clear()  # of a writer that was killed after its commit
            discarded = ()
        elif not differences(earlier, job) and not any(input_changes(earlier.plan, job.plan)):
            new = [one for one in job.environments if one not in earlier.environments]
            merged = JobSpec(merge(earlier.plan, job.plan), job.fingerprint, None, [*earlier.environments, *new])
            same = stored["mode"] == options.mode and not target.reusable
            name = stored["commit"] if same else commit_id(merged, basis)
            return _Resumed(merged, name, tuple(one for one in (*discarded, stored["commit"]) if one != name))
        else:
            if not allowed.overwrite:
                refuse_differences(f"{target.shown}: an interrupted write", earlier, job, "discards it", allowed)
            state.clear()
            discarded = (*discarded, stored["commit"])
    published = _published(target, snapshot) if target.reusable else None
    if published is not None:
        if not allowed.overwrite:
            refuse_differences(target.shown, published, job, "replaces it", allowed)
        if not differences(published, job):
            environments = [*published.environments, *job.environments]
            job = JobSpec(merge(published.plan, job.plan), job.fingerprint, None, environments)
    name = commit_id(job, basis)
    return _Resumed(job, name, tuple(one for one in discarded if one != name))


def _published(target: Target, snapshot: Any) -> JobSpec | None:
    """The job of a folder's commit."""
    for name in target.commits(snapshot):
        record = read_record(target, name)
        plan = read_record(target, name, plan=True)
        if record is not None and plan is not None:
            return JobSpec(plan_from_json(plan), record["fingerprint"], record, record.get("environments", []))
    return None


def _store_plan(write: TableWrite) -> None:
    content = plan_to_json(write.plan) | {
        "fingerprint": write.job.fingerprint,
        "environments": list(write.job.environments),
        "commit": write.id,
        "mode": write.options.mode,
        "discarded": list(write.discarded),
        "positions": dict(write.request.positions),
    }
    write.state.write_plan(content)
    location = write.parts.location
    if "://" not in location:
        atomic_io.make_folder(Path(location))


def _keep_sound_parts(write: TableWrite, snapshot: Any) -> None:
    """Set `done` and `pending`: keep parts of an earlier commit by their size, and sound ones of this commit.

    With mode overwrite parts of an earlier commit are not kept. Nothing is deleted: another writer may have taken over.
    """
    folder, own = folder_at(write.parts.location), write.parts.below
    expected = {part_name(write.plan, chunk, write.job.fingerprint): chunk for chunk in write.plan.chunks}
    sizes = folder.sizes()
    published = _published(write.target, snapshot) if write.target.reusable else None
    entries = published.record["parts"] if published is not None and published.record is not None else []
    kept = [
        part
        for part in map(part_of_entry, entries)
        if expected.keys() >= {name.rpartition("/")[2] for name in part.members or [part.name]}
        and sizes.get(part.name) == part.bytes
        and write.options.mode != "overwrite"
    ]
    chunks = {chunk for part in kept for chunk in part.all_chunks}
    names = [name for name in expected if f"{own}{name}" in sizes and expected[name].index not in chunks]
    staged = [(write.parts, name, expected[name]) for name in names]
    size = sum(sizes[f"{own}{name}"] for name in names)
    found = [*write.request.spread(_read_staged, staged, size=size, name="check finished chunks")]
    write.removed = sum(part is None for part in found)
    write.done = [*kept, *(part for part in found if part is not None)]
    chunks |= {part.chunk for part in found if part is not None}
    write.pending = tuple(chunk for chunk in write.plan.chunks if chunk.index not in chunks)


def _read_staged(one: tuple[PartFolder, str, Chunk]) -> Part | None:
    folder, name, chunk = one
    return folder.find(name, chunk.index, chunk.rows)


def _check_positions(target: Target, snapshot: Any, options: SinkOptions, positions: Mapping[str, int]) -> None:
    """Raise FingerprintError if another writer has already added as much of a source; an overwrite starts again."""
    if options.mode == "overwrite":
        return
    for name, position in positions.items():
        reached = target.position(snapshot, name)
        if reached is not None and reached >= position:
            raise FingerprintError(
                f"{target.shown}: the source was scored up to version {reached} by another job meanwhile, this one "
                f"goes up to {position}. Run the same command again: it does what is new."
            )
