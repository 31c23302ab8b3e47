"""CSV and JSON lines, record by record, so that a malformed record costs only its own line.

The plan's scan and the workers' reading use the same generators, and where a record ends depends on nothing before it.
So they agree on where records begin, whatever the damage. A CSV line that ends inside quotes goes on in the lines after
it, if these complete a record of as many fields as the header has. If not, that line alone is a bad record, and the
next line begins another. Blank lines are no records; but where the header has one column, each is an empty field, as
polars and pyarrow write a null. Bytes that are not UTF-8 become surrogates and are found in the values.

Cost: about a million records per second and core, and the memory of one record. In a damaged file a line may be read
again for each line before it that ends inside quotes, at most `2 * columns + 1` times: where both lines alone end
inside quotes, the record of the first ends a field in the second, and too many fields end the search.
"""

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count
from typing import Any, BinaryIO, NamedTuple, cast

from torchlake.errors import TableError
from torchlake.tables.formats.values import is_utf8
from torchlake.tables.sources.files import open_binary

SEGMENT_BYTES = 1 << 20
SEGMENT_ROWS = 256
MAX_FIELD = 16 << 20
"Characters of a CSV field: how far a quote that is never closed can be followed."
MAX_COLUMNS = 1 << 16
BOM = b"\xef\xbb\xbf"
MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}


class BadRecord(str):
    """In a record's place: why it could not be parsed."""


class Segment(NamedTuple):
    """Consecutive records of a file: the finest places where it can be cut."""

    rows: int
    bytes: int


class CountedLines:
    """Lines of a binary file as text, with the place in the file behind the last of them in `offset`."""

    def __init__(self, source: BinaryIO, offset: int = 0) -> None:
        self.source = source
        self.offset = offset

    def __iter__(self) -> Iterator[str]:
        for line in self.source:
            self.offset += len(line)
            yield line.decode("utf-8", "surrogateescape")

    def seek(self, offset: int) -> None:
        """Go on with the line that begins at `offset`."""
        self.source.seek(offset)
        self.offset = offset


def delimiter(file: str) -> str:
    """Tab for `.tsv`, comma otherwise."""
    return "\t" if file.lower().endswith(".tsv") else ","


def csv_records(lines: CountedLines, delimiter: str, width: int | None) -> Iterator[list[str] | BadRecord]:
    """The fields of each record, `width` of them (any number for None), or why its first line is malformed."""
    csv.field_size_limit(MAX_FIELD)
    parse = partial(csv.reader, delimiter=delimiter, strict=True)
    most, ends_field = width or MAX_COLUMNS, f'"{delimiter}'.encode()
    begin = ended = 0

    def texts() -> Iterator[str]:
        """The lines, until the record that began at `begin` goes on through too many fields."""
        nonlocal ended
        for line in lines.source:
            text = line.decode("utf-8", "surrogateescape")
            if lines.offset != begin and ends_field in line:
                ended += 1 if ended < most else _fields_ended_in(text, parse)  # most records end before any is parsed
                if ended >= 2 * most:
                    return
            lines.offset += len(line)
            yield text

    read = parse(texts()).__next__
    while True:
        begin, ended = lines.offset, 0
        fields: list[str] | None
        try:
            fields = read()
        except StopIteration:
            return
        except csv.Error:
            fields = None
        if fields is not None and len(fields) == width:
            yield fields
        elif fields is None or (fields and width is not None):
            lines.seek(begin)
            yield _why_bad(next(iter(lines)), parse, width)
            read = parse(texts()).__next__
        elif fields:
            yield fields
        elif width == 1:
            yield [""]


def _fields_ended_in(text: str, parse: Callable[[Iterable[str]], Any]) -> int:
    """How many fields a line ends that begins inside quotes and ends inside those of another field."""
    try:
        return len(next(parse(['"', text, '"']))) - 1
    except csv.Error:
        return 0


def _why_bad(line: str, parse: Callable[[Iterable[str]], Any], width: int | None) -> BadRecord:
    """Why a line is no record; only the line itself says so, thus chunks of any size give the same reason."""
    reader = parse([line, '"'])
    try:
        fields = next(reader)
    except csv.Error as error:
        return BadRecord(f"bad_csv: {error}")
    if reader.line_num > 1:
        return BadRecord("bad_csv: the line ends inside quotes, and the lines after it do not complete the record")
    return BadRecord(f"bad_csv: {len(fields)} fields, expected {width}")


def json_records(lines: CountedLines) -> Iterator[dict[str, Any] | BadRecord]:
    """The object in each line, or why there is none; blank lines are passed over."""
    for line in lines:
        if line.isspace():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield BadRecord(f"bad_json: {str(error)[:200]}")
            continue
        yield value if isinstance(value, dict) else BadRecord(f"bad_json: {type(value).__name__}, expected an object")


def open_lines(file: str) -> tuple[BinaryIO, CountedLines]:
    """Open a text file behind its byte order mark.

    Raises TableError when it is compressed or UTF-16, saying what to do.
    """
    source = open_binary(file)
    if not isinstance(source, io.BufferedReader):  # an object's file takes a hundred times as long to find a line
        source = io.BufferedReader(cast(io.RawIOBase, source), SEGMENT_BYTES)
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
    """The column names; a first one that is empty becomes "Unnamed: 0", as pandas names the index that it writes.

    Raises TableError when they are missing, empty, doubled or not UTF-8.
    """
    source, lines = open_lines(file)
    with source:
        return _header(file, lines)


def scan(file: str, format: str, segment_rows: int | None = None) -> tuple[int, list[Segment]]:
    """Where the records lie: the offset in bytes of the first, and segments of at most `segment_rows` records each.

    Memory: 16 bytes per segment.
    """
    source, lines = open_lines(file)
    with source:
        records: Iterator[Any]
        if format == "csv":
            records = csv_records(lines, delimiter(file), len(_header(file, lines)))
        else:
            records = (line for line in lines if not line.isspace())
        start = begin = lines.offset
        segments, rows = [], 0
        for _ in records:
            rows += 1
            if rows == (segment_rows or SEGMENT_ROWS) or lines.offset - begin >= SEGMENT_BYTES:
                segments.append(Segment(rows, lines.offset - begin))
                begin, rows = lines.offset, 0
        if rows:
            segments.append(Segment(rows, lines.offset - begin))
    return start, segments


def read_records(file: str, format: str, offset: int, size: int, width: int | None = None) -> Iterator[Any]:
    """The records of a byte range that begins and ends between records; `width` is the number of a CSV's columns."""
    with open_binary(file) as source:
        source.seek(offset)
        content = source.read(size)
    if len(content) != size:
        raise TableError(f"{file}: ends at byte {offset + len(content):,}; it was longer when the job was planned")
    lines = CountedLines(io.BytesIO(content))
    return csv_records(lines, delimiter(file), width) if format == "csv" else json_records(lines)


def _header(file: str, lines: CountedLines) -> list[str]:
    """The column names; `lines` go on behind them."""
    header = next(csv_records(lines, delimiter(file), None), None)
    if header is None:
        raise TableError(f"{file}: has no header line")
    if isinstance(header, BadRecord):
        raise TableError(f"{file}: the header line cannot be read ({header})")
    if header[0] == "" and len(header) > 1:
        numbered = (f"Unnamed: 0.{number}" if number else "Unnamed: 0" for number in count())
        header[0] = next(name for name in numbered if name not in header)
    for place, name in enumerate(header, 1):
        if not name.strip():
            raise TableError(f"{file}: column {place} of the header has no name; name every column")
        if header.count(name) > 1:
            raise TableError(f"{file}: the header names the column {name!r} twice; rename one")
        if not is_utf8(name):
            raise TableError(f"{file}: the header is not UTF-8; convert the file to UTF-8 first")
    return header
