"""Where a table's files are: local paths, folders, globs and fsspec URLs, opened and identified alike.

A file has two names: its path or URL, to open it, and its name relative to the folder the user gave, which stays the
same when the folder moves and is what row ids are made of.

fsspec opens an URL only after `check_url`: it knows protocols that unpack archives, read through other URLs, render
templates with the environment in them, run a shell elsewhere or send what they read in the clear, and it chains them.
"""

import glob
import hashlib
import os
import posixpath
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from torchlake import durable
from torchlake.errors import MissingExtra, TableError
from torchlake.redaction import redacted

WILDCARDS = frozenset("*?[")
STORES = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "hdfs", "memory")
"""Protocols of storages that hold files, and know who may read them. Not among them: plain http and what is made of it
(webhdfs), what needs a password in the URL (ftp, smb), and ssh, which runs programs."""
READ_ONLY = ("https", "hf")
"Protocols of public files: nothing is written there."


class Found(NamedTuple):
    name: str
    "Relative to the folder that was given."
    file: str
    "An absolute path, or an URL."


def is_url(path: str) -> bool:
    """Whether `path` is an fsspec URL (`file://` URLs are local paths and never get this far)."""
    return "://" in path


def find(source: str | Path | Sequence[str | Path], wanted: Callable[[str], bool]) -> list[Found]:
    """The files that `source` means, sorted by name; in folders and globs only those whose names are `wanted`.

    Raises TableError saying what was looked for when there is nothing.
    """
    sources = [source] if isinstance(source, str | Path) else list(source)
    if not sources:
        raise TableError("No files were given: the list of inputs is empty.")
    bases, files = [], []
    for one in sources:
        base, found = _expand(os.fspath(one), wanted)
        bases.append(base)
        files += found
    twice = sorted({file for file in files if files.count(file) > 1}) if len(set(files)) < len(files) else []
    if twice:
        raise TableError(
            f"{twice[0]} is named twice by {describe(source)}: its rows would be there twice. Name it once."
        )
    base = _common(bases)
    return sorted(Found(posixpath.relpath(file, base) if base else file, file) for file in files)


def describe(source: str | Path | Sequence[str | Path]) -> str:
    """`source` as the user wrote it."""
    return os.fspath(source) if isinstance(source, str | Path) else ", ".join(os.fspath(one) for one in source)


def open_binary(file: str) -> BinaryIO:
    """Open a local file or an URL for reading. Raises TableError when it cannot be opened."""
    try:
        if not is_url(file):
            return open(file, "rb")
        filesystem, path = filesystem_of(file)
        return cast(BinaryIO, filesystem.open(path, "rb"))
    except OSError as error:
        raise TableError(f"{file}: {error.strerror or error}") from error


def stat(file: str) -> tuple[int, int]:
    """Size in bytes and modification time in nanoseconds (0 where the storage has none)."""
    try:
        if not is_url(file):
            status = os.stat(file)
            return status.st_size, status.st_mtime_ns
        filesystem, path = filesystem_of(file)
        return int(filesystem.info(path)["size"]), 0
    except OSError as error:
        raise TableError(f"{file}: {error.strerror or error}") from error


def content_id(file: str) -> str:
    """What identifies a file's content: the sha256 of its bytes; for an URL, of the storage's own version mark."""
    try:
        if not is_url(file):
            return durable.sha256_file(Path(file))
        filesystem, path = filesystem_of(file)
        return hashlib.sha256(str(filesystem.ukey(path)).encode()).hexdigest()
    except OSError as error:
        raise TableError(f"{file}: {error.strerror or error}") from error


def check_url(url: str, *, to_write: bool = False) -> str:
    """The protocol of an URL that may be opened. Raises TableError saying which may be, for all others."""
    protocol = url.partition("://")[0]
    shown, allowed = redacted(url), STORES if to_write else STORES + READ_ONLY
    if "::" in url:
        raise TableError(
            f"{shown}: an URL in another one ('::') is refused: it would be unpacked, copied or led elsewhere. "
            "Name the files themselves; unpack an archive first."
        )
    if protocol not in allowed:
        hint = " Use https." if protocol == "http" and not to_write else ""
        raise TableError(
            f"{shown}: the protocol {protocol[:40]!r} is refused.{hint} Allowed are local paths, file and "
            f"{', '.join(allowed)}."
        )
    return protocol


def filesystem_of(url: str) -> tuple[Any, str]:
    """The fsspec file system of an URL and the path in it.

    Raises TableError as `check_url` does, MissingExtra when the protocol's library is not installed.
    """
    from fsspec.core import url_to_fs

    check_url(url)
    try:
        filesystem, path = url_to_fs(url)
    except ImportError as error:
        raise MissingExtra(f"{redacted(url)}: {error}") from error
    except ValueError as error:
        raise TableError(f"{redacted(url)}: {error}") from error
    return filesystem, path


def _expand(source: str, wanted: Callable[[str], bool]) -> tuple[str, list[str]]:
    """The folder that names are relative to, and the files."""
    if source.startswith("file://"):
        source = source.removeprefix("file://")
    if is_url(source):
        return _expand_url(source, wanted)
    path = os.path.abspath(os.path.expanduser(source))
    if os.path.isdir(path):
        files = [os.path.join(top, name) for top, folders, names in os.walk(path) if _shown(folders) for name in names]
        return path, _some([file for file in files if _is_shown(file) and wanted(file)], source)
    if os.path.exists(path):
        return os.path.dirname(path), [path]
    if WILDCARDS & set(source):
        base = _before_wildcard(path)
        files = [file for file in glob.glob(path, recursive=True) if os.path.isfile(file)]
        return base, _some([file for file in files if _is_shown(file) and wanted(file)], source)
    raise TableError(f"{source}: there is no such file or folder.{_nearest(path)}")


def _expand_url(url: str, wanted: Callable[[str], bool]) -> tuple[str, list[str]]:
    filesystem, path = filesystem_of(url)
    try:
        if filesystem.isfile(path):
            return url.rpartition("/")[0], [url]
        if WILDCARDS & set(path):
            paths = filesystem.glob(path)
            base = _before_wildcard(path)
        else:
            paths = filesystem.find(path) if filesystem.isdir(path) else []
            base = path
    except OSError as error:
        raise TableError(f"{url}: {error.strerror or error}") from error
    below = [found for found in paths if not any(part[0] in "._" for part in _parts(found, base))]
    files = [filesystem.unstrip_protocol(found) for found in below if wanted(found) and not filesystem.isdir(found)]
    return filesystem.unstrip_protocol(base), _some(files, url)


def _parts(path: str, base: str) -> list[str]:
    return [part for part in path.removeprefix(base).split("/") if part]


def _shown(folders: list[str]) -> bool:
    """Keep `os.walk` out of hidden folders and of those that begin with an underscore, as Spark and Hive do."""
    folders[:] = sorted(name for name in folders if name[0] not in "._")
    return True


def _is_shown(file: str) -> bool:
    return os.path.basename(file)[0] not in "._"


def _some(files: list[str], source: str) -> list[str]:
    if not files:
        raise TableError(
            f"{source}: no table files there. Looked for .parquet, .csv, .tsv, .jsonl, .ndjson, .json and .arrow; "
            "names that begin with '_' or '.' do not count."
        )
    return files


def _before_wildcard(path: str) -> str:
    parts = path.split("/")
    first = next(place for place, part in enumerate(parts) if WILDCARDS & set(part))
    return "/".join(parts[:first])


def _common(bases: list[str]) -> str:
    """The deepest folder above all of them; the empty string when there is none."""
    schemes = {base.partition("://")[0] if is_url(base) else "" for base in bases}
    if len(schemes) > 1:
        return ""
    scheme = schemes.pop()
    return posixpath.commonpath(bases) if not scheme else _common_url(scheme, bases)


def _common_url(scheme: str, bases: list[str]) -> str:
    common = posixpath.commonpath(["/" + base.partition("://")[2].lstrip("/") for base in bases])
    lead = "/" if bases[0].startswith(f"{scheme}:///") else ""
    return f"{scheme}://{lead}{common.lstrip('/')}"


def _nearest(path: str) -> str:
    folder = os.path.dirname(path)
    close = get_close_matches(os.path.basename(path), os.listdir(folder) if os.path.isdir(folder) else [], n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
