"""Versions of input files, compared before and after reading, so that rows of different versions are never mixed.

A local file's version is its size, mtime, ctime and inode. Tools cannot set the ctime, so a file that was written to or
replaced is detected even if its size and mtime were preserved (`cp -p`, `rsync -t`). An object's version is its ETag or
generation. A different version may have the same rows, if a file was copied back or its permissions changed; then a
sha256 of the content is compared. For a file above 1 GiB it is the sha256 of its blocks' sha256s, so that several
processes can hash one file. Cost: one `stat` or one request per check, and a pass over the file if the version differs.
"""

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torchlake.errors import FingerprintError, TableError, Unavailable
from torchlake.storage.access import open_binary
from torchlake.storage.errors import storage_errors
from torchlake.storage.spread import Spread, each_file
from torchlake.storage.urls import filesystem_of, is_url

CONTENT_MARKS = ("ETag", "etag", "generation", "md5Hash", "blob_id", "oid")
TIME_MARKS = ("LastModified", "last_modified", "Last-Modified", "updated", "mtime", "modified", "created")
SETTLED_NS = 20_000_000  # two ticks of the kernel's clock for ctime
SETTLE_ATTEMPTS = 100  # for a file that is being written
_BLOCK = 1 << 20
HASHED_BYTES = 1 << 30
"Maximum bytes of a local file that are hashed by one sha256."


class Version(NamedTuple):
    """The version of a file or object; equal versions have equal bytes."""

    size: int
    "Size in bytes."
    mtime_ns: int = 0
    ctime_ns: int = 0
    inode: int = 0
    mark: str = ""
    "An object's ETag, generation or time; empty for local files, and for web servers that send none."


def version_of(file: str) -> Version:
    """Return the current version of a local file or a URL. Raises TableError when it cannot be read."""
    with storage_errors(file):
        if not is_url(file):
            status = os.stat(file)
            return Version(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        info = _info(file)
    if info.get("size") is None:
        raise TableError(f"{file}: its server does not report its size; download it first.")
    return Version(int(info["size"]), mark=_mark(info, CONTENT_MARKS) or _mark(info, TIME_MARKS))


def settled_version_of(file: str) -> Version:
    """Return `version_of` once a local file is two ticks old, because a write in the tick of `stat` is not detected."""
    for _ in range(SETTLE_ATTEMPTS):
        version = version_of(file)
        if not 0 <= time.time_ns() - version.ctime_ns < SETTLED_NS:
            break
        time.sleep(SETTLED_NS / 1e9)
    return version


def content_id(file: str) -> str:
    """Return a sha256 that identifies a file's content: of its bytes, or of an object's size and ETag if it has one."""
    blocks = hashed_blocks(file, version_of(file))
    return joined_id([block_id(block) for block in blocks])


def hashed_blocks(file: str, version: Version) -> list[tuple[str, int]]:
    """Return the (file, offset) pairs that `block_id` hashes: one, except for a local file above `HASHED_BYTES`."""
    return [(file, offset) for offset in range(0, 1 if is_url(file) else max(1, version.size), HASHED_BYTES)]


def joined_id(ids: Sequence[str]) -> str:
    """Return the `content_id` of a file whose blocks have these ids."""
    return ids[0] if len(ids) == 1 else hashlib.sha256("".join(ids).encode()).hexdigest()


def block_id(block: tuple[str, int]) -> str:
    """Return the sha256 of one of `hashed_blocks`. Raises TableError when it cannot be read."""
    file, offset = block
    with storage_errors(file):
        if not is_url(file):
            return _sha256_of(file, offset)
        info = _info(file)
        mark = _mark(info, CONTENT_MARKS)
        if mark:
            return hashlib.sha256(f"{info['size']}:{mark}".encode()).hexdigest()
        content = hashlib.sha256()
        with open_binary(file) as source:
            while read := source.read(_BLOCK):
                content.update(read)
        return content.hexdigest()


def content_ids(
    files: Sequence[str], versions: Sequence[Version], known: Sequence[str | None], spread: Spread
) -> list[str | None]:
    """Return each file's `content_id`, computed by `spread` where it is not known."""
    blocks = {
        file: hashed_blocks(file, version)
        for file, version, sha256 in zip(files, versions, known, strict=True)
        if not sha256
    }
    size = sum(version.size for file, version in zip(files, versions, strict=True) if file in blocks)
    flat = [block for one in blocks.values() for block in one]
    remote = any(is_url(file) for file, _ in flat)
    ids = each_file(block_id, flat, remote=True) if remote else spread(block_id, flat, size=size, name="hash the input")
    found = {file: joined_id([next(ids) for _ in one]) for file, one in blocks.items()}
    return [sha256 or found[file] for file, sha256 in zip(files, known, strict=True)]


def _sha256_of(file: str, offset: int) -> str:
    content, left = hashlib.sha256(), HASHED_BYTES
    with open(file, "rb") as source:
        source.seek(offset)
        while left and (read := source.read(min(_BLOCK, left))):
            content.update(read)
            left -= len(read)
    return content.hexdigest()


class ContentChecker:
    """A check that inputs still have their planned content; it remembers other versions with that content."""

    def __init__(self) -> None:
        self._equal: set[tuple[str, Version, str]] = set()

    def is_unchanged(self, file: str, planned: Version, sha256: str) -> bool:
        """Return whether the file has the planned content. Raises TableError when it cannot be read."""
        now = version_of(file)
        if now == planned or (file, now, sha256) in self._equal:
            return True
        if content_id(file) != sha256 or version_of(file) != now:
            return False
        self._equal.add((file, now, sha256))
        return True

    def check(self, file: str, planned: Version, sha256: str, *, may_be_gone: bool = False) -> None:
        """Raise FingerprintError when the content has changed, or the file was removed (unless `may_be_gone`)."""
        try:
            same, what = self.is_unchanged(file, planned, sha256), "changed while it was being read"
        except TableError as error:
            if may_be_gone and isinstance(error, Unavailable):
                return
            same, what = False, f"can no longer be read ({error})"
        if not same:
            raise FingerprintError(
                f"{file}: {what}, so its rows may be from either version. No row of it was published. Run the same "
                "command again once nothing writes to the input; --accept-new-input then processes this file again."
            )


def _info(url: str) -> dict[str, Any]:
    filesystem, path = filesystem_of(url)
    filesystem.invalidate_cache()  # fsspec caches listings for the life of the process
    info: dict[str, Any] = filesystem.info(path)
    return info


def _mark(info: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """Return the first of these fields that is set, in one form: requests for objects and for folders differ."""
    found = next((info[name] for name in names if info.get(name)), "")
    return str(found.isoformat() if hasattr(found, "isoformat") else found).removeprefix("W/").strip('"')
