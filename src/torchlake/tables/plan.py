"""The plan of a job as plain data: the files of its input, and the chunks they are split into; stored as JSON."""

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from torchlake.atomic_io import digest
from torchlake.errors import DataError
from torchlake.storage.versions import Version

FORMAT = 2
SAMPLE = "sample"
"The column with the number of a row's answer, if each answer has a row."
COUNTS = ("left_out", "unread_files")
"Keys of a plan's selection that count what was not requested."
FORMAT_OF_VIEWS = 3
"Format of a plan in which some files are read with a view or only some of their rows."


def samples_of(fingerprint: Mapping[str, Any]) -> int:
    """Return how many rows a job writes for each row that it reads; SAMPLE numbers them."""
    return int(fingerprint.get("samples", 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """One file of the input, as planned."""

    path: str
    name: str
    "Path relative to the folder that the user gave, so that it stays the same when the folder moves."
    version: Version
    sha256: str
    "The hash of its bytes, or of an object's ETag; empty in a plan made with `hashed=False`."
    rows: int
    checksums: bool | None
    "Whether its pages have checksums; None if the format has none."
    view: str = ""
    "How the table's columns are read from the file, as JSON (`SourceFile`); empty if they are read by name."
    selected: str = ""
    "The sha256 of the rows that are read; empty if all are."

    @property
    def content(self) -> str:
        """The sha256 that identifies the rows that are read from the file."""
        return digest([self.sha256, self.view, self.selected]) if self.view or self.selected else self.sha256


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A range of rows of a file, with everything that a worker needs to read them."""

    index: int
    "Its number in the job; numbers have gaps if files were removed from the input."
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
    "Rows to read: those of the range that are not skipped."
    offset: int = 0
    schema: bytes
    "The Arrow schema of the plan's columns, serialized."
    view: str = ""
    "As in InputFile."
    skipped: bytes = b""
    "A bitmap of the range that marks the rows left out; empty if there are none. Costs a bit per row of the range."
    bytes: int = 0

    @property
    def span(self) -> int:
        """Number of rows of the range, including those that are skipped."""
        return self.rows + int.from_bytes(self.skipped, "little").bit_count()

    @property
    def kept(self) -> np.ndarray:
        """(span,) bool, which rows of the range are read."""
        if not self.skipped:
            return np.ones(self.rows, bool)
        bits = np.unpackbits(np.frombuffer(self.skipped, np.uint8), count=self.span, bitorder="little")
        return ~bits.astype(bool)

    @property
    def numbers(self) -> np.ndarray:
        """(rows,) int64, the number of each row that is read in the file."""
        if not self.skipped:
            return np.arange(self.first_row, self.first_row + self.rows)
        return self.first_row + np.flatnonzero(self.kept)

    def number(self, row: int) -> int:
        """Return the number in the file of the chunk's row `row`."""
        return int(self.numbers[row]) if self.skipped else self.first_row + row

    @property
    def where(self) -> str:
        """A description of the range, for messages."""
        return f"rows {self.first_row:,} to {self.first_row + self.span - 1:,}"


@dataclass(frozen=True, kw_only=True)
class ChunkPlan:
    """The files of a job and their chunks. Plans with the same `id` have the same rows in the same chunks."""

    inputs: tuple[InputFile, ...]
    chunks: tuple[Chunk, ...]
    serialized: bytes
    "The Arrow schema of the columns to read. Kept as bytes, because versions of Arrow serialize it differently."
    rows: int
    sources: tuple[Mapping[str, Any], ...] = ()
    "What was read, for each table with versions (`SourceTable.identity`)."
    selection: Mapping[str, Any] = field(default_factory=dict)
    "Which rows were requested, and how many were `left_out` for each reason, besides the rows of `unread_files`."

    @cached_property
    def schema(self) -> pa.Schema:
        """The schema of the columns to read."""
        return pa.ipc.read_schema(pa.py_buffer(self.serialized))

    @property
    def asked(self) -> dict[str, Any]:
        """Which rows were requested; empty if all were."""
        return {name: value for name, value in self.selection.items() if name not in COUNTS}

    @cached_property
    def id(self) -> str:
        """The sha256 of the files' names, content and rows, the columns, the chunks' ranges, and the selection."""
        value = plan_to_json(self)
        views = [name for name in ("view", "selected") if name in value["inputs"]]
        files = [value["inputs"][name] for name in ("name", "sha256", "rows", *views)]
        asked = [self.asked] if self.asked else []
        content = json.dumps([files, value["schema"], value["chunks"], *asked], separators=(",", ":"))
        return hashlib.sha256(content.encode()).hexdigest()

    @cached_property
    def content_of(self) -> dict[str, str]:
        """The sha256 of each input's rows, by the file's name."""
        return {one.name: one.content for one in self.inputs}


Bitmap = bytes
_VIEWS = ("view", "selected")


class Split(NamedTuple):
    """A range of rows of one file; the fields are those of `Chunk`."""

    first_row: int
    rows: int
    row_groups: tuple[int, int] = (0, 0)
    groups_row: int = 0
    offset: int = 0
    bytes: int = 0
    skipped: Bitmap = b""


def new_chunk(
    index: int, file: InputFile, format: str, schema: bytes, split: Split, *, view: str | None = None
) -> Chunk:
    """Return the chunk of a split; `schema` is the plan's, serialized. `view`: by default the file's."""
    return Chunk(
        index=index,
        file=file.path,
        name=file.name,
        version=file.version,
        sha256=file.sha256,
        format=format,
        schema=schema,
        view=file.view if view is None else view,
        **split._asdict(),
    )


def plan_to_json(plan: ChunkPlan) -> dict[str, Any]:
    """Return the plan as JSON values, stored by column: fast and small for 100,000 chunks."""
    place = {one.name: number for number, one in enumerate(plan.inputs)}
    chunks = plan.chunks
    used = [name for name in _VIEWS if any(getattr(one, name) for one in plan.inputs)]
    files = [name for name in InputFile.__slots__ if name not in _VIEWS or name in used]
    ranges = {
        "index": [chunk.index for chunk in chunks],
        "input": [place[chunk.name] for chunk in chunks],
        "format": chunks[0].format if chunks else "",
        **{
            name: [getattr(chunk, name) for chunk in chunks]
            for name in ("row_groups", "first_row", "rows", "offset", "bytes")
        },
    }
    starts = [chunk.groups_row for chunk in chunks]
    left_out = any(chunk.skipped for chunk in chunks) or starts != _starts_of_groups(ranges)
    if left_out:
        ranges |= {"skipped": [_packed(chunk.skipped) for chunk in chunks], "groups_row": starts}
    return {
        "format": FORMAT_OF_VIEWS if used or left_out else FORMAT,
        "rows": plan.rows,
        "schema": base64.b64encode(plan.serialized).decode(),
        **({"sources": [dict(one) for one in plan.sources]} if plan.sources else {}),
        **({"selection": dict(plan.selection)} if plan.selection else {}),
        "inputs": {name: [getattr(one, name) for one in plan.inputs] for name in files},
        "chunks": ranges,
    }


def plan_from_json(value: Any) -> ChunkPlan:
    """Return the plan that `plan_to_json` wrote. Raises DataError when it is of another version or damaged."""
    try:
        if value["format"] not in (FORMAT, FORMAT_OF_VIEWS):
            raise DataError(
                f"this plan has format {value['format']}, but this version reads {FORMAT} and {FORMAT_OF_VIEWS}. "
                "Use the version of torchlake that wrote it, or write the output again with overwrite (--overwrite)."
            )
        fields = value["inputs"]
        fields["version"] = [Version(*version) for version in fields["version"]]
        names = [name for name in InputFile.__slots__ if name in fields or name not in _VIEWS]
        inputs = tuple(
            InputFile(**dict(zip(names, row, strict=True)))
            for row in zip(*(fields[name] for name in names), strict=True)
        )
        serialized = base64.b64decode(value["schema"])
        columns = value["chunks"]
        columns.setdefault("groups_row", _starts_of_groups(columns))
        columns["skipped"] = [
            zlib.decompress(base64.b64decode(one)) if one else b""
            for one in columns.get("skipped", [""] * len(columns["index"]))
        ]
        columns["row_groups"] = [(first, count) for first, count in columns["row_groups"]]
        splits = zip(*(columns[field] for field in Split._fields), strict=True)
        chunks = tuple(
            new_chunk(index, inputs[place], columns["format"], serialized, Split(*split))
            for index, place, split in zip(columns["index"], columns["input"], splits, strict=True)
        )
        pa.ipc.read_schema(pa.py_buffer(serialized))  # raises if it is damaged
        hash(inputs)  # raises for a list in place of a value
        return ChunkPlan(
            inputs=inputs,
            chunks=chunks,
            serialized=serialized,
            rows=value["rows"],
            sources=tuple(value.get("sources", ())),
            selection=value.get("selection", {}),
        )
    except (LookupError, TypeError, AttributeError, ValueError, OSError, zlib.error, pa.ArrowException) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"not a plan: {error!r}") from error


def _packed(bitmap: bytes) -> str:
    return base64.b64encode(zlib.compress(bitmap)).decode() if bitmap else ""


def _starts_of_groups(columns: Mapping[str, Any]) -> list[int]:
    """Return each chunk's `groups_row` if no row was left out: where the first chunk of the same row groups begins."""
    keys = [(place, *groups) for place, groups in zip(columns["input"], columns["row_groups"], strict=True)]
    first: dict[tuple[int, ...], int] = {}
    for key, row in zip(keys, columns["first_row"], strict=True):
        first[key] = min(row, first.get(key, row))
    return [0 if key[1:] == (0, 0) else first[key] for key in keys]


def chunk_label(item: tuple[Chunk, str]) -> str:
    """Return the label of an item (chunk, part name) in an engine's user interface: the chunk's number and file."""
    return f"chunk {item[0].index} {item[0].name}"
