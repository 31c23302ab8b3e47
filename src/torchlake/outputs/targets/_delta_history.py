"""Whether the rows of a commit to a Delta table are still there, by the operations in the table's history.

The log keeps the transaction of a commit for good, even if a RESTORE to an earlier version, an overwrite or a deletion
by another program has removed its rows. Cost: reading the history, for commits none of whose files the table lists.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

_REPLACING = frozenset({"TRUNCATE", "REPLACE TABLE", "CREATE OR REPLACE TABLE", "REPLACE TABLE AS SELECT",
    "CREATE OR REPLACE TABLE AS SELECT"})  # fmt: skip
_ADDING = frozenset({"STREAMING UPDATE", "CREATE TABLE", "CREATE TABLE AS SELECT", "ADD COLUMNS", "CHANGE COLUMN",
    "SET TBLPROPERTIES", "UNSET TBLPROPERTIES", "ADD CONSTRAINT", "DROP CONSTRAINT", "UPGRADE PROTOCOL", "ADD FEATURE",
    "VACUUM START", "VACUUM END", "FSCK"})  # fmt: skip
"Operations that move no row to another file."


def is_lost(history: Sequence[Mapping[str, Any]], made: int, keeps_files: Callable[[Mapping[str, Any]], bool]) -> bool:
    """Return whether it is certain that no row of a commit is in the table, which lists none of the commit's files.

    `history` has the entries of the log, the newest first; `made` is the version of the commit. `keeps_files` says
    whether a write that adds rows moved no other row to its own files.
    """
    entries = {int(one["version"]): one for one in history}
    version, moved = max(entries), False
    while version > made:
        one = entries.get(version)
        if one is None:  # removed from the log by its retention
            return False
        operation, values = str(one.get("operation", "")).upper(), one.get("operationParameters") or {}
        restored = _restored(entries, version, values) if operation == "RESTORE" else None
        if restored is not None:
            version = restored
            continue
        if _replaces_all(operation, values):
            return True
        adds = operation in _ADDING or (operation == "WRITE" and _mode(values) != "overwrite" and keeps_files(one))
        moved = moved or not (adds or (operation == "DELETE" and _added_files(one) == 0))
        version -= 1
    # Without an operation that could have moved them, the rows went with their files.
    return version < made or not moved


def _restored(entries: Mapping[int, Mapping[str, Any]], version: int, values: Mapping[str, Any]) -> int | None:
    """Return the version that a RESTORE made current again; None if the log does not say it as a number or in ms."""
    number, time_ms = str(values.get("version") or ""), str(values.get("datetime") or "")
    if number.isdecimal():
        return int(number)
    if not time_ms.isdecimal():
        return None
    before = [one for one in entries if one < version and int(entries[one].get("timestamp", 0)) <= int(time_ms)]
    return max(before, default=None)


def _replaces_all(operation: str, values: Mapping[str, Any]) -> bool:
    """Return whether the operation left no row that was there before."""
    predicate = str(values.get("predicate") or "").strip()
    everything = predicate in ("", "[]", "true", '["true"]')
    dynamic = str(values.get("isDynamicPartitionOverwriteMode") or "").lower() == "true"
    overwrites = operation == "WRITE" and _mode(values) == "overwrite" and not dynamic
    return operation in _REPLACING or (everything and (overwrites or operation == "DELETE"))


def _mode(values: Mapping[str, Any]) -> str:
    return str(values.get("mode") or "").lower()


def _added_files(entry: Mapping[str, Any]) -> int | None:
    metrics = entry.get("operationMetrics") or {}
    found = metrics.get("num_added_files", metrics.get("numAddedFiles"))
    return None if found is None else int(found)
