"""The rows that a job requests."""

from dataclasses import asdict, dataclass
from typing import Any

from torchlake.errors import UsageError
from torchlake.tables.selection.grammar import parse


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which rows of a table are read: those where `where` is true, then a `sample` of them, then the first `limit`.

    Raises UsageError for a value out of range and for a condition that cannot be parsed.
    """

    where: str | None = None
    "A condition such as \"stars >= 3 and lang = 'en'\"; rows where it is false or null are left out."
    sample: float | None = None
    "Share of the rows, above 0 and up to 1; the choice depends only on `seed` and the row ids."
    limit: int | None = None
    "Maximum number of rows, in the order of the table."
    seed: int = 0
    "Seed of the sample."

    def __post_init__(self) -> None:
        if self.where is not None:
            parse(self.where)
        if self.sample is not None and not 0 < self.sample <= 1:
            raise UsageError(f"sample: expected a share of the rows above 0 and up to 1, got {self.sample}.")
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"limit: expected a number of rows, 1 or more, got {self.limit}.")

    @property
    def asked(self) -> dict[str, Any]:
        """The options that were given, for records; empty if all rows are read."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        if self.sample is None:
            del given["seed"]
        return given
