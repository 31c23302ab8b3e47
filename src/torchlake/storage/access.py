"""Open and read local files and objects by URL; errors of the storage become `Unavailable`."""

import errno
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

from torchlake.errors import TorchlakeError, Unavailable
from torchlake.redaction import redacted
from torchlake.storage.urls import credentials_of, filesystem_of, is_url, secret_repository


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


@contextmanager
def storage_errors(file: str) -> Iterator[None]:
    """Turn errors of the storage of a local file or a URL into Unavailable.

    fsspec translates some errors to OSError; those about credentials, regions and connections come from the storages'
    libraries, which have no common class.
    """
    try:
        yield
    except TorchlakeError:
        raise
    except OSError as error:
        raise unavailable(file, error) from error
    except Exception as error:
        if not is_url(file):
            raise
        raise unavailable(file, error) from error


def unavailable(file: str, error: Exception) -> Unavailable:
    """Return the error for a file that cannot be opened or read; for objects, it says where credentials come from."""
    said = str(getattr(error, "strerror", None) or error).strip()
    why = said.splitlines()[0] if said else type(error).__name__
    if not is_url(file):
        return Unavailable(f"{file}: {why}")
    kinds = " ".join(kind.__name__ for kind in type(error).__mro__)
    advice = ""
    if isinstance(error, PermissionError):
        advice = f"The credentials that were found cannot read it; they come from {credentials_of(file)}."
    elif "Credential" in kinds or "Authentication" in kinds:
        advice = f"Credentials come from {credentials_of(file)}."
    elif "GatedRepo" in kinds or "RepositoryNotFound" in kinds:
        advice = secret_repository(file)
    elif getattr(error, "errno", None) == errno.EREMCHG:
        advice = "The bucket is in another region: set AWS_DEFAULT_REGION to its region."
    return Unavailable(redacted(f"{file}: {why.rstrip('.')}. {advice}".rstrip()))


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
