"""Where a table's files are: local paths, folders, globs and fsspec URLs, found and opened alike.

A file has two names: its path or URL, to open it, and its name relative to the folder the user gave, which stays the
same when the folder moves and is what row ids are made of. In folders and globs, links are followed and each file
counts once; names that begin with "_" or "." do not count, as for Spark and Hive.
"""

import glob
import logging
import os
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast
from urllib.parse import unquote

from torchlake.errors import TableError, Unavailable
from torchlake.tables.sources.urls import filesystem_of, is_url

log = logging.getLogger(__name__)

WILDCARDS = frozenset("*?[")


class InputPath(NamedTuple):
    name: str
    "Relative to the folder that was given."
    file: str
    "An absolute path, or an URL."
    listed: bool = True
    "InputPath in a folder or by a glob; False for a file that was named itself."


def find(source: str | Path | Sequence[str | Path], wanted: Callable[[str], bool]) -> list[InputPath]:
    """The files that `source` means, sorted by name; in folders and globs only those that are `wanted`.

    Raises TableError saying what was looked for when there is nothing, or naming a file that is named twice.
    """
    sources = [source] if isinstance(source, str | Path) else list(source)
    if not sources:
        raise TableError("No files were given: the list of inputs is empty.")
    bases, found = [], []
    for one in sources:
        base, files, listed = _expand(local_path(os.fspath(one)), wanted)
        bases.append(base)
        found += [(file, listed) for file in files]
    twice = _first_twice([_real(file) for file, _ in found]) if len(sources) > 1 else None  # a listing has each once
    if twice is not None:
        raise TableError(f"{twice} is named twice by {describe(source)}: its rows would be there twice. Name it once.")
    base = _common(bases)
    named = (InputPath(posixpath.relpath(file, base) if base else file, file, listed) for file, listed in found)
    return [_with_utf8_name(one) for one in sorted(named)]


def describe(source: str | Path | Sequence[str | Path]) -> str:
    """`source` as the user wrote it."""
    return os.fspath(source) if isinstance(source, str | Path) else ", ".join(os.fspath(one) for one in source)


def local_path(source: str) -> str:
    """The path in a `file:` URL; anything else as it is."""
    match = re.match(r"file:(?://(?:localhost)?)?(?=/)", source)
    if match is None:
        return source
    path = source[match.end() :]
    return path if os.path.exists(path) or "%" not in path else unquote(path)


def open_binary(file: str) -> BinaryIO:
    """Open a local file or an URL for reading. Raises Unavailable when it cannot be opened."""
    try:
        if not is_url(file):
            return open(file, "rb")
        filesystem, path = filesystem_of(file)
        return cast(BinaryIO, filesystem.open(path, "rb"))
    except OSError as error:
        raise unavailable(file, error) from error


def read_range(file: str, start: int, stop: int) -> bytes:
    """The bytes of a local file or an URL from `start` to `stop`, by one request; fewer where the file ends.

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
    """The error for a file that its storage does not give."""
    return Unavailable(f"{file}: {error.strerror or error}")


def _expand(source: str, wanted: Callable[[str], bool]) -> tuple[str, list[str], bool]:
    """The folder that names are relative to, the files, and whether they were listed rather than named."""
    if is_url(source):
        return _expand_url(source, wanted)
    path = os.path.abspath(os.path.expanduser(source))
    if os.path.isdir(path):
        return path, _some(_wanted_files(path, _below(path), wanted), source), True
    if os.path.exists(path):
        return os.path.dirname(path), [path], False
    if WILDCARDS & set(source):
        base = _before_wildcard(path)
        _check_listed(base, source)
        found = (file for file in glob.glob(path, recursive=True) if os.path.isfile(file))
        return base, _some(_wanted_files(base, found, wanted), source), True
    _check_listed(path, source)
    raise TableError(f"{source}: there is no such file or folder.{_nearest(path)}")


def _check_listed(folder: str, source: str) -> None:
    """Raise Unavailable with the reason why nothing is found there, where it is another one than that nothing is."""
    try:
        os.scandir(folder).close()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # a name with a zero byte is no name
        return
    except OSError as error:
        raise unavailable(source, error) from error


def _expand_url(url: str, wanted: Callable[[str], bool]) -> tuple[str, list[str], bool]:
    filesystem, path = filesystem_of(url)
    try:
        filesystem.invalidate_cache()  # fsspec keeps listings for the life of the process
        if filesystem.isfile(path):
            return url.rpartition("/")[0], [url], False
        if WILDCARDS & set(path):
            paths = [found for found in filesystem.glob(path) if not filesystem.isdir(found)]
            base = _before_wildcard(path)
        else:
            paths = filesystem.find(path) if filesystem.isdir(path) else []
            base = path
        root = filesystem.unstrip_protocol(base)
        files = [filesystem.unstrip_protocol(found) for found in paths]
    except OSError as error:
        raise unavailable(url, error) from error
    return root, _some(_wanted_files(root, files, wanted), url), True


def _below(folder: str) -> Iterator[str]:
    """The files below a folder, each folder once, linked ones included. Raises Unavailable where one is closed."""

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # another process has just removed it
            raise unavailable(os.fsdecode(error.filename or folder), error) from error

    seen: set[str] = set()
    for top, folders, names in os.walk(folder, followlinks=True, onerror=refuse):
        real = os.path.realpath(top)
        folders[:] = [] if real in seen else sorted(folders)
        if real not in seen:
            yield from (os.path.join(top, name) for name in names)
        seen.add(real)


def _wanted_files(base: str, files: Iterable[str], wanted: Callable[[str], bool]) -> list[str]:
    """Those below `base` that are shown and wanted, each once: a link beside the file that it leads to does not count.

    Files that are left out are logged.
    """
    shown = [file for file in files if not any(part[0] in "._" for part in _parts(file, base))]
    found, left, linked = {}, [], []
    reals = [(file, _real(file)) for file in shown]
    for file, real in sorted(reals, key=lambda one: (one[1] != one[0], one[0])):
        if not wanted(file):
            left.append(file)
        elif real in found:
            linked.append(file)
        else:
            found[real] = file
    for what, some in (
        ("by their names they are no table files", left),
        ("links to files that are read anyway", linked),
    ):
        if some and found:
            log.warning("%s: %d files are not read (%s), for example %s", base, len(some), what, some[0])
    return list(found.values())


def _real(file: str) -> str:
    """Where the links in a local path lead."""
    return file if is_url(file) else os.path.realpath(file)


def _parts(path: str, base: str) -> list[str]:
    return [part for part in path.removeprefix(base).split("/") if part]


def _some(files: list[str], source: str) -> list[str]:
    if not files:
        raise TableError(
            f"{source}: no table files there. Looked for .parquet, .csv, .tsv, .jsonl, .ndjson, .json and .arrow; "
            "names that begin with '_' or '.' do not count."
        )
    return files


def _first_twice(names: Sequence[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def _with_utf8_name(found: InputPath) -> InputPath:
    """The file. Raises TableError when its name cannot be written into a record."""
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
    try:
        close = get_close_matches(os.path.basename(path), os.listdir(os.path.dirname(path)), n=1)
    except OSError:
        return ""
    return f" Did you mean {close[0]!r}?" if close else ""
