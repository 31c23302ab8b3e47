"""Which rows of the planned chunks are read: those that are not deleted, and that were asked for.

The rows are chosen while planning, so every attempt, every engine and `verify` see the same ones, and the number of
rows in is known before any work.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from torchlake.tables.plan import InputFile, Split
from torchlake.tables.table import Table


def select_rows(
    table: Table, splits: Iterable[tuple[InputFile, Split]], left_out: Counter[str]
) -> Iterator[tuple[InputFile, Split]]:
    """The splits with the rows that are left out marked as skipped; those without any row are omitted.

    Counts the rows in `left_out`, by reason.
    """
    for file, split in splits:
        kept = np.ones(split.rows, bool)
        deleted = table.deleted.get(file.path)
        if deleted is not None:
            kept &= ~_bits(deleted, split.first_row, split.rows)
            left_out["deleted"] += int(split.rows - kept.sum())
        if kept.all():
            yield file, split
        elif kept.any():
            skipped = np.packbits(~kept, bitorder="little").tobytes()
            yield file, split._replace(rows=int(kept.sum()), skipped=skipped)


def _bits(bitmap: bytes, first: int, count: int) -> np.ndarray:
    """`count` bits of a bitmap from `first` on; those after its end are False."""
    packed = np.frombuffer(bitmap, np.uint8)[first // 8 : (first + count + 7) // 8]
    bits = np.unpackbits(packed, bitorder="little")[first % 8 :][:count]
    return np.pad(bits, (0, count - len(bits))).astype(bool)
