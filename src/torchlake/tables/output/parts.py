"""A part is one chunk's result: a Parquet file whose name is a hash of everything that determines its rows.

So every attempt at a chunk, by a retry, a speculative copy or a late worker, writes to the same name.

For tables whose log has statistics of each file, they are computed while a chunk's rows are in memory, so that a commit
reads no part; Delta's are in the section "Per-file Statistics" of its specification (delta-io/delta, PROTOCOL.md).
"""

import datetime
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from torchlake import atomic_io
from torchlake.errors import TableError
from torchlake.tables.formats.columnar import translate_errors
from torchlake.tables.output.failures import count_failed
from torchlake.tables.plan import Chunk, Plan
from torchlake.tables.storage.folders import folder_at

TEXT_LENGTH = 32
"Of the texts whose bounds are kept. A lowest value may be cut off; a highest one that is longer has no bound."


TABLE = "table"
"The folder in the staging folder that becomes the output."


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A chunk's file: its rows, how many of them have an `error`, its sha256 and size."""

    name: str
    chunk: int
    rows: int
    failed: int
    sha256: str
    bytes: int
    statistics: str = ""
    "Of its columns, as JSON, if its table keeps them; not in the commit record."
    chunks: tuple[int, ...] = ()
    "Of a file with the rows of several chunks, their numbers."
    members: tuple[str, ...] = ()
    "The names of the parts that such a file was made from."
    partition: tuple[tuple[str, str | None], ...] = ()
    "Of a file of one partition, the columns and their values as text."

    @property
    def all_chunks(self) -> tuple[int, ...]:
        """The chunks whose rows it has."""
        return self.chunks or (self.chunk,)

    def entry(self) -> dict[str, Any]:
        """The part in a commit record."""
        value = {name: getattr(self, name) for name in self.__slots__ if name != "statistics"}
        return {name: one for name, one in value.items() if one != ()}


def part_of_entry(entry: Mapping[str, Any]) -> Part:
    """The part of an entry in a commit record."""
    several = {name: tuple(entry[name]) for name in ("chunks", "members") if name in entry}
    partition = tuple((name, value) for name, value in entry.get("partition", ()))
    return Part(**{**entry, **several, "partition": partition})


def part_name(plan: Plan, chunk: Chunk, fingerprint: Mapping[str, Any]) -> str:
    """The file name of a chunk's part, "part-00012-<16 hex digits>.parquet".

    It depends on the content of the chunk's file, the chunk's range and the fingerprint, but not on the rest of the
    plan: a part stays valid when files are added to the input.
    """
    place = [chunk.name, chunk.row_groups, chunk.first_row, chunk.rows, chunk.offset, chunk.bytes]
    value = [plan.content_of[chunk.name], *place, plan.schema.names, fingerprint]
    return f"part-{chunk.index:05d}-{atomic_io.fingerprint(value)[:16]}.parquet"


@dataclass(frozen=True, kw_only=True)
class PartFolder:
    """Where the parts of a job are written, and in which form; plain values, so that every engine can send them."""

    location: str
    "A path or URL."
    schema: pa.Schema | None = None
    "Parts are cast to it, where a table has other types than Arrow."
    statistics: bool = False
    "Parts have statistics of their columns, for a table's log."

    def write(self, name: str, table: pa.Table, *, chunk: int) -> Part:
        """Write a chunk's rows durably, with page checksums. Called in workers.

        The first attempt wins, and its part is returned: scores may differ in the last digit on another kind of CPU,
        and the driver may already know the first part. Raises StorageError when the disk is full or the folder is gone.
        """
        if self.schema is not None:
            table = _cast(table, self.schema, f"{self.location}/{name}")
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
        content, folder = sink.getvalue().to_pybytes(), folder_at(self.location)
        with translate_errors(f"{self.location}/{name}"):  # Arrow cannot read everything that it writes
            pq.ParquetFile(pa.BufferReader(content)).read()
        while not folder.write_new(name, content, site="part"):
            part = self.find(name, chunk, table.num_rows)
            if part is not None:
                return part
            folder.delete([name])  # damaged
        return self._part(name, chunk, table, content)

    def find(self, name: str, chunk: int, rows: int) -> Part | None:
        """The sound part of an earlier attempt, every page verified; None if it is not there or damaged."""
        content = folder_at(self.location).content(name)
        if content is None:
            return None
        try:
            table = pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True).read()
        except (pa.ArrowException, OSError):
            return None
        return self._part(name, chunk, table, content) if table.num_rows == rows else None

    def _part(self, name: str, chunk: int, table: pa.Table, content: bytes) -> Part:
        return Part(
            name=name,
            chunk=chunk,
            rows=table.num_rows,
            failed=count_failed(table),
            sha256=hashlib.sha256(content).hexdigest(),
            bytes=len(content),
            statistics=delta_statistics(table) if self.statistics else "",
        )


def stored_schema(schema: pa.Schema) -> pa.Schema:
    """The schema that a Parquet file written with `schema` has when read. Raises TableError if it cannot be written."""
    sink = pa.BufferOutputStream()
    try:
        pq.write_table(pa.Table.from_batches([], schema), sink)  # empty_table() would import pandas
    except pa.ArrowException as error:
        raise TableError(
            f"a column cannot be written to Parquet: {error}. The columns are {schema_in_words(schema)}. Leave it out, "
            "or convert it."
        ) from error
    return pq.read_schema(pa.BufferReader(sink.getvalue())).remove_metadata()


def schema_in_words(schema: pa.Schema) -> str:
    """Column names and types."""
    return ", ".join(f"{field.name} {field.type}" for field in schema)


def _cast(table: pa.Table, schema: pa.Schema, where: str) -> pa.Table:
    """The rows with other types. Raises TableError for a value that another type cannot hold."""
    try:
        return table.cast(schema)
    except pa.ArrowInvalid as error:
        raise TableError(
            f"{where}: a value cannot be kept by the table's format: {error}. Leave the column out, or convert it."
        ) from error


def delta_statistics(table: pa.Table) -> str:
    """The statistics of a file with these rows, as JSON."""
    low: dict[str, Any] = {}
    high: dict[str, Any] = {}
    nulls = {}
    for field in table.schema:
        if pa.types.is_nested(field.type):  # statistics of structs are by field; none are kept
            continue
        column = table[field.name]
        nulls[field.name] = column.null_count
        bounds = _bounds(column) if column.null_count < len(column) else None
        if bounds is not None:
            low[field.name], high[field.name] = bounds
    low = {name: value for name, value in low.items() if value is not None}
    high = {name: value for name, value in high.items() if value is not None}
    return json.dumps({"numRecords": table.num_rows, "minValues": low, "maxValues": high, "nullCount": nulls})


def joined_statistics(several: Sequence[str]) -> str:
    """The statistics of all rows, from those of their parts: a column has bounds if every part with values has them."""
    parts = [json.loads(one) for one in several]
    nulls: dict[str, int] = {}
    for part in parts:
        for name, count in part["nullCount"].items():
            nulls[name] = nulls.get(name, 0) + count
    joined: dict[str, dict[str, Any]] = {"minValues": {}, "maxValues": {}}
    for bound, choose in (("minValues", min), ("maxValues", max)):
        for name in nulls:
            filled = [part for part in parts if part["nullCount"].get(name) != part["numRecords"]]
            if filled and all(name in part[bound] for part in filled):
                joined[bound][name] = choose(part[bound][name] for part in filled)
    return json.dumps({"numRecords": sum(part["numRecords"] for part in parts), **joined, "nullCount": nulls})


def _bounds(column: pa.ChunkedArray) -> tuple[Any, Any] | None:
    """The lowest and highest value as in a log; None for types that have none."""
    kind = column.type
    known = (pa.types.is_integer, pa.types.is_floating, pa.types.is_string, pa.types.is_large_string)
    times = (pa.types.is_date32, pa.types.is_timestamp, pa.types.is_decimal)
    if not any(is_kind(kind) for is_kind in (*known, *times)):
        return None
    if pa.types.is_floating(kind) and pc.any(pc.is_nan(column)).as_py():
        return None
    found = pc.min_max(column).as_py()
    return _text(found["min"], lowest=True), _text(found["max"], lowest=False)


def _text(value: Any, *, lowest: bool) -> Any:
    """A bound as JSON; None if it has none."""
    if isinstance(value, str):
        return value[:TEXT_LENGTH] if lowest or len(value) <= TEXT_LENGTH else None
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Decimal):
        return float(value) if Decimal(float(value)) == value else None
    if isinstance(value, datetime.datetime):
        # Logs have milliseconds: the lowest is rounded down, the highest up.
        cut = value.replace(microsecond=value.microsecond // 1000 * 1000)
        if not lowest and cut != value:
            cut += datetime.timedelta(milliseconds=1)
        return (
            cut.astimezone(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            if (value.tzinfo)
            else cut.isoformat(timespec="milliseconds")
        )
    return value.isoformat() if isinstance(value, datetime.date) else value
