"""How a stored table is read: the arguments that every function on stored tables accepts."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict

from torchlake.errors import UsageError
from torchlake.tables.formats.streams import Dialect
from torchlake.tables.selection.options import Selection


class FilterArguments(TypedDict, total=False):
    """The arguments of a function that draws its own sample."""

    where: str | None
    limit: int | None
    csv: Mapping[str, str] | None


class ReadArguments(FilterArguments, total=False):
    """The arguments of the other functions; `predict` documents them."""

    sample: float | None
    seed: int | None


READ_ARGUMENTS = frozenset(ReadArguments.__annotations__) | frozenset(FilterArguments.__annotations__)


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How a stored table is read."""

    selection: Selection = field(default_factory=Selection)
    csv: Dialect = field(default_factory=Dialect)

    @property
    def asked(self) -> dict[str, Any]:
        """The options that were given, for records; empty if all rows are read."""
        return {**self.selection.asked, **({"csv": self.csv.given} if self.csv.given else {})}

    def refuse_for_frames(self) -> None:
        """Raise UsageError if there is any option: a frame selects its own rows."""
        if self.asked:
            given = ", ".join(self.asked)
            raise UsageError(f"{given}: only for stored tables; select the rows of a frame with its own methods.")


def read_options(given: Mapping[str, Any]) -> ReadOptions:
    """Return the options among these arguments of a function.

    Raises TypeError for an unknown argument, as a function does, and UsageError for a value out of range.
    """
    unknown = sorted(given.keys() - READ_ARGUMENTS)
    if unknown:
        raise TypeError(f"got an unexpected keyword argument {unknown[0]!r}")
    names = {one.name for one in fields(Selection)}
    selection = {name: value for name, value in given.items() if name in names and value is not None}
    return ReadOptions(selection=Selection(**selection), csv=dialect(given.get("csv") or {}))


def dialect(given: Mapping[str, str | None]) -> Dialect:
    """Return the dialect with these values. Raises UsageError for an unknown key or an invalid value."""
    known = {one.name for one in fields(Dialect)}
    unknown = sorted(given.keys() - known)
    if unknown:
        raise UsageError(f"csv: there is no option {unknown[0]!r}. Options: {', '.join(sorted(known))}.")
    return Dialect(**{name: value for name, value in given.items() if value is not None})
