"""What each format says of itself before any row is read: the schema, and the pieces a file can be cut at.

parquet  footer: schema, row groups          arrow  IPC file or stream: schema, record batches
csv      header line: every column a string  jsonl  types from the first 1,000 lines
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from torchlake.errors import TableError
from torchlake.tables import extensions, lines, values
from torchlake.tables.files import filesystem_of, is_url, open_binary, stat
from torchlake.tables.lines import Bad, Segment

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
TYPED_LINES = 1_000
ARROW_MAGIC = b"ARROW1\0\0"


class Pieces(NamedTuple):
    """Where a file can be cut: row groups or record batches, or for text formats segments of whole records."""

    segments: list[Segment]
    start: int
    "Byte of the first record (text formats)."
    checksums: bool | None
    "Whether pages carry checksums; None where the format has none."


def is_table_file(name: str) -> bool:
    """Whether a folder's file is taken for a table, a compressed text file (refused later, by name) included."""
    stem, extension = os.path.splitext(name.lower())
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
    with open_binary(file) as source:
        head = source.read(8)
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith(b"ARROW1"):
        return "arrow"
    raise TableError(f"{file}: the format is not known by its name; give it one of {', '.join(EXTENSIONS)}.")


def schema_of(file: str, format: str, columns: Sequence[str]) -> pa.Schema:
    """The columns of one file, plainly typed (see `plain`), without metadata.

    Raises TableError naming the file when it cannot be read, UnsafeError for extension types that may run code.
    """
    if stat(file)[0] == 0:
        raise TableError(f"{file}: empty (0 bytes)")
    if format == "csv":
        return pa.schema([pa.field(name, pa.string()) for name in lines.csv_header(file)])
    if format == "jsonl":
        return _json_schema(file, columns)
    if format == "parquet":
        with open_parquet(file) as parquet:
            schema = parquet.schema_arrow
    else:
        with open_arrow(file) as reader:
            schema = reader.schema
    return pa.schema([pa.field(field.name, plain(field.type)) for field in schema])


def pieces_of(file: str, format: str, columns: Sequence[str], mark_rows: int | None) -> Pieces:
    """Where a file can be cut; `columns` are those whose bytes count, `mark_rows` the finest cut of a text file."""
    if format in ("csv", "jsonl"):
        start, segments = lines.scan(file, format, mark_rows)
        return Pieces(segments, start, None)
    if format == "parquet":
        with open_parquet(file) as parquet:
            metadata = parquet.metadata
            return Pieces(_row_groups(metadata, columns), 0, _has_checksums(file, metadata))
    with open_arrow(file) as reader:
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_random(reader) else reader
        with reading(file):
            return Pieces([Segment(batch.num_rows, batch.select(list(columns)).nbytes) for batch in batches], 0, None)


@contextmanager
def open_parquet(file: str) -> Iterator[pq.ParquetFile]:
    """A Parquet file that is streamed in constant memory with its page checksums verified."""
    extensions.check_parquet(file)
    with reading(file):
        source = pa.PythonFile(open_binary(file), mode="r") if is_url(file) else file
        parquet = pq.ParquetFile(source, page_checksum_verification=True, pre_buffer=False, buffer_size=1 << 20)
    with parquet:
        yield parquet


@contextmanager
def open_arrow(file: str) -> Iterator[pa.RecordBatchFileReader | pa.RecordBatchStreamReader]:
    """An Arrow IPC file (random access) or stream (in order), memory-mapped where it is local.

    An IPC file whose footer mentions extension types is read as the stream it contains: the footer's copy of the schema
    was not looked at, the stream's was.
    """
    with open_binary(file) as source:
        is_file = source.read(8) == ARROW_MAGIC
    extended = extensions.check_ipc_stream(file, len(ARROW_MAGIC) if is_file else 0)
    if is_file and (extended or extensions.ipc_footer_has_extensions(file)):
        is_file, start = False, len(ARROW_MAGIC)
    else:
        start = 0
    if is_url(file):
        filesystem, path = filesystem_of(file)
        mapped = pa.PythonFile(filesystem.open(path, "rb"), mode="r")
    else:
        mapped = pa.memory_map(file)
    with mapped:
        mapped.seek(start)
        with reading(file):
            reader = pa.ipc.open_file(mapped) if is_file else pa.ipc.open_stream(mapped)
        yield reader


def is_random(reader: pa.RecordBatchFileReader | pa.RecordBatchStreamReader) -> bool:
    """Whether the batches can be had in any order."""
    return isinstance(reader, pa.RecordBatchFileReader)


@contextmanager
def reading(file: str, where: str = "") -> Iterator[None]:
    """What pyarrow or the storage says inside becomes a TableError that names the file (and the rows)."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        damaged = " The file is damaged; restore it." if "CRC" in str(error) or "checksum" in str(error) else ""
        raise TableError(f"{file}{where}: cannot be read: {error}.{damaged}") from error


def plain(kind: pa.DataType) -> pa.DataType:
    """The type a column is read as: extension types as their storage, dictionaries and views as what they encode."""
    if isinstance(kind, pa.BaseExtensionType):
        return plain(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return plain(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    return kind


def _row_groups(metadata: pq.FileMetaData, columns: Sequence[str]) -> list[Segment]:
    if metadata.num_row_groups == 0:
        return []
    first = metadata.row_group(0)
    paths = [first.column(i).path_in_schema for i in range(first.num_columns)]
    wanted = [i for i, path in enumerate(paths) if path in columns or path.partition(".")[0] in columns]
    groups = (metadata.row_group(i) for i in range(metadata.num_row_groups))
    return [Segment(group.num_rows, sum(group.column(i).total_uncompressed_size for i in wanted)) for group in groups]


def _has_checksums(file: str, metadata: pq.FileMetaData) -> bool | None:
    """Whether the first page's header (Thrift, compact: three i32 fields, then perhaps the checksum) has a checksum."""
    if metadata.num_row_groups == 0 or metadata.num_columns == 0 or metadata.num_rows == 0:
        return None
    column = metadata.row_group(0).column(0)
    with open_binary(file) as source:
        source.seek(column.dictionary_page_offset or column.data_page_offset)
        header = source.read(32)
    place = 0
    for _ in range(3):
        place += 1
        while place < len(header) and header[place] & 0x80:
            place += 1
        place += 1
    return header[place : place + 1] == b"\x15"


def _json_schema(file: str, columns: Sequence[str]) -> pa.Schema:
    """Types from the first lines; on past them while a column that is asked for has shown nothing but null."""
    types: dict[str, pa.DataType] = {}
    source, counted = lines.open_lines(file)
    with source:
        records = lines.json_records(counted)
        first = next(records, None)
        if isinstance(first, Bad) and "list, expected" in first:
            raise TableError(f"{file}: a JSON array; write one object per line (JSON lines) instead.")
        for number, record in enumerate(chain([first] if first is not None else [], records), 1):
            if number > TYPED_LINES and not any(pa.types.is_null(types.get(name, pa.int8())) for name in columns):
                break
            if isinstance(record, Bad):
                continue
            for name, value in record.items():
                try:
                    types[name] = values.unify(types.get(name, pa.null()), values.infer(value))
                except ValueError as error:
                    if name in columns:
                        raise TableError(f"{file}: line {number}: the column {name!r} has {error}") from None
    if not types:
        raise TableError(f"{file}: no JSON object in its first lines; JSON lines hold one object per line.")
    return pa.schema([pa.field(name, kind) for name, kind in types.items()])
