"""The records of a target's commits: what was written, from which input, by which model; and each commit's plan.

    _torchlake/commits/<id>.json   _torchlake/commits/<id>.plan.json

They are written before the commit, which names them by its id; a record without a commit has no meaning. A local folder
has one commit, whose record and plan are `_torchlake/commit.json` and `plan.json`: the commit moves them into place
with the rows. Below are what a record contains and the checks before every commit, the same for every target.
"""

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from torchlake import atomic_io
from torchlake.errors import DataError, OutputError, TableError
from torchlake.outputs.compatibility import JobSpec
from torchlake.outputs.parts import Part
from torchlake.outputs.target import STATE, Snapshot, Target, as_table
from torchlake.storage.folders import folder_at
from torchlake.storage.spread import each_file
from torchlake.storage.urls import is_url
from torchlake.storage.versions import ContentChecker
from torchlake.tables.plan import ChunkPlan, InputFile, plan_from_json, plan_to_json, samples_of
from torchlake.tables.record import COMMIT, PLAN, is_record, recorded_schema

FOLDER = f"{STATE}/commits"
OWN_ROWS = ("create", "append", "overwrite")
"Modes of writing in which no row of another commit is written again, as replace-where does in files that it changes."


def write_record(target: Target, commit: str, record: Mapping[str, Any], plan: ChunkPlan) -> None:
    """Store the record and the plan of a commit that is about to be made."""
    folder = folder_at(target.root)
    folder.write(_name(target, commit, plan=True), json.dumps(plan_to_json(plan)).encode(), site="commit.plan")
    folder.write(_name(target, commit), json.dumps(record, indent=1).encode(), site="commit.record")


def read_record(target: Target, commit: str, *, plan: bool = False) -> dict[str, Any] | None:
    """Return the record of a commit, or its plan; None if it is missing. Raises DataError when it is damaged."""
    name = _name(target, commit, plan=plan)
    content = folder_at(target.root).content(name)
    if content is None:
        return None
    value: dict[str, Any] = atomic_io.parse_json(content, f"{target.root}/{name}")
    if not plan and not is_record(value):
        raise TableError(f"{target.root}/{name}: not a commit record of this version")
    return value


def _name(target: Target, commit: str, *, plan: bool = False) -> str:
    if target.staged:
        return PLAN if plan else COMMIT
    return f"{FOLDER}/{commit}{'.plan' if plan else ''}.json"


def last_job(target: Target, snapshot: Snapshot) -> JobSpec | None:
    """Return the job of torchlake's last commit to a target. Raises OutputError when its plan is damaged."""
    latest = snapshot.latest  # once: Delta looks for it in the table's log
    if latest is None:
        return None
    record, plan = read_record(target, latest), read_record(target, latest, plan=True)
    if record is None or plan is None:
        return None
    try:
        return JobSpec(plan_from_json(plan), record["fingerprint"], record, record.get("environments", []))
    except DataError as error:
        name = _name(target, latest, plan=True)
        raise OutputError(f"{target.root}/{name}: {error}. Remove its folder, or give another output.") from error


def commits_of(target: Target, snapshot: Snapshot) -> list[str]:
    """Return the ids of the commits whose records are kept and whose rows the target has; a folder has one at most."""
    table = as_table(target)
    if table is not None:
        made = table.commits(snapshot)
        lost = _lost(target, snapshot, made)
        return [one for one in made if one not in lost]
    return [] if snapshot.latest is None else [snapshot.latest]


def _lost(target: Target, snapshot: Snapshot, commits: Sequence[str]) -> set[str]:
    """Return those of a table's commits whose rows certainly are gone, as its history or its files say.

    Where the history says nothing: if all files with rows are of commits that wrote the rows of their own jobs alone, a
    commit without a file has no row. Cost: the records of all commits.
    """
    table = as_table(target)
    assert table is not None, "only a table has rows of several commits"
    lost = {one: table.lost(snapshot, one) for one in commits}
    if None not in lost.values():
        return {one for one, known in lost.items() if known}
    records = [read_record(target, one) for one in table.commits(snapshot)]
    own = [one for one in records if one is not None and one.get("mode") in OWN_ROWS]
    only_own = sum(len(target.live(snapshot, one) or ()) for one in own) == len(table.paths(snapshot))
    return {one for one, known in lost.items() if known or (known is None and only_own)}


def position_of(target: Target, snapshot: Snapshot, name: str) -> int | None:
    """Return how far a source was read for the rows that a target has; None if it was not."""
    table = as_table(target)
    if table is not None:
        stored = table.position(snapshot, name)
        return None if stored is None else _position_of_rows(target, snapshot, name, stored)
    record = None if snapshot.latest is None else read_record(target, snapshot.latest)
    found: int | None = (record or {}).get("positions", {}).get(name)
    return found


def source_commits(target: Target, snapshot: Snapshot, name: str, position: int) -> Iterator[str]:
    """Yield what the records of rows that a target has say about the commit of the source at a position, if anything.

    The newest record comes first. It is empty in records of earlier versions of torchlake.
    """
    for reached, record in _positions(target, snapshot, name):
        if reached == position:
            yield from (str(one.get("commit", "")) for one in record.get("sources", ()))


def _position_of_rows(target: Target, snapshot: Snapshot, name: str, stored: int) -> int | None:
    """Return the highest position of a commit whose rows are still there, at most the `stored` one.

    Mostly the newest commit has it, so that one record is read. If no record has the name, they were deleted, and the
    table's own number is all that is known.
    """
    found: list[int] = []
    for position, _ in _positions(target, snapshot, name):
        found.append(position)
        if position == stored:
            break
    return (max(found) if max(found) >= 0 else None) if found else stored


def _positions(target: Target, snapshot: Snapshot, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the position in each commit's record that has this one, -1 if its rows are gone, and the record."""
    for commit in dict.fromkeys([*([snapshot.latest] if snapshot.latest else []), *stored_commits(target.root)]):
        record = read_record(target, commit) or {}
        position = (record.get("positions") or {}).get(name)
        if position is not None and target.has(snapshot, commit):
            yield -1 if _lost(target, snapshot, [commit]) else position, record


def parts_of(target: Target, record: Mapping[str, Any]) -> str:
    """Return the path or URL where the parts of a commit are."""
    if target.staged:
        return target.root
    return target.part_folder(record["commit"], recorded_schema(record)).location


def stored_commits(root: str) -> list[str]:
    """Return the ids of all records at a target, including records without a commit."""
    names = (name.rpartition("/")[2] for name in folder_at(root).sizes(FOLDER))
    return sorted(name.partition(".")[0] for name in names if name.endswith(".plan.json"))


def commit_record(
    job: JobSpec,
    parts: Sequence[Part],
    schema: pa.Schema,
    provenance: Mapping[str, Any],
    *,
    quarantined: Sequence[tuple[str, str]] = (),
    removed: int = 0,
) -> dict[str, Any]:
    """Return the record of a commit of `parts`, whose columns are `schema`."""
    plan = job.plan
    return {
        "format": 1,
        "plan": plan.id,
        "fingerprint": job.fingerprint,
        "rows": sum(part.rows for part in parts),
        "failed": sum(part.failed for part in parts),
        "parts": [part.entry() for part in parts],
        **schema_fields(schema),
        "environments": list(job.environments),
        "quarantined": [list(one) for one in quarantined],
        "removed": removed,
        **({"sources": [dict(one) for one in plan.sources]} if plan.sources else {}),
        **({"selection": dict(plan.selection)} if plan.selection else {}),
        "provenance": dict(provenance),
        "committed": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def schema_fields(schema: pa.Schema) -> dict[str, Any]:
    """Return the fields of a record that describe the columns."""
    schema = schema.remove_metadata()
    return {
        "schema": {column.name: str(column.type) for column in schema},
        "arrow_schema": base64.b64encode(schema.serialize().to_pybytes()).decode(),
    }


def check_parts(job: JobSpec, parts: Sequence[Part]) -> None:
    """Assert that every chunk's rows are in one part; `parts` are sorted by chunk."""
    rows = {chunk.index: chunk.rows * samples_of(job.fingerprint) for chunk in job.plan.chunks}
    assert sorted(chunk for part in parts for chunk in part.all_chunks) == sorted(rows), "every chunk has one part"
    assert all(part.rows == sum(rows[chunk] for chunk in part.all_chunks) for part in parts), "with all of its rows"


def check_inputs(plan: ChunkPlan) -> None:
    """Raise FingerprintError when an input file has changed since it was planned."""
    remote = any(is_url(one.path) for one in plan.inputs)
    for _ in each_file(_check_input, plan.inputs, remote=remote):
        pass


def _check_input(one: InputFile) -> None:
    # The rows were read from the planned version, so the file may have been removed by now.
    ContentChecker().check(one.path, one.version, one.sha256, may_be_gone=True)
