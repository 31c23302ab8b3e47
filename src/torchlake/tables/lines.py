"""CSV and JSON lines, record by record, so that a malformed record costs only itself.

The plan's scan and the workers' reading use the same generator, so they agree on where a record begins: `csv.reader` is
fed one line at a time and the bytes of the lines it took are counted. A quoted newline, a byte order mark, CRLF and
blank lines (which are no records) therefore need no rules of their own. Bytes that are not UTF-8 become surrogates and
are found in the values. Price: about a million records per second and core.
"""

import csv
import io
import json
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

from torchlake.errors import TableError
from torchlake.tables.files import open_binary

MARK_BYTES = 1 << 20
MARK_ROWS = 256
MAX_FIELD = 16 << 20
"Characters of a CSV field: an unclosed quote ends here instead of swallowing the file into memory."
BOM = b"\xef\xbb\xbf"
MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}


class Bad(str):
    """In a record's place: why it could not be parsed."""


class Segment(NamedTuple):
    """Consecutive records of a file: the finest places where it can be cut."""

    rows: int
    bytes: int


class CountedLines:
    """Lines of a binary file as text, with the number of bytes handed out so far in `offset`."""

    def __init__(self, lines: BinaryIO, offset: int = 0) -> None:
        self.lines = lines
        self.offset = offset

    def __iter__(self) -> "CountedLines":
        return self

    def __next__(self) -> str:
        line = next(self.lines)
        self.offset += len(line)
        return line.decode("utf-8", "surrogateescape")


def delimiter(file: str) -> str:
    """Tab for `.tsv`, comma otherwise."""
    return "\t" if file.endswith(".tsv") else ","


def csv_records(lines: Iterator[str], delimiter: str) -> Iterator[list[str] | Bad]:
    """The fields of each record, or why it is malformed; blank lines are passed over."""
    csv.field_size_limit(MAX_FIELD)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield Bad(f"bad_csv: {error}")
            continue
        if fields:
            yield fields


def json_records(lines: Iterator[str]) -> Iterator[dict[str, Any] | Bad]:
    """The object in each line, or why there is none; blank lines are passed over."""
    for line in lines:
        if line.isspace():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield Bad(f"bad_json: {str(error)[:200]}")
            continue
        yield value if isinstance(value, dict) else Bad(f"bad_json: {type(value).__name__}, expected an object")


def open_lines(file: str) -> tuple[BinaryIO, CountedLines]:
    """Open a text file behind its byte order mark.

    Raises TableError when it is compressed or UTF-16, saying what to do.
    """
    source = open_binary(file)
    head = source.read(8)
    kind = next((kind for magic, kind in MAGIC.items() if head.startswith(magic)), None)
    if kind is not None:
        source.close()
        raise TableError(f"{file}: compressed with {kind}; text files are read by byte ranges, so decompress it first.")
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        source.close()
        raise TableError(f"{file}: UTF-16; convert it to UTF-8 first (iconv -f UTF-16 -t UTF-8).")
    start = len(BOM) if head.startswith(BOM) else 0
    source.seek(start)
    return source, CountedLines(source, start)


def csv_header(file: str) -> list[str]:
    """The column names. Raises TableError when they are missing, empty, doubled or not UTF-8."""
    source, lines = open_lines(file)
    with source:
        header = next(csv_records(lines, delimiter(file)), None)
    if header is None:
        raise TableError(f"{file}: has no header line")
    if isinstance(header, Bad):
        raise TableError(f"{file}: the header line cannot be read ({header})")
    for place, name in enumerate(header, 1):
        if not name.strip():
            raise TableError(f"{file}: column {place} of the header has no name; name every column")
        if header.count(name) > 1:
            raise TableError(f"{file}: the header names the column {name!r} twice; rename one")
        if not _is_utf8(name):
            raise TableError(f"{file}: the header is not UTF-8; convert the file to UTF-8 first")
    return header


def scan(file: str, format: str, mark_rows: int | None = None) -> tuple[int, list[Segment]]:
    """Where the records lie: the offset in bytes of the first, and segments of at most `mark_rows` records each.

    Memory: 16 bytes per segment.
    """
    source, lines = open_lines(file)
    with source:
        records = csv_records(lines, delimiter(file)) if format == "csv" else _filled_lines(lines)
        if format == "csv":
            next(records)  # the header
        start = begin = lines.offset
        segments, rows = [], 0
        for _ in records:
            rows += 1
            if rows == (mark_rows or MARK_ROWS) or lines.offset - begin >= MARK_BYTES:
                segments.append(Segment(rows, lines.offset - begin))
                begin, rows = lines.offset, 0
        if rows:
            segments.append(Segment(rows, lines.offset - begin))
    return start, segments


def read_records(file: str, format: str, offset: int, size: int) -> Iterator[Any]:
    """The records of a byte range that begins and ends between records."""
    with open_binary(file) as source:
        source.seek(offset)
        content = source.read(size)
    if len(content) != size:
        raise TableError(f"{file}: ends at byte {offset + len(content):,}; it was longer when the job was planned")
    lines = CountedLines(io.BytesIO(content))
    return csv_records(lines, delimiter(file)) if format == "csv" else json_records(lines)


def _filled_lines(lines: Iterator[str]) -> Iterator[str]:
    return (line for line in lines if not line.isspace())


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
