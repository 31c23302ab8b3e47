"""Find which source reads an input, which version of it a job reads, and names for the files of several tables."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

from torchlake import plugins
from torchlake.errors import TableError
from torchlake.tables.sources._interface import SourceTable


def source_of(one: Any) -> ModuleType | None:
    """Return the source that recognizes a string, path or object; None for loose files."""
    kinds = [plugins.load("sources", name) for name in plugins.names("sources") if name != "files"]
    return next((kind for kind in kinds if kind.recognizes(one)), None)


def pinned(source: Any) -> Any:
    """Return `source` with a version for each table in it that has versions, as a list if it was a sequence.

    A function that opens a table several times pins it first, so that it reads one version even if another is
    committed meanwhile. Raises TableError when a table cannot be read.
    """
    if isinstance(source, Sequence) and not isinstance(source, str):
        return [pinned(one) for one in source]
    kind = source_of(source)
    return source if kind is None else kind.pin(source)


def with_own_names(tables: Sequence[SourceTable]) -> list[SourceTable]:
    """Return the tables with names that begin with the table's, as several may have files of one name."""
    read = Counter(one.file for table in tables for one in table.files)
    shared = next((file for file, count in read.items() if count > 1), None)
    if shared is not None:
        raise TableError(f"{shared}: is in two of the tables, so its rows would be read twice. Name each table once.")
    renamed = []
    for table in tables:
        named = str(table.identity.get("table", "")).rstrip("/").rpartition("/")[2]
        folder = f"{named}/" if named else ""
        files = tuple(replace(one, name=f"{folder}{one.name}") for one in table.files)
        renamed.append(replace(table, files=files))
    counts = Counter(one.name for table in renamed for one in table.files)
    twice = next((name for name, count in counts.items() if count > 1), None)
    if twice is not None:
        raise TableError(
            f"Two of the tables have a file {twice}, but row ids need different names. Rename one of the folders."
        )
    return renamed
