"""The rows of rows.parquet in memory, without texts: some 60 bytes a row."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from torchlake.evaluation.sections.rows import FIXED

HINTS = ("label_quality", "label_issue")


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

    def codes(self, name: str) -> np.ndarray:
        """Return the numbers of the classes in a column, (N,)."""
        classes = pa.array(self.labels, self.table[name].type)
        return np.asarray(pc.index_in(self.table[name].combine_chunks(), classes).to_numpy())


def read_judged(
    path: Path, kind: str, labels: Sequence[Any], slices: Sequence[str] = (), *, hints: bool = False
) -> JudgedRows:
    """Return the rows of rows.parquet that have a loss."""
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        names = [name for name in FIXED if name != "error" and (name not in ("label", "prediction") or kind != "texts")]
        extra = [
            name for name in ("probabilities", *(HINTS if hints else ()), *slices) if name in file.schema_arrow.names
        ]
        table = file.read(columns=[*names, *extra])
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
