"""Convert frames in memory (pyarrow, pandas, polars) to Arrow tables and back.

pandas and polars are recognized without importing them: a caller that has such a frame has imported the library.
"""

import sys
from typing import Any, Protocol, TypeVar

import pyarrow as pa

from torchlake.errors import TableError
from torchlake.tables.sources._interface import SourceTable


class Frame(Protocol):
    """A pyarrow, pandas, polars or Spark frame, or a Ray Dataset: a source that has columns, unlike a path."""

    @property
    def columns(self) -> Any:
        """The columns, or their names."""


FrameT = TypeVar("FrameT", bound=Frame)


def is_frame(value: Any) -> bool:
    """Return whether `value` is a pyarrow Table or RecordBatch, a pandas DataFrame or a polars DataFrame."""
    return isinstance(value, pa.Table | pa.RecordBatch) or _is(value, "pandas") or _is(value, "polars")


def recognizes(source: Any) -> bool:
    """Return whether `source` is a frame, in memory or lazy."""
    return is_frame(source) or engine_of(source) is not None


def pin(source: Any) -> Any:
    """Return the frame: it has no versions."""
    return source


def open_source(source: Any) -> SourceTable:
    """Raise TableError: a frame has no files; the functions that accept one read it themselves."""
    raise TableError(
        f"{type(source).__name__}: predict, evaluate, optimize and train accept a single frame. To read it together "
        "with other tables, save it as Parquet first."
    )


def engine_of(value: Any) -> str | None:
    """Return the engine of a lazy frame: "spark" for a Spark DataFrame, "ray" for a Ray Dataset, else None."""
    for cls in type(value).__mro__:
        if cls.__name__ == "DataFrame" and cls.__module__.startswith("pyspark.sql"):
            return "spark"
        if cls.__name__ == "Dataset" and cls.__module__.startswith("ray.data"):
            return "ray"
    return None


def to_arrow(frame: Any) -> pa.Table:
    """Return the frame's columns as an Arrow table, without a pandas index (`to_original_frame` restores it).

    Raises TableError naming a column that Arrow cannot store, or a duplicate one.
    """
    if isinstance(frame, pa.RecordBatch):
        frame = pa.Table.from_batches([frame])
    if not isinstance(frame, pa.Table):
        names = [str(name) for name in frame.columns]
        check_names(names, "the frame")
        try:
            if _is(frame, "polars"):
                return frame.to_arrow()
            if not all(isinstance(name, str) for name in frame.columns):
                frame = frame.set_axis(names, axis="columns")
            return pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(None)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise TableError(f"the frame cannot be read as an Arrow table: {error}") from error
    check_names(frame.column_names, "the frame")
    return frame


def to_original_frame(frame: Any, table: pa.Table) -> Any:
    """Return `table`, which is `frame` with columns appended, as a frame of the same library.

    A pandas or polars frame keeps its columns and index unchanged, even with types that Arrow does not have; only the
    new columns are taken from `table`.
    """
    if isinstance(frame, pa.RecordBatch):
        batches = table.combine_chunks().to_batches()
        return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)
    if isinstance(frame, pa.Table):
        return table
    assert table.num_rows == len(frame), "the number of rows must not change"
    added = table.select(table.column_names[len(frame.columns) :])
    if added.num_columns == 0:
        return frame
    if _is(frame, "polars"):
        return frame.hstack(sys.modules["polars"].from_arrow(added))
    new = added.to_pandas()
    new.index = frame.index
    return sys.modules["pandas"].concat([frame, new], axis=1)


def check_names(names: list[str], whose: str) -> None:
    """Raise TableError if two columns have the same name."""
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise TableError(f"{whose} has two columns named {twice!r}; rename one.")


def _is(value: Any, library: str) -> bool:
    module = sys.modules.get(library)
    return module is not None and isinstance(value, module.DataFrame)
