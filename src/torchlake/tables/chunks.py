"""The plan of a job: a table split into chunks, fixed ranges of rows, before any work starts.

The chunks depend on the table alone, not on processes or engine, so a job that is run again finds the same chunks.
Each lies inside one file. In Parquet and Arrow files a big row group is split evenly and small ones are joined; text
files are split between records. Cost: one pass over text files, the footers of others, and one sha256 of every local
file; memory 16 bytes per 256 text records.
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
from torchlake.tables.table import Table, check_columns

FORMAT = 2
CHUNKS = 64
MIN_ROWS, MAX_ROWS = 1024, 32768


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """One file of the input, as planned."""

    path: str
    name: str
    "Relative to the folder that the user gave, so that it stays the same when the folder moves."
    version: Version
    sha256: str
    "Of its bytes, or of the ETag of an object; empty in a plan made with `hashed=False`."
    rows: int
    checksums: bool | None
    "Whether its pages have checksums; None if the format has none."


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Rows `first_row` to `first_row + rows` of a file, with everything that a worker needs to read them."""

    index: int
    "Its number in the job; there are gaps if files were removed from the input."
    file: str
    name: str
    "As in InputFile; so are version and sha256."
    version: Version
    sha256: str
    format: str
    row_groups: tuple[int, int]
    "First row group (or record batch) and their number; (0, 0) for text."
    groups_row: int = 0
    "The first row of the first row group."
    first_row: int
    rows: int
    offset: int = 0
    schema: bytes
    "The Arrow schema of the plan's columns, serialized."
    bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The files of a job and their chunks. Plans with equal `id` have equal rows in equal chunks."""

    inputs: tuple[InputFile, ...]
    chunks: tuple[Chunk, ...]
    serialized: bytes
    "The Arrow schema of the columns to read. Kept as bytes, because versions of Arrow serialize it differently."
    rows: int

    @cached_property
    def schema(self) -> pa.Schema:
        """The schema of the columns to read."""
        return pa.ipc.read_schema(pa.py_buffer(self.serialized))

    @cached_property
    def id(self) -> str:
        """The sha256 of the files' names, content and rows, the columns, and the chunks' ranges."""
        value = plan_to_json(self)
        files = [value["inputs"][field] for field in ("name", "sha256", "rows")]
        content = json.dumps([files, value["schema"], value["chunks"]], separators=(",", ":"))
        return hashlib.sha256(content.encode()).hexdigest()

    @cached_property
    def sha256_of(self) -> dict[str, str]:
        """The sha256 of each input, by the file's name."""
        return {one.name: one.sha256 for one in self.inputs}


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
    chunks = tuple(_chunk(index, file, table.format, serialized, split) for index, (file, split) in enumerate(splits))
    return Plan(inputs=tuple(inputs), chunks=chunks, serialized=serialized, rows=sum(rows))


class Split(NamedTuple):
    """A range of rows of one file; the fields are those of `Chunk`."""

    first_row: int
    rows: int
    row_groups: tuple[int, int] = (0, 0)
    groups_row: int = 0
    offset: int = 0
    bytes: int = 0


def _chunk(index: int, file: InputFile, format: str, schema: bytes, split: Split) -> Chunk:
    return Chunk(
        index=index,
        file=file.path,
        name=file.name,
        version=file.version,
        sha256=file.sha256,
        format=format,
        schema=schema,
        **split._asdict(),
    )


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


def chunk_label(item: tuple[Chunk, str]) -> str:
    """The label of an item (chunk, part name) in an engine's user interface: the chunk's number and file."""
    return f"chunk {item[0].index} {item[0].name}"


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values, stored by column: fast and small for 100,000 chunks."""
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
            **{
                field: [getattr(chunk, field) for chunk in chunks]
                for field in ("row_groups", "first_row", "rows", "offset", "bytes")
            },
        },
    }


def plan_from_json(value: Any) -> Plan:
    """The plan that `plan_to_json` wrote. Raises DataError when it is of another version or damaged."""
    try:
        if value["format"] not in (1, FORMAT):
            raise DataError(f"this plan has format {value['format']}; this version reads formats 1 and {FORMAT}")
        fields = value["inputs"]
        if value["format"] == 1:  # has sizes and times only; such files are compared by content
            fields["version"] = list(zip(fields.pop("size"), fields.pop("mtime_ns"), strict=True))
        fields["version"] = [Version(*version) for version in fields["version"]]
        inputs = tuple(
            InputFile(**dict(zip(InputFile.__slots__, row, strict=True)))
            for row in zip(*(fields[field] for field in InputFile.__slots__), strict=True)
        )
        serialized = base64.b64decode(value["schema"])
        columns = value["chunks"]
        columns["groups_row"] = _starts_of_groups(columns)
        columns["row_groups"] = [(first, count) for first, count in columns["row_groups"]]
        splits = zip(*(columns[field] for field in Split._fields), strict=True)
        chunks = tuple(
            _chunk(index, inputs[place], columns["format"], serialized, Split(*split))
            for index, place, split in zip(columns["index"], columns["input"], splits, strict=True)
        )
        pa.ipc.read_schema(pa.py_buffer(serialized))  # raises if it is damaged
        return Plan(inputs=inputs, chunks=chunks, serialized=serialized, rows=value["rows"])
    except (KeyError, TypeError, IndexError, ValueError, pa.ArrowException) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"not a plan: {error!r}") from error


def _starts_of_groups(columns: dict[str, list[Any]]) -> list[int]:
    """Each chunk's `groups_row`: the first row of the first chunk with the same row groups."""
    keys = [(place, *groups) for place, groups in zip(columns["input"], columns["row_groups"], strict=True)]
    first: dict[tuple[int, ...], int] = {}
    for key, row in zip(keys, columns["first_row"], strict=True):
        first[key] = min(row, first.get(key, row))
    return [first[key] for key in keys]


def _ceil_div(amount: int, size: int) -> int:
    """`amount / size`, rounded up; at least 1."""
    return max(1, -(-amount // size))
