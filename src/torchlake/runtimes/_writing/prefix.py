"""Which rows begin alike: what one of them has computed of its beginning is copied to the others.

Keys and values of a token depend only on those before it, so equal beginnings have equal ones. Beginnings are counted
in blocks of `BLOCK` tokens: prompts that differ a little later are filled together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from torchlake.runtimes._writing.row import Row

BLOCK = 16


@dataclass
class Beginnings:
    """A tree of the first blocks of prompts; `rows` {number: row} are those that begin so."""

    rows: dict[int, Row] = field(default_factory=dict)
    longer: dict[bytes, "Beginnings"] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        """Add a row."""
        at = self
        for block in _blocks(row.prompt):
            at = at.longer.setdefault(block, Beginnings())
            at.rows[row.number] = row

    def remove(self, row: Row) -> None:
        """Take out a row."""
        at = self
        for block in _blocks(row.prompt):
            at, before = at.longer[block], at
            del at.rows[row.number]
            if not at.rows:
                del before.longer[block]
                return

    def find(self, ids: np.ndarray) -> tuple[int, Row | None]:
        """Return how many first tokens of `ids` (L,) a row shares with it, and that row; the last token never
        counts, because its scores are wanted."""
        at, length = self, 0
        for block in _blocks(ids[:-1]):
            if (longer := at.longer.get(block)) is None:
                break
            at, length = longer, length + BLOCK
        return length, next(iter(at.rows.values()), None) if length else None


def leader(rows: Sequence[Row]) -> tuple[int, Row | None]:
    """Return the length of the longest beginning that at least half of the rows share, and one that has it."""
    tree = Beginnings()
    for row in rows:
        tree.add(row)
    length, found = 0, None
    while most := max(tree.longer.values(), key=lambda one: len(one.rows), default=None):
        if len(most.rows) < max(2, len(rows) / 2):
            break
        tree, length, found = most, length + BLOCK, next(iter(most.rows.values()))
    return length, found


def _blocks(ids: np.ndarray) -> Iterator[bytes]:
    for start in range(0, len(ids) - BLOCK + 1, BLOCK):
        yield ids[start : start + BLOCK].tobytes()
