"""What tables with a log share: their loose files are refused, and values in their log become strings.

Without its log, the files of a Delta, Iceberg or Hudi table include deleted rows.

A table is recognized by its log, in the folder of a file or any folder above it, whether the input is a folder, a
partition, a glob, a folder of tables, a link or a URL. Files that the user names one by one are read.
"""

import fnmatch
import os
import posixpath
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pyarrow as pa

from torchlake.errors import TableError, Unavailable
from torchlake.storage.errors import storage_errors
from torchlake.storage.urls import filesystem_of, is_url

THREADS = 16
_LOGS = {"_delta_log": "Delta", ".hoodie": "Hudi"}
_ICEBERG = "*.metadata.json"
_ADVICE = {
    "Delta": "or the table's folder itself",
    "Iceberg": "or the table's name in its catalog (iceberg:CATALOG.NAMESPACE.TABLE)",
    "Hudi": "for example those of a Spark query's inputFiles()",
}


def constant_text(where: str, column: str, value: pa.Scalar) -> str | None:
    """Return a value from a table's log as a string that Arrow casts back. Raises TableError if no string does."""
    if not value.is_valid:
        return None
    try:
        text = value.cast(pa.string())
        if text.cast(value.type) == value:
            return str(text)
    except pa.ArrowException as error:
        raise TableError(
            f"{where}: the column {column!r} is {value.type}; values of that type in the table's log are not supported."
        ) from error
    raise TableError(
        f"{where}: the value {value} of the column {column!r} in the table's log cannot be read without loss."
    )


def logged_text(where: str, column: str, text: str | None, kind: pa.DataType) -> str | None:
    """Return the text of a partition's value in a log of Delta as `constant_text`; an empty one is null."""
    if not text:
        return None
    # Times are UTC; only the newer of the two ways to write them has a zone.
    zoned = not pa.types.is_timestamp(kind) or kind.tz is None or re.search(r"(Z|[+-]\d\d:?\d\d)$", text)
    try:
        value = pa.scalar(text if zoned else f"{text}Z").cast(kind)
    except pa.ArrowException as error:
        raise TableError(f"{where}: the column {column!r} is {kind}, but has the value {text!r} in the log.") from error
    return constant_text(where, column, value)


def refuse_lakehouse_tables(listed: Sequence[str]) -> None:
    """Raise TableError when a file that was found in a folder or by a glob is part of such a table."""
    files = {*listed}
    files |= {os.path.realpath(file) for file in files if not is_url(file) and os.path.islink(file)}
    folders: set[str] = set()
    for folder in {file.rpartition("/")[0] for file in files}:
        if is_url(folder):
            # Partition folders have no log; there may be thousands, and each costs requests.
            folders |= {above for above in _with_parents(folder) if "=" not in posixpath.basename(above)}
        else:
            folders |= {*_with_parents(folder), *_with_parents(os.path.realpath(folder))}
    local = [folder for folder in folders if not is_url(folder)]
    with ThreadPoolExecutor(THREADS) as threads:
        urls = sorted(folders - {*local})
        kinds = [*zip(local, map(_kind_here, local), strict=True), *zip(urls, threads.map(_kind_at, urls), strict=True)]
    for folder, kind in kinds:
        if kind is not None:
            raise TableError(
                f"{folder}: is a table in {kind} format; read as loose files it includes deleted rows. Give the "
                f"files of one version, {_ADVICE[kind]}."
            )


def _with_parents(folder: str) -> Iterator[str]:
    """Yield the folder and its parents; for a URL, up to its bucket."""
    scheme, separator, folder = folder.rpartition("://")
    while folder.strip("/"):
        yield f"{scheme}{separator}{folder}"
        folder = posixpath.dirname(folder)


def _kind_here(folder: str) -> str | None:
    for log, kind in _LOGS.items():
        if os.path.isdir(os.path.join(folder, log)):
            return kind
    with suppress(OSError):
        if fnmatch.filter(os.listdir(os.path.join(folder, "metadata")), _ICEBERG):
            return "Iceberg"
    return None


def _kind_at(url: str) -> str | None:
    filesystem, path = filesystem_of(url)
    with suppress(Unavailable), storage_errors(url):  # without permission to list, no table can be recognized
        for log, kind in _LOGS.items():
            if filesystem.isdir(f"{path}/{log}"):
                return kind
        if filesystem.isdir(f"{path}/metadata") and filesystem.glob(f"{path}/metadata/{_ICEBERG}"):
            return "Iceberg"
    return None
