"""Parquet and Arrow files: their footers, where they can be cut, and readers that stream in constant memory.

A Parquet footer is read once, by one request to an object store. Extension types that may run code are looked for in
its raw bytes before pyarrow sees it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from torchlake.errors import TableError
from torchlake.tables.formats import extensions
from torchlake.tables.formats.lines import Segment
from torchlake.tables.sources.files import open_binary, read_range
from torchlake.tables.sources.urls import is_url
from torchlake.tables.sources.versions import Version

ARROW_MAGIC = b"ARROW1\0\0"
TAIL_BYTES = 1 << 16  # of a Parquet file, read at once: most footers are shorter
SAMPLED_GROUPS, SAMPLED_ROWS = 4, 64
# INT96 has nanoseconds of any day in 5.8 million years. In nanoseconds, pyarrow's default, days outside 1677 to 2262
# become others without an error, and Hive and Spark write such days to mean "for ever".
_INT96 = {"coerce_int96_timestamp_unit": "us"}


class Footer(NamedTuple):
    """What a Parquet file says of itself."""

    version: Version
    "Of the file, when its footer was read."
    schema: pa.Schema
    columns: tuple[str, ...]
    "Whose bytes are counted in `groups`."
    groups: list[Segment]
    "Rows and uncompressed bytes of each row group."
    checksums: bool | None
    "Whether pages carry checksums; None where there is no page."


def parquet_footer(file: str, version: Version, columns: Sequence[str]) -> Footer:
    """Read the footer of a file of that version; `columns` (all, when none are named) are those whose bytes count.

    Raises TableError when it is not a whole Parquet file, UnsafeError for extension types that may run code.
    """
    tail = read_range(file, max(0, version.size - TAIL_BYTES), version.size)
    length = extensions.footer_length(file, tail, version.size)
    if length + 8 > len(tail):
        tail = read_range(file, version.size - length - 8, version.size)
    footer = tail[len(tail) - length - 8 : -8]
    extensions.check_footer(file, footer)
    with translate_errors(file):
        alone = pa.BufferReader(b"PAR1" + footer + tail[-8:])
        parquet = pq.ParquetFile(alone, **_INT96)
        schema, metadata = parquet.schema_arrow, parquet.metadata
    wanted = tuple(columns) or tuple(schema.names)
    return Footer(version, schema, wanted, _row_groups(metadata, wanted), _has_checksums(file, version, metadata))


@contextmanager
def open_parquet(file: str) -> Iterator[pq.ParquetFile]:
    """A Parquet file that is streamed in constant memory with its page checksums verified."""
    extensions.check_parquet(file)
    with translate_errors(file):
        source = pa.PythonFile(open_binary(file), mode="r") if is_url(file) else file
        parquet = pq.ParquetFile(
            source, page_checksum_verification=True, pre_buffer=False, buffer_size=1 << 20, **_INT96
        )
    with parquet:
        yield parquet


def parquet_batches(
    file: str, parquet: pq.ParquetFile, groups: Sequence[int], columns: Sequence[str], rows: int
) -> Iterator[pa.RecordBatch]:
    """Batches of at most so many rows. Raises TableError for an INT96 timestamp with less than microseconds."""
    read = partial(pq.ParquetFile.iter_batches, batch_size=rows, row_groups=list(groups), use_threads=False)
    schema = parquet.metadata.schema
    stored = (schema.column(place) for place in range(len(schema)))
    int96 = {column.path.partition(".")[0] for column in stored if column.physical_type == "INT96"} & {*columns}
    batches = read(parquet, columns=list(columns))
    if not int96:
        yield from batches
        return
    with translate_errors(file):
        source = pa.PythonFile(open_binary(file), mode="r") if is_url(file) else file
        exact = pq.ParquetFile(source, pre_buffer=False, buffer_size=1 << 20)
    with exact:
        for batch, nanoseconds in zip(batches, read(exact, columns=sorted(int96)), strict=True):
            for name in int96 & {field.name for field in batch.schema if pa.types.is_timestamp(field.type)}:
                _check_no_digit_is_lost(file, name, batch[name], nanoseconds[name])
            yield batch


def sampled_size(file: str, footer: Footer, most_bytes: int) -> float:
    """By how much the rows of dictionary-encoded strings are larger in memory than in the file, at least 1.

    A text that many rows share is there once in the file. A few rows of a few row groups say how large rows are; none
    has to where a group would have at most `most_bytes` if each of its rows were as large as the whole group.
    """
    if all(rows * size <= most_bytes for rows, size in footer.groups):
        return 1.0
    with open_parquet(file) as parquet:
        metadata, worst = parquet.metadata, 1.0
        for group in range(0, metadata.num_row_groups, max(1, metadata.num_row_groups // SAMPLED_GROUPS)):
            described = metadata.row_group(group)
            if described.num_rows == 0 or not _has_dictionaries(described, footer.columns):
                continue
            try:
                batches = parquet.iter_batches(
                    SAMPLED_ROWS, row_groups=[group], columns=list(footer.columns), use_threads=False
                )
                batch = next(batches)
            except (pa.ArrowException, OSError, StopIteration):  # damaged: whoever reads these rows names them
                continue
            decoded = (one.dictionary_decode() if pa.types.is_dictionary(one.type) else one for one in batch.columns)
            in_memory = sum(column.nbytes for column in decoded) / batch.num_rows * described.num_rows
            worst = max(worst, in_memory / max(1, footer.groups[group].bytes))
    return worst


@contextmanager
def open_arrow(
    file: str, columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatchFileReader | pa.RecordBatchStreamReader]:
    """An Arrow IPC file (random access) or stream (in order); only `columns`, where named, are decompressed.

    An IPC file whose footer mentions extension types is read as the stream it contains: the footer's copy of the schema
    was not looked at, the stream's was. Nothing is memory-mapped: a mapped file that is written to changes rows that
    were read before.
    """
    with open_binary(file) as source:
        is_file = source.read(8) == ARROW_MAGIC
    extended = extensions.check_ipc_stream(file, len(ARROW_MAGIC) if is_file else 0)
    if is_file and (extended or extensions.ipc_footer_has_extensions(file)):
        is_file, start = False, len(ARROW_MAGIC)
    else:
        start = 0
    open_reader: Callable[..., pa.RecordBatchFileReader | pa.RecordBatchStreamReader]
    open_reader = pa.ipc.open_file if is_file else pa.ipc.open_stream
    with (
        pa.PythonFile(open_binary(file), mode="r") if is_url(file) else pa.OSFile(file) as source,
        translate_errors(file),
    ):
        source.seek(start)
        reader = open_reader(source)
        if columns is not None:
            # An empty list would mean all columns.
            places = [place for place, name in enumerate(reader.schema.names) if name in columns] or [0]
            source.seek(start)
            reader = open_reader(source, options=pa.ipc.IpcReadOptions(included_fields=places))
        yield reader


def is_random_access(reader: pa.RecordBatchFileReader | pa.RecordBatchStreamReader) -> bool:
    """Whether the batches can be read in any order."""
    return isinstance(reader, pa.RecordBatchFileReader)


def arrow_batches(file: str, columns: Sequence[str]) -> list[Segment]:
    """Rows and bytes of each record batch: the columns are decompressed once for that."""
    with open_arrow(file, columns) as reader:
        batches = (
            (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_random_access(reader) else reader
        )
        with translate_errors(file):
            return [Segment(batch.num_rows, batch.nbytes if columns else 0) for batch in batches]


@contextmanager
def translate_errors(file: str, where: str = "") -> Iterator[None]:
    """What pyarrow or the storage says inside becomes a TableError that names the file (and the rows)."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        damaged = " The file is damaged; restore it." if "CRC" in str(error) or "checksum" in str(error) else ""
        raise TableError(f"{file}{where}: cannot be read: {error}.{damaged}") from error


def _row_groups(metadata: pq.FileMetaData, columns: Sequence[str]) -> list[Segment]:
    if metadata.num_row_groups == 0:
        return []
    first = metadata.row_group(0)
    paths = [first.column(i).path_in_schema for i in range(first.num_columns)]
    names = {*columns}
    wanted = [i for i, path in enumerate(paths) if path in names or path.partition(".")[0] in names]
    groups = (metadata.row_group(i) for i in range(metadata.num_row_groups))
    return [Segment(group.num_rows, sum(group.column(i).total_uncompressed_size for i in wanted)) for group in groups]


def _has_dictionaries(group: pq.RowGroupMetaData, columns: Sequence[str]) -> bool:
    found = (group.column(i) for i in range(group.num_columns))
    return any(
        column.has_dictionary_page
        and column.physical_type == "BYTE_ARRAY"
        and column.path_in_schema.partition(".")[0] in columns
        for column in found
    )


def _has_checksums(file: str, version: Version, metadata: pq.FileMetaData) -> bool | None:
    """Whether the first page's header (Thrift, compact: three i32 fields, then perhaps the checksum) has a checksum."""
    if metadata.num_row_groups == 0 or metadata.num_columns == 0 or metadata.num_rows == 0:
        return None
    column = metadata.row_group(0).column(0)
    first = column.dictionary_page_offset or column.data_page_offset
    header = read_range(file, first, min(first + 32, version.size))
    place = 0
    for _ in range(3):
        place += 1
        while place < len(header) and header[place] & 0x80:
            place += 1
        place += 1
    return header[place : place + 1] == b"\x15"


def _check_no_digit_is_lost(file: str, name: str, column: pa.Array, exact: pa.Array) -> None:
    """Raise TableError where a timestamp within the range of nanoseconds has some that microseconds do not."""
    microseconds, nanoseconds = (one.cast(pa.int64()).fill_null(0).to_numpy() for one in (column, exact))
    in_range = abs(microseconds) < 2**63 // 1000
    if (in_range & (nanoseconds // 1000 * 1000 != nanoseconds)).any():
        raise TableError(
            f"{file}: the column {name!r} has INT96 timestamps with nanoseconds, which cannot be read without loss. "
            "Write it as TIMESTAMP."
        )
