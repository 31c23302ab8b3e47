"""Refuse files with Arrow extension types that may run code, before pyarrow opens them.

pyarrow passes the metadata of a registered Python extension type to that type's deserializer as soon as it parses the
schema, and some deserializers unpickle it (Ray's tensor types, `arrow.py_extension_type`). So the schema is parsed
first with the key that marks an extension type replaced by another of the same length: the column then has its storage
type, and the type's name is ordinary metadata. Only Arrow's canonical types, which are C++ and contain no code, are
allowed. Cost: one read of the footer.

`check_columns` refuses a Parquet footer at which pyarrow would end the process.
"""

import base64
import io
import os
import re
import struct
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from torchlake.errors import TableError, UnsafeError

CANONICAL = frozenset(
    f"arrow.{name}"
    for name in (
        "bool8", "fixed_shape_tensor", "json", "opaque", "parquet.variant", "uuid", "variable_shape_tensor",
        "timestamp_with_offset",
    )
)  # fmt: skip
KEY = b"ARROW:extension:name"
MASKED_KEY = b"TLAKE:extension:name"
PARQUET_KEY = b"ARROW:schema"
MAX_SCHEMA_BYTES = 256 << 20


def check_parquet(file: str, source: pa.NativeFile) -> None:
    """Refuse a Parquet file with extension types other than Arrow's; `file` is the name of the open `source`.

    Raises UnsafeError naming file, column and type; TableError when it is not a complete Parquet file.
    """
    size = source.size()
    source.seek(max(0, size - 8))
    length = footer_length(file, source.read(8), size)
    source.seek(size - 8 - length)
    check_footer(file, source.read(length))


def check_footer(file: str, footer: bytes) -> None:
    """Check the bytes of a Parquet footer; see `check_parquet`."""
    if not any(pattern in footer for pattern in _base64_patterns(KEY)):
        return
    match = re.search(re.escape(PARQUET_KEY) + rb"\x18([\x80-\xff]{0,4}[\x00-\x7f])", footer)
    if match is None or footer.count(PARQUET_KEY) != 1:
        raise UnsafeError(
            f"{file}: refused, because its Arrow schema is stored in an unusual way that hides extension types. Write "
            "the file again with pyarrow."
        )
    length = sum((byte & 0x7F) << (7 * place) for place, byte in enumerate(match.group(1)))
    encoded = footer[match.end() : match.end() + length]
    try:
        _check_names(file, base64.b64decode(encoded, validate=True))
    except ValueError as error:
        if isinstance(error, UnsafeError):
            raise
        raise UnsafeError(
            f"{file}: refused, because its stored Arrow schema cannot be read ({error}). Write the file again."
        ) from error


def check_columns(metadata: pq.FileMetaData, size: int) -> None:
    """Raise OSError if a column of a row group is described in a damaged way.

    `metadata.row_group(i).column(j)` ends the process then, because pyarrow does not catch what C++ throws there. It
    does where it finds the pages that it reads ahead, before it reads them. Costs a fifth to a half of parsing the
    footer, and 0.1 ms.
    """
    file = _Unreadable(size)
    parquet = pq.ParquetFile(pa.PythonFile(file, mode="r"), metadata=metadata, pre_buffer=True)
    try:
        for _ in parquet.iter_batches(row_groups=range(metadata.num_row_groups), use_threads=False):
            break
    except pa.ArrowException:  # a type that Arrow does not read, of a column that the job may not want
        return
    except OSError:
        if not file.asked:
            raise


def check_ipc_stream(file: str, source: pa.NativeFile, start: int) -> bool:
    """Check an Arrow stream from byte `start` on, as `check_parquet` does; return whether it has extension types."""
    source.seek(start)
    head = source.read(8)
    if len(head) < 8 or head[:4] != b"\xff\xff\xff\xff":
        raise TableError(f"{file}: not an Arrow IPC file or stream")
    (length,) = struct.unpack("<i", head[4:])
    if not 0 < length <= MAX_SCHEMA_BYTES:
        raise TableError(f"{file}: not an Arrow IPC file or stream (a schema of {length:,} bytes)")
    message = head + source.read(length)
    if KEY not in message:
        return False
    _check_names(file, message)
    return True


def ipc_footer_has_extensions(file: str, source: pa.NativeFile) -> bool:
    """Return whether the footer of an Arrow IPC file, which has a copy of the schema, mentions extension types."""
    size = source.size()
    source.seek(max(0, size - 10))
    (length,) = struct.unpack("<i", source.read(10)[:4])
    if not 0 < length <= size - 10:
        raise TableError(f"{file}: truncated or damaged (its footer claims {length:,} bytes)")
    source.seek(size - 10 - length)
    return KEY in source.read(length)


def footer_length(file: str, tail: bytes, size: int) -> int:
    """Return the footer's length in bytes, from the last 8 bytes. Raises TableError if it is not a Parquet file."""
    if tail[-4:] == b"PARE":
        raise TableError(f"{file}: encrypted Parquet is not supported; decrypt it first")
    if size < 12 or tail[-4:] != b"PAR1":
        raise TableError(f"{file}: truncated or not a Parquet file ({size:,} bytes, no footer)")
    (length,) = struct.unpack("<I", tail[-8:-4])
    if length > size - 12:
        raise TableError(f"{file}: damaged: its footer claims {length:,} bytes, the file has {size:,}")
    return int(length)


class _Unreadable(io.RawIOBase):
    """A file of `size` bytes that ends where it is read; `asked` says whether it was.

    It raises nothing: Arrow would never free the exception, 6 to 20 KB.
    """

    def __init__(self, size: int):
        self.size, self.asked = size, False

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self.size if whence == os.SEEK_END else offset

    def tell(self) -> int:
        return self.size

    def read(self, size: int = -1) -> bytes:
        self.asked = True
        return b""


def _check_names(file: str, serialized: bytes) -> None:
    schema = pa.ipc.read_schema(pa.py_buffer(serialized.replace(KEY, MASKED_KEY)))
    for field in _fields(schema):
        name = (field.metadata or {}).get(MASKED_KEY)
        if name is not None and name.decode("utf-8", "replace") not in CANONICAL:
            raise UnsafeError(
                f"{file}: the column {field.name!r} has the extension type {name.decode('utf-8', 'replace')!r}. "
                "Only Arrow's canonical extension types are read, because others may run code while loading. "
                "Write the column as its plain storage type."
            )


def _fields(parent: pa.Schema | pa.DataType) -> Iterator[pa.Field]:
    """Yield all fields, including those nested in structs, lists, maps and dictionary values."""
    for place in range(len(parent) if isinstance(parent, pa.Schema) else parent.num_fields):
        field = parent.field(place)
        yield field
        yield from _fields(field.type)
    if isinstance(parent, pa.DictionaryType):
        yield from _fields(parent.value_type)


def _base64_patterns(word: bytes) -> list[bytes]:
    """Return `word` in base64 for each of its three alignments, without the ends that depend on the bytes around it."""
    patterns = []
    for shift in range(3):
        encoded = base64.b64encode(b"\0" * shift + word)
        patterns.append(encoded[(8 * shift + 5) // 6 : len(encoded) // 4 * 4 - 4])
    return patterns
