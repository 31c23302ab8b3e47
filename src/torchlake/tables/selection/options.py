"""The rows that a job asks for."""

from dataclasses import asdict, dataclass
from typing import Any

from torchlake.errors import UsageError
from torchlake.tables.selection.grammar import parse


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which rows of a table are read: those that `where` is true for, of these a `sample`, of these the first `limit`.

    Raises UsageError for a value out of range, or a condition that cannot be parsed.
    """

    where: str | None = None
    "A condition such as \"stars >= 3 and lang = 'en'\"; rows where it is false or null are left out."
    sample: float | None = None
    "Share of the rows, above 0 and up to 1; which ones depends on `seed` and the row ids only."
    limit: int | None = None
    "Maximum number of rows, in the order of the table."
    seed: int = 0
    "Of the sample."

    def __post_init__(self) -> None:
        if self.where is not None:
            parse(self.where)
        if self.sample is not None and not 0 < self.sample <= 1:
            raise UsageError(f"sample is a share of the rows, above 0 and up to 1; {self.sample} was given.")
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"limit is a number of rows, 1 or more; {self.limit} was given.")

    @property
    def asked(self) -> dict[str, Any]:
        """The options that were given, for records; empty if all rows are read."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        if self.sample is None:
            del given["seed"]
        return given
