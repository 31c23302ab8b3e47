"""CSV and JSON lines, record by record: a malformed record affects only its own line.

The plan's scan and the workers' reading use the same generators, and where a record ends does not depend on the records
before it, so both agree on where records begin in a damaged file. A CSV line that ends inside quotes continues on the
next lines if these complete a record with as many fields as the header; otherwise that line alone is a bad record.
Blank lines are skipped, except in a CSV file with one column, where each is an empty field: polars and pyarrow write
nulls this way. Bytes that are not UTF-8 become surrogates, and are found when values are converted.

Cost: about a million records per second and core, and the memory of one record. In a damaged file a line may be read
again for each line before it that ends inside quotes, at most `2 * columns + 1` times: too many fields end the search.
"""

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count
from typing import Any, BinaryIO, NamedTuple, cast

from torchlake.errors import TableError
from torchlake.storage.access import open_binary
from torchlake.tables.formats.streams import BOM, Dialect, Replay, TextRanges, is_stream, open_stream
from torchlake.tables.formats.values import is_utf8

SEGMENT_BYTES = 1 << 20
SEGMENT_ROWS = 256
MAX_FIELD = 16 << 20
"Maximum characters of a CSV field: the search for a closing quote ends there."
MAX_COLUMNS = 1 << 16
MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}


class BadRecord(str):
    """The reason why a record could not be parsed, in place of the record."""


class Segment(NamedTuple):
    """The size of consecutive records; a file is split only between segments."""

    rows: int
    bytes: int


class CountedLines:
    """The lines of a binary file as text; `offset` is the position in the file after the last line."""

    def __init__(self, source: BinaryIO | Replay, offset: int = 0) -> None:
        self.source = source
        self.offset = offset

    def __iter__(self) -> Iterator[str]:
        for line in self.source:
            self.offset += len(line)
            yield line.decode("utf-8", "surrogateescape")

    def seek(self, offset: int) -> None:
        """Move to the line that begins at `offset`."""
        self.source.seek(offset)
        self.offset = offset


def csv_records(lines: CountedLines, file: str, dialect: Dialect, width: int | None) -> Iterator[list[str] | BadRecord]:
    """Yield the `width` fields (None: any number) of each record, or why its first line is malformed."""
    csv.field_size_limit(MAX_FIELD)
    delimiter, quote = dialect.delimiter_of(file), dialect.quote
    parse = partial(csv.reader, delimiter=delimiter, quotechar=quote, strict=True)
    most, ends_field = width or MAX_COLUMNS, f"{quote}{delimiter}".encode()
    begin = ended = 0
    if not isinstance(lines.source, Replay) and not lines.source.seekable():
        lines.source = Replay(lines.source, lines.offset)
    forget = lines.source.forget if isinstance(lines.source, Replay) else None

    def texts() -> Iterator[str]:
        """Yield the lines, until the record that began at `begin` has too many fields."""
        nonlocal ended
        for line in lines.source:
            text = line.decode("utf-8", "surrogateescape")
            if lines.offset != begin and ends_field in line:
                ended += (
                    1 if ended < most else _fields_ended_in(text, parse, quote)
                )  # most records end before a line needs parsing
                if ended >= 2 * most:
                    return
            lines.offset += len(line)
            yield text

    read = parse(texts()).__next__
    while True:
        begin, ended = lines.offset, 0
        if forget is not None:
            forget()
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
            yield _bad_line(next(iter(lines)), parse, quote, width)
            read = parse(texts()).__next__
        elif fields:
            yield fields
        elif width == 1:
            yield [""]


def _fields_ended_in(text: str, parse: Callable[[Iterable[str]], Any], quote: str) -> int:
    """Return how many fields end in a line that begins inside one field's quotes and ends inside another's."""
    try:
        return len(next(parse([quote, text, quote]))) - 1
    except csv.Error:
        return 0


def _bad_line(line: str, parse: Callable[[Iterable[str]], Any], quote: str, width: int | None) -> BadRecord:
    """Return why a line is not a record, by the line alone, so that chunks of any size give the same reason."""
    reader = parse([line, quote])
    try:
        fields = next(reader)
    except csv.Error as error:
        return BadRecord(f"bad_csv: {error}")
    if reader.line_num > 1:
        return BadRecord("bad_csv: the line ends inside quotes, and the lines after it do not complete the record")
    return BadRecord(f"bad_csv: {len(fields)} fields, expected {width}")


def json_records(lines: CountedLines) -> Iterator[dict[str, Any] | BadRecord]:
    """Yield the object in each line, or why the line has none; skip blank lines."""
    for line in lines:
        if line.isspace():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield BadRecord(f"bad_json: {str(error)[:200]}")
            continue
        yield value if isinstance(value, dict) else BadRecord(f"bad_json: {type(value).__name__}, expected an object")


def open_lines(file: str, dialect: Dialect) -> tuple[BinaryIO, CountedLines]:
    """Open a text file after its byte order mark.

    Raises TableError when it is compressed and its name does not show that, or UTF-16 without being declared as such.
    """
    if is_stream(file, dialect):
        source = open_stream(file, dialect)
        return source, CountedLines(source)
    source = open_binary(file)
    if not isinstance(source, io.BufferedReader):  # fsspec files are a hundred times slower to find a line
        source = io.BufferedReader(cast(io.RawIOBase, source), SEGMENT_BYTES)
    head = source.read(8)
    kind = next((kind for magic, kind in MAGIC.items() if head.startswith(magic)), None)
    if kind is not None:
        source.close()
        raise TableError(
            f"{file}: compressed with {kind}, but its name does not show it. Rename it to end with .gz, .bz2 or .zst, "
            "or decompress it."
        )
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        source.close()
        raise TableError(
            f"{file}: is UTF-16. Give the encoding of a CSV file (--csv encoding=utf-16), or convert the file to UTF-8 "
            "(iconv -f UTF-16 -t UTF-8)."
        )
    start = len(BOM) if head.startswith(BOM) else 0
    source.seek(start)
    return source, CountedLines(source, start)


def csv_header(file: str, dialect: Dialect) -> list[str]:
    """Return the column names. An empty first name becomes "Unnamed: 0": pandas writes its index without a name.

    Raises TableError when names are missing, empty, duplicate or not UTF-8.
    """
    source, lines = open_lines(file, dialect)
    with source:
        return header_of(file, lines, dialect)


def read_records(
    ranges: TextRanges, file: str, format: str, dialect: Dialect, offset: int, size: int, width: int | None = None
) -> Iterator[Any]:
    """Return the records of a byte range that begins and ends between records; a CSV file has `width` columns."""
    content = ranges.read(file, dialect, offset, offset + size)
    if len(content) != size:
        raise TableError(f"{file}: ends at byte {offset + len(content):,}, but was longer when the job was planned")
    lines = CountedLines(io.BytesIO(content))
    return csv_records(lines, file, dialect, width) if format == "csv" else json_records(lines)


def header_of(file: str, lines: CountedLines, dialect: Dialect) -> list[str]:
    """Return the column names; `lines` continue after them."""
    header = next(csv_records(lines, file, dialect, None), None)
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
            raise TableError(
                f"{file}: the header is not {dialect.encoding}. Give the encoding of the file, such as --csv "
                "encoding=latin-1, in a job data.csv: {encoding: latin-1}."
            )
    return header
