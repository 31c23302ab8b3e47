"""Check a key column for nulls, NaN and duplicates: exact, in constant memory.

Every key's 64-bit hash is written to a temporary file, which is sorted in place (memory-mapped, so the kernel pages
it). Keys with equal hashes are read again and compared. Cost: 8 bytes of disk per row, one pass over the key column, a
second one only if hashes are equal.
"""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from torchlake.errors import TableError
from torchlake.tables.formats.layout import storage_type
from torchlake.tables.hashes import Words, hashes, identities, is_hashable
from torchlake.tables.plan import Plan
from torchlake.tables.reading import ChunkReader
from torchlake.tables.table import Table

EXAMPLES = 3
CANDIDATES = 65_536
"Hashes whose keys are compared in one pass."
BLOCK = 1 << 20
"Hashes per block when scanning."

Rows = npt.NDArray[np.int64]


class Keys(NamedTuple):
    """The keys of consecutive rows of the file `where`, from `first_row` on."""

    where: str
    first_row: int
    values: pa.ChunkedArray
    unreadable: Iterable[int] = ()
    "Indices of rows that could not be read: their null keys do not count."


def check_key(table: Table, plan: Plan, key: str) -> None:
    """Raise TableError with up to 3 examples (file, row, key) when `key` has nulls, NaN or duplicates."""

    def read() -> Iterator[Keys]:
        reader = ChunkReader([key])
        try:
            for chunk in plan.chunks:
                rows, errors = reader.read(chunk)
                yield Keys(chunk.file, chunk.first_row, rows[key], errors)
        finally:
            reader.close()

    problem = key_problem(read, plan.rows)
    if problem is not None:
        raise TableError(
            f"{table.source}: the key {key!r} {problem}. Fix the rows, name another key, or leave it out: rows then "
            "get a generated row_id."
        )


def key_problem(read: Callable[[], Iterator[Keys]], rows: int) -> str | None:
    """A description, with examples, of what is wrong with at most `rows` keys; None if nothing is.

    `read` is called once, and again to compare keys with equal hashes.
    """
    if rows == 0:
        return None
    with tempfile.TemporaryFile(prefix="torchlake-keys-") as file:
        os.truncate(file.fileno(), rows * 8)
        stored = np.memmap(file, dtype=np.uint64, mode="r+", shape=(rows,))
        count = 0
        faults: dict[str, list[str]] = {"null": [], "NaN": []}
        for keys in read():
            if not is_hashable(storage_type(keys.values.type)):
                return "holds lists or structs, which cannot be keys"
            for found in _hashes(keys, faults):
                stored[count : count + len(found)] = found
                count += len(found)
            if any(len(examples) >= EXAMPLES for examples in faults.values()):
                break
        for fault, examples in faults.items():
            if examples:
                return f"is {fault}, for example in {'; '.join(examples[:EXAMPLES])}"
        ordered = stored[:count]
        if not _is_sorted(ordered):
            ordered.sort()
        for candidates in _equal_neighbors(ordered):
            if examples := _duplicates(read, candidates):
                return f"is not unique, for example {'; '.join(examples)}"
    return None


def _hashes(keys: Keys, faults: dict[str, list[str]]) -> Iterator[Words]:
    """The hashes of the keys that are not null; adds rows whose key is null or NaN to `faults`."""
    unreadable = keys.first_row + np.fromiter(keys.unreadable, np.int64)
    for numbers, values, missing in _arrays(keys):
        faults["null"] += _places(keys, missing[~np.isin(missing, unreadable)])
        if pa.types.is_floating(values.type):
            faults["NaN"] += _places(keys, numbers[np.isnan(values.to_numpy(zero_copy_only=False))])
        yield hashes(values)


def _arrays(keys: Keys) -> Iterator[tuple[Rows, pa.Array, Rows]]:
    """By array: the row numbers of the keys that are not null, these keys decoded, the row numbers of nulls."""
    first = keys.first_row
    for values in keys.values.chunks:
        values = values.cast(storage_type(values.type))
        numbers = np.arange(first, first + len(values), dtype=np.int64)
        first += len(values)
        if values.null_count:
            null = values.is_null().to_numpy(zero_copy_only=False)
            yield numbers[~null], values.drop_null(), numbers[null]
        else:
            yield numbers, values, numbers[:0]


def _places(keys: Keys, numbers: Rows) -> list[str]:
    return [f"{keys.where} row {number}" for number in numbers[:EXAMPLES].tolist()]


def _blocks(stored: Words) -> Iterator[Words]:
    """Blocks of the array, each beginning with the last value of the previous one."""
    for start in range(0, len(stored) - 1, BLOCK):
        yield np.asarray(stored[start : start + BLOCK + 1])


def _is_sorted(stored: Words) -> bool:
    """Whether it is sorted already, as for an ordered column of numbers or times, which are their own hashes."""
    return all(bool((block[1:] >= block[:-1]).all()) for block in _blocks(stored))


def _equal_neighbors(ordered: Words) -> Iterator[Words]:
    """Hashes that occur more than once, in arrays of at most `CANDIDATES`."""
    found = np.empty(0, np.uint64)
    for block in _blocks(ordered):
        found = np.concatenate([found, np.unique(block[1:][block[1:] == block[:-1]])])
        while len(found) >= CANDIDATES:
            yield found[:CANDIDATES]
            found = found[CANDIDATES:]
    if len(found):
        yield found


def _duplicates(read: Callable[[], Iterator[Keys]], candidates: Words) -> list[str]:
    """Up to 3 keys that occur twice, each with both places."""
    first: dict[bytes, str] = {}
    examples: list[str] = []
    for keys in read():
        for numbers, values, _ in _arrays(keys):
            rows = np.flatnonzero(np.isin(hashes(values), candidates))
            values = values.take(pa.array(rows))
            for place, identity in enumerate(identities(values)):
                where = f"{keys.where} row {numbers[rows[place]]}"
                before = first.setdefault(identity, where)
                if before != where:
                    examples.append(f"{_shown(values[place])} in {before} and {where}")
                    if len(examples) == EXAMPLES:
                        return examples
    return examples


def _shown(key: pa.Scalar) -> str:
    """The `repr` of a key; the stored number if Python cannot represent the date or time."""
    try:
        return repr(key.as_py())
    except (ValueError, OverflowError, LookupError, pa.ArrowException):
        return repr(key.value if pa.types.is_temporal(key.type) else key.as_buffer().to_pybytes())
