"""What a command makes of the rows of a table: the part of a table job that differs between the commands."""

from collections.abc import Generator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import pyarrow as pa

from torchlake.jobs.worker.read_ahead import WrittenChunk
from torchlake.outputs.transaction import Transaction
from torchlake.tables.plan import Chunk
from torchlake.tables.table import Table

R_co = TypeVar("R_co", bound=WrittenChunk, covariant=True)


class Work(Protocol[R_co]):
    """The work of a command. `table_job` calls its methods in this order, for each increment of a call again."""

    @property
    def name(self) -> str:
        """The command, for messages."""

    @property
    def key(self) -> str | None:
        """The column that identifies a row, whose values are checked; None: there is none, or it needs no check."""

    @property
    def columns(self) -> Sequence[str]:
        """The columns to read; empty: all."""

    @property
    def environment(self) -> Mapping[str, str]:
        """The versions of libraries that may change the result."""

    def fit(self, source: Table) -> pa.Schema:
        """Return the schema of the output. Raises TableError and UsageError for a table that the work cannot read."""

    def fingerprint(self, source: Table, earlier: Mapping[str, Any]) -> dict[str, Any]:
        """Return all settings that, with the rows, determine the output; `earlier` are those of an earlier write."""

    def start(self, out: Transaction, items: list[tuple[Chunk, str]]) -> Generator[R_co, None, None]:
        """Write the pending chunks, with their part names, and yield the reports."""

    def provenance(self, out: Transaction, made: Sequence[Any], seconds: float) -> dict[str, Any]:
        """Return the entries in the commit record; `made` are the reports, `seconds` those of the call so far."""
