"""Each format's schema, and where its files can be split, before any row is read.

parquet  footer: schema, row groups          arrow  IPC file or stream: schema, record batches
csv      header line: every column a string  jsonl  types from the values, see `_json_schema`
"""

import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import pyarrow as pa

from torchlake.errors import TableError
from torchlake.storage.access import read_range
from torchlake.storage.versions import Version
from torchlake.tables.formats import lines, values
from torchlake.tables.formats.columnar import Footer, arrow_segments, open_arrow, parquet_footer, sampled_size
from torchlake.tables.formats.lines import BadRecord, Segment
from torchlake.tables.formats.scanning import Scanned, join_ranges, ranges_of, scan_range
from torchlake.tables.formats.streams import Dialect, plain_name

EXTENSIONS = {
    **dict.fromkeys((".parquet", ".parq", ".pq"), "parquet"),
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    **dict.fromkeys((".arrow", ".ipc", ".feather"), "arrow"),
}
COMPRESSED = frozenset({".gz", ".bz2", ".xz", ".zst", ".lz4", ".snappy", ".zip"})
MAGIC = {b"PAR1": "parquet", b"ARROW1": "arrow"}
UTF8 = Dialect()
MAX_BYTES = 16 << 20  # of a chunk in memory
TYPED_LINES = 1_000


class SplitCandidates(NamedTuple):
    """The row groups or record batches of a file, or segments of whole records; files are split between them."""

    segments: list[Segment]
    start: int
    "Offset of the first record in bytes (text formats)."
    checksums: bool | None
    "Whether pages have checksums; None if the format has none."


def is_table_file(name: str) -> bool:
    """Return whether a file in a folder is part of a table: by its extension, or its first bytes if it has none.

    Files that are compressed as a whole count as well, even if `format_of` refuses them.
    """
    extension = os.path.splitext(name.lower())[1]
    if not extension:  # Hive writes names without an extension
        return _format_by_magic(name) is not None
    return extension in EXTENSIONS or _compressed_format(name) is not None


def format_of(file: str) -> str:
    """Return the format, by the file's extension, else by its first bytes. Raises TableError for others."""
    inner = _compressed_format(file)
    if inner in ("csv", "jsonl") and plain_name(file) != file.lower():
        return inner
    if inner is not None:
        raise TableError(
            f"{file}: compressed as a whole, which works only for CSV and JSON lines in .gz, .bz2 and .zst. Decompress "
            "it, or convert it to Parquet, which is compressed inside."
        )
    format = EXTENSIONS.get(os.path.splitext(file.lower())[1]) or _format_by_magic(file)
    if format is not None:
        return format
    raise TableError(
        f"{file}: its name does not show its format. Rename it to end with one of {', '.join(EXTENSIONS)}."
    )


def _compressed_format(name: str) -> str | None:
    """Return the format inside a file that is compressed as a whole, by its name; None for other files."""
    stem, extension = os.path.splitext(name.lower())
    return EXTENSIONS.get(os.path.splitext(stem)[1]) if extension in COMPRESSED else None


def _format_by_magic(file: str) -> str | None:
    head = read_range(file, 0, 8)
    return next((kind for magic, kind in MAGIC.items() if head.startswith(magic)), None)


def schema_of(
    file: str,
    format: str,
    version: Version,
    columns: Sequence[str],
    bounded: Sequence[str] = (),
    dialect: Dialect = UTF8,
) -> tuple[pa.Schema, Footer | None]:
    """Return a file's columns by their `storage_type`, without metadata, and the footer of a Parquet file.

    The footer has the statistics of the columns `bounded`; `dialect` is that of a CSV file.

    Raises TableError naming the file when it cannot be read, UnsafeError for extension types that may run code.
    """
    if version.size == 0:
        raise TableError(f"{file}: empty (0 bytes)")
    if format == "csv":
        return pa.schema([pa.field(name, pa.string()) for name in lines.csv_header(file, dialect)]), None
    if format == "jsonl":
        return _json_schema(file, columns), None
    footer = None
    if format == "parquet":
        footer = parquet_footer(file, version, columns, bounded)
        schema = footer.schema
    else:
        with open_arrow(file) as reader:
            schema = reader.schema
    return pa.schema([pa.field(field.name, storage_type(field.type)) for field in schema]), footer


def split_candidates(
    file: str,
    format: str,
    version: Version,
    footer: Footer | None,
    columns: Sequence[str],
    segment_rows: int | None,
    dialect: Dialect = UTF8,
    sampled: bool = True,
) -> SplitCandidates:
    """Return where a file can be split, counting the bytes of `columns`; text segments have at most `segment_rows`.

    `sampled=False`: for a Parquet file that is not read, sizes in memory are not estimated from its rows.
    """
    if format in ("csv", "jsonl"):
        return text_candidates(map(scan_range, ranges_of(file, format, dialect, version.size, segment_rows)))
    if format == "arrow":
        return SplitCandidates(arrow_segments(file, columns), 0, None)
    if footer is None or footer.version != version or {*columns} != {*footer.columns}:
        footer = parquet_footer(file, version, columns)
    ratio = sampled_size(file, footer, MAX_BYTES) if columns and sampled else 1.0
    return SplitCandidates([Segment(rows, int(size * ratio)) for rows, size in footer.groups], 0, footer.checksums)


def text_candidates(scanned: Iterable[Scanned]) -> SplitCandidates:
    """Return where a text file can be split, from its scanned ranges in order."""
    start, segments = join_ranges(scanned)
    return SplitCandidates(segments, start, None)


def storage_type(kind: pa.DataType) -> pa.DataType:
    """Return the type that a column is read as: the storage of an extension type, the values of a dictionary or view.

    Fixed-size lists are read as lists, because Arrow cannot read Parquet files in which one of them is null.
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
    """Return the types of `columns` from all lines, and of other columns (all, if none are named) from the first 1,000.

    If a value does not fit those before it, the file is bad if that happens in the first 1,000 lines of a requested
    column; later only its row is bad. Names that are not UTF-8 are left out, because Arrow cannot store them.
    """
    kinds: dict[str, values.Kind] = {}
    source, counted = lines.open_lines(file, UTF8)
    with source:
        for number, record in enumerate(lines.json_records(counted), 1):
            first = number <= TYPED_LINES
            if not first and not columns:
                break
            if isinstance(record, BadRecord):
                if number == 1 and "list, expected" in record:
                    raise TableError(f"{file}: is a JSON array; write one object per line (JSON lines) instead.")
                continue
            for name in record if first else (name for name in columns if name in record):
                try:
                    kinds[name] = values.widen(kinds.get(name, values.NULL), record[name])
                except ValueError as error:
                    if first and name in columns:
                        raise TableError(f"{file}: line {number}: the column {name!r} has {error}") from None
    if not kinds:
        raise TableError(f"{file}: its first lines have no JSON object. Write one object per line (JSON lines).")
    for name in columns:
        if not values.is_utf8(name):
            raise TableError(f"{file}: the column name {name!r} is not UTF-8; rename the column.")
    return pa.schema([pa.field(name, values.arrow_type(kind)) for name, kind in kinds.items() if values.is_utf8(name)])
