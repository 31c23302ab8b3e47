"""Incremental jobs: only the rows that are new since the last call are read, and added exactly once.

The output itself stores how far a table was read, in the commit that adds the rows: as a transaction in a Delta log, or
a property of an Iceberg table. So two jobs that read the same versions cannot both commit. If versions only add files,
these files are read. If rows were changed or deleted, a change data feed and a key are needed: the rows of changed keys
are scored again and replaced, those of deleted keys are removed. Loose files have no versions: the files that no
earlier job on this output has read are new.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import pyarrow as pa

from torchlake.atomic_io import fingerprint
from torchlake.errors import FingerprintError, TableError, UsageError
from torchlake.jobs.work import Work
from torchlake.outputs.find import Output, output_of
from torchlake.outputs.records import commits_of, position_of, read_record
from torchlake.outputs.target import Target
from torchlake.tables.plan import Plan, plan_from_json
from torchlake.tables.sources._find import source_of
from torchlake.tables.sources._interface import Followed
from torchlake.tables.table import open_table


@dataclass(frozen=True, kw_only=True)
class Increment:
    """Rows to read, and what else their commit does besides adding them."""

    table: Any
    output: Output
    positions: Mapping[str, int] | None
    "How far the table is read; None for files, whose new ones are found when they are planned."
    deleted_keys: pa.Array | None = None


def new_rows(work: Work[Any], table: Any, output: Output) -> Iterator[Increment]:
    """Yield the increments that the last call has not committed; take each one after the commit of the one before.

    Raises UsageError for a table or an output that cannot be followed, TableError for rows that were changed in a way
    that cannot be.
    """
    source = followed(table)
    if source is None:
        # The first time an interrupted write is finished, the second time finds the files that came since.
        yield from repeat(file_increment(table, output), 2)
        return
    rows = open_table(source.at(source.position), columns=work.columns)
    work.fit(rows)
    name = position_name(source.name, work.fingerprint(rows, output.earlier().fingerprint))
    yield from increments(source, output, name, work.key)


def only_new(
    plan: Plan, output: Output, settings: Mapping[str, Any], increment: Increment | None
) -> tuple[Plan, Mapping[str, int]] | None:
    """Return the plan of the rows to read, and the positions to store with them; None if no file is new."""
    if increment is None:
        return plan, full_position(plan, output, settings)
    if increment.positions is None:
        return new_files(plan, output, settings)
    return plan, increment.positions


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


def increments(source: Followed, output: Output, name: str, key: str | None) -> Iterator[Increment]:
    """Yield the increments to read in order: first one that an interrupted call had begun, then what is new since.

    `name` identifies the job and the table; `key` is the output's. Yields nothing when nothing is new. Raises
    TableError when rows were changed in a way that cannot be followed.
    """
    target = _table_of(output)
    begun = output.earlier().positions.get(name)
    # An interrupted write ends at the version that was current when it began. It is finished first, with its own end:
    # its stored plan and its parts belong to exactly these files, and another end would discard all of them.
    for position in dict.fromkeys([*([begun] if begun is not None else []), source.position]):
        if position < 0:
            continue
        reached = position_of(target, target.snapshot(), name)
        # Read again for each increment, because the caller has committed the one before by now. A killed call may also
        # have committed after it stored the plan: then there is nothing left to add.
        if reached is not None and reached >= position:
            continue
        positions = {name: position}
        if reached is None:
            yield Increment(table=source.at(position), output=output, positions=positions)
        elif not source.has_changed(reached, position):
            added = _in_mode(output, "append")
            yield Increment(table=source.added(reached, position), output=added, positions=positions)
        else:
            yield _by_key(source, reached, position, output, key, positions)


def _table_of(output: Output) -> Target:
    target = output.target
    if target.reusable:
        raise UsageError(
            f"{output.path}: incremental adds to a Delta or Iceberg table; give format delta. For a Parquet folder, "
            "accept_new_input adds new input files."
        )
    return target


def _by_key(
    source: Followed, reached: int, position: int, output: Output, key: str | None, positions: Mapping[str, int]
) -> Increment:
    why = source.has_changed(reached, position)
    changed = None if key is None else source.changed_rows(reached, position, key)
    if changed is None:
        raise TableError(
            f"{source.name}: {why}. To follow changed rows, give a key (--key) and a table with a change data feed "
            "(delta.enableChangeDataFeed), or score the whole table again (mode overwrite)."
        )
    return Increment(
        table=changed.rows,
        output=_in_mode(output, "replace-where"),
        positions=positions,
        deleted_keys=changed.deleted,
    )


def _in_mode(output: Output, mode: Any) -> Output:
    return output_of(output.text, replace(output.target.options, mode=mode))


def position_name(table: str, settings: Mapping[str, Any]) -> str:
    """Return the name of a job's position in a table: the same for the same settings, apart from `ranges` it found."""
    chosen = {name: value for name, value in settings.items() if name != "ranges"}
    return f"torchlake-{fingerprint([table, chosen])[:32]}"


def full_position(plan: Plan, output: Output, settings: Mapping[str, Any]) -> dict[str, int]:
    """Return the position that a job on a whole table stores, so that a later one can be incremental; else empty."""
    if output.target.reusable or output.target.options.mode not in ("create", "overwrite"):
        return {}
    if len(plan.sources) != 1 or plan.selection or plan.sources[0].get("kind") != "delta" or "since" in plan.sources[0]:
        return {}
    return {position_name(plan.sources[0]["table"], settings): int(plan.sources[0]["version"])}


def file_increment(table: Any, output: Output) -> Increment:
    """Return the files of a folder that are new to an output. Raises UsageError if the output cannot be added to."""
    target = _table_of(output)
    added = bool(commits_of(target, target.snapshot()))
    return Increment(table=table, output=_in_mode(output, "append") if added else output, positions=None)


def new_files(plan: Plan, output: Output, settings: Mapping[str, Any]) -> tuple[Plan, dict[str, int]] | None:
    """Return the plan of the files that no job with these settings has added to the output; None if there are none.

    Also returns the position of the commit, which is the number of such commits. The files of an interrupted job come
    first. Raises FingerprintError for a file whose content has changed since it was read.
    """
    target, name = _table_of(output), position_name("files", settings)
    snapshot = target.snapshot()
    seen: dict[str, str] = {}
    for commit in commits_of(target, snapshot):
        record = read_record(target, commit)
        stored = read_record(target, commit, plan=True) if record and record["fingerprint"] == settings else None
        if stored is not None:
            seen |= plan_from_json(stored).content_of
    changed = [one.path for one in plan.inputs if one.name in seen and seen[one.name] != one.content]
    if changed:
        raise FingerprintError(
            f"{changed[0]}: has changed since its rows were added to {target.shown}. Score everything again (mode "
            "overwrite), or give changed rows as a new file with mode replace-where."
        )
    names = {one.name for one in plan.inputs if one.name not in seen}
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
