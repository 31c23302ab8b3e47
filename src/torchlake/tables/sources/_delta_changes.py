"""Find what the versions of a Delta table changed: files that were added, or rows by key from its change data feed.

The log has one JSON file for each version, whose actions state whether they change rows (`dataChange`); a compaction
does not. A file that was added and has been compacted since is read as it was added. Cost: one small file per version.
"""

import hashlib
import json
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc

from torchlake.errors import TableError, Unavailable
from torchlake.storage.access import open_binary, read_range
from torchlake.tables.formats.layout import storage_type
from torchlake.tables.sources._interface import ChangedRows

LOG = "_delta_log"
_HASHED_BYTES = 1 << 20
_OF_FEED = ("_change_type", "_commit_version", "_commit_timestamp")
"The columns of a change data feed that are not the table's."


class Added(NamedTuple):
    """The files that some versions added."""

    files: list[dict[str, Any]]
    "Their `add` actions, in the order of the log."
    changed: str
    "The version that also changed or removed rows; empty if the added files are all that happened."


def added_files(table: str, since: int, version: int) -> Added:
    """Return the files that versions after `since` added, up to `version`. Raises TableError if a log is missing."""
    found: dict[str, dict[str, Any]] = {}
    changed = ""
    for number in range(since + 1, version + 1):
        actions = list(_actions(table, number))
        removed = {unquote(one["remove"]["path"]): one["remove"] for one in actions if "remove" in one}
        for one in actions:
            add = one.get("add")
            if add is None or not add.get("dataChange", True):
                continue
            path = unquote(add["path"])
            if path in removed or add.get("deletionVector"):
                changed = changed or f"version {number} changed rows of {path}"
            else:
                found[path] = {**add, "path": path}
        for path, remove in removed.items():
            if remove.get("dataChange", True):
                changed = changed or f"version {number} removed or changed rows of {path}"
    return Added(list(found.values()), changed)


def commit_id(table: str, number: int) -> str:
    """Return a hash of the start of a version's log, which names new files; empty if the log was removed."""
    try:
        return hashlib.sha256(read_range(_log_of(table, number), 0, _HASHED_BYTES)).hexdigest()[:32]
    except Unavailable as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return ""
        raise


def _log_of(table: str, number: int) -> str:
    return f"{table.rstrip('/')}/{LOG}/{number:020d}.json"


def _actions(table: str, number: int) -> Iterator[dict[str, Any]]:
    try:
        with open_binary(_log_of(table, number)) as source:
            content = source.read()
    except Unavailable as error:
        raise TableError(
            f"{table}: the log of version {number} was removed, so new rows cannot be found ({error}). Score the whole "
            "table again (mode overwrite)."
        ) from error
    yield from (json.loads(line) for line in content.splitlines() if line.strip())


def changed_rows(delta_table: Any, since: int, version: int, key: str) -> ChangedRows | None:
    """Return the rows that the versions after `since` added and removed; None if the table has no change data feed.

    Cost: the changes in memory. Raises TableError when the feed cannot be read.
    """
    if delta_table.metadata().configuration.get("delta.enableChangeDataFeed") != "true":
        return None
    try:
        feed = pa.table(delta_table.load_cdf(starting_version=since + 1, ending_version=version).read_all())
    except Exception as error:  # from deltalake or the storage
        raise TableError(
            f"{delta_table.table_uri}: the change data feed after version {since} cannot be read: "
            f"{str(error).splitlines()[0]}. Score the whole table again (mode overwrite)."
        ) from error
    # deltalake returns string views, for which Arrow lacks functions, and partition columns in types of its own.
    types = {field.name: storage_type(field.type) for field in pa.schema(delta_table.schema().to_arrow())}
    types["_change_type"] = pa.string()
    feed = feed.cast(pa.schema([field.with_type(types.get(field.name, field.type)) for field in feed.schema]))
    if key not in feed.column_names:
        raise TableError(f"{delta_table.table_uri}: has no column {key!r}. Give a column of the table as the key.")
    feed = feed.take(pc.sort_indices(feed["_commit_version"]))
    removed = pc.is_in(feed["_change_type"], pa.array(["update_preimage", "delete"]))
    return ChangedRows(feed.select([name for name in feed.column_names if name not in _OF_FEED]), removed)
