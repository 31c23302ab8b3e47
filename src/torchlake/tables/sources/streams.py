"""Store Arrow streams and frames as Parquet files, because a job reads its rows several times and in several processes.

A stream is anything with `__arrow_c_stream__` (a DuckDB relation, an ADBC result, a pyarrow reader), a lazy frame of
polars or a dataset of Hugging Face's `datasets`. It is read once, and one row group at a time is in memory. Row groups
have a fixed number of rows, so that equal rows make an equal file, in whatever batches they arrive. A folder of images
is stored as their paths and labels.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from torchlake import atomic_io
from torchlake.errors import DataError, TableError
from torchlake.tables.sources._interface import SourceFile, SourceTable
from torchlake.tables.sources.files import StoredTable, find, is_image, is_image_folder
from torchlake.tables.sources.frames import Frame, check_names, engine_of, is_frame, to_arrow

GROUP_ROWS = 16_384


class Stream(Protocol):
    """Record batches of Arrow, by the Arrow PyCapsule interface."""

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        """Return a capsule with an ArrowArrayStream."""


Input = StoredTable | Frame | Stream | Sequence[str | Path | Frame | Stream]
"Input that can be scored into an output: stored tables, and frames and streams that are stored first."


@dataclass(frozen=True)
class Stored:
    """A stream or frame that has been stored."""

    path: Path
    kind: str
    "The name of its class."

    def __fspath__(self) -> str:
        return str(self.path)


def recognizes(source: Any) -> bool:
    """Return whether `source` is a stream (also a lazy frame or dataset, not a frame in memory), or a stored one."""
    return isinstance(source, Stored) or _is_stream(source)


def pin(source: Any) -> Any:
    """Return the stream: it has no versions."""
    return source


def open_source(source: Any) -> SourceTable:
    """Return the one file of a stored stream. Raises TableError for a stream itself, which callers store first."""
    if isinstance(source, Stored):
        file = SourceFile(name=source.path.name, file=str(source.path))
        return SourceTable(files=(file,), identity={"kind": "stream", "of": source.kind})
    raise TableError(f"{type(source).__name__}: a stream can be read only once; save it as Parquet first.")


def is_stored_first(source: Any) -> bool:
    """Return whether `source` is a frame in memory, a stream or a folder of images, or a list with one."""
    several = isinstance(source, Sequence) and not isinstance(source, str)
    return any(is_frame(one) or _is_stream(one) or is_image_folder(one) for one in (source if several else [source]))


def store(source: Any, path: Path) -> int:
    """Write the rows of a stream or frame to the Parquet file `path`, durably; return their number.

    A file with the same content stays as it is. Raises TableError when the stream fails, or has a column that Parquet
    cannot store; then `path` is unchanged.
    """
    atomic_io.make_folder(path.parent)
    atomic_io.remove(atomic_io.stale_temporaries(path))
    building = atomic_io.temporary_path(path)
    try:
        rows = _write(source, building)
        if not path.exists() or atomic_io.sha256_file(path) != atomic_io.sha256_file(building):
            atomic_io.move_into_place(building, path, site="spool")
    except OSError as error:
        raise atomic_io.storage_error(error, path) from error
    finally:
        building.unlink(missing_ok=True)
    return rows


def _write(source: Any, path: Path) -> int:
    name, rows = type(source).__name__, 0
    schema, tables = _read(source)
    check_names(schema.names, f"the {name}")
    schema = schema.remove_metadata()
    try:
        with pq.ParquetWriter(path, schema, compression="zstd", write_page_checksum=True) as writer:
            for group in _groups(tables, schema):
                writer.write_table(group)
                rows += group.num_rows
    except DataError:
        raise
    except pa.ArrowException as error:
        raise TableError(f"the {name} cannot be stored as Parquet after {rows:,} rows: {error}") from error
    return rows


def _groups(tables: Iterator[pa.Table], schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield the same rows in tables of GROUP_ROWS rows, the last one shorter."""
    waiting: list[pa.Table] = []
    rows = 0
    for table in tables:
        waiting.append(table.cast(schema))
        rows += table.num_rows
        if rows < GROUP_ROWS:
            continue
        whole = pa.concat_tables(waiting)
        for first in range(0, rows - GROUP_ROWS + 1, GROUP_ROWS):
            yield whole.slice(first, GROUP_ROWS).combine_chunks()
        waiting, rows = [whole.slice(rows - rows % GROUP_ROWS)], rows % GROUP_ROWS
    if rows:
        yield pa.concat_tables(waiting).combine_chunks()


def _read(source: Any) -> tuple[pa.Schema, Iterator[pa.Table]]:
    """Return the columns of a source and its rows; errors of the source's library become TableError."""
    try:
        if isinstance(source, str | Path):
            source = _images_of(source)
        if is_frame(source):
            table = to_arrow(source)
            return table.schema, iter([table])
        if _is_lazy(source):
            return _read_lazy(source)
        if _is_dataset(source):
            return _first_schema(source.with_format("arrow").iter(batch_size=GROUP_ROWS), source)
        reader = pa.RecordBatchReader.from_stream(source)
        return reader.schema, _tables(reader, source)
    except DataError:
        raise
    except Exception as error:  # from any library
        raise _failed(source, 0, error) from error


def _images_of(folder: str | Path) -> pa.Table:
    """Return the images of a folder, sorted by name: their paths, and as labels the folders in it that they are in."""
    found = find(folder, is_image)
    labels = [one.name.partition("/")[0] if "/" in one.name else None for one in found]
    return pa.table({"image": [one.file for one in found], "label": pa.array(labels, pa.string())})


def _read_lazy(source: Any) -> tuple[pa.Schema, Iterator[pa.Table]]:
    if not hasattr(source, "collect_batches"):
        raise TableError("A LazyFrame needs polars 1.34 or newer: update polars, or give frame.collect().")
    schema = source.collect_schema().to_frame().to_arrow().schema
    return schema, (frame.to_arrow() for frame in _guarded(source.collect_batches(chunk_size=GROUP_ROWS), source))


def _first_schema(batches: Iterator[pa.Table], source: Any) -> tuple[pa.Schema, Iterator[pa.Table]]:
    """Return the columns of the first batch, which a streamed dataset may not know before."""
    rest = _guarded(batches, source)
    first = next(rest, None)
    if first is None:
        features = source.features
        return (pa.schema([]) if features is None else features.arrow_schema), iter(())
    return first.schema, chain([first], rest)


def _tables(reader: pa.RecordBatchReader, source: Any) -> Iterator[pa.Table]:
    with reader:
        yield from (pa.Table.from_batches([batch]) for batch in _guarded(reader, source))


def _guarded(batches: Any, source: Any) -> Iterator[Any]:
    """Yield the batches; an error of the source's library becomes a TableError with the number of rows before it."""
    rows = 0
    iterator = iter(batches)
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return
        except Exception as error:  # from any library
            raise _failed(source, rows, error) from error
        rows += len(batch)
        yield batch


def _failed(source: Any, rows: int, error: Exception) -> TableError:
    return TableError(f"the {type(source).__name__} failed after {rows:,} rows: {type(error).__name__}: {error}")


def _is_stream(source: Any) -> bool:
    if isinstance(source, str | Path) or is_frame(source) or engine_of(source) is not None:
        return False
    return hasattr(source, "__arrow_c_stream__") or _is_lazy(source) or _is_dataset(source)


def _is_lazy(value: Any) -> bool:
    polars = sys.modules.get("polars")
    return polars is not None and isinstance(value, polars.LazyFrame)


def _is_dataset(value: Any) -> bool:
    return any(
        cls.__name__ in ("Dataset", "IterableDataset") and cls.__module__.startswith("datasets.")
        for cls in type(value).__mro__
    )
