"""The plan of a job: a table split into chunks, fixed ranges of rows, before any work starts.

The chunks depend on the table alone, not on processes or engine, so a job that is run again finds the same chunks.
Each is part of one file. In Parquet and Arrow files a big row group is split evenly and small ones are joined; text
files are split between records. Chunks of slow rows are smaller (`RowCost`). Cost: one pass over text files, the
footers of others, and one sha256 of every local file; memory 16 bytes per 256 text records.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from torchlake.atomic_io import digest
from torchlake.errors import TableError
from torchlake.storage.spread import Spread, each_file, in_process
from torchlake.storage.urls import is_url
from torchlake.storage.versions import Version, content_ids, settled_version_of, version_of
from torchlake.tables.formats.layout import MAX_BYTES, SplitCandidates, split_candidates, text_candidates
from torchlake.tables.formats.lines import Segment
from torchlake.tables.formats.scanning import ranges_of, scan_range
from torchlake.tables.plan import Chunk, ChunkPlan, InputFile, Split, new_chunk
from torchlake.tables.reading import ChunkReader
from torchlake.tables.selecting import RowSelector
from torchlake.tables.selection.conditions import columns_of
from torchlake.tables.sources._interface import View
from torchlake.tables.table import Table, check_columns

TEXT = ("csv", "jsonl")
CHUNKS = 64
MIN_ROWS, MAX_ROWS = 1024, 32768
FIRST_ROWS = 32
CHUNK_S = 300.0
"Expected seconds of a chunk of slow rows."
FEWEST_ROWS, MOST_CHUNKS = 4, 4096
"Slow rows share a batch, and each chunk is a file: fewer rows, or more chunks, only if single rows are that slow."


@dataclass(frozen=True, kw_only=True)
class RowCost:
    """What a row costs where each takes long: the texts of a model that writes.

    It is an estimate from the job alone, never a measured speed: a job that is run again has to find the same chunks.
    """

    row_s: float = 0.0
    "Seconds of a row, besides those of its bytes."
    byte_s: float = 0.0
    "Seconds of each byte."

    def limits(self, rows: int, size: int) -> tuple[int, int]:
        """Return the most rows and bytes of a chunk of a table of `rows` rows and `size` bytes."""
        mean = size / max(1, rows)
        seconds = max(self.row_s + self.byte_s * mean, 1e-9)
        most = max(1, rows // MOST_CHUNKS, min(max(rows // CHUNKS, FEWEST_ROWS), MIN_ROWS, int(CHUNK_S / seconds)))
        return most, min(MAX_BYTES, max(1, int(2 * most * mean))) if self.byte_s and size else MAX_BYTES

    @property
    def segment_rows(self) -> int:
        """Rows between two places where a text file may be split."""
        return min(FEWEST_ROWS, max(1, int(CHUNK_S / max(self.row_s, 1e-9))))


def plan_chunks(
    table: Table,
    *,
    columns: Sequence[str],
    chunk_rows: int | RowCost | None = None,
    cached: Sequence[InputFile] = (),
    hashed: bool = True,
    spread: Spread = in_process,
) -> ChunkPlan:
    """Split `table` into chunks of `chunk_rows` rows, by default 1/64 of it, from 1,024 to 32,768; at most 16 MiB each.

    Slow rows, with a cost for `chunk_rows`: 1/64 of the table, from 1 to 1,024 rows that take at most `CHUNK_S`.

    A file's sha256 is taken from `cached` if its path and version are the same. `hashed=False` computes none, for
    plans whose rows are only read. `spread` hashes files and scans text. Raises TableError when a column is missing, or
    a file cannot be read or is changing.
    """
    check_columns(table.source, columns, table.schema)
    serialized = pa.schema([table.schema.field(name) for name in columns]).serialize().to_pybytes()
    known = {(one.path, one.version): one.sha256 for one in cached}
    remote = any(map(is_url, table.files))
    # Take the versions before the scan, so that rows appended later count as a change.
    versions = list(each_file(settled_version_of, table.files, remote=remote))
    files, left_out = _selected(table, versions, columns, chunk_rows, spread)
    paths, versions = [one.path for one, _ in files], [one.version for one, _ in files]
    contents = [known.get((one.path, one.version)) for one, _ in files]
    if hashed:
        contents = content_ids(paths, versions, contents, spread)
    after = each_file(version_of, paths, remote=remote)
    inputs, splits = [], []
    for (one, chosen), now, sha256 in zip(files, after, contents, strict=True):
        if now != one.version:
            raise TableError(
                f"{one.path}: changed while it was being planned. Run the same command again once nothing writes to it."
            )
        planned = _selected_file(replace(one, sha256=sha256 or ""), chosen)
        inputs.append(planned)
        splits += [(planned, each) for each in chosen]
    chunks = tuple(
        new_chunk(index, file, table.format, serialized, split) for index, (file, split) in enumerate(splits)
    )
    return ChunkPlan(
        inputs=tuple(inputs),
        chunks=chunks,
        serialized=serialized,
        rows=sum(one.rows for one in inputs),
        sources=table.sources,
        selection={**table.options.asked, **left_out},
    )


def _selected(
    table: Table, versions: Sequence[Version], columns: Sequence[str], wanted_rows: int | RowCost | None, spread: Spread
) -> tuple[list[tuple[InputFile, list[Split]]], dict[str, Any]]:
    """Return the files that have rows to read, with all of their rows counted; their splits; and what is left out.

    With a limit, files are scanned until it is reached, and the size of chunks comes from it.
    """
    of_condition = columns_of(table.condition) if table.condition is not None else ()
    wanted, views = tuple(dict.fromkeys((*columns, *of_condition))), _views(table, columns)
    selector, unread = RowSelector(table, _views(table, of_condition)), table.unread_files
    limit, size = table.options.selection.limit, 0
    chunk_rows = wanted_rows.segment_rows if isinstance(wanted_rows, RowCost) else wanted_rows
    scanned: Iterable[SplitCandidates | None] = [None] * len(table.files)
    if limit is None:
        scanned = found = _split_candidates(table, versions, wanted, chunk_rows, selector, spread)
        limit = sum(segment.rows for one in found for segment in one.segments)
        size = sum(segment.bytes for one in found for segment in one.segments)
    if isinstance(wanted_rows, RowCost):
        most = wanted_rows.limits(limit, size)
    else:
        most = chunk_rows or min(max(limit // CHUNKS, MIN_ROWS), MAX_ROWS), MAX_BYTES
    files = []
    for file, name, version, candidates in zip(table.files, table.names, versions, scanned, strict=True):
        if candidates is None and selector.full:
            unread += 1
            continue
        one = candidates or _candidates_of(_to_scan(table, file, version, wanted, chunk_rows))
        planned = InputFile(
            path=file,
            name=name,
            version=version,
            sha256="",
            rows=sum(segment.rows for segment in one.segments),
            checksums=one.checksums,
            view=views.get(file, ""),
        )
        split = split_text(one, *most) if table.format in TEXT else split_row_groups(one.segments, *most)
        chosen = list(selector.select(planned, split))
        if chosen or not table.options.selection.asked:
            files.append((planned, chosen))
    selector.close()
    left_out = {reason: rows for reason, rows in selector.left_out.items() if rows}
    return files, {**({"left_out": left_out} if left_out else {}), **({"unread_files": unread} if unread else {})}


def _split_candidates(
    table: Table,
    versions: Sequence[Version],
    columns: Sequence[str],
    chunk_rows: int | None,
    selector: RowSelector,
    spread: Spread,
) -> list[SplitCandidates]:
    """Return where each file can be split; text is scanned, and a large file in several ranges at the same time."""
    if table.format in TEXT:
        ranges = [
            ranges_of(file, table.format, table.options.csv, version.size, chunk_rows)
            for file, version in zip(table.files, versions, strict=True)
        ]
        size = sum(version.size for version in versions)
        scanned = spread(scan_range, [one for each in ranges for one in each], size=size, name="scan the text")
        with closing(scanned):
            return [text_candidates(islice(scanned, len(each))) for each in ranges]
    files = [
        _to_scan(table, file, version, columns, chunk_rows, sampled=selector.may_select(file))
        for file, version in zip(table.files, versions, strict=True)
    ]
    return list(each_file(_candidates_of, files, remote=any(map(is_url, table.files))))


def _to_scan(
    table: Table, file: str, version: Version, columns: Sequence[str], chunk_rows: int | None, *, sampled: bool = True
) -> tuple[Any, ...]:
    """Return the arguments of `split_candidates`."""
    footer, stored = table.footers.get(file), _stored(table, file, columns)
    return file, table.format, version, footer, stored, chunk_rows, table.options.csv, sampled


def _candidates_of(file: tuple[Any, ...]) -> SplitCandidates:
    return split_candidates(*file)


def _views(table: Table, columns: Sequence[str]) -> dict[str, str]:
    """Return the views of the files as JSON, with these columns only: others do not change what is read."""
    return {
        file: View(
            constants={name: value for name, value in view.constants.items() if name in columns},
            names={name: stored for name, stored in view.names.items() if name in columns},
            csv=view.csv,
        ).to_json()
        for file, view in table.views.items()
    }


def _stored(table: Table, file: str, columns: Sequence[str]) -> Sequence[str]:
    """Return the file's own names of the columns that it has."""
    view = table.views.get(file)
    if view is None:
        return columns
    return [view.names.get(name, name) for name in columns if name not in view.constants]


def _selected_file(file: InputFile, splits: Sequence[Split]) -> InputFile:
    """Return the file with the rows that are read of it, and what identifies these rows."""
    rows = sum(split.rows for split in splits)
    if rows == file.rows:
        return file
    ranges = [(split.first_row, split.rows, hashlib.sha256(split.skipped).hexdigest()) for split in splits]
    return replace(file, rows=rows, selected=digest(ranges))


def split_row_groups(groups: Sequence[Segment], size: int, max_bytes: int = MAX_BYTES) -> Iterator[Split]:
    """Make chunks of row groups: split big ones evenly, and join small neighbors while they fit."""
    first_row = first = joined = joined_bytes = 0
    for place, group in enumerate(groups):
        whole = group.rows <= size and group.bytes <= max_bytes
        if joined and (not whole or joined + group.rows > size or joined_bytes + group.bytes > max_bytes):
            yield Split(first_row, joined, (first, place - first), first_row)
            first_row, first, joined, joined_bytes = first_row + joined, place, 0, 0
        if whole:
            joined, joined_bytes = joined + group.rows, joined_bytes + group.bytes
        else:
            count = min(group.rows, max(_ceil_div(group.rows, size), _ceil_div(group.bytes, max_bytes)))
            for part in range(count):
                start, stop = group.rows * part // count, group.rows * (part + 1) // count
                yield Split(first_row + start, stop - start, (place, 1), first_row)
            first_row, first = first_row + group.rows, place + 1
    if joined:
        yield Split(first_row, joined, (first, len(groups) - first), first_row)


def split_text(file: SplitCandidates, size: int, max_bytes: int = MAX_BYTES) -> Iterator[Split]:
    """Make chunks of about equal rows from a text file's segments: at most `size` rows and, unless it is one segment,
    `max_bytes`."""
    total = sum(segment.rows for segment in file.segments)
    count = max(_ceil_div(total, size), _ceil_div(sum(segment.bytes for segment in file.segments), max_bytes))
    target = _ceil_div(total, count)
    first_row, offset, rows, length = 0, file.start, 0, 0
    for segment in file.segments:
        if rows and (rows + segment.rows > size or length + segment.bytes > max_bytes or rows >= target):
            yield Split(first_row, rows, offset=offset, bytes=length)
            first_row, offset, rows, length = first_row + rows, offset + length, 0, 0
        rows, length = rows + segment.rows, length + segment.bytes
    if rows:
        yield Split(first_row, rows, offset=offset, bytes=length)


def _ceil_div(amount: int, size: int) -> int:
    """Return `amount / size`, rounded up; at least 1."""
    return max(1, -(-amount // size))


SAMPLED_CHUNK_ROWS = 1_024
SAMPLED_CHUNKS = 32


def sample_rows(table: Table, columns: Sequence[str]) -> tuple[pa.Table, dict[int, str], ChunkPlan]:
    """Return the columns of about 32,768 rows in the table's order, all of a smaller table, the reasons of unreadable
    ones, and the plan."""
    plan = plan_chunks(table, columns=columns, chunk_rows=SAMPLED_CHUNK_ROWS, hashed=False)
    reader, pieces, unreadable, first = ChunkReader(columns), [plan.schema.empty_table()], dict[int, str](), 0
    for chunk in sampled_chunks(plan):
        rows, bad = reader.read(chunk)
        unreadable |= {first + row: reason for row, reason in bad.items()}
        pieces.append(rows)
        first += len(rows)
    reader.close()
    return pa.concat_tables(pieces[1:] or pieces), unreadable, plan


def first_rows(table: Table, columns: Sequence[str]) -> pa.Table:
    """Return the columns of a few rows: those at the beginning of the first file."""
    if not table.files:
        return table.schema.empty_table().select(list(columns))
    one = replace(table, files=table.files[:1], names=table.names[:1])
    plan, reader = plan_chunks(one, columns=columns, chunk_rows=FIRST_ROWS, hashed=False), ChunkReader(columns)
    rows = reader.read(plan.chunks[0])[0] if plan.chunks else plan.schema.empty_table()
    reader.close()
    return rows


def sampled_chunks(plan: ChunkPlan) -> list[Chunk]:
    """Return the chunks of the rows in a sample: more of them where chunks are small."""
    chunks = plan.chunks
    wanted = max(SAMPLED_CHUNKS, SAMPLED_CHUNKS * SAMPLED_CHUNK_ROWS * len(chunks) // max(1, plan.rows))
    return [chunks[place] for place in evenly_spaced(len(chunks), min(len(chunks), wanted))]


def evenly_spaced(rows: int, wanted: int) -> np.ndarray:
    """Return `wanted` positions spread evenly over `rows`: the middles of as many equal parts."""
    return ((np.arange(wanted) + 0.5) * rows / max(1, wanted)).astype(np.int64)
