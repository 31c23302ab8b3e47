"""`verify` checks a finished output against its commit record and plan: every row once, nothing else.

It checks the sha256 of each part, every page's checksum, rows against the plan, each row id or key, and orphan files.
Cost: one read of the output, by several threads, and one of the input's key column if there is a key. Memory is
constant.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
from torchlake.tables.keys import Keys, key_problem
from torchlake.tables.output.failures import count_failed
from torchlake.tables.plan import Chunk, Plan, plan_from_json
from torchlake.tables.reading import ChunkReader, row_ids
from torchlake.tables.record import FOLDER, PLAN, output_path, read_commit, recorded_schema
from torchlake.tables.storage.versions import ContentChecker

THREADS = 4
"Parts that are read at the same time: hashing and decoding release the GIL."


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


def verify(output: str | Path) -> Verification:
    """Check an output against its commit record and plan. Raises TableError when there is no finished output."""
    out = output_path(output)
    record = read_commit(out)
    plan = plan_from_json(atomic_io.read_json(out / PLAN))
    found = Verification(rows_in=plan.rows)
    if plan.id != record["plan"]:
        found.problems.append(f"{PLAN} is not the plan that was committed: one of the two was edited.")
    chunks, schema = {chunk.index: chunk for chunk in plan.chunks}, recorded_schema(record)
    sound: list[tuple[Path, Chunk]] = []
    with ThreadPoolExecutor(THREADS) as threads:
        check = partial(_check_part, out, chunks, schema)
        for part, seen in zip(record["parts"], threads.map(check, record["parts"]), strict=True):
            found.problems += seen.problems
            if seen.rows is not None:
                found.parts += 1
                found.rows_out += seen.rows
                found.rows_failed += seen.failed
            if seen.path is not None and part["chunk"] in chunks:
                sound.append((seen.path, chunks[part["chunk"]]))
    _check_totals(record, plan, found)
    _note_selection(plan, found)
    _find_orphan_files(out, {part["name"] for part in record["parts"]}, found)
    unchanged = _check_inputs(plan, found)
    key = record["fingerprint"].get("key")
    if isinstance(key, str) and key in record["schema"]:
        _check_keys(sound, key, unchanged, found)
    elif "row_id" in record["schema"]:
        _check_row_ids(sound, found)
    return found


@dataclass(kw_only=True)
class _Part:
    """What `verify` found in one part."""

    rows: int | None = None
    "None if it cannot be read."
    failed: int = 0
    path: Path | None = None
    "None unless it can be read and has the recorded columns."
    problems: list[str] = field(default_factory=list)


def _check_part(out: Path, chunks: dict[int, Chunk], schema: pa.Schema | dict[str, str], part: dict[str, Any]) -> _Part:
    """Check one part, down to its pages."""
    name, seen = part["name"], _Part()
    try:
        path = atomic_io.safe_join(out, name)
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
    chunk = chunks.get(part["chunk"])
    expected = chunk.rows if chunk is not None else 0
    if seen.rows != expected:
        seen.problems.append(f"{name}: {seen.rows:,} rows, the plan has {expected:,}.")
    if columns.equals(schema) if isinstance(schema, pa.Schema) else _as_names(columns) == schema:
        seen.path = path
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
    unchanged, inputs = set(), ContentChecker()
    for one in plan.inputs:
        try:
            same = inputs.is_unchanged(one.path, one.version, one.sha256)
        except TableError:
            found.notes.append(f"{one.path}: the input is gone; its rows cannot be compared.")
            continue
        if same:
            unchanged.add(one.name)
        else:
            found.notes.append(f"{one.path}: the input has changed since the output was committed.")
    bare = sum(one.checksums is False for one in plan.inputs)
    if bare:
        found.notes.append(f"{bare:,} of {len(plan.inputs):,} input files have no checksums in their pages.")
    return unchanged


def _check_row_ids(sound: list[tuple[Path, Chunk]], found: Verification) -> None:
    for path, chunk in sound:
        ids = _read(path, ["row_id"])["row_id"].combine_chunks()
        if ids.type != pa.string() or not ids.equals(row_ids(chunk)):
            found.problems.append(
                f"{path.name}: its row ids are not those of {chunk.name} from row {chunk.first_row:,}."
            )


def _check_keys(sound: list[tuple[Path, Chunk]], key: str, unchanged: set[str], found: Verification) -> None:
    """Check that keys are unique, and that each part has the keys of its chunk if the input is unchanged."""

    def read() -> Iterator[Keys]:
        for path, _ in sound:
            rows = _read(path, [key, "error"])
            failed = _not_null(rows["error"]) if "error" in rows.column_names else ()
            yield Keys(path.name, 0, rows[key], failed)

    problem = key_problem(read, found.rows_out)
    if problem is not None:
        found.problems.append(f"The key {key!r} {problem}.")
    reader = ChunkReader([key])
    for path, chunk in sound:
        if chunk.name in unchanged and not _same_values(_read(path, [key])[key], reader.read(chunk)[0][key]):
            found.problems.append(f"{path.name}: its keys are not those of {chunk.name} from row {chunk.first_row:,}.")
    reader.close()


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
