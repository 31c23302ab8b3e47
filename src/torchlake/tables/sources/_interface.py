"""What a source gives: the identity of a table, its schema, and the files that its rows are read from.

A source is a file in this package, with these functions; `follow` is optional:

    recognizes(source)      whether a string, path or object names a table of this kind; cheap, and imports no library
    pin(source)             the same with its present version, to be opened again; unchanged if it has no versions
    open_source(source)     its `SourceTable`; raises TableError, or MissingExtra when a library is not installed
    follow(source)          for a table whose new rows can be found: `Followed`, or None for one fixed version

Everything above reads files: a chunk is a range of rows of one file, and its version is checked before and after. A
file may have fewer columns than its table, or other names for them (its `View`), and rows that are deleted.
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
    "Columns that the file lacks and their value in all of its rows, as Arrow casts it from a string."
    names: Mapping[str, str] = field(default_factory=dict)
    "The file's name of a column."
    csv: Mapping[str, str] = field(default_factory=dict)
    "How a CSV file is written (`formats/streams.py`), where it is not the default."

    def to_json(self) -> str:
        """The empty string for a file whose columns are the table's."""
        if self == View():
            return ""
        csv = {"csv": dict(self.csv)} if self.csv else {}
        return json.dumps({"constants": dict(self.constants), "names": dict(self.names), **csv}, sort_keys=True)


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One file of a table."""

    name: str
    "Relative to the table's folder; used in row ids."
    file: str
    "An absolute path or a URL."
    size: int | None = None
    "In bytes, if the table's log says so."
    rows: int | None = None
    "With those that are deleted, if the table's log says so."
    view: View = field(default_factory=View)
    deleted: bytes = b""
    "A bitmap of the file's rows, with those that are deleted; rows after its end are not."


@dataclass(frozen=True, kw_only=True)
class SourceTable:
    """A table as a source found it."""

    files: tuple[SourceFile, ...]
    "In the order of the rows."
    identity: Mapping[str, Any] = field(default_factory=dict)
    "For records: the kind, the table, its version; empty for loose files, each of which is recorded."
    schema: pa.Schema | None = None
    "A column that a file lacks is null in its rows. None: every file has the columns of the first one."
    partitions: pa.Schema = field(default_factory=lambda: pa.schema([]))
    "The types of columns that are constants of files."
    view: Callable[[SourceFile, pa.Schema, Sequence[str]], View] | None = None
    """A Parquet file's view for some columns (all, if none are named), from the schema in its footer; None: the file's
    own."""
    bounds: Mapping[str, Bounds] = field(default_factory=dict)
    "By column, statistics of each file in the table's log; files that a condition rules out are not opened."


class ChangedRows(NamedTuple):
    """What some versions did to the rows, by key."""

    rows: pa.Table
    "Inserted and updated rows as they are at the last version, once each."
    deleted: pa.Array
    "Keys whose rows are gone."


@dataclass(frozen=True, kw_only=True)
class Followed:
    """A table whose versions are followed: positions grow with every version."""

    name: str
    "The same at every version."
    position: int
    "Of the current version; below 0 for a table that has none yet."
    at: Callable[[int], str]
    "The table at a position."
    added: Callable[[int, int], str]
    "The files that were added after a position, up to another one."
    has_changed: Callable[[int, int], str]
    "Why files that were added in between are not all that is new; empty if they are."
    changed_rows: Callable[[int, int, str], ChangedRows | None]
    "What happened in between to rows with a key; None if the table does not say."


@lru_cache(maxsize=1024)
def view_of(text: str) -> View:
    """The view that `to_json` wrote."""
    return View(**json.loads(text)) if text else View()
