"""Begin a write: find what is there already, what an interrupted write left, and what remains to be done.

A job whose commit was made is complete. The interrupted write of the same job continues: its plan is stored, and its
sound parts are kept. In a folder, parts of the last commit are kept as well. What cannot fit on the disk ends here.
"""

import errno
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torchlake import atomic_io
from torchlake.errors import DataError, FingerprintError, Locked, OutputError, StorageError
from torchlake.outputs.compatibility import (
    JobSpec,
    continued,
    differences,
    input_changes,
    refuse_differences,
)
from torchlake.outputs.finished import FoundAtTarget, commit_id, finished_record, is_result, needs_new_id
from torchlake.outputs.records import last_job, read_record
from torchlake.outputs.staging.kept import damage, keep_sound_parts
from torchlake.outputs.staging.state import JobState, state_of
from torchlake.outputs.target import Snapshot, Target, as_table, refuse_other_partitions
from torchlake.outputs.transaction import Transaction, WriteRequest, check_positions
from torchlake.storage.urls import is_url
from torchlake.tables.plan import InputFile, plan_from_json, plan_to_json


class Earlier(NamedTuple):
    """What is known about an earlier write to an output."""

    fingerprint: Mapping[str, Any]
    "Its settings; empty if there was none."
    inputs: Sequence[InputFile]
    "Its input files: `plan_chunks` reuses the sha256 of unchanged ones."
    positions: Mapping[str, int] = {}
    "How far it reads its sources, if the write was interrupted."


def earlier_write(target: Target) -> Earlier:
    """Return the interrupted write to a target, or torchlake's last commit there; a damaged one is left out."""
    if not target.root:
        return Earlier({}, ())
    with suppress(DataError, OutputError, OSError):
        stored = _interrupted(state_of(target))
        if stored is not None and stored.is_of(target, target.snapshot()):
            return Earlier(stored.job.fingerprint, stored.job.plan.inputs, stored.positions)
    with suppress(DataError, OutputError, OSError):
        last = last_job(target, target.snapshot())
        if last is not None:
            return Earlier(last.fingerprint, last.plan.inputs)
    return Earlier({}, ())


@contextmanager
def transaction(target: Target, request: WriteRequest) -> Iterator[Transaction]:
    """Write the result of a plan to a target.

    If the target already has the result of this job, the transaction is `complete`; an interrupted write of the job is
    resumed; `request.allowed` lists what else may be replaced.

    Raises before any work: FingerprintError (the output or the interrupted write belongs to another job, or the input
    changed), Locked (another writer is active), OutputError (the target does not take such rows, holds others, or has
    no space).
    """
    overwrite = request.allowed.overwrite or target.options.mode == "overwrite"
    request = replace(request, allowed=replace(request.allowed, overwrite=overwrite))
    write = _begin(target, request)
    try:
        yield write
    finally:
        write.close()


def _begin(target: Target, request: WriteRequest) -> Transaction:
    """Check what is at the target, and start or resume the write, unless the job is complete."""
    fingerprint = json.loads(json.dumps(dict(request.fingerprint)))
    job = JobSpec(request.plan, fingerprint, None, [dict(request.environment)])
    # First without the lease: a finished job and a refusal cost a few reads and write nothing, so that a user who may
    # only read the output gets its record. All is decided again under the lease: another writer may commit in between.
    try:
        left = bool(target.root) and state_of(target).is_left()
        found = _look(target, request, job)
        finished = finished_record(found)
    except OSError as error:
        if error.filename is None:  # of a library
            raise
        raise OutputError(
            f"{target.shown}: cannot be read: {error.strerror}: {error.filename}. Give an output in a folder that this "
            "user can read and write, or change the folder's permissions."
        ) from error
    if finished is None:
        _check(found)
        table = as_table(target)
        if table is not None:
            # Before the lease, which is stored below the target: the place of an Iceberg table is known only once it
            # exists.
            table.prepare(request.schema)
    elif not left:
        return _completed(found, finished)
    state = state_of(target)
    try:
        try:
            state.acquire(request.lease_s, target.shown)
        except (Locked, OutputError, StorageError):
            if finished is None:
                raise
            return _completed(found, finished)  # only what others have left is not removed
        return _begin_leased(_look(target, request, job), state)
    except BaseException as error:
        state.release()
        if isinstance(error, OSError) and error.filename is not None:
            kind = OutputError if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) else StorageError
            raise kind(f"{target.shown}: cannot be prepared: {error.strerror}: {error.filename}") from error
        raise


def _begin_leased(found: FoundAtTarget, state: JobState) -> Transaction:
    """Repeat the checks of `_begin`, now that no other writer can interfere, and store the plan."""
    stored = _interrupted(state)
    if stored is not None and (_was_made(found, stored) or not stored.is_of(found.target, found.snapshot)):
        # Its writer was killed after the commit, or its table is gone. Parts of a commit are rows of the target now, so
        # neither the commit nor what it replaced may be listed as discarded: the folders of discarded commits are
        # deleted.
        state.clear()
        stored = None
    finished = finished_record(found)
    if finished is not None:
        state.finish() if stored is None else state.release()  # another job's interrupted write stays
        return _completed(found, finished)
    _check(found)
    write = _resumed(found, state, stored)
    # Before any part is written: without a plan the next run would take the parts of a folder for orphans, and would
    # not know the id that names the folder of a table's parts.
    state.write_plan(_stored_plan(write))
    if not (found.target.staged or is_url(write.parts.location)):
        atomic_io.make_folder(Path(write.parts.location))
    keep_sound_parts(write, found.published)
    _check_free_space(write)
    return write


def _look(target: Target, request: WriteRequest, job: JobSpec) -> FoundAtTarget:
    snapshot = target.snapshot()
    published = last_job(target, snapshot) if target.reusable else None
    if target.reusable and snapshot.latest is not None and published is None:
        raise OutputError(f"{target.shown}: its plan is missing. Remove the folder, or give another output.")
    return FoundAtTarget(target, request, job, snapshot, published, {})


def _transaction(found: FoundAtTarget, state: JobState, job: JobSpec, name: str, **fields: Any) -> Transaction:
    target, request = found.target, found.request
    parts = target.part_folder(name, request.schema)
    return Transaction(target=target, request=request, state=state, job=job, id=name, parts=parts, **fields)


def _completed(found: FoundAtTarget, record: dict[str, Any]) -> Transaction:
    state, name, job = state_of(found.target), record.get("commit", ""), found.job
    if found.target.options.partition_by:
        refuse_other_partitions(found.target.shown, found.target.partition_by, found.target.options)
    if record["plan"] != job.plan.id:  # its parts have the chunk numbers of its own plan
        stored = read_record(found.target, name, plan=True)
        job = job if stored is None else job._replace(plan=plan_from_json(stored))
    return _transaction(found, state, job, name, complete=True, record=record)


def _check(found: FoundAtTarget) -> None:
    """Raise unless the job, which is not complete, may write to the target."""
    target, request, job, snapshot, published, _ = found
    target.check(snapshot, request.rows, request.key)
    check_positions(target, snapshot, request.positions)
    if published is None or published.record is None or request.allowed.overwrite:
        return
    refuse_differences(target.shown, published, job, "replaces it", request.allowed)
    if not any(input_changes(published.plan, job.plan)):
        problem = damage(target, published.record, thorough=False)
        if problem is None:  # the same rows under another name
            named = published.record.get("commit_id")
            has = "a commit without an id" if named is None else f"the commit {named!r}"
            raise FingerprintError(f"{target.shown}: has {has}. Give another output, or --overwrite to replace it.")
        raise OutputError(f"{target.shown}: is damaged: {problem}. --overwrite writes it again.")


class _Interrupted(NamedTuple):
    """An interrupted write."""

    job: JobSpec
    commit: str
    "The id of its commit; empty for a local folder."
    mode: str
    discarded: tuple[str, ...]
    positions: Mapping[str, int]
    table_id: str
    "The own id of the table; empty if there was none yet."

    def is_of(self, target: Target, snapshot: Snapshot) -> bool:
        """Return whether it is a write to this table, and not to one that had its name before."""
        return not self.table_id or _table_id(target, snapshot) in ("", self.table_id)


def _table_id(target: Target, snapshot: Snapshot) -> str:
    table = as_table(target)
    return "" if table is None else table.table_id(snapshot)


def _interrupted(state: JobState) -> _Interrupted | None:
    """Return the write whose plan is stored. Raises OutputError when the plan is damaged."""
    stored = state.read_plan()
    if stored is None:
        return None
    try:
        job = JobSpec(plan_from_json(stored), stored["fingerprint"], None, stored.get("environments", []))
    except DataError as error:
        place = f"{state.location}/plan.json"
        raise OutputError(f"{place}: {error}. Remove its folder, or give another output.") from error
    discarded, positions = tuple(stored.get("discarded", ())), stored.get("positions", {})
    return _Interrupted(
        job, stored.get("commit", ""), stored.get("mode", ""), discarded, positions, stored.get("table_id", "")
    )


def _was_made(found: FoundAtTarget, stored: _Interrupted) -> bool:
    """Return whether the commit of an interrupted write was made: to resume it would write the same rows again."""
    if stored.commit:
        return found.target.has(found.snapshot, stored.commit)
    return is_result(found, stored.job)


def _resumed(found: FoundAtTarget, state: JobState, stored: _Interrupted | None) -> Transaction:
    """Return the write, with the chunks of the interrupted one or the last commit that it continues."""
    target, _, job, snapshot, earlier, _ = found
    name = ""
    discarded: tuple[str, ...] = ()
    if stored is not None:
        discarded = (*stored.discarded, *([stored.commit] if stored.commit else []))
        if _continues(found, stored):
            # The interrupted write comes before the output: with --accept-new-input it was planned on top of the output
            # and has the output's chunks already, while the output lacks its new ones. Chunk numbers are part of a
            # part's name, so merging with the wrong plan would make finished parts unusable.
            earlier = stored.job
            # The stored id names the folder of the finished parts. For a folder in an object store it is computed
            # again, and is the same unless another writer has committed since. Then the stored id can no longer be
            # committed, because it depends on the version before, and its parts are deleted after this commit.
            name = stored.commit if stored.mode == target.options.mode and not target.reusable else ""
        else:
            # The parts of a table or bucket are deleted only after this job's commit: their writer may be suspended
            # just before its own commit, which could still succeed and needs them.
            state.clear()
    if earlier is not None and not differences(earlier, job):
        job = continued(earlier, job)
    # The same overwrite may be wanted again after others wrote: with the version in its id it is a new commit. An
    # append of the same rows must never be a new commit, so its id depends on the job alone, unless all rows of that
    # commit are gone: the target would not commit its id again.
    given = found.request.commit_id
    replaces = (target.options.mode == "overwrite" and given is None) or target.reusable
    basis = snapshot.version if replaces else ""
    while not name and needs_new_id(found, commit_id(job, given, basis)):
        basis += f"+{snapshot.version}" if basis else snapshot.version
    name = name or commit_id(job, given, basis)
    return _transaction(
        found,
        state,
        job,
        name,
        discarded=tuple(one for one in discarded if one != name),
        table_id=_table_id(target, found.snapshot),
    )


def _continues(found: FoundAtTarget, stored: _Interrupted) -> bool:
    """Return whether the job continues the interrupted write; else its parts are discarded.

    Raises FingerprintError if the write is of another job and may not be discarded.
    """
    target, allowed = found.target, found.request.allowed
    if found.request.commit_id is not None:
        # A batch that is repeated may have its rows in another order: then they are computed again.
        allowed = replace(allowed, new_input=True, removed_input=True)
    try:
        refuse_differences(f"{target.shown}: an interrupted write", stored.job, found.job, "discards it", allowed)
    except FingerprintError:
        if not allowed.overwrite:
            raise
        return False
    # New input makes another commit. Where its id names the folder of the parts, they cannot be kept.
    return target.staged or not any(input_changes(stored.job.plan, found.job.plan))


def _stored_plan(write: Transaction) -> dict[str, Any]:
    """Return the plan as it is stored until the commit; that of a local folder becomes part of the output."""
    job = write.job
    content = plan_to_json(job.plan) | {"fingerprint": job.fingerprint, "environments": list(job.environments)}
    if write.target.staged:
        return content
    return content | {
        "commit": write.id,
        "mode": write.target.options.mode,
        "discarded": list(write.discarded),
        "positions": dict(write.request.positions),
        "table_id": write.table_id,
    }


def _check_free_space(write: Transaction) -> None:
    """Raise OutputError if the job certainly does not fit: every output takes more than 8 bytes per row."""
    if is_url(write.parts.location):
        return
    needed = 8 * sum(chunk.rows for chunk in write.pending)
    free = shutil.disk_usage(write.parts.location).free
    if free < needed:
        raise OutputError(
            f"{write.target.shown}: needs at least {needed:,} bytes, but {free:,} are free. Make room first."
        )
