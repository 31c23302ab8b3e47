"""A part is one chunk's result: a Parquet file whose name is a hash of everything that determines its rows.

So every attempt at a chunk, by a retry, a speculative copy or a late worker, writes to the same name.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from torchlake import atomic_io
from torchlake.errors import TableError
from torchlake.tables.formats.columnar import translate_errors
from torchlake.tables.output.failures import count_failed
from torchlake.tables.plan import Chunk, Plan

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


def part_name(plan: Plan, chunk: Chunk, fingerprint: Mapping[str, Any]) -> str:
    """The file name of a chunk's part, "part-00012-<16 hex digits>.parquet".

    It depends on the content of the chunk's file, the chunk's range and the fingerprint, but not on the rest of the
    plan: a part stays valid when files are added to the input.
    """
    place = [chunk.name, chunk.row_groups, chunk.first_row, chunk.rows, chunk.offset, chunk.bytes]
    value = [plan.content_of[chunk.name], *place, plan.schema.names, fingerprint]
    return f"part-{chunk.index:05d}-{atomic_io.fingerprint(value)[:16]}.parquet"


def write_part(staging: Path, name: str, table: pa.Table, *, chunk: int) -> Part:
    """Write a chunk's rows durably into the staging folder, with page checksums. Called in workers.

    The first attempt wins, and its part is returned: scores may differ in the last digit on another kind of CPU, and
    the driver may already know the first part. Raises StorageError when the disk is full or the folder is gone.
    """
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    content, path = sink.getvalue().to_pybytes(), staging / TABLE / name
    with translate_errors(str(path)):  # Arrow cannot read everything that it writes
        pq.ParquetFile(pa.BufferReader(content)).read()
    while not atomic_io.write_new_bytes(path, content, site="part"):
        part = read_part(path, chunk, table.num_rows)
        if part is not None:
            return part
        path.unlink(missing_ok=True)  # damaged
    return _part(name, chunk, table, content)


def part_of_lost_attempt(staging: Path, name: str, chunk: Chunk) -> Part | None:
    """The sound part of an earlier attempt whose result did not reach the driver, or None."""
    path = staging / TABLE / name
    return read_part(path, chunk.index, chunk.rows) if path.exists() else None


def read_part(path: Path, chunk: int, rows: int) -> Part | None:
    """The part in `path`, every page verified; None if it is damaged or does not have `rows` rows."""
    content = path.read_bytes()
    try:
        table = pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True).read()
    except (pa.ArrowException, OSError):
        return None
    return _part(path.name, chunk, table, content) if table.num_rows == rows else None


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


def _part(name: str, chunk: int, table: pa.Table, content: bytes) -> Part:
    return Part(
        name=name,
        chunk=chunk,
        rows=table.num_rows,
        failed=count_failed(table),
        sha256=hashlib.sha256(content).hexdigest(),
        bytes=len(content),
    )
