"""Find where the records of a text file begin, in ranges of the file that several processes scan at the same time.

A range is scanned from its first line as if a record began there. That may be inside the quotes of a field; but where a
record ends depends on where it begins and on nothing else, so a scan that began at a wrong line is right from the first
record start that it shares with the true records. `join_ranges` follows these from one range into the next, and scans
again what is before such a place: nothing in JSON lines, and in most CSV files nothing or a few records.

The ranges depend on the file's size alone, so any number of processes finds the same segments.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any, BinaryIO, NamedTuple

from torchlake.tables.formats.lines import (
    SEGMENT_BYTES,
    SEGMENT_ROWS,
    CountedLines,
    Segment,
    csv_header,
    csv_records,
    header_of,
    open_lines,
)
from torchlake.tables.formats.streams import Dialect, is_stream

RANGE_BYTES = 256 << 20
"Bytes of a text file that one process scans."


class TextRange(NamedTuple):
    """A part of a text file that is scanned alone: the records that begin in it."""

    file: str
    format: str
    dialect: Dialect
    segment_rows: int | None
    "Maximum records of a segment; None: `SEGMENT_ROWS`."
    start: int
    stop: int | None
    "None: the end of the file."


class Scanned(NamedTuple):
    """The records of a range, if one begins at `start`."""

    range: TextRange
    start: int
    segments: list[Segment]

    @property
    def ends(self) -> list[int]:
        """The offset at the end of each segment."""
        return [*accumulate((segment.bytes for segment in self.segments), initial=self.start)][1:]


def ranges_of(file: str, format: str, dialect: Dialect, size: int, segment_rows: int | None = None) -> list[TextRange]:
    """Return the ranges of a file of `size` bytes: just one if it can only be read from its beginning."""
    starts = [0] if is_stream(file, dialect) else [*range(0, size, RANGE_BYTES)] or [0]
    return [
        TextRange(file, format, dialect, segment_rows, start, stop)
        for start, stop in zip(starts, [*starts[1:], None], strict=True)
    ]


def scan_range(part: TextRange) -> Scanned:
    """Scan the records that begin in a range, from its first line on. Raises TableError for a bad header."""
    source, lines = open_lines(part.file, part.dialect)
    with source:
        width = None
        if part.start:
            width = len(csv_header(part.file, part.dialect)) if part.format == "csv" else None
            lines.seek(part.start - 1)
            lines.offset += _to_line_end(source)
        elif part.format == "csv":
            width = len(header_of(part.file, lines, part.dialect))
        return Scanned(part, lines.offset, list(_segments(part, lines, width)))


def join_ranges(scanned: Iterable[Scanned]) -> tuple[int, list[Segment]]:
    """Return the offset of a file's first record, and its segments, from all of its ranges in order."""
    first: int | None = None
    at, segments = 0, []
    for one in scanned:
        if first is None:
            first = at = one.start
        if at > one.start and one.segments and at < one.ends[-1]:
            one = _scan_until_shared(one, at)
        if at <= one.start and one.segments:
            assert at == one.start, "the lines before it have no record"
            segments += one.segments
            at = one.ends[-1]
    return first or 0, segments


def _scan_until_shared(one: Scanned, at: int) -> Scanned:
    """Return the records of a range whose first one begins at `at`, scanning up to a segment end that was known."""
    part, ends = one.range, one.ends
    if at in ends:
        return Scanned(part, at, one.segments[ends.index(at) + 1 :])
    width = len(csv_header(part.file, part.dialect)) if part.format == "csv" else None
    source, lines = open_lines(part.file, part.dialect)
    with source:
        lines.seek(at)
        found = list(_segments(part, lines, width, shared=frozenset(ends)))
    place = bisect_left(ends, lines.offset)
    known = one.segments[place + 1 :] if place < len(ends) and ends[place] == lines.offset else []
    return Scanned(part, at, found + known)


def _segments(
    part: TextRange, lines: CountedLines, width: int | None, shared: frozenset[int] = frozenset()
) -> Iterator[Segment]:
    """Yield segments of the records that begin before the end of the range, up to one that ends at one of `shared`."""
    records: Iterator[Any]
    if part.format == "csv":
        records = csv_records(lines, part.file, part.dialect, width)
    else:
        records = (line for line in lines if not line.isspace())
    begin, rows = lines.offset, 0
    if part.stop is not None and begin >= part.stop:
        return
    for _ in records:
        rows += 1
        ends = lines.offset in shared or (part.stop is not None and lines.offset >= part.stop)
        if ends or rows == (part.segment_rows or SEGMENT_ROWS) or lines.offset - begin >= SEGMENT_BYTES:
            yield Segment(rows, lines.offset - begin)
            begin, rows = lines.offset, 0
        if ends:
            return
    if rows:
        yield Segment(rows, lines.offset - begin)


def _to_line_end(source: BinaryIO) -> int:
    """Read to the end of the line; return the number of bytes."""
    size = 0
    while read := source.readline(SEGMENT_BYTES):
        size += len(read)
        if read.endswith(b"\n"):
            break
    return size
