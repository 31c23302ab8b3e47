"""Check one part of an output: its bytes, pages, columns, and the row ids or keys of its chunks; and, in a table, what
the log says about it."""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchlake import atomic_io
from torchlake.errors import DataError, StorageError, UnsafeError
from torchlake.outputs.target import Logged
from torchlake.storage.folders import folder_at
from torchlake.storage.urls import is_url
from torchlake.tables.failures import count_failed
from torchlake.tables.formats.columnar import open_parquet
from torchlake.tables.formats.types import shortened
from torchlake.tables.keys import Keys, row_ids
from torchlake.tables.plan import SAMPLE, Chunk
from torchlake.tables.reading import ChunkReader


@dataclass(frozen=True, kw_only=True)
class PartCheck:
    """What the parts of a commit are checked against."""

    folder: str
    "The path or URL where the parts are."
    schema: pa.Schema
    key: str | None
    row_ids: bool
    unchanged: frozenset[str]
    "Names of the unchanged inputs, with whose keys the parts are compared."
    logged: Mapping[str, Logged]
    "What a table's log says about the parts, by name; readers find rows by it."
    samples: int = 1
    "Rows that were written for each that was read; the column `sample` numbers them."


@dataclass(kw_only=True)
class CheckedPart:
    """What was found in one part."""

    rows: int | None = None
    "None if it cannot be read."
    failed: int = 0
    file: str | None = None
    "The part's path or URL; None unless it can be read and has the recorded columns."
    problems: list[str] = field(default_factory=list)


def check_parts(check: PartCheck, parts: Sequence[tuple[dict[str, Any], Sequence[Chunk]]]) -> list[CheckedPart]:
    """Check adjacent parts, each with its chunks, which are read forward."""
    reader = ChunkReader([] if check.key is None else [check.key])
    try:
        return [_check_part(check, reader, part, chunks) for part, chunks in parts]
    finally:
        reader.close()


def keys_of(key: str, files: Sequence[str], *, sampled: bool = False) -> Iterator[Keys]:
    """Yield the keys of parts, `sampled` with the number of the sample; those of failed rows may be null."""
    for file in files:
        rows = _read(file, [key, "error", *([SAMPLE] if sampled else [])])
        failed, keys = _not_null(rows["error"]) if "error" in rows.column_names else (), rows[key]
        if sampled:
            keys = pc.binary_join_element_wise(keys.cast(pa.string()), rows[SAMPLE].cast(pa.string()), " sample ")
        yield Keys(os.path.basename(file), 0, keys, failed)


def _check_part(check: PartCheck, reader: ChunkReader, part: dict[str, Any], chunks: Sequence[Chunk]) -> CheckedPart:
    """Check one part, down to its pages, its row ids and its keys."""
    name, seen = part["name"], CheckedPart()
    gone = {column for column, _ in part.get("partition", ())}  # a file of one partition lacks its columns
    schema = pa.schema([column for column in check.schema if column.name not in gone])
    try:
        digest = _sha256(check.folder, name)
        if digest is None:
            seen.problems.append(f"{name}: missing.")
            return seen
        if digest != part["sha256"]:
            seen.problems.append(f"{name}: its sha256 differs from the committed one; it is damaged, or was edited.")
        file = f"{check.folder}/{name}"
        logged = check.logged.get(name)
        columns, seen.rows, seen.failed, wrong = _count_rows(file, logged)
        if logged is not None:
            seen.problems += _log_problems(part, logged, seen.rows, wrong)
    except UnsafeError as error:
        seen.problems.append(str(error))
        return seen
    except (pa.ArrowException, OSError, DataError, StorageError, KeyError) as error:  # KeyError: two of one name
        seen.problems.append(f"{name}: cannot be read: {error}")
        return seen
    # A file of one partition has only some of the rows of its chunks.
    expected = part["rows"] if part.get("partition") else check.samples * sum(chunk.rows for chunk in chunks)
    if seen.rows != expected:
        seen.problems.append(f"{name}: has {seen.rows:,} rows, but {expected:,} in the plan.")
    if shortened(columns).equals(shortened(schema)):
        if chunks:
            seen.file = file
            seen.problems += _check_identity(check, reader, file, chunks, some=bool(part.get("partition")))
    else:
        seen.problems.append(f"{name}: its columns are {as_names(columns)}, but {as_names(schema)} in the record.")
    return seen


def _sha256(folder: str, name: str) -> str | None:
    """Return the sha256 of a part; None if it is missing. Raises UnsafeError for a name outside the output."""
    if is_url(folder):
        if name.startswith("/") or ".." in name.split("/"):
            raise UnsafeError(f"{name!r} leads out of the output; not read.")
        content = folder_at(folder).content(name)
        return None if content is None else hashlib.sha256(content).hexdigest()
    try:
        path = atomic_io.safe_join(Path(folder), name)
    except UnsafeError:
        raise UnsafeError(f"{name!r} leads out of the output; not read.") from None
    if path.is_symlink():
        raise UnsafeError(f"{name}: a symbolic link; not read.")
    return atomic_io.sha256_file(path) if path.is_file() else None


def _count_rows(file: str, logged: Logged | None) -> tuple[pa.Schema, int, int, set[str]]:
    """Return a part's columns, rows, failed rows, and the columns whose statistics in the log are wrong.

    Every page is read and its checksum verified.
    """
    rows = failed = 0
    wrong: set[str] = set()
    nulls: Counter[str] = Counter()
    with open_parquet(file) as parquet:
        columns = parquet.schema_arrow.remove_metadata()
        for batch in parquet.iter_batches(use_threads=False):
            rows += batch.num_rows
            failed += count_failed(batch)
            nulls.update({name: batch[name].null_count for name in batch.schema.names})
            wrong |= _outside(batch, logged) if logged is not None else set()
    counts = {} if logged is None else logged.nulls
    wrong |= {name for name, count in counts.items() if isinstance(count, int) and count != nulls.get(name, count)}
    return columns, rows, failed, wrong


def _outside(batch: pa.RecordBatch, logged: Logged) -> set[str]:
    """Return the columns that have a value outside of their bounds in the log."""
    found = set()
    for name in {*logged.lowest, *logged.highest} & {
        one.name for one in batch.schema if not pa.types.is_nested(one.type)
    }:
        own = pc.min_max(batch[name]).as_py()
        low, high = logged.lowest.get(name, own["min"]), logged.highest.get(name, own["max"])
        if own["min"] is not None and (own["min"] < low or own["max"] > high):
            found.add(name)
    return found


def _log_problems(part: dict[str, Any], logged: Logged, rows: int, wrong: set[str]) -> list[str]:
    """Return where the table's log differs from a part."""
    said = [f"the statistics of {', '.join(sorted(wrong))}"] if wrong else []
    said += [f"{logged.rows:,} rows"] if logged.rows not in (None, rows) else []
    said += [f"{logged.bytes:,} bytes"] if logged.bytes != part["bytes"] else []
    # Delta stores an empty string as null.
    values = {name: value or None for name, value in part.get("partition", ())}
    if values != {name: value or None for name, value in logged.partition.items()}:
        said.append(f"the partition {dict(logged.partition)}")
    return [f"{part['name']}: the table's log has wrong values: {', '.join(said)}."] if said else []


def as_names(schema: pa.Schema) -> dict[str, str]:
    """Return the names of the types, by column."""
    return {column.name: str(column.type) for column in schema}


def _check_identity(
    check: PartCheck, reader: ChunkReader, file: str, chunks: Sequence[Chunk], *, some: bool
) -> list[str]:
    """Return the problem if a part lacks the row ids of its chunks, or their keys if the input is unchanged.

    `some`: the part has only some of them.
    """
    first, name, every = chunks[0], os.path.basename(file), 1 if some else check.samples
    if every > 1:
        numbers = _read(file, [SAMPLE])[SAMPLE].to_numpy()
        if not np.array_equal(numbers, np.tile(np.arange(every), len(numbers) // every)):
            return [f"{name}: its samples are not 0 to {every - 1} of each row."]
    place = f"{'among ' if some else ''}those of {first.name} from row {first.first_row:,}."
    if check.row_ids:
        ids = _read(file, ["row_id"])["row_id"].combine_chunks()
        expected = pa.chunked_array([row_ids(chunk) for chunk in chunks], pa.string())
        if ids.type != pa.string() or not _are(pa.chunked_array([ids[::every]]), expected, some=some):
            return [f"{name}: its row ids are not {place}"]
        return []
    if check.key is None or any(chunk.name not in check.unchanged for chunk in chunks):
        return []
    written = _read(file, [check.key])[check.key].combine_chunks()[::every]
    read = pa.chunked_array([one for chunk in chunks for one in reader.read(chunk)[0][check.key].chunks])
    try:
        same = _are(pa.chunked_array([written]), read.cast(written.type), some=some)
    except pa.ArrowException:
        same = False
    return [] if same else [f"{name}: its keys are not {place}"]


def _are(written: pa.ChunkedArray, expected: pa.ChunkedArray, *, some: bool) -> bool:
    """Return whether a column equals another one or, if `some`, has only values that the other one has."""
    if some:
        return bool(pc.all(pc.is_in(written, value_set=expected.combine_chunks())).as_py() is not False)
    return bool(expected.equals(written))


def _read(file: str, columns: list[str]) -> pa.Table:
    with open_parquet(file) as parquet:
        have = [name for name in columns if name in parquet.schema_arrow.names]
        return parquet.read(columns=have)


def _not_null(column: pa.ChunkedArray) -> np.ndarray:
    return np.flatnonzero(column.is_valid().to_numpy())
