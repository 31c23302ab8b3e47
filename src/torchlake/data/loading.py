"""Decode token Parquet once into flat arrays on disk, memory-mapped and shared by all ranks of a machine.

    parts of token Parquet  ->  for each column values.bin, and lengths.bin unless its rows are of one width  ->  mmap

Each epoch reads rows in another order, and Parquet has no random access to rows. Decoding takes the memory of one
record batch. Ranks share the kernel's page cache, and a table larger than memory is read from disk as needed. Cost: 4
bytes per token on local disk. The cache may be deleted at any time; it is built again from the parts, whose page
checksums are verified.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from torchlake import atomic_io
from torchlake.data.batching import Ragged, offsets_of
from torchlake.data.features import INPUT_IDS, Array, Tokens, as_matrix, from_arrow
from torchlake.errors import DataError
from torchlake.tables.failures import count_failed
from torchlake.tables.record import committed_files, read_commit

FORMAT = 2
HASHES = "hashes"
MARKS = ("markup", "leak")
"Columns of token Parquet that only the data checks read."
BATCH_ROWS = 16384


@dataclass(frozen=True, slots=True)
class TokenTable:
    """The rows without an error, in the order of the table."""

    tokens: Tokens | None
    "Ragged as read from disk; `packing` and `bins` make Blocks and Bins of it. None for a task without text."
    targets: Array | None
    "(N,) int64 classes, (N, C) float32 for multi-label, (N,) float32 for regression, or in the task's own type."
    others: Mapping[str, Array] = field(default_factory=dict)
    "The other model inputs."
    sizes: np.ndarray | None = None
    "(N,) int32, what each row costs in a batch; None: its tokens."
    hashes: np.ndarray | None = None
    "(N, C + 1) uint64, the hashes of each row's input columns and of its target; None for packed rows."

    def __len__(self) -> int:
        return len(self.tokens if self.sizes is None else self.sizes)  # type: ignore[arg-type]

    def lengths_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return what each of the rows `numbers` (B,) costs in a batch, as (B,) int64."""
        if self.sizes is not None:
            return np.asarray(self.sizes[numbers], dtype=np.int64)
        assert self.tokens is not None, "rows have tokens or sizes"
        return self.tokens.lengths_of(numbers)

    @property
    def arrays(self) -> dict[str, Array]:
        """The model inputs by name."""
        ids: dict[str, Array] = {INPUT_IDS: self.tokens} if isinstance(self.tokens, Ragged) else {}
        return {**ids, **self.others}


def build_cache(prepared: Path, cache: Path) -> None:
    """Decode the token Parquet folder `prepared` into the folder `cache`, unless it exists.

    One process of a machine calls this before `open_tokens`; concurrent calls are safe. Raises DataError naming a part
    that cannot be read, and StorageError if the disk is full.
    """
    identity = _identity(prepared)
    if _is_current(cache, identity):
        return
    building = atomic_io.temporary_path(cache)
    try:
        building.mkdir(parents=True)
        about = _decode(committed_files(prepared), building)
        atomic_io.write_json(building / "about.json", {**about, "identity": identity}, site="cache.about")
        atomic_io.remove([cache])
        os.rename(building, cache)
    except OSError as error:
        atomic_io.remove([building])
        if _is_current(cache, identity):
            return
        raise atomic_io.storage_error(error, cache) from error


def open_tokens(cache: Path) -> TokenTable:
    """Return the cache as memory-mapped arrays. Raises DataError if it has no rows."""
    about = atomic_io.read_json(cache / "about.json")
    if about["rows"] == 0:
        raise DataError(
            "the table has no row with both text and label (if the task has labels): there is nothing to learn"
        )
    arrays = {name: _open_array(cache / name, about["rows"], column) for name, column in about["columns"].items()}
    sizes, targets, tokens = arrays.pop("length"), arrays.pop("target", None), arrays.pop(INPUT_IDS, None)
    hashes = arrays.pop(HASHES)
    assert isinstance(sizes, np.ndarray), "one number per row"
    assert isinstance(hashes, np.ndarray), "as many numbers per row"
    assert tokens is None or isinstance(tokens, Ragged), "rows of any length"
    return TokenTable(tokens, targets, arrays, sizes, hashes)


def _open_array(folder: Path, rows: int, column: Mapping[str, Any]) -> Array:
    values = _map(folder / "values.bin", np.dtype(column["type"]))
    if not column["ragged"]:
        return values.reshape(rows, column["width"]) if column["width"] else values
    offsets = offsets_of(_map(folder / "lengths.bin", np.dtype(np.int32)))
    found = (len(offsets) - 1, len(values))
    assert found == (rows, offsets[-1]), f"{folder}: {found} rows and values, expected {rows} and {offsets[-1]}"
    return Ragged(values, offsets)


def _decode(files: list[Path], folder: Path) -> dict[str, Any]:
    rows, columns = 0, dict[str, dict[str, Any]]()
    with ExitStack() as stack:
        opened: dict[Path, IO[bytes]] = {}

        def write(path: Path, array: np.ndarray) -> None:
            if path not in opened:
                path.parent.mkdir(exist_ok=True)
                opened[path] = stack.enter_context(open(path, "wb"))
            opened[path].write(np.ascontiguousarray(array).data)

        for batch in _trainable(files):
            rows += len(batch)
            for name in batch.schema.names:
                column = batch.column(name)
                array = as_matrix(from_arrow(column)) if name == "target" else from_arrow(column)
                if isinstance(array, Ragged):
                    write(folder / name / "lengths.bin", array.lengths.astype(np.int32))
                values = array.values if isinstance(array, Ragged) else array
                write(folder / name / "values.bin", values)
                width = array.shape[1] if isinstance(array, np.ndarray) and array.ndim > 1 else 0
                columns[name] = {"type": values.dtype.str, "ragged": isinstance(array, Ragged), "width": width}
    return {"rows": rows, "columns": columns}


def _trainable(files: list[Path]) -> Iterator[pa.RecordBatch]:
    """Yield the rows without an error, in record batches that are not empty."""
    for path in files:
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                names = [name for name in file.schema_arrow.names if name not in ("row_id", "cut", *MARKS)]
                for batch in file.iter_batches(BATCH_ROWS, columns=names, use_threads=False):
                    good = batch.filter(batch.column("error").is_null()) if count_failed(batch) else batch
                    if len(good):
                        yield good.drop_columns(["error"])
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path}: {error}. Delete the folder {path.parent} and run again.") from error


def _identity(prepared: Path) -> str:
    return atomic_io.digest([FORMAT, read_commit(prepared)["parts"]])


def _is_current(cache: Path, identity: str) -> bool:
    about = cache / "about.json"
    return about.is_file() and atomic_io.read_json(about)["identity"] == identity


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    # An empty file cannot be mapped.
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype=dtype)
