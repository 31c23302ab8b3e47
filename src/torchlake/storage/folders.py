"""Folders that parts and records are written to, local or in an object store, behind one interface."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from torchlake import atomic_io
from torchlake.storage.objects import ObjectFolder
from torchlake.storage.urls import is_url


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


def folder_at(location: str | Path) -> Folder:
    """Return the folder at a path or URL."""
    text = os.fspath(location)
    return ObjectFolder(text) if is_url(text) else LocalFolder(Path(text))
