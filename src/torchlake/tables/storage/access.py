"""Open and read local files and objects by URL; errors of the storage become `Unavailable`."""

from typing import BinaryIO, cast

from torchlake.errors import Unavailable
from torchlake.tables.storage.urls import filesystem_of, is_url


def open_binary(file: str) -> BinaryIO:
    """Open a local file or a URL for reading. Raises Unavailable when it cannot be opened."""
    try:
        if not is_url(file):
            return open(file, "rb")
        filesystem, path = filesystem_of(file)
        return cast(BinaryIO, filesystem.open(path, "rb"))
    except OSError as error:
        raise unavailable(file, error) from error


def read_range(file: str, start: int, stop: int) -> bytes:
    """The bytes from `start` to `stop` of a local file or a URL, by one request; fewer if the file ends.

    Raises Unavailable when it cannot be read.
    """
    try:
        if not is_url(file):
            with open(file, "rb") as source:
                source.seek(start)
                return source.read(stop - start)
        filesystem, path = filesystem_of(file)
        return bytes(filesystem.cat_file(path, start=start, end=stop))
    except OSError as error:
        raise unavailable(file, error) from error


def unavailable(file: str, error: OSError) -> Unavailable:
    """The error for a file that cannot be opened or read."""
    return Unavailable(f"{file}: {error.strerror or error}")
