"""How a stored table is read: the arguments that every function for one accepts."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict

from torchlake.errors import UsageError
from torchlake.tables.selection.options import Selection


class FilterArguments(TypedDict, total=False):
    """The arguments of a function that draws a sample by itself."""

    where: str | None
    limit: int | None


class ReadArguments(FilterArguments, total=False):
    """The arguments of the other functions; `predict` documents them."""

    sample: float | None
    seed: int | None


READ_ARGUMENTS = frozenset(ReadArguments.__annotations__) | frozenset(FilterArguments.__annotations__)


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How a stored table is read."""

    selection: Selection = field(default_factory=Selection)

    def refuse_for_frames(self) -> None:
        """Raise UsageError if there is any option: a frame selects its own rows."""
        if self.selection.asked:
            given = ", ".join(self.selection.asked)
            raise UsageError(f"{given}: for stored tables; select the rows of a frame with its own methods.")


def read_options(given: Mapping[str, Any]) -> ReadOptions:
    """The options among these arguments of a function.

    Raises TypeError for another argument, as a function does, and UsageError for a value out of range.
    """
    unknown = sorted(given.keys() - READ_ARGUMENTS)
    if unknown:
        raise TypeError(f"got an unexpected keyword argument {unknown[0]!r}")
    names = {one.name for one in fields(Selection)}
    selection = {name: value for name, value in given.items() if name in names and value is not None}
    return ReadOptions(selection=Selection(**selection))
