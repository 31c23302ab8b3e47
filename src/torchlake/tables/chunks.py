"""The plan of a job: a table split into chunks, fixed ranges of rows, before any work starts.

The chunks depend on the table alone, not on processes or engine, so a job that is run again finds the same chunks.
Each lies inside one file. In Parquet and Arrow files a big row group is split evenly and small ones are joined; text
files are split between records. Cost: one pass over text files, the footers of others, and one sha256 of every local
file; memory 16 bytes per 256 text records.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa

from torchlake.atomic_io import fingerprint
from torchlake.errors import TableError
from torchlake.tables.formats.layout import MAX_BYTES, SplitCandidates, split_candidates
from torchlake.tables.formats.lines import Segment
from torchlake.tables.plan import InputFile, Plan, Split, new_chunk
from torchlake.tables.selecting import RowSelector
from torchlake.tables.selection.conditions import columns_of
from torchlake.tables.sources._interface import View
from torchlake.tables.storage.versions import Version, content_id, settled_version_of, version_of
from torchlake.tables.table import Table, check_columns

CHUNKS = 64
MIN_ROWS, MAX_ROWS = 1024, 32768


def plan_chunks(
    table: Table,
    *,
    columns: Sequence[str],
    chunk_rows: int | None = None,
    cached: Sequence[InputFile] = (),
    hashed: bool = True,
) -> Plan:
    """Split `table` into chunks of `chunk_rows` rows, by default 1/64 of it, from 1,024 to 32,768; at most 16 MiB each.

    A file's sha256 is taken from `cached` if its path and version are the same. `hashed=False` computes none, for a
    plan that is only read from. Raises TableError when a column is missing, or a file cannot be read or is changing.
    """
    check_columns(table.source, columns, table.schema)
    serialized = pa.schema([table.schema.field(name) for name in columns]).serialize().to_pybytes()
    views, of_condition = _views(table, columns), columns_of(table.condition) if table.condition is not None else ()
    selector = RowSelector(table, _views(table, of_condition))
    known = {(one.path, one.version): one.sha256 for one in cached}
    # The versions before the scan, so that rows appended later count as a change.
    versions = [settled_version_of(file) for file in table.files]
    read = tuple(dict.fromkeys((*columns, *of_condition)))
    scan = partial(_candidates, table, columns=read, segment_rows=chunk_rows)
    size, candidates = _scanned(table, zip(table.files, versions, strict=True), scan, chunk_rows)
    inputs: list[InputFile] = []
    splits: list[tuple[InputFile, Split]] = []
    unread = table.unread_files
    for file, name, version, one in zip(table.files, table.names, versions, candidates, strict=True):
        if selector.full and one is None:
            unread += 1
            continue
        one = one or scan(file, version)
        rows = sum(segment.rows for segment in one.segments)
        view = views.get(file, "")
        planned = InputFile(
            path=file, name=name, version=version, sha256="", rows=rows, checksums=one.checksums, view=view
        )
        is_text = table.format in ("csv", "jsonl")
        chosen = list(
            selector.select(planned, split_text(one, size) if is_text else split_row_groups(one.segments, size))
        )
        if table.options.selection.asked and not chosen:
            continue
        sha256 = (known.get((file, version)) or content_id(file)) if hashed else ""
        if version_of(file) != version:
            raise TableError(
                f"{file}: changed while it was being planned. Run the same command again once nothing writes to it."
            )
        planned = _selected_file(replace(planned, sha256=sha256), chosen)
        inputs.append(planned)
        splits += [(planned, each) for each in chosen]
    selector.close()
    chunks = tuple(
        new_chunk(index, file, table.format, serialized, split) for index, (file, split) in enumerate(splits)
    )
    return Plan(
        inputs=tuple(inputs),
        chunks=chunks,
        serialized=serialized,
        rows=sum(one.rows for one in inputs),
        sources=table.sources,
        selection=_selection(table, selector, unread),
    )


def _scanned(
    table: Table,
    files: Iterable[tuple[str, Version]],
    scan: Callable[[str, Version], SplitCandidates],
    chunk_rows: int | None,
) -> tuple[int, Sequence[SplitCandidates | None]]:
    """The rows of a chunk, and where each file can be split; None for all if `limit` may make scanning some needless.

    A chunk's size then comes from the limit, so the whole table need not be counted.
    """
    limit = table.options.selection.limit
    if limit is not None:
        return chunk_rows or _chunk_size(limit), [None] * len(table.files)
    candidates = [scan(file, version) for file, version in files]
    return chunk_rows or _chunk_size(sum(segment.rows for one in candidates for segment in one.segments)), candidates


def _chunk_size(rows: int) -> int:
    return min(max(rows // CHUNKS, MIN_ROWS), MAX_ROWS)


def _candidates(
    table: Table, file: str, version: Version, *, columns: Sequence[str], segment_rows: int | None
) -> SplitCandidates:
    stored = _stored(table, file, columns)
    return split_candidates(
        file, table.format, version, table.footers.get(file), stored, segment_rows, table.options.csv
    )


def _selection(table: Table, selector: RowSelector, unread_files: int) -> dict[str, Any]:
    """The selection for records: what was asked, and what was left out."""
    left_out = {reason: rows for reason, rows in selector.left_out.items() if rows}
    return {
        **table.options.asked,
        **({"left_out": left_out} if left_out else {}),
        **({"unread_files": unread_files} if unread_files else {}),
    }


def _views(table: Table, columns: Sequence[str]) -> dict[str, str]:
    """The views of the files as JSON, with these columns only: others do not change what is read."""
    return {
        file: View(
            constants={name: value for name, value in view.constants.items() if name in columns},
            names={name: stored for name, stored in view.names.items() if name in columns},
            csv=view.csv,
        ).to_json()
        for file, view in table.views.items()
    }


def _stored(table: Table, file: str, columns: Sequence[str]) -> Sequence[str]:
    """The file's own names of the columns that it has."""
    view = table.views.get(file)
    if view is None:
        return columns
    return [view.names.get(name, name) for name in columns if name not in view.constants]


def _selected_file(file: InputFile, splits: Sequence[Split]) -> InputFile:
    """The file with the rows that are read of it, and what identifies these rows."""
    rows = sum(split.rows for split in splits)
    if rows == file.rows:
        return file
    ranges = [(split.first_row, split.rows, hashlib.sha256(split.skipped).hexdigest()) for split in splits]
    return replace(file, rows=rows, selected=fingerprint(ranges))


def split_row_groups(groups: Sequence[Segment], size: int) -> Iterator[Split]:
    """Row groups to chunks: big ones split evenly, small neighbors joined while they fit."""
    first_row = first = joined = joined_bytes = 0
    for place, group in enumerate(groups):
        whole = group.rows <= size and group.bytes <= MAX_BYTES
        if joined and (not whole or joined + group.rows > size or joined_bytes + group.bytes > MAX_BYTES):
            yield Split(first_row, joined, (first, place - first), first_row)
            first_row, first, joined, joined_bytes = first_row + joined, place, 0, 0
        if whole:
            joined, joined_bytes = joined + group.rows, joined_bytes + group.bytes
        else:
            count = min(group.rows, max(_ceil_div(group.rows, size), _ceil_div(group.bytes, MAX_BYTES)))
            for part in range(count):
                start, stop = group.rows * part // count, group.rows * (part + 1) // count
                yield Split(first_row + start, stop - start, (place, 1), first_row)
            first_row, first = first_row + group.rows, place + 1
    if joined:
        yield Split(first_row, joined, (first, len(groups) - first), first_row)


def split_text(file: SplitCandidates, size: int) -> Iterator[Split]:
    """Segments of a text file to chunks of about equal rows: at most `size` rows and, unless one segment, 16 MiB."""
    total = sum(segment.rows for segment in file.segments)
    count = max(_ceil_div(total, size), _ceil_div(sum(segment.bytes for segment in file.segments), MAX_BYTES))
    target = _ceil_div(total, count)
    first_row, offset, rows, length = 0, file.start, 0, 0
    for segment in file.segments:
        if rows and (rows + segment.rows > size or length + segment.bytes > MAX_BYTES or rows >= target):
            yield Split(first_row, rows, offset=offset, bytes=length)
            first_row, offset, rows, length = first_row + rows, offset + length, 0, 0
        rows, length = rows + segment.rows, length + segment.bytes
    if rows:
        yield Split(first_row, rows, offset=offset, bytes=length)


def _ceil_div(amount: int, size: int) -> int:
    """`amount / size`, rounded up; at least 1."""
    return max(1, -(-amount // size))
