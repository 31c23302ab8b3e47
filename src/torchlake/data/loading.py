"""Decode token Parquet once into flat arrays on disk, memory-mapped and shared by all ranks of a machine.

    parts of token Parquet  ->  values.bin (int32) | lengths.bin (int32) | targets.bin   ->  mmap

Each epoch reads rows in another order, and Parquet has no random access to rows. Decoding takes the memory of one
record batch. Ranks share the kernel's page cache, and a table larger than memory is read from disk as needed. Cost: 4
bytes per token on local disk. The cache may be deleted at any time; it is built again from the parts, whose page
checksums are verified.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from torchlake import atomic_io
from torchlake.data.batching import Ragged, offsets_of
from torchlake.data.bins import Bins
from torchlake.data.packing import Blocks
from torchlake.errors import DataError
from torchlake.tables.output.failures import count_failed
from torchlake.tables.record import committed_files, read_commit

FORMAT = 1
BATCH_ROWS = 16384


@dataclass(frozen=True, slots=True)
class TokenTable:
    """The rows without an error, in the order of the table."""

    tokens: Ragged | Blocks | Bins
    "Ragged as read from disk; `packing` and `bins` make Blocks and Bins of it."
    targets: np.ndarray | None
    "(N,) int64 classes, (N, C) float32 for multi-label, (N,) float32 for regression; None without labels."

    def __len__(self) -> int:
        return len(self.tokens)


def build_cache(prepared: Path, cache: Path) -> None:
    """Decode the token Parquet folder `prepared` into the folder `cache`, unless it is there already.

    One process of a machine calls this before `open_tokens`; concurrent calls are safe. Raises DataError naming a part
    that cannot be read, StorageError when the disk is full.
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
    """The cache as memory-mapped arrays. Raises DataError when it has no row."""
    about = atomic_io.read_json(cache / "about.json")
    rows = about["rows"]
    if rows == 0:
        raise DataError(
            "the table has no row with both a text and a label, where the task has labels: nothing to learn"
        )
    offsets = offsets_of(_map(cache / "lengths.bin", np.dtype(np.int32)))
    targets = None if about["target"] is None else _map(cache / "targets.bin", np.dtype(about["target"]))
    if targets is not None and about["width"]:
        targets = targets.reshape(rows, about["width"])
    values = _map(cache / "values.bin", np.dtype(np.int32))
    found = (len(offsets) - 1, len(values))
    assert found == (rows, offsets[-1]), f"{cache}: {found} rows and tokens, expected {rows} and {offsets[-1]}"
    return TokenTable(Ragged(values, offsets), targets)


def _decode(files: list[Path], folder: Path) -> dict[str, int | str | None]:
    rows = width = 0
    target: str | None = None
    with ExitStack() as stack:
        values, lengths, targets = (
            stack.enter_context(open(folder / f"{name}.bin", "wb")) for name in ("values", "lengths", "targets")
        )
        for batch in _trainable(files):
            ids = batch.column("input_ids")
            values.write(ids.flatten().to_numpy(zero_copy_only=False))
            lengths.write(pc.list_value_length(ids).cast(pa.int32()).to_numpy(zero_copy_only=False))
            rows += len(batch)
            if "target" not in batch.schema.names:
                continue
            column = batch.column("target")
            if pa.types.is_list(column.type):
                width = len(column.flatten()) // len(batch)
                column = column.flatten()
            array = column.to_numpy(zero_copy_only=False)
            targets.write(array)
            target = array.dtype.str
    return {"rows": rows, "target": target, "width": width}


def _trainable(files: list[Path]) -> Iterator[pa.RecordBatch]:
    """The rows without an error, in record batches that are not empty."""
    for path in files:
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                names = [name for name in ("input_ids", "target", "error") if name in file.schema_arrow.names]
                for batch in file.iter_batches(BATCH_ROWS, columns=names, use_threads=False):
                    good = batch.filter(batch.column("error").is_null()) if count_failed(batch) else batch
                    if len(good):
                        yield good
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path}: {error}. Delete the folder {path.parent} and run again.") from error


def _identity(prepared: Path) -> str:
    return atomic_io.fingerprint([FORMAT, read_commit(prepared)["parts"]])


def _is_current(cache: Path, identity: str) -> bool:
    about = cache / "about.json"
    return about.is_file() and atomic_io.read_json(about)["identity"] == identity


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    # An empty file cannot be mapped.
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype=dtype)
