"""`verify` checks a finished output against its commit record and plan: every row once, nothing else.

It checks the sha256 of each part, every page's checksum, rows against the plan, each row id or key, and orphan files.
Cost: one read of the output, and two of its key column and one of the input's if there is a key, by threads of this
process or on an engine. Memory is constant.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from torchlake import atomic_io
from torchlake.errors import DataError, TableError, UnsafeError
from torchlake.tables.formats.columnar import open_parquet
from torchlake.tables.keys import ITEM_ROWS, Keys, bundled, key_problem
from torchlake.tables.output.failures import count_failed
from torchlake.tables.plan import Chunk, InputFile, Plan, plan_from_json
from torchlake.tables.reading import ChunkReader, row_ids
from torchlake.tables.record import FOLDER, PLAN, output_path, read_commit, recorded_schema
from torchlake.tables.storage.spread import Spread, each_file, in_process
from torchlake.tables.storage.urls import is_url
from torchlake.tables.storage.versions import ContentChecker

BUNDLE_BYTES = 64 << 20
"Of parts that are checked together: neighbors, which come from one file of the input."


@dataclass(kw_only=True)
class Verification:
    """The result of `verify`; the output is sound if `problems` is empty."""

    rows_in: int
    rows_out: int = 0
    rows_failed: int = 0
    "Rows whose `error` is not null."
    parts: int = 0
    problems: list[str] = field(default_factory=list)
    "One sentence each."
    notes: list[str] = field(default_factory=list)
    "Not faults: inputs that changed, are gone, or have no page checksums."


def verify(output: str | Path, *, spread: Spread | None = None) -> Verification:
    """Check an output against its commit record and plan. Raises TableError when there is no finished output.

    `spread` is an engine's, to read a large output with all of its machines: `verify(output, spread=engine.spread)`.
    """
    spread = spread or in_process
    out = output_path(output)
    record = read_commit(out)
    plan = plan_from_json(atomic_io.read_json(out / PLAN))
    found = Verification(rows_in=plan.rows)
    if plan.id != record["plan"]:
        found.problems.append(f"{PLAN} is not the plan that was committed: one of the two was edited.")
    chunks, schema = {chunk.index: chunk for chunk in plan.chunks}, recorded_schema(record)
    key = record["fingerprint"].get("key")
    key = key if isinstance(key, str) and key in record["schema"] else None
    unchanged = _check_inputs(plan, found)
    check = _PartCheck(
        out=out, schema=schema, key=key, row_ids=key is None and "row_id" in record["schema"], unchanged=unchanged
    )
    tasks = [(part, chunks.get(part["chunk"])) for part in record["parts"]]
    sizes = [max(0, int(part["bytes"])) for part in record["parts"]]
    bundles = bundled(tasks, sizes, BUNDLE_BYTES)
    sound: list[tuple[Path, int]] = []
    seen_parts = spread(partial(_check_parts, check), bundles, size=sum(sizes), name="verify")
    for seen in (one for bundle in seen_parts for one in bundle):
        found.problems += seen.problems
        if seen.rows is not None:
            found.parts += 1
            found.rows_out += seen.rows
            found.rows_failed += seen.failed
            if seen.path is not None:
                sound.append((seen.path, seen.rows))
    _check_totals(record, plan, found)
    _note_selection(plan, found)
    _find_orphan_files(out, {part["name"] for part in record["parts"]}, found)
    if key is not None:
        items = bundled([path for path, _ in sound], [rows for _, rows in sound], ITEM_ROWS)
        folder = out if os.access(out, os.W_OK) else None
        problem = key_problem(partial(_keys_of, key), items, rows=found.rows_out, spread=spread, scratch=folder)
        if problem is not None:
            found.problems.append(f"The key {key!r} {problem}.")
    return found


@dataclass(frozen=True, kw_only=True)
class _PartCheck:
    """What the parts of an output are checked against."""

    out: Path
    schema: pa.Schema | dict[str, str]
    key: str | None
    row_ids: bool
    unchanged: set[str]
    "Names of the inputs that did not change: keys are compared with theirs."


@dataclass(kw_only=True)
class _Part:
    """What `verify` found in one part."""

    rows: int | None = None
    "None if it cannot be read."
    failed: int = 0
    path: Path | None = None
    "None unless it can be read and has the recorded columns."
    problems: list[str] = field(default_factory=list)


def _check_parts(check: _PartCheck, parts: Sequence[tuple[dict[str, Any], Chunk | None]]) -> list[_Part]:
    """Check neighboring parts, whose chunks are read forward."""
    reader = ChunkReader([] if check.key is None else [check.key])
    try:
        return [_check_part(check, reader, part, chunk) for part, chunk in parts]
    finally:
        reader.close()


def _check_part(check: _PartCheck, reader: ChunkReader, part: dict[str, Any], chunk: Chunk | None) -> _Part:
    """Check one part, down to its pages, its row ids and its keys."""
    name, schema, seen = part["name"], check.schema, _Part()
    try:
        path = atomic_io.safe_join(check.out, name)
    except UnsafeError:
        seen.problems.append(f"{name!r} leads out of the output; not read.")
        return seen
    if path.is_symlink() or not path.is_file():
        seen.problems.append(f"{name}: {'a symbolic link; not read' if path.is_symlink() else 'missing'}.")
        return seen
    try:
        if atomic_io.sha256_file(path) != part["sha256"]:
            seen.problems.append(f"{name}: its sha256 is not the one that was committed: damaged, or edited.")
        columns, seen.rows, seen.failed = _count_rows(path)
    except (pa.ArrowException, OSError, DataError, UnsafeError) as error:
        seen.problems.append(f"{name}: cannot be read: {error}")
        return seen
    expected = chunk.rows if chunk is not None else 0
    if seen.rows != expected:
        seen.problems.append(f"{name}: {seen.rows:,} rows, the plan has {expected:,}.")
    if columns.equals(schema) if isinstance(schema, pa.Schema) else _as_names(columns) == schema:
        if chunk is not None:
            seen.path = path
            seen.problems += _check_identity(check, reader, path, chunk)
    else:
        recorded = _as_names(schema) if isinstance(schema, pa.Schema) else schema
        seen.problems.append(f"{name}: its columns are {_as_names(columns)}, the record says {recorded}.")
    return seen


def _count_rows(path: Path) -> tuple[pa.Schema, int, int]:
    """A part's columns, rows and failed rows; every page is read and its checksum verified."""
    rows = failed = 0
    with open_parquet(str(path)) as parquet:
        columns = parquet.schema_arrow.remove_metadata()
        for batch in parquet.iter_batches(use_threads=False):
            rows += batch.num_rows
            failed += count_failed(batch)
    return columns, rows, failed


def _as_names(schema: pa.Schema) -> dict[str, str]:
    return {column.name: str(column.type) for column in schema}


def _check_totals(record: dict[str, Any], plan: Plan, found: Verification) -> None:
    made = sorted(part["chunk"] for part in record["parts"])
    planned = sorted(chunk.index for chunk in plan.chunks) or [0]
    if made != planned:
        missing, extra = sorted(set(planned) - set(made))[:3], sorted(set(made) - set(planned))[:3]
        doubled = sorted({one for one, other in pairwise(made) if one == other})[:3]
        found.problems.append(
            f"Parts and chunks do not match one to one (missing: {missing}, unplanned: {extra}, doubled: {doubled})."
        )
    if found.rows_out != plan.rows:
        found.problems.append(f"{found.rows_out:,} rows out, {plan.rows:,} rows in.")
    if (record["rows"], record["failed"]) != (found.rows_out, found.rows_failed):
        found.problems.append(
            f"The record says {record['rows']:,} rows and {record['failed']:,} failed; there are {found.rows_out:,} "
            f"and {found.rows_failed:,}."
        )


def _note_selection(plan: Plan, found: Verification) -> None:
    """Note which rows of the input were asked for, so that rows in are not taken for all rows."""
    if plan.asked:
        asked = ", ".join(f"{name} {value}" for name, value in plan.asked.items())
        left_out = [f"{rows:,} by {reason}" for reason, rows in plan.selection.get("left_out", {}).items()]
        files = plan.selection.get("unread_files", 0)
        left_out += [f"{files:,} files were not read"] * bool(files)
        found.notes.append(f"only selected rows were read ({asked}); left out: {', '.join(left_out) or 'none'}.")


def _find_orphan_files(out: Path, names: set[str], found: Verification) -> None:
    """Report files that the record does not list; readers of the folder take the Parquet files for rows."""
    for folder, folders, listed in os.walk(out):
        folders[:] = [name for name in folders if Path(folder, name) != out / FOLDER]
        for name in sorted(listed):
            path = Path(folder, name).relative_to(out)
            if str(path) in names or name.startswith((".", "_")):
                continue
            if name.endswith(".parquet"):
                found.problems.append(
                    f"{path}: a Parquet file that the record does not list; readers take it for rows."
                )
            else:
                found.notes.append(f"{path}: a file that the record does not list.")


def _check_inputs(plan: Plan, found: Verification) -> set[str]:
    """Note inputs that changed, are gone or have no checksums; returns the names of the unchanged ones."""
    unchanged = set()
    remote = any(is_url(one.path) for one in plan.inputs)
    for one, same in zip(plan.inputs, each_file(_is_unchanged, plan.inputs, remote=remote), strict=True):
        if same:
            unchanged.add(one.name)
        elif same is None:
            found.notes.append(f"{one.path}: the input is gone; its rows cannot be compared.")
        else:
            found.notes.append(f"{one.path}: the input has changed since the output was committed.")
    bare = sum(one.checksums is False for one in plan.inputs)
    if bare:
        found.notes.append(f"{bare:,} of {len(plan.inputs):,} input files have no checksums in their pages.")
    return unchanged


def _is_unchanged(one: InputFile) -> bool | None:
    """Whether a file has the planned content; None if it cannot be read."""
    try:
        return ContentChecker().is_unchanged(one.path, one.version, one.sha256)
    except TableError:
        return None


def _check_identity(check: _PartCheck, reader: ChunkReader, path: Path, chunk: Chunk) -> list[str]:
    """Whether the part has the row ids of its chunk, or its keys if the input is unchanged."""
    place = f"those of {chunk.name} from row {chunk.first_row:,}."
    if check.row_ids:
        ids = _read(path, ["row_id"])["row_id"].combine_chunks()
        if ids.type != pa.string() or not ids.equals(row_ids(chunk)):
            return [f"{path.name}: its row ids are not {place}"]
        return []
    if check.key is None or chunk.name not in check.unchanged:
        return []
    same = _same_values(_read(path, [check.key])[check.key], reader.read(chunk)[0][check.key])
    return [] if same else [f"{path.name}: its keys are not {place}"]


def _keys_of(key: str, parts: Sequence[Path]) -> Iterator[Keys]:
    """The keys of parts; those of failed rows may be null."""
    for path in parts:
        rows = _read(path, [key, "error"])
        failed = _not_null(rows["error"]) if "error" in rows.column_names else ()
        yield Keys(path.name, 0, rows[key], failed)


def _same_values(written: pa.ChunkedArray, read: pa.ChunkedArray) -> bool:
    """Whether a column of the output equals that of the input, cast to the type that Parquet stored."""
    try:
        same: bool = read.cast(written.type).equals(written)
    except pa.ArrowException:
        return False
    return same


def _read(path: Path, columns: list[str]) -> pa.Table:
    with pq.ParquetFile(path) as parquet:
        return parquet.read(columns=columns)


def _not_null(column: pa.ChunkedArray) -> np.ndarray:
    return np.flatnonzero(column.is_valid().to_numpy())
