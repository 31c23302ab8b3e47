"""`verify`: check a finished output against its commit records and plans, so that it has every row once, nothing else.

It checks the sha256 of each part, every page's checksum, rows against the plan, each row id or key, and orphan files.
In a table with a log it checks torchlake's own commits, as far as the table still has their files. Cost: one read of
the output and, with a key, two reads of its key column and one of the input's, by threads of this process or on an
engine. Memory is constant.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from torchlake.display import Shown, count, shown
from torchlake.outputs.find import Committed, committed, output_text
from torchlake.redaction import redacted
from torchlake.storage.errors import library_errors
from torchlake.storage.spread import Spread, in_process
from torchlake.storage.urls import is_url
from torchlake.tables.keys import ITEM_ROWS, bundled, key_problem
from torchlake.tables.plan import ChunkPlan, plan_from_json, samples_of
from torchlake.tables.record import PLAN, SEAL, recorded_schema, sealed
from torchlake.tables.verification.inputs import other_files, selection_note, unchanged_inputs
from torchlake.tables.verification.parts import PartCheck, check_parts, keys_of

BUNDLE_BYTES = 64 << 20
"Bytes of adjacent parts that are checked together, because they come from one file of the input."


@shown
@dataclass(kw_only=True)
class Verification:
    """The result of `verify`; the output is sound if `problems` is empty."""

    rows_in: int = 0
    rows_out: int = 0
    rows_failed: int = 0
    "Rows whose `error` is not null."
    parts: int = 0
    problems: list[str] = field(default_factory=list)
    "One sentence for each problem."
    notes: list[str] = field(default_factory=list)
    "What is not a problem: inputs that changed, were removed, or have no page checksums; rows of other writers."

    def _shown(self) -> Shown:
        found = count(len(self.problems), "problem") if self.problems else "sound"
        lists = {"problem": self.problems, "note": self.notes}
        tables = [[[name], *([line] for line in lines)] for name, lines in lists.items() if lines]
        return (
            f"{found}, {count(self.rows_out, 'row')}, {self.rows_failed:,} failed, {count(self.parts, 'part')}",
            tables,
        )


def verify(output: str | Path, *, spread: Spread | None = None) -> Verification:
    """Check an output of any kind against its commit records. Raises TableError when there is no finished output.

    `spread` is an engine's, to read a large output with all of its machines: `verify(output, spread=engine.spread)`.
    """
    found = Verification()
    with library_errors(redacted(output_text(output)), "Its records are damaged; write the output again."):
        made = committed(output)
        found.notes += made.notes
        for one in made.commits:
            _verify_commit(one, found, spread or in_process)
    return found


def _verify_commit(one: Committed, found: Verification, spread: Spread) -> None:
    """Check the rows of one commit, and add what is found."""
    record, plan = one.record, plan_from_json(one.plan)
    if plan.id != record["plan"]:
        found.problems.append(f"{PLAN} is not the plan that was committed: one of the two was edited.")
    if SEAL in record and record != sealed(record):
        found.problems.append("The commit record was edited: its hash differs.")
    parts = [part for part in record["parts"] if one.live is None or part["name"] in one.live]
    whole = len(parts) == len(record["parts"])
    if not whole:
        gone = len(record["parts"]) - len(parts)
        found.notes.append(
            f"commit {record.get('commit', '')[:16]}: {gone:,} of its {len(record['parts']):,} files are no longer in "
            "the table (another commit replaced, changed or compacted their rows); the others are checked."
        )
    chunks, schema = {chunk.index: chunk for chunk in plan.chunks}, recorded_schema(record)
    key = record["fingerprint"].get("key")
    key = key if isinstance(key, str) and key in record["schema"] else None
    row_ids, samples = key is None and "row_id" in record["schema"], samples_of(record["fingerprint"])
    if key in {name for part in parts for name, _ in part.get("partition", ())}:  # its files lack the column
        found.notes.append(f"The key {key!r} is a partition column: its values are compared with the log only.")
        key = None
    facts: Any = {"folder": one.folder, "logged": one.logged, "unchanged": unchanged_inputs(plan, found.notes)}
    deleted = sum(one.logged[part["name"]].deleted for part in parts if part["name"] in one.logged)
    if deleted:
        found.notes.append(f"commit {record.get('commit', '')[:16]}: {deleted:,} rows of its files are deleted.")
    check = PartCheck(schema=schema, key=key, row_ids=row_ids, samples=samples, **facts)
    tasks = [(part, [chunks[chunk] for chunk in _chunks_of(part) if chunk in chunks]) for part in parts]
    sizes = [max(0, int(part["bytes"])) for part in parts]
    bundles = bundled(tasks, sizes, BUNDLE_BYTES)
    rows = failed = 0
    sound: list[tuple[str, int]] = []
    seen_parts = spread(partial(check_parts, check), bundles, size=sum(sizes), name="verify")
    for seen in (one for bundle in seen_parts for one in bundle):
        found.problems += seen.problems
        if seen.rows is not None:
            found.parts += 1
            rows += seen.rows
            failed += seen.failed
            if seen.file is not None:
                sound.append((seen.file, seen.rows))
    if whole:
        found.problems += _total_problems(record, plan, rows, failed)
    found.rows_in += plan.rows if whole else rows // check.samples
    found.rows_out += rows - deleted
    found.rows_failed += failed
    found.notes += filter(None, [selection_note(plan)])
    if one.live is None:
        _find_orphan_files(Path(one.folder), {part["name"] for part in record["parts"]}, found)
    # Row ids in partitions are checked like keys: files of the same chunk must not share one.
    unique = key or ("row_id" if row_ids and any(part.get("partition") for part in parts) else None)
    if unique is not None:
        items = bundled([path for path, _ in sound], [count for _, count in sound], ITEM_ROWS)
        # The processes of an engine share the output's folder, unless it is a table's or in an object store.
        shared = one.live is None and os.access(one.folder, os.W_OK)
        folder = Path(one.folder) if shared else None
        compare = spread if shared else in_process
        problem = key_problem(
            partial(keys_of, unique, sampled=check.samples > 1), items, rows=rows, spread=compare, scratch=folder
        )
        if problem is not None:
            found.problems.append(f"The key {unique!r} {problem}.")


def _chunks_of(part: Mapping[str, Any]) -> list[int]:
    chunks: list[int] = part.get("chunks") or [part["chunk"]]
    return chunks


def _total_problems(record: dict[str, Any], plan: ChunkPlan, rows: int, failed: int) -> list[str]:
    problems = []
    partitioned = any(part.get("partition") for part in record["parts"])
    made = sorted(chunk for part in record["parts"] for chunk in _chunks_of(part))
    made = sorted({*made}) if partitioned else made
    planned = sorted(chunk.index for chunk in plan.chunks) or made
    if made != planned:
        missing, extra = sorted(set(planned) - set(made))[:3], sorted(set(made) - set(planned))[:3]
        doubled = sorted({one for one, other in pairwise(made) if one == other})[:3]
        problems.append(
            f"Parts and chunks do not match one to one (missing: {missing}, unplanned: {extra}, duplicate: {doubled})."
        )
    samples = samples_of(record["fingerprint"])
    if rows != plan.rows * samples:
        each = f", {samples:,} rows for each" if samples > 1 else ""
        problems.append(f"{rows:,} rows out, {plan.rows:,} rows in{each}.")
    if (record["rows"], record["failed"]) != (rows, failed):
        problems.append(
            f"The record has {record['rows']:,} rows, {record['failed']:,} of them failed; the parts have {rows:,} and "
            f"{failed:,}."
        )
    return problems


def _find_orphan_files(out: Path, names: set[str], found: Verification) -> None:
    """Report files that the record does not list; readers of the folder would read Parquet files among them."""
    for path in () if is_url(str(out)) else other_files(out, names):
        if path.endswith(".parquet"):
            found.problems.append(f"{path}: a Parquet file that the record does not list; readers would read its rows.")
        else:
            found.notes.append(f"{path}: a file that the record does not list.")
