"""Incremental jobs: only the rows that are new since the last call are read, and added exactly once.

An increment leaves the output as a full rescore would, or it is refused. The output itself stores how far a table was
read, in the commit that adds the rows: as a transaction in a Delta log, or a property of an Iceberg table. So two jobs
that read the same versions cannot both commit. A position belongs to one table (by its id, not its name), one selection
of rows and one set of settings: rows of the same table that were scored in another way are not added to.

If versions only add files, these files are read. If rows were changed or deleted, a change data feed and a key are
needed: rows that were changed or deleted are removed by their key, and changed and new ones are scored. Loose files
have no versions: the files that no earlier job on this output has read are new. A row to add whose key another row of
the output has is refused at the commit (`outputs/rewrite.py`).
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import pyarrow as pa

from torchlake.atomic_io import digest
from torchlake.errors import FingerprintError, TableError, UsageError
from torchlake.jobs.changes import net_changes
from torchlake.jobs.options import OutputOptions
from torchlake.jobs.work import Work
from torchlake.outputs.find import Output, output_of
from torchlake.outputs.records import commits_of, position_of, read_record, source_commits
from torchlake.outputs.target import Target
from torchlake.storage.urls import is_url
from torchlake.tables.plan import ChunkPlan, InputFile, plan_from_json
from torchlake.tables.selection.binding import bind
from torchlake.tables.selection.grammar import parse
from torchlake.tables.selection.rows import evaluate
from torchlake.tables.sources._find import source_of
from torchlake.tables.sources._interface import Followed
from torchlake.tables.sources._options import ReadOptions
from torchlake.tables.table import open_table

AGAIN = "Score everything again: once without incremental, with mode overwrite."
FILTERS = frozenset({"where", "csv"})
"Options of reading that give the same rows of a file each time, unlike a sample or a limit of the whole table."


@dataclass(frozen=True, kw_only=True)
class Increment:
    """Rows to read, and what else their commit does besides adding them."""

    table: Any
    output: Output
    positions: Mapping[str, int] | None
    "How far the table is read; None for files, whose new ones are found when they are planned."
    deleted_keys: pa.Array | None = None
    source: Mapping[str, Any] | None = None
    "The identity of the table whose rows `table` has, if they are not in its files."


def new_rows(work: Work[Any], table: Any, output: Output, options: OutputOptions) -> Iterator[Increment]:
    """Yield the increments that the last call has not committed; take each one after the commit of the one before.

    The first one is what an interrupted call had begun. Yields nothing when nothing is new.

    Raises UsageError for a table or an output that cannot be followed, TableError for rows that were changed in a way
    that cannot be, FingerprintError for an output that has rows of this table from a job with other settings.
    """
    target, source = _table_of(output), followed(table)
    if source is None:
        added = _in_mode(output, "append") if commits_of(target, target.snapshot()) else output
        # The first time an interrupted write is finished, the second time finds the files that came since.
        yield from repeat(Increment(table=table, output=added, positions=None), 2)
        return
    rows = open_table(source.at(source.position), columns=work.columns, options=options.read)
    work.fit(rows)
    earlier = output.earlier()
    settings = work.fingerprint(rows, earlier.fingerprint)
    name = position_name([source.name, source.id], settings, options.read.asked)
    begun = earlier.positions.get(name)
    # An interrupted write ends at the version that was current when it began. It is finished first, with its own end:
    # its stored plan and its parts belong to exactly these files, and another end would discard all of them.
    for position in dict.fromkeys([*([begun] if begun is not None else []), source.position]):
        if position < 0:
            continue
        # Read again for each increment, because the caller has committed the one before by now. A killed call may also
        # have committed after it stored the plan: then there is nothing left to add.
        snapshot = target.snapshot()
        reached = position_of(target, snapshot, name)
        if reached is None:
            reached = _reached_by_others(target, snapshot, source, settings, options.read.asked)
        if reached is None:
            yield Increment(table=source.at(position), output=output, positions={name: position})
            continue
        _refuse_older_copy(target, snapshot, source, name, reached)
        if reached < position:
            yield _since(source, reached, position, output, work.key, options.read, {name: position})


def followed(table: Any) -> Followed | None:
    """Return the table to be followed by version; None for loose files.

    Raises UsageError for a list of tables, and for a source that cannot be followed.
    """
    kind = source_of(table)
    if isinstance(table, list | tuple) or (kind is not None and not hasattr(kind, "follow")):
        raise UsageError("incremental reads one Delta or Iceberg table or one folder of files. Give only one of them.")
    if kind is None:
        return None
    found: Followed | None = kind.follow(table)
    if found is None:
        raise UsageError(f"{table}: incremental reads the table's current version; give the table without a version.")
    return found


def _refuse_older_copy(target: Target, snapshot: Any, source: Followed, name: str, reached: int) -> None:
    """Raise TableError if the source does not have the version that was read, or has another one in its place."""
    if reached > source.position:
        why = f"the table ends at {source.position}"
    else:
        read, now = source_commits(target, snapshot, name, reached), source.commit(reached)
        if not now or next(read, "") in ("", now) or any(one in ("", now) for one in read):
            return
        why = f"the table's version {reached} is another one now"
    raise TableError(
        f"{source.name}: {target.shown} has its rows up to version {reached}, but {why}: an older copy was put in its "
        f"place. {AGAIN}"
    )


def position_name(source: Any, settings: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """Return the name of a job's position in a source: the same for the same settings and selection of rows.

    The `ranges` of 8-bit vectors do not count: they are taken from the first rows, and kept.
    """
    chosen = {name: value for name, value in settings.items() if name != "ranges"}
    return f"torchlake-{digest([source, chosen, *([dict(asked)] if asked else [])])[:32]}"


def only_new(
    plan: ChunkPlan, output: Output, settings: Mapping[str, Any], increment: Increment | None
) -> tuple[ChunkPlan, Mapping[str, int]] | None:
    """Return the plan of the rows to read, and the positions to store with them; None if no file is new."""
    if increment is None:
        return plan, _full_position(plan, output, settings)
    if increment.positions is None:
        return _new_files(plan, output, settings)
    return (plan if increment.source is None else replace(plan, sources=(increment.source,))), increment.positions


def _table_of(output: Output) -> Target:
    target = output.target
    if target.reusable:
        raise UsageError(
            f"{output.path}: incremental adds to a Delta or Iceberg table; give format delta. For a Parquet folder, "
            "accept_new_input adds new input files."
        )
    return target


def _in_mode(output: Output, mode: Any) -> Output:
    return output_of(output.text, replace(output.target.options, mode=mode))


def _since(
    source: Followed,
    reached: int,
    position: int,
    output: Output,
    key: str | None,
    read: ReadOptions,
    positions: Mapping[str, int],
) -> Increment:
    """Return what happened between two positions."""
    why = source.has_changed(reached, position)
    if not why:
        return Increment(table=source.added(reached, position), output=_in_mode(output, "append"), positions=positions)
    changed = None if key is None else source.changed_rows(reached, position, key)
    if key is None or changed is None:
        raise TableError(
            f"{source.name}: {why}. To follow changed rows, give a key (--key) and a table with a change data feed "
            "(delta.enableChangeDataFeed), or score the whole table again (mode overwrite)."
        )
    where = read.selection.where
    added, gone = net_changes(changed, key)
    if where is not None:  # a row that was not selected may have the key of one that was
        gone = gone.filter(evaluate(bind(parse(where), gone.schema, where), gone))
    return Increment(
        table=added,
        output=_in_mode(output, "replace-where"),
        positions=positions,
        deleted_keys=gone[key].combine_chunks(),
        source=changed.identity,
    )


def _reached_by_others(
    target: Target, snapshot: Any, source: Followed, settings: Mapping[str, Any], asked: Mapping[str, Any]
) -> int | None:
    """Return how far an earlier version of torchlake has read the source; None if the output has no rows of it.

    Raises FingerprintError if another job has scored some: to add all rows would write those a second time.
    """
    reached = None
    for record in _records(target, snapshot):
        read = [
            one for one in record.get("sources", ()) if {one.get("table"), one.get("id")} & {source.name, source.id}
        ]
        if not read:
            continue
        different = _different(record, settings, asked)
        if read[0].get("id") not in (None, source.id):
            different = ["the table was dropped and recreated"]
        elif read[0].get("table") != source.name:
            different = [f"table: {read[0].get('table')} -> {source.name}"]
        reached = None if different else position_of(target, snapshot, position_name(source.name, settings, {}))
        if reached is None:
            raise FingerprintError(
                f"{target.shown}: has rows of {source.name} that another job has scored:\n  "
                + "\n  ".join(different or ["how far it was read is not recorded"])
                + f"\n{AGAIN}"
            )
    return reached


def _different(record: Mapping[str, Any], settings: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """Return the differences between the job of a record and one with these settings, a line each."""
    before = {**record["fingerprint"], **{name: record.get("selection", {}).get(name) for name in FILTERS}}
    after = {**settings, **{name: asked.get(name) for name in FILTERS}}
    pairs = [(name, before.get(name), after.get(name)) for name in dict.fromkeys([*before, *after]) if name != "ranges"]
    return [f"{name}: {old!r} -> {new!r}" for name, old, new in pairs if old != new]


def _records(target: Target, snapshot: Any) -> Iterator[dict[str, Any]]:
    """Yield the records of the commits whose rows the target has."""
    for commit in commits_of(target, snapshot):
        record = read_record(target, commit)
        if record is not None:
            yield record


def _full_position(plan: ChunkPlan, output: Output, settings: Mapping[str, Any]) -> dict[str, int]:
    """Return the position that a job on a whole table stores, so that a later one can be incremental; else empty."""
    if output.target.reusable or output.target.options.mode not in ("create", "overwrite"):
        return {}
    if len(plan.sources) != 1 or plan.asked.keys() - FILTERS or "since" in plan.sources[0]:
        return {}
    (one,) = plan.sources
    if one.get("position") is None or one.get("id") is None:
        return {}
    return {position_name([one["table"], one["id"]], settings, plan.asked): int(one["position"])}


def _new_files(plan: ChunkPlan, output: Output, settings: Mapping[str, Any]) -> tuple[ChunkPlan, dict[str, int]] | None:
    """Return the plan of the files that no job with these settings has added to the output; None if there are none.

    Also returns the position of the commit, which is the number of such commits. The files of an interrupted job come
    first. Raises FingerprintError for rows in the output that a full rescore would not have: those of a file that has
    changed or is gone, and those that were scored with other settings.
    """
    target, name = _table_of(output), position_name("files", settings, plan.asked)
    snapshot = target.snapshot()
    seen: dict[str, tuple[InputFile, Mapping[str, Any]]] = {}
    for record in _records(target, snapshot):
        stored = read_record(target, record["commit"], plan=True)
        if stored is None or record.get("sources"):
            continue
        read = plan_from_json(stored)
        files = {one.name: (one, read.asked) for one in read.inputs}
        different = _different(record, settings, plan.asked)
        if different and files.keys() & {one.name for one in plan.inputs}:
            raise FingerprintError(
                f"{target.shown}: has rows of these files that another job has scored:\n  "
                + "\n  ".join(different)
                + f"\n{AGAIN}"
            )
        seen |= {} if different else files
    now = {one.name: one for one in plan.inputs}
    for one, asked in seen.values():
        problem = _problem(one, now.get(one.name), asked, plan.asked)
        if problem:
            raise FingerprintError(f"{target.shown}: {problem} {AGAIN}")
    names = now.keys() - seen.keys()
    earlier = output.earlier()
    if name in earlier.positions:
        names = names & {one.name for one in earlier.inputs} or names
    if not names:
        return None
    inputs = tuple(one for one in plan.inputs if one.name in names)
    chunks = [chunk for chunk in plan.chunks if chunk.name in names]
    numbered = tuple(replace(chunk, index=number) for number, chunk in enumerate(chunks))
    reached = position_of(target, snapshot, name)
    only = replace(plan, inputs=inputs, chunks=numbered, rows=sum(one.rows for one in inputs))
    return only, {name: (reached or 0) + 1}


def _problem(before: InputFile, now: InputFile | None, asked: Mapping[str, Any], asks: Mapping[str, Any]) -> str:
    """Return why the rows of a file in the output are not those of the input now; empty if they are.

    `asked` says which rows were requested then, `asks` now.
    """
    if now is None:
        return f"{before.path}: is gone, but its rows are still in the output."
    if now.content != before.content:
        if now.sha256 != before.sha256:
            return f"{now.path}: has changed since its rows were added."
        names = [name for name in {**asked, **asks} if asked.get(name) != asks.get(name)]
        chosen = ", ".join(f"{name}: {asked.get(name)!r} -> {asks.get(name)!r}" for name in names) or "of all files"
        return f"{now.path}: other rows of it were added than are selected now ({chosen})."
    # A folder that was moved has the same files at other paths; two folders have two files.
    if now.path != before.path and (is_url(before.path) or os.path.exists(before.path)):
        return f"{now.path}: is not {before.path}, a file of the same name whose rows were added."
    return ""
