"""Whether a key column is one: no nulls, no duplicates; exact, in constant memory.

Every key's 64-bit hash goes into a temporary file, which is sorted in place (memory-mapped, so the kernel pages it);
equal neighbours are candidates, and only their keys are read again and compared themselves. Price: 8 bytes of disk per
row, one pass over the key column, a second one only when hashes collide.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from torchlake.errors import TableError
from torchlake.tables.chunks import Plan
from torchlake.tables.reading import ChunkReader
from torchlake.tables.table import Table

EXAMPLES = 3
CANDIDATES = 65_536
"Hashes that are compared by their keys in one pass."


class Keys(NamedTuple):
    """The keys of consecutive rows; `where` names their file, `first_row` the number of the first."""

    where: str
    first_row: int
    values: list[Any]
    unreadable: frozenset[int]
    "Rows that could not be read: their missing key is no fault of the key's."


def check_key(table: Table, plan: Plan, key: str) -> None:
    """Raise TableError with up to 3 examples (file, row, key) when `key` has nulls or duplicates."""

    def read() -> Iterator[Keys]:
        reader = ChunkReader([key])
        try:
            for chunk in plan.chunks:
                rows, errors = reader.read(chunk)
                yield Keys(chunk.file, chunk.first_row, rows[key].to_pylist(), frozenset(errors))
        finally:
            reader.close()

    problem = key_problem(read, plan.rows)
    if problem is not None:
        raise TableError(
            f"{table.source}: the key {key!r} {problem}. Mend the rows, name another key, or leave it out: rows then "
            "get a generated row_id."
        )


def key_problem(read: Callable[[], Iterator[Keys]], rows: int) -> str | None:
    """What is wrong with at most `rows` keys, in words with examples; None when they are unique and not null.

    `read` is called once, and again to compare the keys whose hashes are equal.
    """
    if rows == 0:
        return None
    with tempfile.TemporaryFile(prefix="torchlake-keys-") as file:
        os.truncate(file.fileno(), rows * 8)
        hashes = np.memmap(file, dtype=np.int64, mode="r+", shape=(rows,))
        count = 0
        nulls: list[str] = []
        for keys in read():
            try:
                found = [hash(value) for value in keys.values if value is not None]
            except TypeError:
                return "holds lists or structs, which cannot be keys"
            if len(found) < len(keys.values):
                nulls += [
                    f"{keys.where} row {keys.first_row + row}"
                    for row, value in enumerate(keys.values)
                    if value is None and row not in keys.unreadable
                ][:EXAMPLES]
            hashes[count : count + len(found)] = found
            count += len(found)
        if nulls:
            return f"is null, for example in {'; '.join(nulls[:EXAMPLES])}"
        sorted_hashes = hashes[:count]
        sorted_hashes.sort()
        for candidates in _equal_neighbours(sorted_hashes):
            examples = _duplicates(read, candidates)
            if examples:
                return f"is not unique, for example {'; '.join(examples)}"
    return None


def _equal_neighbours(hashes: np.ndarray, step: int = 1 << 20) -> Iterator[set[int]]:
    """Hashes that are there more than once, as sets of at most `CANDIDATES`."""
    candidates: set[int] = set()
    for start in range(0, len(hashes) - 1, step):
        block = np.asarray(hashes[start : start + step + 1])
        for value in np.unique(block[1:][block[1:] == block[:-1]]).tolist():
            candidates.add(value)
            if len(candidates) == CANDIDATES:
                yield candidates
                candidates = set()
    if candidates:
        yield candidates


def _duplicates(read: Callable[[], Iterator[Keys]], candidates: set[int]) -> list[str]:
    """Up to 3 keys that are there twice, each with the two places."""
    first: dict[Any, str] = {}
    examples: list[str] = []
    for keys in read():
        for row, value in enumerate(keys.values):
            if value is None or hash(value) not in candidates:
                continue
            where = f"{keys.where} row {keys.first_row + row}"
            before = first.setdefault(value, where)
            if before != where:
                examples.append(f"{value!r} in {before} and {where}")
                if len(examples) == EXAMPLES:
                    return examples
    return examples
