"""Find out whether a job's commit was made already: then nothing is left to do."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa

from torchlake import atomic_io
from torchlake.errors import DataError, FingerprintError, OutputError, TorchlakeError
from torchlake.outputs.compatibility import JobSpec, differences, has_same_rows, is_same
from torchlake.outputs.parts import part_of_entry
from torchlake.outputs.records import position_of, read_record, stored_commits
from torchlake.outputs.rewrite import keys_in, repeated_key
from torchlake.outputs.staging.kept import damage
from torchlake.outputs.target import Snapshot, Target, as_table
from torchlake.outputs.transaction import WriteRequest
from torchlake.tables.keys import row_ids
from torchlake.tables.plan import plan_from_json
from torchlake.tables.reading import ChunkReader


def commit_id(job: JobSpec, given: str | None, basis: str = "") -> str:
    """Return the id of a job's commit: the same for the same rows, or for the same name that the caller has `given`.

    `basis` distinguishes commits that are made again, such as repeated overwrites.
    """
    what = [job.plan.id, job.fingerprint] if given is None else ["named", given]
    return atomic_io.digest([*what, *([basis] if basis else [])])[:32]


class FoundAtTarget(NamedTuple):
    """What a job finds at its target."""

    target: Target
    request: WriteRequest
    job: JobSpec
    snapshot: Snapshot
    published: JobSpec | None
    "The job whose result a folder is; None for a table, and for a folder that does not exist yet."
    lost: dict[str, bool]
    "Which of its commits are known to have rows, or none."


def finished_record(found: FoundAtTarget) -> dict[str, Any] | None:
    """Return the record of this job's commit if nothing is left to do."""
    target, request, job, snapshot, published, _ = found
    if target.reusable:
        thorough = request.allowed.overwrite and target.staged  # not all of a bucket, which would be downloaded
        done = published is not None and is_result(found, job, thorough=thorough)
        return published.record if published is not None and done else None
    # The id of an overwrite depends on the version that it replaces, so only the latest commit can be this job's. Rows
    # that are added have one id per job, which is found even if other commits came after it. So has a named commit.
    replaces = target.options.mode == "overwrite" and not request.commit_id
    for name in _candidates(found, [] if replaces else [commit_id(job, request.commit_id)]):
        record = read_record(target, name) if target.has(snapshot, name) else None
        if record is None or not _is_commit(found, record) or is_lost(found, [name]):
            continue
        # Rows that were added to a table are done, even if others changed or deleted some of them: adding them again
        # would double rows that were only updated. To replace doubles none, and promises just these rows, so missing
        # and other ones are replaced again.
        problem = _damage_of_listed(found, record)
        if problem and not replaces:
            raise OutputError(f"{target.shown}: is damaged: {problem}. Write everything again, with mode overwrite.")
        if not _is_repeatable(found) or (not problem and _has_positions(found) and _has_result(found, record)):
            return record
    return None


def _candidates(found: FoundAtTarget, names: Sequence[str]) -> Iterator[str]:
    """Yield the commits that may be the job's: those of these names, the latest, and those that were made again."""
    latest = found.snapshot.latest
    yield from dict.fromkeys([*names, *([] if latest is None else [latest])])
    if any(needs_new_id(found, name) for name in names):
        yield from stored_commits(found.target.root)


def needs_new_id(found: FoundAtTarget, name: str) -> bool:
    """Return whether the job, if it is not complete, needs an id other than this one, which the target has."""
    return is_lost(found, [name]) or (_is_repeatable(found) and found.target.has(found.snapshot, name))


def _is_repeatable(found: FoundAtTarget) -> bool:
    """Return whether the job replaces rows of a table, and its commit has no name that the caller has given."""
    replaces = found.target.options.mode in ("overwrite", "replace-where")
    return replaces and not found.request.commit_id and as_table(found.target) is not None


def _has_result(found: FoundAtTarget, record: Mapping[str, Any]) -> bool:
    """Return whether a table has just the rows of a commit; to replace rows by key, whether it has all of them, and no
    others with their keys.

    Another writer who changes or deletes a row writes its file again, or marks it. Cost for keys: those of the commit,
    and of the other files whose bounds may have one of them.
    """
    target, request, snapshot = found.target, found.request, found.snapshot
    if target.options.mode == "overwrite":
        return target.has(snapshot, record["commit"], record)
    table, key, parts = as_table(target), request.key, [part_of_entry(one) for one in record["parts"]]
    listed = target.live(snapshot, record) or set()
    if table is None or key is None or not {one.name for one in parts} <= listed:
        return False
    folder = target.part_folder(record["commit"], request.schema)
    own = f"/{folder.location.rpartition('/')[2]}/"
    if any(one.deleted for path, one in table.logged(snapshot).items() if own in f"/{path}"):
        return False
    others = [one for one in table.live_files(snapshot) if own not in f"/{one.path}"]
    keys = keys_in(folder, parts, key, request.schema.field(key).type)
    return repeated_key(others, key, keys, request.spread) is None


def _damage_of_listed(found: FoundAtTarget, record: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a file of a commit that the table lists: it was deleted, or cut; None if nothing is."""
    live = found.target.live(found.snapshot, record) or ()
    listed = [one for one in record["parts"] if one["name"] in live]
    return damage(found.target, {**record, "parts": listed}, thorough=False) if listed else None


def _has_positions(found: FoundAtTarget) -> bool:
    """Return whether the target says how far the sources were read; a table may have the same files at two versions."""
    wanted, reached = found.request.positions, partial(position_of, found.target, found.snapshot)
    return all(reached(name) == position for name, position in wanted.items())


def _is_commit(found: FoundAtTarget, record: Mapping[str, Any]) -> bool:
    """Return whether a record is that of the job's commit: of the same rows, or of the name that the caller gave.

    Raises FingerprintError if another job has used the name.
    """
    given, job = found.request.commit_id, found.job
    if given is None or record.get("commit_id") != given:
        if given is not None or record["fingerprint"] != job.fingerprint:
            return False
        return record["plan"] == job.plan.id or _has_other_chunks(found, record)
    before = JobSpec(job.plan, record["fingerprint"])
    if different := differences(before, job):
        raise FingerprintError(
            f"{found.target.shown}: the commit {given!r} was made by another job:\n  "
            + "\n  ".join(different)
            + "\nGive this commit another name (commit_id), or the earlier settings."
        )
    return True


def _has_other_chunks(found: FoundAtTarget, record: Mapping[str, Any]) -> bool:
    """Return whether a commit has the rows of the job in other chunks (chunk_rows). Cost: a read of its plan."""
    with suppress(DataError):  # damaged: unknown
        plan = read_record(found.target, record["commit"], plan=True)
        return plan is not None and has_same_rows(JobSpec(plan_from_json(plan), record["fingerprint"]), found.job)
    return False


def is_lost(found: FoundAtTarget, names: Sequence[str]) -> bool:
    """Return whether one of these commits was made, and all of its rows are gone from the table."""
    table = as_table(found.target)
    if table is None:
        return False
    made = [name for name in names if found.target.has(found.snapshot, name)]
    for name in made:
        if name not in found.lost:
            found.lost[name] = bool(table.lost(found.snapshot, name)) or _has_no_key(found, name)
    return any(found.lost[name] for name in made)


def _has_no_key(found: FoundAtTarget, name: str) -> bool:
    """Return whether a table that lists no file of the job's commit has none of its keys or row ids either.

    A compaction keeps them in other files. Cost: the keys of the job's first chunk; those of all if it has none.
    """
    target, request, job, snapshot, _, _ = found
    record, key, table = read_record(target, name), request.key or "row_id", as_table(target)
    if table is None or record is None or not record["parts"] or target.live(snapshot, record):
        return False
    if key not in request.schema.names or key in target.partition_by:
        return False
    kind, chunks = request.schema.field(key).type, job.plan.chunks
    try:
        files = table.live_files(snapshot)
        with closing(ChunkReader([request.key] if request.key else [])) as reader:
            for some in filter(None, (chunks[:1], chunks[1:])):
                read = [reader.read(one)[0][key].combine_chunks() if request.key else row_ids(one) for one in some]
                keys = pa.chunked_array([one.cast(kind) for one in read], kind).combine_chunks()
                if repeated_key(files, key, keys, request.spread) is not None:
                    return False
    except TorchlakeError:  # deletion vectors in files with other rows, or an input that is not here
        return False
    return True


def is_result(found: FoundAtTarget, job: JobSpec, *, thorough: bool = False) -> bool:
    """Return whether a folder is the result of a job and has all parts."""
    published = found.published
    if published is None or published.record is None:
        return False
    named = found.request.commit_id is not None and job is found.job
    if not (_is_commit(found, published.record) if named else is_same(published, job)):
        return False
    return damage(found.target, published.record, thorough=thorough) is None
