"""Find which source reads an input, and which version of it a job reads."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from torchlake import plugins


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
