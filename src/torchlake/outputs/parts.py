"""A part is one chunk's result: a Parquet file whose name is a hash of everything that determines its rows.

So every attempt at a chunk (a retry, a speculative copy, a late worker) writes to the same name.

Where a table's log has statistics of each file, they are computed while a chunk's rows are in memory, so that a commit
reads no part. Delta's are described in the section "Per-file Statistics" of its specification (delta-io/delta,
PROTOCOL.md).
"""

import datetime
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from torchlake import atomic_io
from torchlake.errors import TableError
from torchlake.storage.folders import folder_at
from torchlake.tables.failures import count_failed
from torchlake.tables.formats.columnar import translate_errors
from torchlake.tables.plan import Chunk, ChunkPlan

TEXT_LENGTH = 32
"Maximum characters of a bound; an upper bound that was cut off ends with LAST, above all strings that begin like it."
LAST = chr(0x10FFFF)
JOBS_ON_ALL_ROWS = ("rank",)
"Jobs in which a row depends on all rows of the input."
TABLE = "table"
"The folder inside the staging folder that becomes the output."


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
    "Statistics of its columns, as JSON, if the table keeps them; not in the commit record."
    chunks: tuple[int, ...] = ()
    "The numbers of the chunks, for a file with the rows of several."
    members: tuple[str, ...] = ()
    "The names of the parts that such a file was made from."
    partition: tuple[tuple[str, str | None], ...] = ()
    "The partition columns and their values as strings, for a file of one partition."

    @property
    def all_chunks(self) -> tuple[int, ...]:
        """The chunks whose rows are in this file."""
        return self.chunks or (self.chunk,)

    def entry(self) -> dict[str, Any]:
        """Return the part in a commit record."""
        value = {name: getattr(self, name) for name in self.__slots__ if name != "statistics"}
        return {name: one for name, one in value.items() if one != ()}


def part_of_entry(entry: Mapping[str, Any]) -> Part:
    """Return the part of an entry in a commit record."""
    several = {name: tuple(entry[name]) for name in ("chunks", "members") if name in entry}
    partition = tuple((name, value) for name, value in entry.get("partition", ()))
    return Part(**{**entry, **several, "partition": partition})


def part_name(plan: ChunkPlan, chunk: Chunk, fingerprint: Mapping[str, Any]) -> str:
    """Return the file name of a chunk's part, "part-00012-<16 hex digits>.parquet".

    It depends on the content of the chunk's file, the chunk's range and the fingerprint, but not on the rest of the
    plan: a part stays valid when files are added to the input. A part of one of JOBS_ON_ALL_ROWS is of one plan only.
    """
    place = [chunk.name, chunk.row_groups, chunk.first_row, chunk.rows, chunk.offset, chunk.bytes]
    content = plan.id if fingerprint.get("job") in JOBS_ON_ALL_ROWS else plan.content_of[chunk.name]
    value = [content, *place, plan.schema.names, fingerprint]
    return f"part-{chunk.index:05d}-{atomic_io.digest(value)[:16]}.parquet"


@dataclass(frozen=True, kw_only=True)
class PartFolder:
    """Where and in which form the parts of a job are written; plain values, so that every engine can send them."""

    location: str
    "A path or URL."
    schema: pa.Schema | None = None
    "The schema that parts are cast to, where a table's types differ from Arrow's."
    statistics: bool = False
    "Whether parts have statistics of their columns, for a table's log."
    below: str = ""
    """The folder inside `location` for this commit's own parts, ending with a slash, where a commit keeps parts of
    earlier ones. No other commit writes or deletes there, so a late writer cannot delete what a later one lists."""

    def write(self, name: str, table: pa.Table, *, chunk: int) -> Part:
        """Write a chunk's rows durably, with page checksums. Workers call it.

        The first attempt wins, and its part is returned: scores may differ in the last digit on another kind of CPU,
        and the driver may already know the first part. Raises StorageError when the disk is full or the folder was
        removed.
        """
        if self.schema is not None:
            table = _cast(table, self.schema, f"{self.location}/{name}")
        content = parquet_bytes(table)
        with translate_errors(f"{self.location}/{name}"):  # Arrow cannot read everything that it writes
            pq.ParquetFile(pa.BufferReader(content)).read()
        stored = self.store(name, content, table.num_rows, site="part")
        found = table if stored is content else _sound(stored, table.num_rows)
        assert found is not None, "what is stored is sound"
        return self.part(name, chunk, found, stored)

    def store(self, name: str, content: bytes, rows: int, *, site: str) -> bytes:
        """Write a Parquet file of `rows` rows durably; return its bytes, or those of a sound file of this name."""
        folder, own = folder_at(self.location), f"{self.below}{name}"
        while not folder.write_new(own, content, site=site):
            # Another attempt was first. Its part wins even if its scores differ in the last digit: the driver may
            # already have its sha256, and replacing it would make the commit record wrong.
            earlier = folder.content(own)
            if earlier is not None and _sound(earlier, rows) is not None:
                return earlier
            # A damaged part is replaced only while it is unchanged, because a third attempt may have done so already;
            # then the loop finds that one's part. A part that was deleted meanwhile is written by the next round.
            if earlier is not None:
                folder.replace_damaged(own, earlier, content, site=site)
        return content

    def find(self, name: str, chunk: int, rows: int) -> Part | None:
        """Return the part of an earlier attempt if it is sound, every page verified; None if missing or damaged."""
        content = folder_at(self.location).content(f"{self.below}{name}")
        table = None if content is None else _sound(content, rows)
        return None if table is None or content is None else self.part(name, chunk, table, content)

    def part(self, name: str, chunk: int, table: pa.Table, content: bytes) -> Part:
        """Return the part with these rows, whose file has this content."""
        return Part(
            name=f"{self.below}{name}",
            chunk=chunk,
            rows=table.num_rows,
            failed=count_failed(table),
            sha256=hashlib.sha256(content).hexdigest(),
            bytes=len(content),
            statistics=delta_statistics(table) if self.statistics else "",
        )


def parquet_bytes(table: pa.Table) -> bytes:
    """Return rows as a Parquet file with page checksums."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _sound(content: bytes, rows: int) -> pa.Table | None:
    """Return the rows of a Parquet file, every page verified; None if it is damaged or does not have `rows` rows."""
    try:
        table = pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True).read()
    except (pa.ArrowException, OSError):
        return None
    return table if table.num_rows == rows else None


def stored_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema of a Parquet file written with `schema`, as it is read. Raises TableError if it cannot be."""
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
    """Return the column names and types as text."""
    return ", ".join(f"{field.name} {field.type}" for field in schema)


def _cast(table: pa.Table, schema: pa.Schema, where: str) -> pa.Table:
    """Return the rows cast to other types. Raises TableError for a value that its new type cannot hold."""
    try:
        return table.cast(schema)
    except ValueError as error:  # ArrowInvalid is a ValueError; a null in a required column raises a plain one
        raise TableError(
            f"{where}: a value cannot be stored in the table's format: {error}. Leave the column out, or convert it."
        ) from error


def delta_statistics(table: pa.Table) -> str:
    """Return the statistics of a file with these rows, as JSON.

    Either every column has both bounds, or none has any: if some columns have bounds, delta-rs takes a missing one for
    null, and a filter then finds no row of the file (`DeltaTable.to_pyarrow_dataset`). Nested columns have none.
    """
    low: dict[str, Any] = {}
    high: dict[str, Any] = {}
    nulls = {}
    complete = True
    for field in table.schema:
        if pa.types.is_nested(field.type):
            continue
        column = table[field.name]
        nulls[field.name] = column.null_count
        if column.null_count < len(column):
            low[field.name], high[field.name] = _bounds(column)
            complete = complete and low[field.name] is not None and high[field.name] is not None
    return _statistics(table.num_rows, nulls, low, high, complete)


def joined_statistics(several: Sequence[str]) -> str:
    """Return the statistics of all rows, from those of their parts: they have bounds if every part has them."""
    parts = [json.loads(one, parse_float=Decimal) for one in several]
    nulls: dict[str, int] = {}
    low: dict[str, Any] = {}
    high: dict[str, Any] = {}
    for part in parts:
        for name, count in part["nullCount"].items():
            nulls[name] = nulls.get(name, 0) + count
        for name, value in part.get("minValues", {}).items():
            low[name] = min(low[name], value) if name in low else value
        for name, value in part.get("maxValues", {}).items():
            high[name] = max(high[name], value) if name in high else value
    complete = all("minValues" in part for part in parts)
    return _statistics(sum(part["numRecords"] for part in parts), nulls, low, high, complete)


def _statistics(
    rows: int, nulls: Mapping[str, int], low: Mapping[str, Any], high: Mapping[str, Any], complete: bool
) -> str:
    bounds = f', "minValues": {_json(low)}, "maxValues": {_json(high)}' if complete else ""
    return f'{{"numRecords": {rows}{bounds}, "nullCount": {_json(nulls)}}}'


def _json(values: Mapping[str, Any]) -> str:
    """Return the values as JSON: decimals with all digits and no exponent, and strings without escapes.

    delta-rs misreads a character that takes two escapes (a surrogate pair).
    """
    entries = (
        f"{json.dumps(name, ensure_ascii=False)}: "
        + (f"{value:f}" if isinstance(value, Decimal) else json.dumps(value, ensure_ascii=False))
        for name, value in values.items()
    )
    return "{" + ", ".join(entries) + "}"


def _bounds(column: pa.ChunkedArray) -> tuple[Any, Any]:
    """Return the lowest and highest value as a log stores them; None for a value that it cannot store."""
    kind = column.type
    if pa.types.is_floating(kind):
        if pc.any(pc.is_nan(column)).as_py():
            return None, None
        found = pc.min_max(column).as_py()
        # Some readers order -0.0 before 0.0, so the bounds include both.
        low, high = found["min"] or -0.0, found["max"] or 0.0
        return low if math.isfinite(low) else None, high if math.isfinite(high) else None
    if pa.types.is_timestamp(kind) or pa.types.is_date32(kind):
        units = column.cast(pa.timestamp("us", kind.tz) if pa.types.is_timestamp(kind) else pa.int32())
        found = pc.min_max(units.cast(pa.int64())).as_py()
        text = _date if pa.types.is_date32(kind) else partial(_time, zone="Z" if kind.tz else "")
        return text(found["min"], lowest=True), text(found["max"], lowest=False)
    known = (
        pa.types.is_integer,
        pa.types.is_boolean,
        pa.types.is_decimal,
        pa.types.is_string,
        pa.types.is_large_string,
    )
    if not any(is_kind(kind) for is_kind in known):
        return None, None
    found = pc.min_max(column).as_py()
    if isinstance(found["min"], str):
        return found["min"][:TEXT_LENGTH], _cut(found["max"])
    return found["min"], found["max"]


def _cut(text: str) -> str | None:
    """Return a string of about TEXT_LENGTH characters that is not lower; None if no string is."""
    if len(text) <= TEXT_LENGTH:
        return text
    return None if text[TEXT_LENGTH] == LAST else text[:TEXT_LENGTH] + LAST


def _date(days: int, *, lowest: bool) -> str | None:
    try:
        return (datetime.date(1970, 1, 1) + datetime.timedelta(days=days)).isoformat()
    except OverflowError:
        return None


def _time(microseconds: int, *, lowest: bool, zone: str) -> str | None:
    """Round the lowest time down and the highest up, to the milliseconds that logs have."""
    milliseconds = microseconds // 1000 if lowest else -(-microseconds // 1000)
    try:
        found = datetime.datetime(1970, 1, 1) + datetime.timedelta(milliseconds=milliseconds)
    except OverflowError:
        return None
    return found.isoformat(timespec="milliseconds") + zone
