"""Which version of an input is read: what its storage says of it cheaply, checked around everything that is read.

A local file's version is its size, its times of modification and of change, and its inode. No tool sets the time of
change, so a file that was written to or replaced is noticed even where its size and modification time were kept
(`cp -p`, `rsync -t`). An object's version is the mark that its storage gives to each content: an ETag, a generation.
Another version may still have the same rows, when a file was copied back or its permissions were changed; then the
content decides. Cost: one `stat` or one request per check, and a sha256 of the file where the version is another one.
"""

import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torchlake import atomic_io
from torchlake.errors import FingerprintError, TableError, Unavailable
from torchlake.tables.sources.files import open_binary, unavailable
from torchlake.tables.sources.urls import filesystem_of, is_url

CONTENT_MARKS = ("ETag", "etag", "generation", "md5Hash", "blob_id", "oid")
TIME_MARKS = ("LastModified", "last_modified", "Last-Modified", "updated", "mtime", "modified", "created")
SETTLED_NS = 20_000_000  # two ticks of the clock that a kernel takes the time of change from
SETTLING = 100  # looks at a file that is being written, before it is taken as it is
_BLOCK = 1 << 20


class Version(NamedTuple):
    """A version of a file or object, as its storage describes it; equal versions have equal bytes."""

    size: int
    "In bytes."
    mtime_ns: int = 0
    ctime_ns: int = 0
    inode: int = 0
    mark: str = ""
    "An object's; empty for local files, and where a web server gives none."


def version_of(file: str) -> Version:
    """The version that a local file or an URL has now. Raises TableError when it cannot be asked for."""
    try:
        if not is_url(file):
            status = os.stat(file)
            return Version(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        info = _info(file)
    except OSError as error:
        raise unavailable(file, error) from error
    if info.get("size") is None:
        raise TableError(f"{file}: its server does not say how many bytes it has; download it first.")
    return Version(int(info["size"]), mark=_mark(info, CONTENT_MARKS) or _mark(info, TIME_MARKS))


def settled_version_of(file: str) -> Version:
    """The same, once a local file has been left alone for two ticks: a write in the tick of `stat` would be unseen."""
    for _ in range(SETTLING):
        version = version_of(file)
        if not 0 <= time.time_ns() - version.ctime_ns < SETTLED_NS:
            break
        time.sleep(SETTLED_NS / 1e9)
    return version


def content_id(file: str) -> str:
    """What identifies a file's content: the sha256 of its bytes; of an object, of the mark that its storage gives it.

    Of an object without such a mark every byte is read.
    """
    try:
        if not is_url(file):
            return atomic_io.sha256_file(Path(file))
        info = _info(file)
        mark = _mark(info, CONTENT_MARKS)
        if mark:
            return hashlib.sha256(f"{info['size']}:{mark}".encode()).hexdigest()
        content = hashlib.sha256()
        with open_binary(file) as source:
            while block := source.read(_BLOCK):
                content.update(block)
        return content.hexdigest()
    except OSError as error:
        raise unavailable(file, error) from error


class ContentChecker:
    """Checks that inputs still have their planned content, and remembers in which other versions they had it."""

    def __init__(self) -> None:
        self._equal: set[tuple[str, Version, str]] = set()

    def is_unchanged(self, file: str, planned: Version, sha256: str) -> bool:
        """Whether the file has that content. Raises TableError when it cannot be read."""
        now = version_of(file)
        if now == planned or (file, now, sha256) in self._equal:
            return True
        if content_id(file) != sha256 or version_of(file) != now:
            return False
        self._equal.add((file, now, sha256))
        return True

    def check(self, file: str, planned: Version, sha256: str, *, may_be_gone: bool = False) -> None:
        """Raise FingerprintError when the file has another content or, unless it may be, is gone."""
        try:
            held, what = self.is_unchanged(file, planned, sha256), "changed while it was being read"
        except TableError as error:
            if may_be_gone and isinstance(error, Unavailable):
                return
            held, what = False, f"can no longer be read ({error})"
        if not held:
            raise FingerprintError(
                f"{file}: {what}, so its rows may be of either version. Nothing of it is published. Run the same "
                "command again once nothing writes to the input; --accept-new-input then does this file again."
            )


def _info(url: str) -> dict[str, Any]:
    filesystem, path = filesystem_of(url)
    filesystem.invalidate_cache()  # fsspec keeps listings for the life of the process
    info: dict[str, Any] = filesystem.info(path)
    return info


def _mark(info: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """The first of these that the storage gives, written alike whether it was asked for one object or for a folder."""
    found = next((info[name] for name in names if info.get(name)), "")
    return str(found.isoformat() if hasattr(found, "isoformat") else found).removeprefix("W/").strip('"')
