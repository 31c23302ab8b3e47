"""The plan: a table cut into chunks, fixed ranges of rows, before any work starts.

The cut depends on the table alone, never on processes or engine, so a job that is run again, on anything, finds the
same chunks. Chunks lie inside one file; in Parquet and Arrow files a big row group is split evenly and small ones are
joined, in text files the cut falls between records. Price: one pass over text files, the footers of others, and one
sha256 of every local file; memory 16 bytes per 256 text records.
"""

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import pyarrow as pa

from torchlake.errors import DataError, TableError
from torchlake.tables.formats.layout import MAX_BYTES, SplitCandidates, split_candidates
from torchlake.tables.formats.lines import Segment
from torchlake.tables.sources.versions import Version, content_id, settled_version_of, version_of
from torchlake.tables.table import Table, missing_column

FORMAT = 2
CHUNKS = 64
MIN_ROWS, MAX_ROWS = 1024, 32768


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """One file of the input, as it was when the job was planned."""

    path: str
    name: str
    "Relative to the folder the user gave: stays when the folder moves."
    version: Version
    sha256: str
    "Of its bytes, or of what its storage says of them; empty in a plan that nothing is written by."
    rows: int
    checksums: bool | None
    "Whether its pages carry checksums; None where the format has none."


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Rows `first_row` to `first_row + rows` of a file, and all a worker needs to read them."""

    index: int
    "Its number in the job; numbers may have gaps once files left the input."
    file: str
    name: str
    "The file's name relative to the folder that was given."
    version: Version
    sha256: str
    "The file's version and content, as it was planned."
    format: str
    row_groups: tuple[int, int]
    "First row group (or record batch) and how many; (0, 0) for text."
    groups_row: int = 0
    "The row that the first of these begins with."
    first_row: int
    rows: int
    offset: int = 0
    schema: bytes
    "The Arrow schema of the plan's columns, serialized."
    bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be read, fixed: the files and their chunks. Equal `id`, equal rows in equal chunks."""

    inputs: tuple[InputFile, ...]
    chunks: tuple[Chunk, ...]
    serialized: bytes
    "The Arrow schema of the columns to be read, as it was first serialized: other versions of Arrow write other bytes."
    rows: int

    @cached_property
    def schema(self) -> pa.Schema:
        """Of the columns to be read."""
        return pa.ipc.read_schema(pa.py_buffer(self.serialized))

    @cached_property
    def id(self) -> str:
        """The sha256 of what is read: names, content and rows of the files, columns, and the chunks' ranges."""
        value = plan_to_json(self)
        files = [value["inputs"][field] for field in ("name", "sha256", "rows")]
        content = json.dumps([files, value["schema"], value["chunks"]], separators=(",", ":"))
        return hashlib.sha256(content.encode()).hexdigest()

    @cached_property
    def sha256_of(self) -> dict[str, str]:
        """The content of each input, by the file's name."""
        return {one.name: one.sha256 for one in self.inputs}


def plan_chunks(
    table: Table,
    *,
    columns: Sequence[str],
    chunk_rows: int | None = None,
    cached: Sequence[InputFile] = (),
    hashed: bool = True,
) -> Plan:
    """Cut `table` into chunks of `chunk_rows` rows: by default 1/64 of it, from 1,024 to 32,768; 16 MiB at most.

    The sha256 of a file that is in `cached` with the same path and version is taken from there; without `hashed` none is
    computed, for a plan that only reads.
    Raises TableError when a column is missing, or a file cannot be read or changes meanwhile.
    """
    for name in columns:
        if name not in table.schema.names:
            raise missing_column(table.source, name, table.schema)
    schema = pa.schema([table.schema.field(name) for name in columns])
    serialized = schema.serialize().to_pybytes()
    # Before the scan, so that what is appended later is seen to be missing.
    versions = [settled_version_of(file) for file in table.files]
    pieces = [
        split_candidates(file, table.format, version, table.footers.get(file), columns, chunk_rows)
        for file, version in zip(table.files, versions, strict=True)
    ]
    rows = [sum(segment.rows for segment in one.segments) for one in pieces]
    size = chunk_rows or min(max(sum(rows) // CHUNKS, MIN_ROWS), MAX_ROWS)
    trusted = {(one.path, one.version): one.sha256 for one in cached}
    inputs: list[InputFile] = []
    chunks: list[Chunk] = []
    for file, name, version, one, count in zip(table.files, table.names, versions, pieces, rows, strict=True):
        sha256 = (trusted.get((file, version)) or content_id(file)) if hashed else ""
        if version_of(file) != version:
            raise TableError(
                f"{file}: changed while it was being planned. Run the same command again once nothing writes to it."
            )
        inputs.append(
            InputFile(
                path=file,
                name=name,
                version=version,
                sha256=sha256,
                rows=count,
                checksums=one.checksums,
            )
        )
        text = table.format in ("csv", "jsonl")
        for cut in split_text(one, size) if text else split_row_groups(one.segments, size):
            chunks.append(
                Chunk(
                    index=len(chunks),
                    file=file,
                    name=name,
                    version=version,
                    sha256=sha256,
                    format=table.format,
                    schema=serialized,
                    **cut._asdict(),
                )
            )
    return Plan(inputs=tuple(inputs), chunks=tuple(chunks), serialized=serialized, rows=sum(rows))


class Split(NamedTuple):
    """Where a chunk lies in its file; the fields are those of `Chunk`."""

    first_row: int
    rows: int
    row_groups: tuple[int, int] = (0, 0)
    groups_row: int = 0
    offset: int = 0
    bytes: int = 0


def split_row_groups(groups: Sequence[Segment], size: int) -> Iterator[Split]:
    """Row groups to chunks: big ones split evenly, small neighbours joined while they fit."""
    first_row = first = joined = joined_bytes = 0
    for place, group in enumerate(groups):
        whole = group.rows <= size and group.bytes <= MAX_BYTES
        if joined and (not whole or joined + group.rows > size or joined_bytes + group.bytes > MAX_BYTES):
            yield Split(first_row, joined, (first, place - first), first_row)
            first_row, first, joined, joined_bytes = first_row + joined, place, 0, 0
        if whole:
            joined, joined_bytes = joined + group.rows, joined_bytes + group.bytes
        else:
            count = min(group.rows, max(_over(group.rows, size), _over(group.bytes, MAX_BYTES)))
            for part in range(count):
                start, stop = group.rows * part // count, group.rows * (part + 1) // count
                yield Split(first_row + start, stop - start, (place, 1), first_row)
            first_row, first = first_row + group.rows, place + 1
    if joined:
        yield Split(first_row, joined, (first, len(groups) - first), first_row)


def split_text(pieces: SplitCandidates, size: int) -> Iterator[Split]:
    """Segments of a text file to chunks of about equal rows, none above `size` rows or, but for one segment, 16 MiB."""
    total, total_bytes = (sum(column) for column in zip(*pieces.segments, strict=True)) if pieces.segments else (0, 0)
    target = _over(total, max(_over(total, size), _over(total_bytes, MAX_BYTES))) if total else 0
    first_row, offset, rows, length = 0, pieces.start, 0, 0
    for segment in pieces.segments:
        if rows and (rows + segment.rows > size or length + segment.bytes > MAX_BYTES or rows >= target):
            yield Split(first_row, rows, offset=offset, bytes=length)
            first_row, offset, rows, length = first_row + rows, offset + length, 0, 0
        rows, length = rows + segment.rows, length + segment.bytes
    if rows:
        yield Split(first_row, rows, offset=offset, bytes=length)


def chunk_label(item: tuple[Chunk, str]) -> str:
    """What an engine's user interface calls a chunk: its number and file, of an item (chunk, part name)."""
    return f"chunk {item[0].index} {item[0].name}"


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain values, in columns: quick and small for 100,000 chunks."""
    place = {one.name: number for number, one in enumerate(plan.inputs)}
    chunks = plan.chunks
    return {
        "format": FORMAT,
        "rows": plan.rows,
        "schema": base64.b64encode(plan.serialized).decode(),
        "inputs": {field: [getattr(one, field) for one in plan.inputs] for field in InputFile.__slots__},
        "chunks": {
            "index": [chunk.index for chunk in chunks],
            "input": [place[chunk.name] for chunk in chunks],
            "format": chunks[0].format if chunks else "",
            "row_groups": [chunk.row_groups for chunk in chunks],
            "first_row": [chunk.first_row for chunk in chunks],
            "rows": [chunk.rows for chunk in chunks],
            "offset": [chunk.offset for chunk in chunks],
            "bytes": [chunk.bytes for chunk in chunks],
        },
    }


def plan_from_json(value: Any) -> Plan:
    """The plan that `plan_to_json` wrote. Raises DataError when it is of another version or damaged."""
    try:
        if value["format"] not in (1, FORMAT):
            raise DataError(f"this plan has format {value['format']}; this version reads formats 1 and {FORMAT}")
        fields = value["inputs"]
        if value["format"] == 1:  # knew sizes and times only; content decides about such files
            fields["version"] = list(zip(fields.pop("size"), fields.pop("mtime_ns"), strict=True))
        fields["version"] = [Version(*version) for version in fields["version"]]
        inputs = tuple(
            InputFile(**dict(zip(InputFile.__slots__, row, strict=True)))
            for row in zip(*(fields[field] for field in InputFile.__slots__), strict=True)
        )
        serialized = base64.b64decode(value["schema"])
        columns = value["chunks"]
        columns["groups_row"] = _starts_of_groups(columns)
        ranges = zip(*(columns[field] for field in ("index", "input", *Split._fields)), strict=True)
        chunks = tuple(
            Chunk(
                index=index,
                file=inputs[place].path,
                name=inputs[place].name,
                version=inputs[place].version,
                sha256=inputs[place].sha256,
                format=columns["format"],
                schema=serialized,
                first_row=first_row,
                rows=rows,
                row_groups=(groups[0], groups[1]),
                groups_row=groups_row,
                offset=offset,
                bytes=length,
            )
            for index, place, first_row, rows, groups, groups_row, offset, length in ranges
        )
        pa.ipc.read_schema(pa.py_buffer(serialized))  # raises where it is damaged
        return Plan(inputs=inputs, chunks=chunks, serialized=serialized, rows=value["rows"])
    except (KeyError, TypeError, IndexError, ValueError, pa.ArrowException) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"not a plan: {error!r}") from error


def _starts_of_groups(columns: dict[str, list[Any]]) -> list[int]:
    """Each chunk's `groups_row`: where the first chunk of the same row groups begins."""
    keys = [(place, *groups) for place, groups in zip(columns["input"], columns["row_groups"], strict=True)]
    first: dict[tuple[int, ...], int] = {}
    for key, row in zip(keys, columns["first_row"], strict=True):
        first[key] = min(row, first.get(key, row))
    return [first[key] for key in keys]


def _over(amount: int, size: int) -> int:
    """`amount / size`, rounded up, at least 1."""
    return max(1, -(-amount // size))
