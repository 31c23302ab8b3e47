"""Make the row ids of tables without a key, and check a key column for nulls, NaN and duplicates.

The check is exact, in constant memory, by as many processes as the engine has. Each item (some chunks, some parts)
writes the sorted 64-bit hashes of its keys to a temporary file. Ranges of hashes are then merged from all files, and
keys with equal hashes are read again and compared. Nothing is merged if the items' ranges do not overlap, as for a
column in ascending order. Cost: 8 bytes of disk per row, one pass over the key column, a second one only if hashes are
equal.
"""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from torchlake.errors import TableError
from torchlake.storage.spread import Spread, in_process
from torchlake.tables.arrays import from_numpy, from_strings
from torchlake.tables.formats.layout import storage_type
from torchlake.tables.hashes import Words, hashes, identities, is_hashable
from torchlake.tables.plan import Chunk, ChunkPlan
from torchlake.tables.reading import ChunkReader
from torchlake.tables.table import Table

EXAMPLES = 3
ITEM_ROWS = 1 << 20
"Number of keys that are hashed and sorted together."
RANGE_ROWS = 1 << 22
"Number of hashes that are merged together; 8 bytes of memory each, and as much again to sort them."
CANDIDATES = 4096
"Number of hashes whose keys are compared in one pass."
SAMPLE = 4096
"One of this many hashes is sampled."
READ_BYTES = 32
"Bytes of a row, in the estimate of how much a check reads."

Item = TypeVar("Item")
Rows = npt.NDArray[np.int64]


class Keys(NamedTuple):
    """The keys of consecutive rows of the file `where`, from `first_row` on."""

    where: str
    first_row: int
    values: pa.ChunkedArray
    unreadable: Iterable[int] = ()
    "Indices of rows that could not be read; their null keys do not count."


def row_ids(chunk: Chunk) -> pa.Array:
    """Return each row's id, "<file name>:<row number in the file>"; names are relative to the table's folder."""
    numbers = from_numpy(chunk.numbers).cast(pa.string())
    return pc.binary_join_element_wise(from_strings([chunk.name])[0], numbers, from_strings([":"])[0])


def check_key(
    table: Table, plan: ChunkPlan, key: str, *, spread: Spread = in_process, scratch: Path | None = None
) -> None:
    """Raise TableError with up to 3 examples (file, row, key) when `key` has nulls, NaN or duplicates.

    `scratch` is an existing folder for temporary files that the processes of `spread` share, by default the system's.
    """
    items = bundled(plan.chunks, [chunk.rows for chunk in plan.chunks], ITEM_ROWS)
    problem = key_problem(partial(_keys_of_chunks, key), items, rows=plan.rows, spread=spread, scratch=scratch)
    if problem is not None:
        raise TableError(
            f"{table.source}: the key {key!r} {problem}. Fix the rows, name another key, or leave the key out; rows "
            "then get a generated row_id."
        )


def bundled(items: Sequence[Item], sizes: Sequence[int], most: int) -> list[list[Item]]:
    """Return the items in lists, in order; a list ends before it has more than `most`, counted by `sizes`."""
    bundles: list[list[Item]] = []
    size = most
    for item, own in zip(items, sizes, strict=True):
        if size + own > most:
            bundles.append([])
            size = 0
        bundles[-1].append(item)
        size += own
    return bundles


def _keys_of_chunks(key: str, chunks: Sequence[Chunk]) -> Iterator[Keys]:
    reader = ChunkReader([key])
    try:
        for chunk in chunks:
            rows, errors = reader.read(chunk)
            yield Keys(chunk.file, chunk.first_row, rows[key], errors)
    finally:
        reader.close()


def key_problem(
    read: Callable[[Item], Iterable[Keys]],
    items: Sequence[Item],
    *,
    rows: int,
    spread: Spread = in_process,
    scratch: Path | None = None,
) -> str | None:
    """Return a description, with examples, of what is wrong with the keys of all items; None if they are valid.

    `read(item)` is called once, and again to compare keys with equal hashes. `rows` is their approximate number.
    """
    size = rows * READ_BYTES
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=scratch) as folder:
        files = [Path(folder, f"{number}.npy") for number in range(len(items))]
        sort = partial(_store_sorted, read)
        found = list(spread(sort, list(zip(files, items, strict=True)), size=size, name="check the key"))
        if not all(one.hashable for one in found):
            return "holds lists or structs, which cannot be keys"
        for fault in FAULTS:
            examples = [example for one in found for example in one.faults[fault]]
            if examples:
                return f"is {fault}, for example in {'; '.join(examples[:EXAMPLES])}"
        if _disjoint(found):
            return None
        ranges = list(enumerate(_ranges(found)))
        equal = spread(partial(_store_equal, files), ranges, size=size, name="compare the keys")
        for path in list(equal):
            stored = np.load(path, mmap_mode="r")
            for start in range(0, len(stored), CANDIDATES):
                candidates = np.array(stored[start : start + CANDIDATES])
                with closing(spread(partial(_with_hash, read, candidates), items, size=size, name="find keys")) as all_:
                    examples = _duplicates(all_)
                if examples:
                    return f"is not unique, for example {'; '.join(examples)}"
    return None


SCRATCH = ".torchlake-keys-"
FAULTS = ("null", "NaN")


class _Sorted(NamedTuple):
    """What is known about an item whose sorted hashes are in a file."""

    rows: int
    sample: Words
    "Every `SAMPLE`-th hash in order, the first, and the last."
    repeated: bool
    "Whether a hash occurs twice."
    faults: dict[str, list[str]]
    hashable: bool = True


def _store_sorted(read: Callable[[Item], Iterable[Keys]], task: tuple[Path, Item]) -> _Sorted:
    """Write the sorted hashes of an item's keys, unless one is null or NaN."""
    path, item = task
    faults: dict[str, list[str]] = {fault: [] for fault in FAULTS}
    found: list[Words] = []
    for keys in read(item):
        if not is_hashable(storage_type(keys.values.type)):
            return _Sorted(0, np.empty(0, np.uint64), False, faults, hashable=False)
        found += _hashes(keys, faults)
        if any(len(examples) >= EXAMPLES for examples in faults.values()):
            break
    ordered = np.concatenate(found) if found else np.empty(0, np.uint64)
    if not any(faults.values()):
        ordered.sort()
        np.save(path, ordered)
    sample = np.concatenate([ordered[::SAMPLE], ordered[-1:]])
    return _Sorted(len(ordered), sample, bool((ordered[1:] == ordered[:-1]).any()), faults)


def _hashes(keys: Keys, faults: dict[str, list[str]]) -> Iterator[Words]:
    """Yield the hashes of the keys that are not null; add rows whose key is null or NaN to `faults`."""
    unreadable = keys.first_row + np.fromiter(keys.unreadable, np.int64)
    for numbers, values, missing in _arrays(keys):
        faults["null"] += _places(keys, missing[~np.isin(missing, unreadable)])
        if pa.types.is_floating(values.type):
            faults["NaN"] += _places(keys, numbers[np.isnan(values.to_numpy(zero_copy_only=False))])
        yield hashes(values)


def _arrays(keys: Keys) -> Iterator[tuple[Rows, pa.Array, Rows]]:
    """Yield the row numbers of keys that are not null, these keys decoded, and the row numbers of nulls, by array."""
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


def _disjoint(found: Sequence[_Sorted]) -> bool:
    """Return whether the ranges of the items show that no hash occurs twice."""
    filled = sorted((one for one in found if one.rows), key=lambda one: int(one.sample[0]))
    apart = all(one.sample[-1] < other.sample[0] for one, other in pairwise(filled))
    return apart and not any(one.repeated for one in found)


def _ranges(found: Sequence[_Sorted]) -> list[tuple[int, int]]:
    """Return ranges of hashes [first, stop) with about `RANGE_ROWS` each, by the samples."""
    sample = np.sort(np.concatenate([one.sample for one in found]))
    count = -(-sum(one.rows for one in found) // RANGE_ROWS)
    cuts = np.unique(sample[[len(sample) * number // count for number in range(1, count)]])
    edges = [0, *(int(cut) for cut in cuts if cut), 1 << 64]
    return list(pairwise(edges))


def _store_equal(files: Sequence[Path], task: tuple[int, tuple[int, int]]) -> Path:
    """Write the hashes of a range that occur more than once in the files; return the new file."""
    number, (first, stop) = task
    parts: list[Words] = []
    equal: list[Words] = [np.empty(0, np.uint64)]
    for file in files:
        stored = np.load(file, mmap_mode="r")
        begin = int(np.searchsorted(stored, np.uint64(first), side="left"))
        end = int(np.searchsorted(stored, np.uint64(stop - 1), side="right"))
        once, often = _apart(np.array(stored[begin:end]))
        parts.append(once)
        equal.append(often)
    merged = np.sort(np.concatenate(parts), kind="stable")  # merges sorted runs: five times faster than sorting
    equal.append(_apart(merged)[1])
    path = files[0].with_name(f"equal-{number}.npy")
    np.save(path, np.unique(np.concatenate(equal)))
    return path


def _apart(ordered: Words) -> tuple[Words, Words]:
    """Return every hash once, and those that occur more than once."""
    again = np.zeros(len(ordered), bool)
    again[1:] = ordered[1:] == ordered[:-1]
    return ordered[~again], np.unique(ordered[again])


Found = tuple[bytes, str, str]
"The identity of a key, the key as text, and its place."


def _with_hash(read: Callable[[Item], Iterable[Keys]], candidates: Words, item: Item) -> list[Found]:
    """Return the keys of an item whose hash is a candidate, each at most twice, because two make a duplicate."""
    found: list[Found] = []
    counts: dict[bytes, int] = {}
    for keys in read(item):
        for numbers, values, _ in _arrays(keys):
            rows = np.flatnonzero(np.isin(hashes(values), candidates))
            values = values.take(pa.array(rows))
            for place, identity in enumerate(identities(values)):
                counts[identity] = counts.get(identity, 0) + 1
                if counts[identity] <= 2:
                    found.append((identity, _shown(values[place]), f"{keys.where} row {numbers[rows[place]]}"))
    return found


def _duplicates(items: Iterable[list[Found]]) -> list[str]:
    """Return up to 3 keys that occur twice, each with both places."""
    first: dict[bytes, str] = {}
    examples: list[str] = []
    for identity, shown, where in (one for item in items for one in item):
        before = first.setdefault(identity, where)
        if before != where:
            examples.append(f"{shown} in {before} and {where}")
            if len(examples) == EXAMPLES:
                break
    return examples


def _shown(key: pa.Scalar) -> str:
    """Return the `repr` of a key; the stored number if Python cannot represent the date or time."""
    try:
        return repr(key.as_py())
    except (ValueError, OverflowError, LookupError, pa.ArrowException):
        value: Any = key.value if pa.types.is_temporal(key.type) else key.as_buffer().to_pybytes()
        return repr(value)
