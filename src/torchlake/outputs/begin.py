"""Begin a write to a table: find what is there already, what an interrupted write left, and what remains to be done.

A job whose commit was made is complete. The interrupted write of the same job continues: its plan is stored, and its
sound parts are kept. For a folder in an object store, parts of the earlier commit are kept as well.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torchlake import atomic_io
from torchlake.errors import OutputError, StorageError
from torchlake.outputs.compatibility import JobSpec, differences, input_changes, merge, refuse_differences
from torchlake.outputs.parts import Part, PartFolder, part_name, part_of_entry
from torchlake.outputs.records import read_record
from torchlake.outputs.staging.state import JobState, state_of
from torchlake.outputs.target import SinkOptions, Target
from torchlake.outputs.write import TableWrite, WriteRequest, check_positions
from torchlake.storage.folders import folder_at
from torchlake.tables.plan import Chunk, InputFile, plan_from_json, plan_to_json


def commit_id(job: JobSpec, basis: str = "") -> str:
    """Return the id of a job's commit: the same for the same rows. `basis` distinguishes repeated overwrites."""
    return atomic_io.fingerprint([job.plan.id, job.fingerprint, *([basis] if basis else [])])[:32]


class Earlier(NamedTuple):
    """What is known about an earlier write to an output."""

    fingerprint: Mapping[str, Any]
    "Its settings; empty if there was none."
    inputs: Sequence[InputFile]
    "Its input files: `plan_chunks` reuses the sha256 of unchanged ones."
    positions: Mapping[str, int] = {}
    "How far it reads its sources, if the write was interrupted."


def earlier_write(target: Target) -> Earlier:
    """Return the interrupted write to a target, or torchlake's last commit there."""
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
    """Write the result of a plan to a target, as `write_transaction` does for a local folder.

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
    # First without the lease, so that a finished job and a refusal cost a few reads and write nothing. All of it is
    # decided again under the lease, because another writer may commit in between.
    snapshot = target.snapshot()
    made = partial(_write, target, options, request)
    finished = _finished(target, snapshot, options, job)
    if finished is not None:
        return made(job=job, id=finished["commit"], state=state_of(target.root), complete=True, record=finished)
    target.check(snapshot, request.schema, request.key)
    check_positions(target, snapshot, options, request.positions)
    # Before the lease, which is stored below the target: the place of an Iceberg table is known only once it exists.
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
            state.finish()  # the writer that committed it was killed before it removed its state
            return made(job=job, id=finished["commit"], state=state, complete=True, record=finished)
        target.check(snapshot, request.schema, request.key)
        job, name, discarded = _resumed(target, snapshot, state, options, request, job)
        write = made(job=job, id=name, state=state, discarded=discarded)
        # Before any part: a crash after the first part must find the id of the commit, because it names the folder of
        # the parts. Under another id the parts would be computed again, and stay as orphans.
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
    """Return the record of this job's commit if nothing is left to do."""
    # The id of an overwrite depends on the version that it replaces, so only the latest commit can be this job's. Rows
    # that are added have one id per job, which is found even if other commits came after it.
    names = [commit_id(job)] if options.mode != "overwrite" else []
    for name in dict.fromkeys([*names, target.latest(snapshot)]):
        record = read_record(target, name) if name is not None and target.has(snapshot, name) else None
        if record is None or record["plan"] != job.plan.id or record["fingerprint"] != job.fingerprint:
            continue
        # Rows that were added to a table are done, even if others changed or deleted some of them: adding them again
        # would double rows that were only updated. A folder or an overwrite promises exactly these rows, so missing
        # ones are written again.
        if not (target.reusable or options.mode == "overwrite") or target.is_whole(snapshot, record):
            return record
    return None


class _Resumed(NamedTuple):
    """How a job continues."""

    job: JobSpec
    "The job with the chunks of the interrupted write or earlier commit that it continues."
    id: str
    "The id of its commit."
    discarded: tuple[str, ...] = ()


def _resumed(
    target: Target, snapshot: Any, state: JobState, options: SinkOptions, request: WriteRequest, job: JobSpec
) -> _Resumed:
    allowed = replace(request.allowed, overwrite=request.allowed.overwrite or options.mode == "overwrite")
    # The same overwrite may be wanted again after others wrote: with the version in its id it is a new commit. An
    # append of the same rows must never be a new commit, so its id depends on the job alone.
    basis = snapshot.version if options.mode == "overwrite" or target.reusable else ""
    published = _published(target, snapshot) if target.reusable else None
    if published is not None and not allowed.overwrite:  # even if an interrupted write may replace it
        refuse_differences(target.shown, published, job, "replaces it", allowed)
    stored = state.read_plan()
    discarded: tuple[str, ...] = ()
    if stored is not None:
        earlier = JobSpec(plan_from_json(stored), stored["fingerprint"], None, stored.get("environments", []))
        discarded = tuple(stored.get("discarded", ()))
        if target.has(snapshot, stored["commit"]):
            # Its writer was killed after the commit. These parts are rows of the target now, so neither the commit
            # nor what it replaced may be listed as discarded: the folders of discarded commits are deleted.
            state.clear()
            discarded = ()
        elif not differences(earlier, job) and not any(input_changes(earlier.plan, job.plan)):
            new = [one for one in job.environments if one not in earlier.environments]
            merged = JobSpec(merge(earlier.plan, job.plan), job.fingerprint, None, [*earlier.environments, *new])
            # The stored id names the folder of the finished parts. For a folder in an object store it is computed
            # again, and is the same unless another writer has committed since. Then the stored id can no longer be
            # committed, because it depends on the version before, and its parts are deleted after this commit.
            same = stored["mode"] == options.mode and not target.reusable
            name = stored["commit"] if same else commit_id(merged, basis)
            return _Resumed(merged, name, tuple(one for one in (*discarded, stored["commit"]) if one != name))
        else:
            if not allowed.overwrite:
                refuse_differences(f"{target.shown}: an interrupted write", earlier, job, "discards it", allowed)
            # Its parts are deleted only after this job's commit: its writer may be suspended just before its own
            # commit, which could still succeed and needs them.
            state.clear()
            discarded = (*discarded, stored["commit"])
    if published is not None and options.mode != "overwrite" and not differences(published, job):
        environments = [*published.environments, *job.environments]
        job = JobSpec(merge(published.plan, job.plan), job.fingerprint, None, environments)
    name = commit_id(job, basis)
    return _Resumed(job, name, tuple(one for one in discarded if one != name))


def _published(target: Target, snapshot: Any) -> JobSpec | None:
    """Return the job of a folder's commit."""
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
    # Parts of the earlier commit are trusted by their size, because reading all of a large output would cost more than
    # a small increment. Parts of this commit are read: their writer may have been killed while it wrote them.
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
