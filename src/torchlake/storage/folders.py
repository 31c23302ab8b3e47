"""Folders that parts, records and checkpoints are written to, behind one interface.

They are local, in an object store that has conditional writes (`objects.py`), or on a file system that only fsspec
opens, such as HDFS.
"""

import hashlib
import logging
import os
import posixpath
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torchlake import atomic_io
from torchlake.errors import MissingExtra, StorageError
from torchlake.failpoints import failpoint
from torchlake.redaction import redacted
from torchlake.storage.errors import storage_failure
from torchlake.storage.objects import Found, ObjectFolder, version_of
from torchlake.storage.urls import EXTRAS, check_url, filesystem_of, is_url, missing_library

log = logging.getLogger(__name__)

PAUSES_S = (0.5, 3.0)
"Seconds before each retry of a request to a file system of fsspec; most have already retried by then."
TEMPORARY = ".tmp"

T = TypeVar("T")


class Folder(Protocol):
    """A folder; names are relative to it, with "/" between folders. Methods raise StorageError."""

    @property
    def location(self) -> str:
        """The absolute path or URL."""

    def write_new(self, name: str, content: bytes, *, site: str) -> bool:
        """Write a file durably and atomically; return False if it exists with other content."""

    def write(self, name: str, content: bytes, *, site: str) -> None:
        """Write or replace a file durably and atomically."""

    def replace_damaged(self, name: str, damaged: bytes, content: bytes, *, site: str) -> None:
        """Replace a file's damaged content, but keep what another writer has written since then."""

    def content(self, name: str) -> bytes | None:
        """Return a file's bytes, or None if there is none."""

    def sizes(self, below: str = "") -> dict[str, int]:
        """Return the size in bytes of every file below a folder, by its name relative to this folder."""

    def delete(self, names: Iterable[str]) -> None:
        """Delete files; ignore those that do not exist."""


class LocalFolder:
    """A folder on this machine, or on a file system that is mounted here."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def location(self) -> str:
        return str(self.path)

    def write_new(self, name: str, content: bytes, *, site: str) -> bool:
        path = self._made(name)
        return atomic_io.write_new_bytes(path, content, site=site) or path.read_bytes() == content

    def write(self, name: str, content: bytes, *, site: str) -> None:
        atomic_io.write_bytes(self._made(name), content, site=site)

    def replace_damaged(self, name: str, damaged: bytes, content: bytes, *, site: str) -> None:
        if self.content(name) == damaged:
            self.write(name, content, site=site)

    def content(self, name: str) -> bytes | None:
        try:
            return (self.path / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise atomic_io.storage_error(error, self.path / name) from error

    def sizes(self, below: str = "") -> dict[str, int]:
        found: dict[str, int] = {}
        for folder, _, names in os.walk(self.path / below):
            for name in names:
                path = Path(folder, name)
                if not path.is_symlink():
                    found[path.relative_to(self.path).as_posix()] = path.stat().st_size
        return found

    def delete(self, names: Iterable[str]) -> None:
        atomic_io.remove(self.path / name for name in names)

    def _made(self, name: str) -> Path:
        """Return the path of a file, creating folders below this one but not this one: without it, writing fails."""
        path = self.path / name
        if "/" in name and self.path.is_dir() and not path.parent.is_dir():
            try:
                atomic_io.make_folder(path.parent)
            except OSError as error:
                raise atomic_io.storage_error(error, path) from error
        return path


class FileSystemFolder:
    """A folder on a file system that only fsspec opens; see ObjectFolder.

    It has no conditional writes. The condition is checked right before, so of two writers at one moment both may win.
    """

    def __init__(self, url: str) -> None:
        self.location = url.rstrip("/")

    def check(self) -> None:
        """Raise TableError or MissingExtra for a storage that cannot be opened, without connecting to it."""
        import fsspec

        try:
            fsspec.get_filesystem_class(check_url(self.location, to_write=True))
        except ImportError as error:
            raise MissingExtra(f"{redacted(self.location)}: {missing_library(self.location, error)}") from None

    def read(self, name: str) -> Found | None:
        """Return a file, or None if there is none."""
        try:
            content = bytes(self._retry(name, lambda fs, path: fs.cat_file(path)))
            return Found(content, _mark(content), self._retry(name, lambda fs, path: fs.modified(path)))
        except FileNotFoundError:
            return None

    def replace(self, name: str, content: bytes, before: Found | None, *, site: str) -> bool:
        """Replace the file `before`, or create it; return False if it now has another version, or was removed."""
        found = self.read(name)
        if version_of(found) != version_of(before):
            return found is not None and found.content == content
        self.write(name, content, site=site)
        return True

    def write(self, name: str, content: bytes, *, site: str) -> None:
        """Create or replace a file."""

        def put(fs: Any, path: str) -> None:
            fs.makedirs(posixpath.dirname(path), exist_ok=True)
            fs.pipe_file(f"{path}{TEMPORARY}", content)  # a crash must not leave half of it under the name
            fs.mv(f"{path}{TEMPORARY}", path)

        failpoint(f"{site}.write")
        self._retry(name, put)
        failpoint(f"{site}.done")

    def put_file(self, name: str, path: Path) -> None:
        """Upload a file."""
        self._retry(name, lambda fs, there: fs.put_file(str(path), there))

    def download(self, name: str, path: Path) -> None:
        """Write a file here. Raises FileNotFoundError when there is no such file."""
        self._retry(name, lambda fs, there: fs.get_file(there, str(path)))

    def sizes(self, below: str = "") -> dict[str, int]:
        """Return the size in bytes of every file below a folder, by its name relative to this folder."""

        def found(fs: Any, path: str) -> dict[str, int]:
            top = path.removesuffix(f"/{below}") if below else path
            return {posixpath.relpath(one, top): int(info["size"]) for one, info in fs.find(path, detail=True).items()}

        try:
            return self._retry(below, found)
        except FileNotFoundError:
            return {}

    def delete(self, names: Iterable[str]) -> None:
        """Delete files; ignore those that do not exist."""
        for name in names:
            with suppress(FileNotFoundError):
                self._retry(name, lambda fs, path: fs.rm_file(path))

    def _retry(self, name: str, call: Callable[[Any, str], T]) -> T:
        """Return `call(file system, path)` for the file `name`, repeated after errors that may be transient.

        Raises FileNotFoundError, and StorageError naming URL and cause for all other errors.
        """
        for pause in PAUSES_S:
            try:
                return self._call(name, call)
            except StorageError as error:
                log.warning("%s Trying again.", str(error).splitlines()[0])
                time.sleep(pause)
        return self._call(name, call)

    def _call(self, name: str, call: Callable[[Any, str], T]) -> T:
        try:
            fs, root = filesystem_of(self.location)
            # fsspec caches listings in each process, but other ranks, in other processes, change the folder.
            fs.invalidate_cache()
            return call(fs, posixpath.join(root.rstrip("/"), name).rstrip("/"))
        except FileNotFoundError:
            raise
        except Exception as error:  # from any library
            raise storage_failure(posixpath.join(self.location, name).rstrip("/"), error) from None


Objects = ObjectFolder | FileSystemFolder


def objects_at(url: str) -> Objects:
    """Return the folder at a URL. Raises TableError for a protocol to which nothing is written."""
    return ObjectFolder(url) if check_url(url, to_write=True) in EXTRAS else FileSystemFolder(url)


def folder_at(location: str | Path) -> Folder:
    """Return the folder at a path or URL."""
    text = os.fspath(location)
    return ObjectFolder(text) if is_url(text) else LocalFolder(Path(text))


def _mark(content: bytes) -> dict[str, str]:
    """Return the version of a file with this content."""
    return {"e_tag": hashlib.sha256(content).hexdigest()}
