"""A version of a Delta table: what its log says about commits, files and operations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from torchlake.outputs.grouping import partition_text
from torchlake.outputs.target import Logged
from torchlake.storage.errors import library_errors
from torchlake.tables.sources import delta as source

KEPT_COMMITS = "torchlake.commit"
"The field of a log entry that names the commit."
_STATISTICS = ("null_count", "min", "max")
HISTORY = 20
"Number of log entries that are searched for torchlake's last commit; entries of maintenance may come after it."


@dataclass(frozen=True, kw_only=True)
class DeltaSnapshot:
    """A table at one version; `table` is None if there is none yet."""

    table: Any

    @property
    def version(self) -> str:
        """The version's number; empty if there is no table, or it never had a row."""
        return "" if self.table is None else str(self.table.version())

    @property
    def latest(self) -> str | None:
        """The commit that the last entries of the log name."""
        if self.table is None:
            return None
        with library_errors(self.table.table_uri):
            entries = self.table.history(HISTORY)
        return next((str(one[KEPT_COMMITS]) for one in entries if KEPT_COMMITS in one), None)

    @cached_property
    def actions(self) -> pa.Table | None:
        """What the log says about the files that it lists; None: it lists none."""
        return pa.table(self.table.get_add_actions()) if self.table is not None and self.table.file_uris() else None

    @cached_property
    def deleted(self) -> Mapping[str, int]:
        """How many rows of the files with deletion vectors are deleted."""
        vectors = {} if self.table is None else source.deleted_rows(self.table)
        return {path: int.from_bytes(bits, "little").bit_count() for path, bits in vectors.items()}

    @cached_property
    def paths(self) -> Sequence[str]:
        """The files with rows, as the log names them: read once, because each commit is looked for among them."""
        if self.actions is None:
            return ()
        paths: list[str] = self.actions["path"].to_pylist()
        if not self.deleted:
            return paths
        rows = self.actions["num_records"].to_pylist()
        return [
            path for path, count in zip(paths, rows, strict=True) if self.deleted.get(source.decoded(path)) != count
        ]

    @cached_property
    def history(self) -> Sequence[Mapping[str, Any]]:
        """The entries of the log about all operations, the newest first."""
        found: list[dict[str, Any]] = self.table.history()
        return found

    @property
    def logged(self) -> Mapping[str, Logged]:
        """The statistics and partitions of the files, by path."""
        found = {}
        for one in self.actions.to_pylist() if self.actions is not None else ():
            nulls, lowest, highest = (
                {name: value for name, value in (one.get(field) or {}).items() if value is not None}
                for field in _STATISTICS
            )
            partition = {name: partition_text(value) for name, value in (one.get("partition") or {}).items()}
            gone = self.deleted.get(source.decoded(one["path"]), 0)
            size, rows = one["size_bytes"], one.get("num_records")
            found[unquote(one["path"])] = Logged(size, rows, partition, nulls, lowest, highest, gone)
        return found
