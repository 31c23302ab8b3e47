"""Choose the rows of the planned chunks that are read: those that were requested and are not deleted.

The rows are chosen while planning, so every attempt, every engine and `verify` see the same ones, and the number of
input rows is known before any work. A row that cannot be read, for example a malformed line, is always chosen: it
becomes an error in the output and does not disappear silently. Cost of a condition: one pass over its columns, without
the row groups that their statistics rule out. Cost of a sample: a hash of each row's number.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchlake.errors import DataError
from torchlake.tables.hashes import mixed
from torchlake.tables.plan import InputFile, Split, new_chunk
from torchlake.tables.reading import ChunkReader
from torchlake.tables.selection.bounds import Outcomes, constant_bounds, outcomes
from torchlake.tables.selection.conditions import Condition, columns_of
from torchlake.tables.selection.rows import evaluate
from torchlake.tables.sources._interface import View
from torchlake.tables.table import Table

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class RowSelector:
    """A chooser of rows of splits, which come in the table's order; `left_out` counts the other rows by reason."""

    def __init__(self, table: Table, views: Mapping[str, str]) -> None:
        """Create a selector; `views` are those of the condition's columns, as JSON by file."""
        self.table = table
        self.left_out: Counter[str] = Counter(table.left_out)
        self.left = table.options.selection.limit
        self._condition = None if table.condition is None else _ConditionReader(table, table.condition, views)

    @property
    def full(self) -> bool:
        """Whether the limit has been reached."""
        return self.left == 0

    def may_select(self, path: str) -> bool:
        """Return whether a file may have requested rows, by the statistics in its footer."""
        if self._condition is None or path not in self.table.footers:
            return True
        footer = self.table.footers[path]
        return bool(self._condition.outcomes(path, [group.rows for group in footer.groups]).true.any())

    def select(self, file: InputFile, splits: Iterable[Split]) -> Iterator[Split]:
        """Yield the splits with the rows left out marked as skipped; omit splits without any row to read."""
        if self._condition is not None:
            self._condition.open(file)
        for split in splits:
            kept = np.ones(split.rows, bool)
            deleted = self.table.deleted.get(file.path)
            if deleted is not None:
                self._leave_out("deleted", kept, ~_bits(deleted, split.first_row, split.rows))
            if self._condition is not None and not self.full and kept.any():
                self._leave_out("where", kept, self._condition.true(file, split))
            if self.table.options.selection.sample is not None and not self.full:
                self._leave_out("sample", kept, self._sampled(file, split))
            if self.left is not None:
                self._leave_out("limit", kept, np.cumsum(kept) <= self.left)
                self.left -= int(kept.sum())
            if kept.all():
                yield split
            elif kept.any():
                skipped = np.packbits(~kept, bitorder="little").tobytes()
                yield split._replace(rows=int(kept.sum()), skipped=skipped)

    def close(self) -> None:
        if self._condition is not None:
            self._condition.reader.close()

    def _leave_out(self, reason: str, kept: np.ndarray, chosen: np.ndarray) -> None:
        before = int(kept.sum())
        kept &= chosen
        self.left_out[reason] += before - int(kept.sum())

    def _sampled(self, file: InputFile, split: Split) -> np.ndarray:
        """Return (rows,) bool: whether the hash of seed, file name and row number is in the sample's share."""
        share, seed = self.table.options.selection.sample, self.table.options.selection.seed
        assert share is not None, "called only if a sample is requested"
        if share == 1:
            return np.ones(split.rows, bool)
        start = np.frombuffer(hashlib.sha256(f"{seed}:{file.name}".encode()).digest()[:8], np.uint64)
        numbers = np.arange(split.first_row, split.first_row + split.rows, dtype=np.uint64)
        return np.asarray(mixed(start ^ mixed(numbers * _GOLDEN)) < np.uint64(int(share * 2**64)))


class _ConditionReader:
    """An evaluator of the condition for the rows of splits."""

    def __init__(self, table: Table, condition: Condition, views: Mapping[str, str]) -> None:
        self.table, self.condition, self.views = table, condition, views
        columns = columns_of(condition)
        self.schema = pa.schema([table.schema.field(name) for name in columns]).serialize().to_pybytes()
        self.reader = ChunkReader(columns)
        self._outcomes: dict[str, Outcomes] = {}

    def open(self, file: InputFile) -> None:
        """Decide for which row groups of the file the condition is true for every row, or for none."""
        footer = self.table.footers.get(file.path)
        rows = [file.rows] if footer is None else [group.rows for group in footer.groups]
        may = self.outcomes(file.path, rows)
        self.ends = np.cumsum(rows)
        self.some, self.every = may.true, may.true & ~may.false & ~may.null

    def outcomes(self, path: str, rows: Sequence[int]) -> Outcomes:
        """Return what the condition may be in each row group of a file; `rows` are their sizes. Computes this once."""
        if path in self._outcomes:
            return self._outcomes[path]
        footer, view = self.table.footers.get(path), self.table.views.get(path, View())
        bounds = {} if footer is None else {**footer.bounds}
        for name in {*view.constants} & {*columns_of(self.condition)}:
            kind = self.table.schema.field(name).type
            bounds[name] = constant_bounds([view.constants[name]] * len(rows), kind)
        self._outcomes[path] = outcomes(self.condition, bounds, len(rows))
        return self._outcomes[path]

    def true(self, file: InputFile, split: Split) -> np.ndarray:
        """Return (rows,) bool: true also for rows that cannot be read. Raises DataError naming the file."""
        first = int(np.searchsorted(self.ends, split.first_row, "right"))
        last = int(np.searchsorted(self.ends, split.first_row + split.rows - 1, "right"))
        if not self.some[first : last + 1].any():
            return np.zeros(split.rows, bool)
        if self.every[first : last + 1].all():
            return np.ones(split.rows, bool)
        chunk = new_chunk(0, file, self.table.format, self.schema, split, view=self.views.get(file.path, ""))
        rows, unreadable = self.reader.read(chunk)
        try:
            found = pc.fill_null(evaluate(self.condition, rows), False)
        except DataError as error:
            raise DataError(f"{file.path}, {chunk.where}: {error}") from error
        true = np.array(found.to_numpy(), dtype=bool)
        true[list(unreadable)] = True
        return true


def _bits(bitmap: bytes, first: int, count: int) -> np.ndarray:
    """Return `count` bits of a bitmap from `first` on; bits after its end are False."""
    packed = np.frombuffer(bitmap, np.uint8)[first // 8 : (first + count + 7) // 8]
    bits = np.unpackbits(packed, bitorder="little")[first % 8 :][:count]
    return np.pad(bits, (0, count - len(bits))).astype(bool)
