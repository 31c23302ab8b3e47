"""Parquet and Arrow files: footers, the sizes of row groups and batches, and readers that stream in constant memory.

A Parquet footer is read once, by one request to an object store, and checked for extension types that may run code
before pyarrow parses it.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from torchlake.errors import TableError
from torchlake.storage.access import open_binary, read_range
from torchlake.storage.errors import unavailable
from torchlake.storage.urls import is_url
from torchlake.storage.versions import Version
from torchlake.tables.formats import extensions
from torchlake.tables.formats.lines import Segment
from torchlake.tables.selection.bounds import UNKNOWN, Bounds

ARROW_MAGIC = b"ARROW1\0\0"
TAIL_BYTES = 1 << 16  # of a Parquet file, read by one request: most footers are shorter
SAMPLED_GROUPS, SAMPLED_ROWS = 4, 64
# In nanoseconds, pyarrow's default, INT96 timestamps outside the years 1677 to 2262 overflow silently; Hive and Spark
# users write such dates to mean "forever".
_INT96 = {"coerce_int96_timestamp_unit": "us"}


class Footer(NamedTuple):
    """The parsed footer of a Parquet file."""

    version: Version
    "Version of the file when its footer was read."
    schema: pa.Schema
    columns: tuple[str, ...]
    "The columns whose bytes are counted in `groups`."
    groups: list[Segment]
    "Rows and uncompressed bytes of each row group."
    checksums: bool | None
    "Whether pages have checksums; None if there is no page."
    bounds: Mapping[str, Bounds] = MappingProxyType({})
    "Statistics of the requested columns in each row group."


def parquet_footer(file: str, version: Version, columns: Sequence[str], bounded: Sequence[str] = ()) -> Footer:
    """Read a file's footer, counting the bytes of `columns` (if empty, of all), with the statistics of `bounded`.

    Raises TableError when it is not a complete Parquet file, UnsafeError for extension types that may run code.
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
        extensions.check_columns(metadata, version.size)
        wanted = tuple(columns) or tuple(schema.names)
        bounds = {name: found for name in bounded if (found := _bounds(metadata, schema, name)) is not None}
        checksums = _has_checksums(file, version, metadata)
        return Footer(version, schema, wanted, _row_groups(metadata, wanted), checksums, bounds)


@contextmanager
def open_parquet(file: str) -> Iterator[pq.ParquetFile]:
    """Check a Parquet file, and open it for streaming in constant memory with page checksums verified."""
    with open_native(file) as source:
        with translate_errors(file):
            extensions.check_parquet(file, source)
            parquet = pq.ParquetFile(
                source, page_checksum_verification=True, pre_buffer=False, buffer_size=1 << 20, **_INT96
            )
        yield parquet


def parquet_batches(
    file: str, parquet: pq.ParquetFile, groups: Sequence[int], columns: Sequence[str], rows: int
) -> Iterator[pa.RecordBatch]:
    """Yield batches of at most `rows` rows. Raises TableError for an INT96 timestamp finer than a microsecond."""
    read = partial(pq.ParquetFile.iter_batches, batch_size=rows, row_groups=list(groups), use_threads=False)
    schema = parquet.metadata.schema
    stored = (schema.column(place) for place in range(len(schema)))
    int96 = {column.path.partition(".")[0] for column in stored if column.physical_type == "INT96"} & {*columns}
    batches = read(parquet, columns=list(columns))
    if not int96:
        yield from batches
        return
    with open_native(file) as source:
        with translate_errors(file):
            exact = pq.ParquetFile(source, pre_buffer=False, buffer_size=1 << 20)
        for batch, nanoseconds in zip(batches, read(exact, columns=sorted(int96)), strict=True):
            for name in int96 & {field.name for field in batch.schema if pa.types.is_timestamp(field.type)}:
                _check_microseconds(file, name, batch[name], nanoseconds[name])
            yield batch


def sampled_size(file: str, footer: Footer, most_bytes: int) -> float:
    """Return the ratio of bytes in memory to bytes in the file, at least 1: a dictionary stores repeated strings once.

    The ratio is estimated from a few rows of a few row groups. No estimate is made if no group could exceed
    `most_bytes`, even if each of its rows were as large as the whole group.
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
            except (pa.ArrowException, OSError, StopIteration):  # damage is reported when these rows are read
                continue
            decoded = (one.dictionary_decode() if pa.types.is_dictionary(one.type) else one for one in batch.columns)
            in_memory = sum(column.nbytes for column in decoded) / batch.num_rows * described.num_rows
            worst = max(worst, in_memory / max(1, footer.groups[group].bytes))
    return worst


@contextmanager
def open_arrow(
    file: str, columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatchFileReader | pa.RecordBatchStreamReader]:
    """Check and open an Arrow IPC file (random access) or stream; only `columns`, if given, are decompressed.

    An IPC file whose footer mentions extension types is read as the stream it contains, because only the stream's
    schema was checked, not the copy in the footer. Nothing is memory-mapped: if a mapped file is written to, rows that
    were read before change.
    """
    open_reader: Callable[..., pa.RecordBatchFileReader | pa.RecordBatchStreamReader] = pa.ipc.open_stream
    with open_native(file) as source, translate_errors(file):
        is_file = source.read(8) == ARROW_MAGIC
        start = len(ARROW_MAGIC) if is_file else 0
        extended = extensions.check_ipc_stream(file, source, start)
        if is_file and not extended and not extensions.ipc_footer_has_extensions(file, source):
            open_reader, start = pa.ipc.open_file, 0
        source.seek(start)
        reader = open_reader(source)
        if columns is not None:
            # An empty list means all columns.
            places = [place for place, name in enumerate(reader.schema.names) if name in columns] or [0]
            source.seek(start)
            reader = open_reader(source, options=pa.ipc.IpcReadOptions(included_fields=places))
        yield reader


def record_batches(
    reader: pa.RecordBatchFileReader | pa.RecordBatchStreamReader, first: int = 0, count: int | None = None
) -> Iterator[pa.RecordBatch]:
    """Return `count` batches (None: all) from `first` on, or fewer if the file ends."""
    stop = None if count is None else first + count
    if isinstance(reader, pa.RecordBatchFileReader):
        return map(reader.get_batch, range(reader.num_record_batches)[first:stop])
    return islice(reader, first, stop)


def arrow_segments(file: str, columns: Sequence[str]) -> list[Segment]:
    """Return the rows and bytes of each record batch; decompresses the columns."""
    with open_arrow(file, columns) as reader:
        return [Segment(batch.num_rows, batch.nbytes if columns else 0) for batch in record_batches(reader)]


def open_native(file: str) -> pa.NativeFile:
    """Open a local file or a URL for pyarrow. Raises Unavailable when it cannot be opened."""
    if is_url(file):
        return pa.PythonFile(open_binary(file), mode="r")
    try:
        return pa.OSFile(file)
    except OSError as error:
        raise unavailable(file, OSError(error.errno, os.strerror(error.errno)) if error.errno else error) from error


@contextmanager
def translate_errors(file: str, where: str = "") -> Iterator[None]:
    """Turn errors of pyarrow and the storage into TableErrors that name the file (and the rows)."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # a damaged name is not UTF-8
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


def _bounds(metadata: pq.FileMetaData, schema: pa.Schema, name: str) -> Bounds | None:
    """Return a column's statistics in each row group; None for nested columns and types whose statistics are not used.

    Nanoseconds and decimals are left out, because Python's values for them differ from Arrow's.
    """
    if name not in schema.names or metadata.num_row_groups == 0:
        return None
    groups, kind = [metadata.row_group(i) for i in range(metadata.num_row_groups)], schema.field(name).type
    place = next((i for i in range(groups[0].num_columns) if groups[0].column(i).path_in_schema == name), None)
    plain = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    plain = plain or kind in (pa.string(), pa.large_string(), pa.date32())
    plain = plain or (pa.types.is_timestamp(kind) and kind.unit != "ns")
    if place is None or not plain:
        return None
    stored = metadata.schema.column(place).physical_type
    # Statistics of a type that is not the column's are damaged, and to look at them would end the process.
    if stored == "INT96" or any(group.column(place).physical_type != stored for group in groups):
        return None
    found = [group.column(place).statistics if group.column(place).is_stats_set else None for group in groups]
    known = [one if one is not None and one.has_min_max else None for one in found]
    try:
        return Bounds(
            lowest=pa.array([None if one is None else one.min for one in known], kind),
            highest=pa.array([None if one is None else one.max for one in known], kind),
            nulls=np.array([UNKNOWN if one is None or not one.has_null_count else one.null_count for one in found]),
            rows=np.array([group.num_rows for group in groups]),
        )
    except (pa.ArrowException, UnicodeDecodeError, OverflowError, TypeError):  # a damaged statistic rules nothing out
        return None


def _has_dictionaries(group: pq.RowGroupMetaData, columns: Sequence[str]) -> bool:
    found = (group.column(i) for i in range(group.num_columns))
    return any(
        column.has_dictionary_page
        and column.physical_type == "BYTE_ARRAY"
        and column.path_in_schema.partition(".")[0] in columns
        for column in found
    )


def _has_checksums(file: str, version: Version, metadata: pq.FileMetaData) -> bool | None:
    """Return whether the first page's header has a checksum (Thrift compact: an optional field after three i32)."""
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


def _check_microseconds(file: str, name: str, column: pa.Array, exact: pa.Array) -> None:
    """Raise TableError if a timestamp that fits in nanoseconds is not a whole number of microseconds."""
    microseconds, nanoseconds = (one.cast(pa.int64()).fill_null(0).to_numpy() for one in (column, exact))
    in_range = abs(microseconds) < 2**63 // 1000
    if (in_range & (nanoseconds // 1000 * 1000 != nanoseconds)).any():
        raise TableError(
            f"{file}: the column {name!r} has INT96 timestamps with nanoseconds, which cannot be read without loss. "
            "Write the column as TIMESTAMP."
        )
