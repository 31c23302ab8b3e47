"""The rows of rows.parquet in memory, without texts and probabilities: some 150 bytes a row with the sections."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from torchlake.evaluation.sections.rows import BATCH_NUMBERS, FIXED, FURTHER

if TYPE_CHECKING:
    from scipy.sparse import csr_array


@dataclass(frozen=True)
class JudgedRows:
    """Rows with a loss, without texts; `places` (N,) are their numbers in the file."""

    path: Path
    kind: str
    labels: tuple[Any, ...]
    table: pa.Table
    places: np.ndarray
    truncated: float | None = None
    "The share of all rows that were cut."

    def numbers(self, name: str) -> np.ndarray:
        """Return a column (N,) as float64, NaN for null."""
        column = self.table[name]
        return np.asarray(column.cast(pa.float64()).to_numpy(), dtype=np.float64)

    @property
    def right(self) -> np.ndarray | None:
        """Whether each row is right, (N,) bool; None for numbers."""
        column = self.table["right"]
        return None if column.null_count else column.to_numpy()

    def codes(self, name: str, labels: Sequence[Any] | None = None) -> np.ndarray:
        """Return the numbers of the classes in a column, (N,), in `labels` if their order is another."""
        classes = pa.array(self.labels if labels is None else labels, self.table[name].type)
        return np.asarray(pc.index_in(self.table[name].combine_chunks(), classes).to_numpy())

    def members(self, name: str, labels: Sequence[Any] | None = None) -> "csr_array":
        """Return which labels the lists of a column have, (N, C) float64: only those are stored."""
        from scipy.sparse import csr_array

        column, known = self.table[name].combine_chunks(), self.labels if labels is None else labels
        found = pc.index_in(pc.list_flatten(column), pa.array(known, column.type.value_type)).to_numpy()
        rows = pc.list_parent_indices(column).to_numpy()
        return csr_array((np.ones(len(rows)), (rows, found)), shape=(len(column), len(known)))

    def chances(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield some rows and the probability of each of several labels, (n, C) float32."""
        first, classes = 0, len(self.labels)
        with pq.ParquetFile(self.path) as file:
            for batch in file.iter_batches(max(128, BATCH_NUMBERS // classes), columns=["probabilities"]):
                flat = batch["probabilities"].flatten().to_numpy(zero_copy_only=False).reshape(-1, classes)
                yield slice(first, first := first + len(flat)), flat


def read_judged(path: Path, kind: str, labels: Sequence[Any], slices: Sequence[str] = ()) -> JudgedRows:
    """Return the rows of rows.parquet that have a loss."""
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        names = [name for name in FIXED if name != "error" and (name not in ("label", "prediction") or kind != "texts")]
        further = [name for name in FURTHER if name in file.schema_arrow.names]
        table = file.read(columns=[*names, *further, *slices])
    cut = table["truncated"].drop_null()
    usable = table["loss"].is_valid()
    return JudgedRows(
        path=path,
        kind=kind,
        labels=tuple(labels),
        table=table.filter(usable),
        places=np.flatnonzero(usable.to_numpy()),
        truncated=pc.mean(cut).as_py() if len(cut) else None,
    )


def listed(rows: JudgedRows, some: np.ndarray) -> list[int]:
    """Return the numbers in the file of some rows."""
    return [int(place) for place in rows.places[some]]
