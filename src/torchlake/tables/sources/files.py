"""Loose files: local paths, folders, globs and fsspec URLs.

A file has two names: its path or URL, and its name relative to the folder that the user gave. The latter stays the same
when the folder moves, and is used in row ids. In folders and globs, links are followed and each file counts once; names
that begin with "_" or "." are ignored, as in Spark and Hive, but not the folder of a partition column, `_day=1`.
"""

import glob
import logging
import os
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from torchlake.errors import TableError, Unavailable, UsageError
from torchlake.storage.errors import storage_errors, unavailable
from torchlake.storage.objects import is_marker
from torchlake.storage.urls import check_url, filesystem_of, is_url, secret_repository
from torchlake.tables.formats.layout import is_table_file
from torchlake.tables.sources._interface import SourceFile, SourceTable, View
from torchlake.tables.sources._lakehouse import refuse_lakehouse_tables
from torchlake.tables.sources._partitions import partitions_of

log = logging.getLogger(__name__)

WILDCARDS = frozenset("*?[")
StoredTable = str | Path | Sequence[str | Path]
"A file, folder, glob or URL, or a list of them."


IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm")


class InputPath(NamedTuple):
    name: str
    "Path relative to the folder that was given."
    file: str
    "An absolute path or a URL."
    listed: bool = True
    "Whether it was found in a folder or by a glob; False for a file that was named directly."
    place: int = 0
    "Position of its input in the list that was given."


def find(source: StoredTable, wanted: Callable[[str], bool]) -> list[InputPath]:
    """Return the files of each input in the given order, sorted by name; in folders and globs only `wanted` ones.

    Raises TableError when there are none, or a file is named twice.
    """
    sources = [source] if isinstance(source, str | Path) else list(source)
    if not sources:
        raise TableError("No files were given: the list of inputs is empty.")
    bases, found = [], []
    for place, one in enumerate(sources):
        base, files, listed = _expand(local_path(one), wanted)
        bases.append(base)
        found += [(file, listed, place) for file in files]
    # A single listing has each file only once.
    counts = Counter(_real(file) for file, *_ in found) if len(sources) > 1 else Counter()
    twice = next((file for file, count in counts.items() if count > 1), None)
    if twice is not None:
        raise TableError(f"{twice} is named twice by {describe(source)}: its rows would be read twice. Name it once.")
    base = _common(bases)
    named = (
        InputPath(posixpath.relpath(file, base) if base else file, file, listed, place) for file, listed, place in found
    )
    return [_check_utf8_name(one) for one in sorted(named, key=lambda one: (one.place, one.name))]


def open_source(source: StoredTable) -> SourceTable:
    """Return the files of `source`, those of each input sorted by name; names of folders may hold columns.

    Raises TableError when there are none, a file is named twice, or a listed one is part of a table with a log.
    """
    return joined(open_each([source] if isinstance(source, str | Path) else source))


def open_each(sources: Sequence[str | Path]) -> list[SourceTable]:
    """Return a table for each input; names are relative to the folder of all, so they differ. Raises TableError."""
    found = find(sources, is_table_file)
    refuse_lakehouse_tables([one.file for one in found if one.listed])
    listed = all(one.listed for one in found)
    partitions, values = partitions_of([one.name for one in found] if listed else [])
    values = values or [{} for _ in found]
    files: list[list[SourceFile]] = [[] for _ in sources]
    for one, own in zip(found, values, strict=True):
        files[one.place].append(SourceFile(name=one.name, file=one.file, view=View(constants=own)))
    return [SourceTable(files=tuple(some), partitions=partitions) for some in files]


def joined(tables: Iterable[SourceTable]) -> SourceTable:
    """Return the files of several of the tables that one call of `open_each` returned."""
    several = list(tables)
    return replace(several[0], files=tuple(file for table in several for file in table.files))


def is_image_folder(source: Any) -> bool:
    """Return whether `source` is a local folder with images, and without a file of a table."""
    if not isinstance(source, str | Path) or not os.path.isdir(local_path(source)):
        return False
    folder, has_images = os.path.abspath(local_path(source)), False
    for file in (one for one in _walk(folder) if not _is_hidden(folder, one)):
        if is_table_file(file):
            return False
        has_images = has_images or is_image(file)
    return has_images


def is_image(file: str) -> bool:
    """Return whether a file's name is that of an image."""
    return file.lower().endswith(IMAGES)


def describe(source: StoredTable) -> str:
    """Return `source` as the user wrote it."""
    return os.fspath(source) if isinstance(source, str | os.PathLike) else ", ".join(os.fspath(one) for one in source)


def local_path(place: str | os.PathLike[str], *, literal: bool = False) -> str:
    """Return the path in a `file:` URL; anything else unchanged. `literal`: a percent sign stays, as Iceberg has it.

    Raises TableError for a URL with a host, UsageError for what is not a string or a path.
    """
    source = os.fspath(place) if isinstance(place, os.PathLike) else place
    if not isinstance(source, str):
        raise UsageError(f"expected a path, a URL or a name, got {source!r:.80}")
    if not source.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in source):
        raise UsageError(f"{source!a}: is not UTF-8. Rename it, or run Python in UTF-8 mode (PYTHONUTF8=1).")
    if host := re.match(r"file://(?!localhost/)([^/]+)", source):
        raise TableError(
            f"{source}: names the host {host[1]!r}. The URL of a local path has three slashes: file:///path."
        )
    match = re.match(r"file:(?://(?:localhost)?)?(?=/)", source)
    if match is None:
        return source
    path = source[match.end() :]
    return path if literal or os.path.exists(path) or "%" not in path else unquote(path)


def _expand(source: str, wanted: Callable[[str], bool]) -> tuple[str, list[str], bool]:
    """Return the folder that names are relative to, the files, and whether they were listed, not named directly."""
    if is_url(source):
        return _expand_url(source, wanted)
    path = os.path.abspath(os.path.expanduser(source))
    if os.path.isdir(path):
        return path, _table_files(path, _walk(path), wanted, source), True
    if os.path.exists(path):
        return os.path.dirname(path), [path], False
    if WILDCARDS & set(source):
        base = _before_wildcard(path)
        _check_readable(base, source)
        found = (file for file in glob.glob(path, recursive=True) if os.path.isfile(file))
        return base, _table_files(base, found, wanted, source), True
    _check_readable(path, source)
    if os.path.islink(path):
        raise TableError(f"{source}: is a link to {os.readlink(path)}, which does not exist.")
    raise TableError(f"{source}: there is no such file or folder.{_nearest(path)}")


def _check_readable(folder: str, source: str) -> None:
    """Raise Unavailable if the folder exists but cannot be listed, for example without permission."""
    try:
        os.scandir(folder).close()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a zero byte in the name
        return
    except OSError as error:
        raise unavailable(source, error) from error


def _expand_url(url: str, wanted: Callable[[str], bool]) -> tuple[str, list[str], bool]:
    with storage_errors(url):
        filesystem, path = filesystem_of(url)
        filesystem.invalidate_cache()  # fsspec caches listings for the life of the process
        if filesystem.isfile(path) and not _is_also_folder(filesystem, path, url):
            return url.rpartition("/")[0], [url], False
        if filesystem.isdir(path):
            found, base = filesystem.find(path, detail=True), path
        elif WILDCARDS & set(path):
            found, base = filesystem.glob(path, detail=True), _before_wildcard(path)
        else:
            found, base = {}, path
        if not found:
            _check_bucket(filesystem, path, url)
        root = filesystem.unstrip_protocol(base)
        files = [
            filesystem.unstrip_protocol(name)
            for name, info in found.items()
            if info["type"] != "directory" and not is_marker(name, info.get("size"))
        ]
    return root, _table_files(root, files, wanted, url), True


def _is_also_folder(filesystem: Any, path: str, url: str) -> bool:
    """Return whether the folder is meant where a bucket has an object of the same name, perhaps an empty marker."""
    marks = url.endswith("/") or ("." not in posixpath.basename(path) and filesystem.size(path) == 0)
    return marks and bool(filesystem.isdir(path))


def _check_bucket(filesystem: Any, path: str, url: str) -> None:
    """Raise Unavailable if the bucket or repository cannot be listed; `find` and `isdir` would report it as empty."""
    depth = 3 if check_url(url) == "hf" else 1
    bucket = "/".join(path.split("/")[:depth])
    try:
        filesystem.ls(bucket)
    except FileNotFoundError as error:
        secret = f" {secret_repository(url)}" if depth == 3 else ""  # the Hub hides private repositories
        raise Unavailable(f"{url}: there is no bucket or repository {bucket!r}. Check its name.{secret}") from error


def _walk(folder: str) -> Iterator[str]:
    """Yield the files below a folder; follow links to folders, each once. Raises Unavailable without permission."""

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # else it was removed meanwhile
            raise unavailable(os.fsdecode(error.filename or folder), error) from error

    seen: set[str] = set()
    for top, folders, names in os.walk(folder, followlinks=True, onerror=refuse):
        real = os.path.realpath(top)
        folders[:] = [] if real in seen else sorted(folders)
        if real not in seen:
            yield from (os.path.join(top, name) for name in names)
        seen.add(real)


def _table_files(base: str, files: Iterable[str], wanted: Callable[[str], bool], source: str) -> list[str]:
    """Return the files below `base` that are `wanted` and not hidden, each once, by its path rather than a link to it.

    Logs the files that are left out. Raises TableError when there are none.
    """
    visible = [file for file in files if not _is_hidden(base, file)]
    found, left, linked = {}, [], []
    reals = [(file, _real(file)) for file in visible]
    for file, real in sorted(reals, key=lambda one: (one[1] != one[0], one[0])):
        if not wanted(file):
            left.append(file)
        elif real in found:
            linked.append(file)
        else:
            found[real] = file
    for what, some in (
        ("their names are not those of table files", left),
        ("links to files that are read anyway", linked),
    ):
        if some and found:
            log.warning("%s: %d files are not read (%s), for example %s", base, len(some), what, some[0])
    if not found:
        raise TableError(
            f"{source}: has no table files (.parquet, .csv, .tsv, .jsonl, .ndjson, .json or .arrow). Names that begin "
            "with '_' or '.' do not count."
            + " It has images: a local folder of them is a table of train, predict and evaluate."
            * any(map(is_image, left))
        )
    return list(found.values())


def _is_hidden(base: str, file: str) -> bool:
    """Return whether the name of a file below `base`, or of a folder above it, is hidden; `_column=value` is not."""
    names = file.removeprefix(base).split("/")
    return any(name.startswith(".") or (name.startswith("_") and "=" not in name) for name in names)


def _real(file: str) -> str:
    """Return a local path with its links resolved."""
    return file if is_url(file) else os.path.realpath(file)


def _check_utf8_name(found: InputPath) -> InputPath:
    """Return the file. Raises TableError when its name cannot be stored in a record."""
    try:
        found.file.encode()
    except UnicodeEncodeError:
        raise TableError(f"{os.fsencode(found.file)!r}: the file's name is not UTF-8; rename it.") from None
    return found


def _before_wildcard(path: str) -> str:
    parts = path.split("/")
    first = next(place for place, part in enumerate(parts) if WILDCARDS & set(part))
    return "/".join(parts[:first])


def _common(bases: list[str]) -> str:
    """Return the deepest folder that contains all of them; the empty string if no folder does."""
    schemes = {base.partition("://")[0] if is_url(base) else "" for base in bases}
    if len(schemes) > 1:
        return ""
    scheme = schemes.pop()
    if not scheme:
        return posixpath.commonpath(bases)
    common = posixpath.commonpath(["/" + base.partition("://")[2].lstrip("/") for base in bases])
    lead = "/" if bases[0].startswith(f"{scheme}:///") else ""
    return f"{scheme}://{lead}{common.lstrip('/')}"


def _nearest(path: str) -> str:
    try:
        close = get_close_matches(os.path.basename(path), os.listdir(os.path.dirname(path)), n=1)
    except OSError:
        return ""
    return f" Did you mean {close[0]!r}?" if close else ""
