"""Open and read local files and objects by URL; errors of the storage become `Unavailable`."""

import io
from typing import Any, BinaryIO, cast

from torchlake.storage.errors import storage_errors
from torchlake.storage.urls import filesystem_of, is_url


def open_binary(file: str) -> BinaryIO:
    """Open a local file or a URL for reading; both it and its reads raise Unavailable."""
    with storage_errors(file):
        if not is_url(file):
            return open(file, "rb")
        filesystem, path = filesystem_of(file)
        return cast(BinaryIO, _Object(file, filesystem.open(path, "rb")))


def read_range(file: str, start: int, stop: int) -> bytes:
    """Return the bytes from `start` to `stop` of a local file or a URL, with one request; fewer if the file ends.

    Raises Unavailable when it cannot be read.
    """
    with storage_errors(file):
        if not is_url(file):
            with open(file, "rb") as source:
                source.seek(start)
                return source.read(stop - start)
        filesystem, path = filesystem_of(file)
        return bytes(filesystem.cat_file(path, start=start, end=stop))


class _Object(io.RawIOBase):
    """An open object whose reads raise Unavailable."""

    def __init__(self, file: str, inner: Any) -> None:
        self._file, self._inner = file, inner

    def read(self, size: int | None = -1) -> bytes:
        with storage_errors(self._file):
            return bytes(self._inner.read(-1 if size is None else size))

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: Any) -> int:
        found = self.read(len(buffer))
        buffer[: len(found)] = found
        return len(found)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._inner.seekable())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._inner.seek(offset, whence))

    def tell(self) -> int:
        return int(self._inner.tell())

    def close(self) -> None:
        self._inner.close()
        super().close()
