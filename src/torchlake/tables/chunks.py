"""The plan of a job: a table split into chunks, fixed ranges of rows, before any work starts.

The chunks depend on the table alone, not on processes or engine, so a job that is run again finds the same chunks.
Each lies inside one file. In Parquet and Arrow files a big row group is split evenly and small ones are joined; text
files are split between records. Cost: one pass over text files, the footers of others, and one sha256 of every local
file; memory 16 bytes per 256 text records.
"""

from collections.abc import Iterator, Sequence

import pyarrow as pa

from torchlake.errors import TableError
from torchlake.tables.formats.layout import MAX_BYTES, SplitCandidates, split_candidates
from torchlake.tables.formats.lines import Segment
from torchlake.tables.plan import InputFile, Plan, Split, new_chunk
from torchlake.tables.storage.versions import content_id, settled_version_of, version_of
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
    # The versions before the scan, so that rows appended later count as a change.
    versions = [settled_version_of(file) for file in table.files]
    candidates = [
        split_candidates(file, table.format, version, table.footers.get(file), columns, chunk_rows)
        for file, version in zip(table.files, versions, strict=True)
    ]
    rows = [sum(segment.rows for segment in one.segments) for one in candidates]
    known = {(one.path, one.version): one.sha256 for one in cached}
    inputs = []
    for file, name, version, one, count in zip(table.files, table.names, versions, candidates, rows, strict=True):
        sha256 = (known.get((file, version)) or content_id(file)) if hashed else ""
        if version_of(file) != version:
            raise TableError(
                f"{file}: changed while it was being planned. Run the same command again once nothing writes to it."
            )
        inputs.append(
            InputFile(path=file, name=name, version=version, sha256=sha256, rows=count, checksums=one.checksums)
        )
    size = chunk_rows or min(max(sum(rows) // CHUNKS, MIN_ROWS), MAX_ROWS)
    is_text = table.format in ("csv", "jsonl")
    splits = [
        (file, split)
        for file, one in zip(inputs, candidates, strict=True)
        for split in (split_text(one, size) if is_text else split_row_groups(one.segments, size))
    ]
    chunks = tuple(
        new_chunk(index, file, table.format, serialized, split) for index, (file, split) in enumerate(splits)
    )
    return Plan(inputs=tuple(inputs), chunks=chunks, serialized=serialized, rows=sum(rows))


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
