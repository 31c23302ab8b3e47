"""Files of a wanted size, or of one partition each, made from parts before a commit.

Parts stay the unit of retry: a job that was killed continues with its parts, and makes the files again. A file's name
is a hash of the parts in it, so every attempt makes the same file. Cost: one read and one write of the output, spread
over an engine; memory for one file in each process.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from torchlake.atomic_io import digest
from torchlake.errors import StorageError
from torchlake.outputs.parts import Part, PartFolder, delta_statistics, joined_statistics
from torchlake.storage.folders import folder_at
from torchlake.storage.spread import Spread
from torchlake.tables.failures import count_failed

PARTITION_BYTES = 256 << 20
"Bytes of the parts that are split by partition together, if no size is given."

Partition = tuple[tuple[str, str | None], ...]


@dataclass(kw_only=True)
class _File:
    """A file that is being made."""

    sink: pa.BufferOutputStream
    writer: pq.ParquetWriter
    rows: int = 0
    failed: int = 0
    chunks: list[int] = field(default_factory=list)
    members: list[str] = field(default_factory=list)
    statistics: list[str] = field(default_factory=list)


def grouped(
    folder: PartFolder,
    parts: Sequence[Part],
    *,
    size: int | None,
    partition_by: Sequence[str] = (),
    spread: Spread,
) -> list[Part]:
    """Return the files with the rows of `parts`, which are sorted by chunk, of about `size` bytes each.

    Without a size or partitions these are the parts. Raises StorageError when a part is missing.
    """
    if not parts or (size is None and not partition_by):
        return list(parts)
    groups = list(_by_size(parts, size or PARTITION_BYTES))
    work = partial(_joined, folder, tuple(partition_by))
    made = spread(work, groups, size=sum(part.bytes for part in parts), name="write files")
    return [file for files in made for file in files]


def _by_size(parts: Sequence[Part], size: int) -> Iterator[list[Part]]:
    group: list[Part] = []
    total = 0
    for part in parts:
        if group and (total + part.bytes > size or part.members):
            yield group
            group, total = [], 0
        group.append(part)
        total += size if part.members else part.bytes  # a file of an earlier commit stays as it is
    yield group


def _joined(folder: PartFolder, partition_by: tuple[str, ...], parts: Sequence[Part]) -> list[Part]:
    if len(parts) == 1 and not partition_by:
        return [parts[0]]
    files: dict[Partition, _File] = {}
    for part in parts:
        content = folder_at(folder.location).content(part.name)
        if content is None or hashlib.sha256(content).hexdigest() != part.sha256:
            raise StorageError(
                f"{folder.location}/{part.name}: the part is missing or damaged; run the same command again."
            )
        table = pq.read_table(pa.BufferReader(content))
        for partition, rows in _split(table, partition_by):
            if partition not in files:
                sink = pa.BufferOutputStream()
                writer = pq.ParquetWriter(sink, rows.schema, compression="zstd", write_page_checksum=True)
                files[partition] = _File(sink=sink, writer=writer)
            _add(files[partition], part, rows, folder.statistics)
    made = [_finished(folder, partition, file) for partition, file in files.items()]
    return sorted(made, key=lambda part: (part.chunk, part.name))


def _split(table: pa.Table, partition_by: Sequence[str]) -> Iterator[tuple[Partition, pa.Table]]:
    """Yield the rows of each partition, in their order, without the partition columns."""
    if not partition_by:
        yield (), table
        return
    keys = table.select(list(partition_by)).append_column("", pa.array(range(table.num_rows), pa.int64()))
    found = keys.group_by(list(partition_by), use_threads=False).aggregate([("", "list")])
    rest = table.drop_columns(list(partition_by))
    # By row number, because no comparison finds NaN, and a comparison with zero finds both zeros.
    for values in found.to_pylist():
        rows = values.pop("_list")
        yield tuple((name, partition_text(value)) for name, value in values.items()), rest.take(pa.array(rows))


def partition_text(value: Any) -> str | None:
    """Return a partition's value as text, as the log of a Delta table has it."""
    if value is None:
        return None
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return str(value)


def _add(file: _File, part: Part, rows: pa.Table, statistics: bool) -> None:
    file.writer.write_table(rows, row_group_size=max(1, rows.num_rows))
    file.rows += rows.num_rows
    file.failed += count_failed(rows)
    file.chunks.append(part.chunk)
    file.members.append(part.name)
    if statistics:
        file.statistics.append(delta_statistics(rows))


def _finished(folder: PartFolder, partition: Partition, file: _File) -> Part:
    file.writer.close()
    name = f"file-{file.chunks[0]:05d}-{digest([file.members, list(partition)])[:16]}.parquet"
    content = folder.store(name, file.sink.getvalue().to_pybytes(), file.rows, site="file")
    return Part(
        name=f"{folder.below}{name}",
        chunk=file.chunks[0],
        rows=file.rows,
        failed=file.failed,
        sha256=hashlib.sha256(content).hexdigest(),
        bytes=len(content),
        statistics=joined_statistics(file.statistics) if folder.statistics else "",
        chunks=tuple(file.chunks),
        members=tuple(file.members),
        partition=partition,
    )
