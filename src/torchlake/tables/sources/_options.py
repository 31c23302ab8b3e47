"""How a stored table is read: the arguments that every function for one accepts."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torchlake.tables.selection.options import Selection, SelectionOptions


class ReadArguments(SelectionOptions, total=False):
    """`where`, `sample`, `limit` and `seed` as in `predict`."""


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How a stored table is read."""

    selection: Selection = field(default_factory=Selection)


def read_options(given: Mapping[str, Any]) -> ReadOptions:
    """The options among these arguments. Raises UsageError for a value out of range."""
    names = {one.name for one in fields(Selection)}
    return ReadOptions(selection=Selection(**{name: given[name] for name in given if name in names}))
