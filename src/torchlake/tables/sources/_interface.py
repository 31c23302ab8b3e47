"""What a source provides: the identity of a table, its schema, and the files that its rows are read from.

A source is a file in this package, with these functions; `follow` is optional:

    recognizes(source)      whether a string, path or object names a table of this kind; cheap, and imports no library
    pin(source)             the same with its current version, to be opened again; unchanged if it has no versions
    open_source(source)     its `SourceTable`; raises TableError, or MissingExtra when a library is not installed
    follow(source)          for a table whose new rows can be found: `Followed`, or None for one fixed version

All other code reads files: a chunk is a range of rows of one file, whose version is checked before and after reading. A
file may have fewer columns than its table or other names for them (its `View`), and deleted rows.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import pyarrow as pa

from torchlake.tables.selection.bounds import Bounds


@dataclass(frozen=True, kw_only=True)
class View:
    """How a table's columns are read from one file; other columns are read by their names."""

    constants: Mapping[str, str | None] = field(default_factory=dict)
    "Columns that the file lacks, with their value in all of its rows as a string that Arrow casts."
    names: Mapping[str, str] = field(default_factory=dict)
    "The name of a column in the file."
    csv: Mapping[str, str] = field(default_factory=dict)
    "How a CSV file is written (`formats/streams.py`), if not by default."

    def to_json(self) -> str:
        """Return the empty string for a file whose columns are the table's."""
        if self == View():
            return ""
        csv = {"csv": dict(self.csv)} if self.csv else {}
        return json.dumps({"constants": dict(self.constants), "names": dict(self.names), **csv}, sort_keys=True)


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One file of a table."""

    name: str
    "Path relative to the table's folder; used in row ids."
    file: str
    "An absolute path or a URL."
    size: int | None = None
    "Bytes, if the table's log has them."
    rows: int | None = None
    "Number of rows including deleted ones, if the table's log has it."
    view: View = field(default_factory=View)
    deleted: bytes = b""
    "A bitmap of the file's rows that marks deleted ones; rows after its end are not deleted."


@dataclass(frozen=True, kw_only=True)
class SourceTable:
    """A table as a source found it."""

    files: tuple[SourceFile, ...]
    "The files, in the order of the rows."
    identity: Mapping[str, Any] = field(default_factory=dict)
    """Kind, table, its own id, version, and that version's position and commit (`Followed`); for records. Empty for
    loose files, each of which is recorded."""
    schema: pa.Schema | None = None
    "The table's columns; a column that a file lacks is null there. None: every file has the columns of the first one."
    partitions: pa.Schema = field(default_factory=lambda: pa.schema([]))
    "The types of the columns that have one value in each file."
    view: Callable[[SourceFile, pa.Schema, Sequence[str]], View] | None = None
    """A Parquet file's view for some columns (all, if none are named), from the schema in its footer; None: the file's
    own."""
    bounds: Mapping[str, Bounds] = field(default_factory=dict)
    "Statistics of each file in the table's log, by column; files that a condition rules out are not opened."


class ChangedRows(NamedTuple):
    """The rows that a range of versions added and removed."""

    rows: pa.Table
    "In the order of the versions; an updated row as it was before and as it is after, in any order."
    removed: pa.ChunkedArray
    "(N,) bool, whether the row was removed; else it was added."
    identity: Mapping[str, Any] = {}
    "That of the table at the last version, as in `SourceTable`."


@dataclass(frozen=True, kw_only=True)
class Followed:
    """A table that is followed from version to version; positions grow with every version."""

    name: str
    "The table's name, the same at every version."
    id: str
    "The table's own id: another one if the table was dropped and recreated under its name."
    position: int
    "The position of the current version; below 0 for a table without versions."
    commit: Callable[[int], str]
    "What distinguishes the version at a position from one that another copy of the table has there; empty if unknown."
    at: Callable[[int], str]
    "The table at a position."
    added: Callable[[int, int], str]
    "The files that were added after one position, up to another."
    has_changed: Callable[[int, int], str]
    "Why the files that were added in between are not all that is new; empty if they are."
    changed_rows: Callable[[int, int, str], ChangedRows | None]
    "The rows that were added and removed in between, of a table with this key; None if it does not record them."


@lru_cache(maxsize=1024)
def view_of(text: str) -> View:
    """Return the view that `to_json` wrote."""
    return View(**json.loads(text)) if text else View()
