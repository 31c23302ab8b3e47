"""How a stored table is read: the checked values of `ReadArguments`, which every function on stored tables accepts."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torchlake.errors import UsageError
from torchlake.tables.formats.streams import Dialect
from torchlake.tables.selection.options import Selection


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
    names = {one.name for one in fields(Selection)}
    unknown = sorted(given.keys() - names - {"csv"})
    if unknown:
        raise TypeError(f"got an unexpected keyword argument {unknown[0]!r}")
    selection = {name: value for name, value in given.items() if name in names and value is not None}
    return ReadOptions(selection=Selection(**selection), csv=dialect(given.get("csv") or {}))


def refuse_seed_alone(given: Mapping[str, Any]) -> None:
    """Raise UsageError for a seed without a sample, in a function that draws nothing else."""
    if given.get("seed") is not None and given.get("sample") is None:
        raise UsageError("seed: of a sample of the rows; give sample as well, or leave it out.")


def dialect(given: Mapping[str, str | None]) -> Dialect:
    """Return the dialect with these values. Raises UsageError for an unknown key or an invalid value."""
    known = {one.name for one in fields(Dialect)}
    unknown = sorted(given.keys() - known)
    if unknown:
        raise UsageError(f"csv: there is no option {unknown[0]!r}. Options: {', '.join(sorted(known))}.")
    return Dialect(**{name: value for name, value in given.items() if value is not None})
