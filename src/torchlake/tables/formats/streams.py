"""Text files that are read from their beginning: compressed ones, and those in an encoding other than UTF-8.

Their content is decompressed and converted to UTF-8 while it is read; offsets count the bytes after that. A reader
moves forward only, so a chunk costs what comes before it in the file, unless the same reader has read the chunk before
it: with P processes a file is decompressed up to P times. Memory is constant.
"""

import codecs
import io
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, BinaryIO, cast

import pyarrow as pa

from torchlake.errors import TableError, UsageError
from torchlake.storage.access import open_binary, read_range

BLOCK = 1 << 20
BOM = b"\xef\xbb\xbf"
MAX_LINE = 256 << 20
"Maximum bytes of a line: a few kilobytes can decompress to gigabytes without the end of a line."
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """How a CSV file is written. Raises UsageError for an invalid value."""

    delimiter: str | None = None
    "One character between fields; None: a tab in `.tsv` files, else a comma."
    quote: str = '"'
    "One character around a field, doubled inside it."
    encoding: str = "utf-8"
    "An encoding that Python has, such as latin-1, cp1252 or utf-16."

    def __post_init__(self) -> None:
        for name in ("delimiter", "quote"):
            value = getattr(self, name)
            if value is not None and (len(value) != 1 or value in "\r\n"):
                raise UsageError(f"csv: {name} must be one character, got {value!r}.")
        if self.delimiter == self.quote:
            raise UsageError(f"csv: delimiter and quote are both {self.quote!r}; they must differ.")
        try:
            known = codecs.lookup(self.encoding)
        except LookupError:
            known = None
        if known is None or not getattr(known, "_is_text_encoding", True):
            raise UsageError(f"csv: there is no encoding {self.encoding!r}; common ones are utf-8, latin-1 and utf-16.")

    @cached_property
    def is_utf8(self) -> bool:
        """Whether the file is read as it is."""
        return codecs.lookup(self.encoding).name in ("utf-8", "ascii", "utf-8-sig")

    @cached_property
    def given(self) -> dict[str, str]:
        """The values that are not the default, for records."""
        default = asdict(Dialect())
        return {name: value for name, value in asdict(self).items() if value != default[name]}

    def delimiter_of(self, file: str) -> str:
        """Return the character between the fields of a file."""
        return self.delimiter or ("\t" if plain_name(file).endswith(".tsv") else ",")


def plain_name(file: str) -> str:
    """Return the name in lower case, without the extension of a compression that is read."""
    stem, extension = os.path.splitext(file.lower())
    return stem if extension in COMPRESSIONS else file.lower()


def is_stream(file: str, dialect: Dialect) -> bool:
    """Return whether a text file can only be read from its beginning."""
    return os.path.splitext(file.lower())[1] in COMPRESSIONS or not dialect.is_utf8


def open_stream(file: str, dialect: Dialect) -> BinaryIO:
    """Return the file as UTF-8 without a byte order mark. Reading raises TableError when it is damaged or cut short."""
    return io.BufferedReader(cast(io.RawIOBase, _Blocks(_blocks(file, dialect))), BLOCK)


class TextRanges:
    """A reader of byte ranges of text files; streams are fastest in ascending order."""

    def __init__(self) -> None:
        self._of: tuple[str, Dialect] | None = None
        self._source: BinaryIO | None = None
        self._at = 0

    def read(self, file: str, dialect: Dialect, start: int, stop: int) -> bytes:
        """Return the bytes from `start` to `stop`, fewer if the file ends."""
        if not is_stream(file, dialect):
            return read_range(file, start, stop)
        if self._source is None or self._of != (file, dialect) or start < self._at:
            self.close()
            self._source, self._of, self._at = open_stream(file, dialect), (file, dialect), 0
        while self._at < start and (skipped := self._source.read(min(BLOCK, start - self._at))):
            self._at += len(skipped)
        content = self._source.read(stop - start)
        self._at += len(content)
        return content

    def close(self) -> None:
        """Close the open stream, if any."""
        if self._source is not None:
            self._source.close()
        self._source = None


class Replay:
    """A forward-only source made seekable, back to the line where `forget` was last called."""

    def __init__(self, source: BinaryIO, offset: int) -> None:
        self.source, self.offset = source, offset
        self.kept: deque[tuple[int, bytes]] = deque()
        self.ahead: deque[bytes] = deque()

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        line = self.ahead.popleft() if self.ahead else next(self.source)
        self.kept.append((self.offset, line))
        self.offset += len(line)
        return line

    def forget(self) -> None:
        """Drop the lines before this place."""
        self.kept.clear()

    def seek(self, offset: int) -> None:
        """Move to the line that begins at `offset`."""
        while self.kept and self.kept[-1][0] >= offset:
            self.offset, line = self.kept.pop()
            self.ahead.appendleft(line)


class _Blocks(io.RawIOBase):
    """A file of the bytes that an iterator yields."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self.blocks, self.left = blocks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.left:
            block = next(self.blocks, None)
            if block is None:
                return 0
            self.left = memoryview(block)
        count = min(len(buffer), len(self.left))
        buffer[:count], self.left = self.left[:count], self.left[count:]
        return count

    def close(self) -> None:
        if not self.closed:
            self.blocks.close()  # type: ignore[attr-defined]
        super().close()


def _blocks(file: str, dialect: Dialect) -> Iterator[bytes]:
    """Yield the file's content, decompressed and converted, without the byte order mark."""
    compression = COMPRESSIONS.get(os.path.splitext(file.lower())[1])
    decoder = None if dialect.is_utf8 else codecs.getincrementaldecoder(dialect.encoding)("surrogateescape")
    begun, line = False, 0
    with open_binary(file) as raw:
        stream: Any = raw if compression is None else pa.CompressedInputStream(pa.PythonFile(raw, "r"), compression)
        while True:
            try:
                text = block = stream.read(BLOCK)
                if decoder is not None:  # bytes that are invalid in the encoding stay as they are
                    text = decoder.decode(block, final=not block).encode("utf-8", "surrogateescape")
            except UnicodeError as error:
                raise TableError(
                    f"{file}: is not {dialect.encoding}: {error}. Give its encoding (--csv encoding=NAME)."
                ) from error
            except (OSError, pa.ArrowException) as error:
                raise TableError(
                    f"{file}: cannot be decompressed ({compression}): {error}. It is damaged or cut short; restore it."
                ) from error
            end = text.rfind(b"\n") + 1
            line = len(text) - end + (0 if end else line)
            if line > MAX_LINE:
                raise TableError(f"{file}: has a line longer than {MAX_LINE >> 20} MiB, the limit. Split the line.")
            if text:
                yield text if begun else text.removeprefix(BOM)
                begun = True
            if not block:
                return
