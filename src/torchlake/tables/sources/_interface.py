"""What a source gives: the identity of a table, its schema, and the files that its rows are read from.

A source is a file in this package, with two functions:

    recognizes(source)      whether a string, path or object names a table of this kind; cheap, and imports no library
    open_source(source)     its `SourceTable`; raises TableError, or MissingExtra when a library is not installed

Everything above reads files: a chunk is a range of rows of one file, and its version is checked before and after.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One file of a table."""

    name: str
    "Relative to the table's folder; used in row ids."
    file: str
    "An absolute path or a URL."


@dataclass(frozen=True, kw_only=True)
class SourceTable:
    """A table as a source found it."""

    files: tuple[SourceFile, ...]
    "In the order of the rows."
    identity: Mapping[str, Any] = field(default_factory=dict)
    "For records: the kind, the table, its version; empty for loose files, each of which is recorded."
    schema: pa.Schema | None = None
    "None: that of the files."
