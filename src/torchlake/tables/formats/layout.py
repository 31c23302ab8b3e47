"""What each format says of itself before any row is read: the schema, and the pieces a file can be cut at.

parquet  footer: schema, row groups          arrow  IPC file or stream: schema, record batches
csv      header line: every column a string  jsonl  types from the values, see `_json_schema`
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa

from torchlake.errors import TableError
from torchlake.tables.formats import lines, values
from torchlake.tables.formats.columnar import Footer, arrow_batches, open_arrow, parquet_footer, sampled_size
from torchlake.tables.formats.lines import BadRecord, Segment
from torchlake.tables.sources.files import read_range
from torchlake.tables.sources.versions import Version

EXTENSIONS = {
    ".parquet": "parquet",
    ".parq": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".arrow": "arrow",
    ".ipc": "arrow",
    ".feather": "arrow",
}
COMPRESSED = frozenset({".gz", ".bz2", ".xz", ".zst", ".lz4", ".snappy", ".zip"})
MAGIC = {b"PAR1": "parquet", b"ARROW1": "arrow"}
MAX_BYTES = 16 << 20  # of a chunk in memory
TYPED_LINES = 1_000


class SplitCandidates(NamedTuple):
    """Where a file can be cut: row groups or record batches, or for text formats segments of whole records."""

    segments: list[Segment]
    start: int
    "Byte of the first record (text formats)."
    checksums: bool | None
    "Whether pages carry checksums; None where the format has none."


def is_table_file(name: str) -> bool:
    """Whether a folder's file is taken for a table: by its name's extension, or its first bytes where it has none.

    A compressed text file, which is refused later, is one too.
    """
    stem, extension = os.path.splitext(name.lower())
    if not extension:  # as Hive names its files
        return _by_first_bytes(name) is not None
    return extension in EXTENSIONS or (extension in COMPRESSED and os.path.splitext(stem)[1] in EXTENSIONS)


def format_of(file: str) -> str:
    """The format, by the file's extension, else by its first bytes. Raises TableError for others."""
    stem, extension = os.path.splitext(file.lower())
    if extension in COMPRESSED and os.path.splitext(stem)[1] in EXTENSIONS:
        raise TableError(
            f"{file}: compressed as a whole, so it cannot be cut into chunks. Decompress it, or convert it to Parquet, "
            "which is compressed inside."
        )
    if extension in EXTENSIONS:
        return EXTENSIONS[extension]
    known = _by_first_bytes(file)
    if known is not None:
        return known
    raise TableError(f"{file}: the format is not known by its name; give it one of {', '.join(EXTENSIONS)}.")


def _by_first_bytes(file: str) -> str | None:
    head = read_range(file, 0, 8)
    return next((kind for magic, kind in MAGIC.items() if head.startswith(magic)), None)


def schema_of(file: str, format: str, version: Version, columns: Sequence[str]) -> tuple[pa.Schema, Footer | None]:
    """The columns of one file of that version, plainly typed (see `plain`), without metadata; of a Parquet file its
    footer too, so that nobody has to read it again.

    Raises TableError naming the file when it cannot be read, UnsafeError for extension types that may run code.
    """
    if version.size == 0:
        raise TableError(f"{file}: empty (0 bytes)")
    footer = None
    if format == "csv":
        return pa.schema([pa.field(name, pa.string()) for name in lines.csv_header(file)]), None
    if format == "jsonl":
        return _json_schema(file, columns), None
    if format == "parquet":
        footer = parquet_footer(file, version, columns)
        schema = footer.schema
    else:
        with open_arrow(file) as reader:
            schema = reader.schema
    return pa.schema([pa.field(field.name, storage_type(field.type)) for field in schema]), footer


def split_candidates(
    file: str, format: str, version: Version, footer: Footer | None, columns: Sequence[str], segment_rows: int | None
) -> SplitCandidates:
    """Where a file can be cut; `columns` are those whose bytes count, `segment_rows` the finest cut of a text file."""
    if format in ("csv", "jsonl"):
        start, segments = lines.scan(file, format, segment_rows)
        return SplitCandidates(segments, start, None)
    if format == "arrow":
        return SplitCandidates(arrow_batches(file, columns), 0, None)
    if footer is None or footer.version != version or {*columns} != {*footer.columns}:
        footer = parquet_footer(file, version, columns)
    ratio = sampled_size(file, footer, MAX_BYTES) if columns else 1.0
    return SplitCandidates([Segment(rows, int(size * ratio)) for rows, size in footer.groups], 0, footer.checksums)


def storage_type(kind: pa.DataType) -> pa.DataType:
    """The type a column is read as: extension types as their storage, dictionaries and views as what they encode.

    Lists of a fixed size are read as lists, because Parquet files in which one of them is null cannot be read by Arrow.
    """
    if isinstance(kind, pa.BaseExtensionType):
        return storage_type(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return storage_type(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    return pa.list_(kind.value_field) if pa.types.is_fixed_size_list(kind) else kind


def _json_schema(file: str, columns: Sequence[str]) -> pa.Schema:
    """Types from all lines for `columns`; for other columns, or all where none are named, from the first 1,000 lines.

    A value of `columns` that has no type together with those before it is an error of the file in the first 1,000
    lines, and later an error of its row. Names that are not UTF-8 are left out, as Arrow cannot hold them.
    """
    kinds: dict[str, values.Kind] = {}
    source, counted = lines.open_lines(file)
    with source:
        for number, record in enumerate(lines.json_records(counted), 1):
            first = number <= TYPED_LINES
            if not first and not columns:
                break
            if isinstance(record, BadRecord):
                if number == 1 and "list, expected" in record:
                    raise TableError(f"{file}: a JSON array; write one object per line (JSON lines) instead.")
                continue
            for name in record if first else (name for name in columns if name in record):
                try:
                    kinds[name] = values.widen(kinds.get(name, values.NULL), record[name])
                except ValueError as error:
                    if first and name in columns:
                        raise TableError(f"{file}: line {number}: the column {name!r} has {error}") from None
    if not kinds:
        raise TableError(f"{file}: no JSON object in its first lines; JSON lines hold one object per line.")
    for name in columns:
        if not values.is_utf8(name):
            raise TableError(f"{file}: the column name {name!r} is not UTF-8; rename the column.")
    return pa.schema([pa.field(name, values.arrow_type(kind)) for name, kind in kinds.items() if values.is_utf8(name)])
