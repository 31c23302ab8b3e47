"""Frames in memory: pyarrow, pandas and polars in and out, so that `predict` gives back the kind it was given.

pandas and polars are recognised without being imported: who has such a frame has imported the library.
"""

import sys
from typing import Any

import pyarrow as pa

from torchlake.errors import TableError


def is_frame(value: Any) -> bool:
    """Whether `value` is a pyarrow Table or RecordBatch, a pandas DataFrame or a polars DataFrame."""
    return isinstance(value, pa.Table | pa.RecordBatch) or _is(value, "pandas") or _is(value, "polars")


def engine_of(value: Any) -> str | None:
    """The engine whose own, lazy kind of frame `value` is: a Spark DataFrame or a Ray Dataset; None for all else."""
    for cls in type(value).__mro__:
        if cls.__name__ == "DataFrame" and cls.__module__.startswith("pyspark.sql"):
            return "spark"
        if cls.__name__ == "Dataset" and cls.__module__.startswith("ray.data"):
            return "ray"
    return None


def to_arrow(frame: Any) -> pa.Table:
    """The frame's columns as an Arrow table; a pandas index is left out (`to_original_frame` puts it back).

    Raises TableError naming the column that Arrow cannot hold, or that is there twice.
    """
    if isinstance(frame, pa.RecordBatch):
        frame = pa.Table.from_batches([frame])
    if not isinstance(frame, pa.Table):
        names = [str(name) for name in frame.columns]
        _refuse_twice(names)
        try:
            if _is(frame, "polars"):
                return frame.to_arrow()
            if not all(isinstance(name, str) for name in frame.columns):
                frame = frame.set_axis(names, axis="columns")
            return pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(None)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise TableError(f"the frame cannot be read as an Arrow table: {error}") from error
    _refuse_twice(frame.column_names)
    return frame


def to_original_frame(frame: Any, table: pa.Table) -> Any:
    """`table` as a frame of the kind of `frame`: its own columns first, in its order, then new ones; rows likewise.

    A pandas or polars frame keeps its own columns (and index) as they are, types that Arrow does not have included;
    only the new ones are taken from `table`.
    """
    if isinstance(frame, pa.RecordBatch):
        batches = table.combine_chunks().to_batches()
        return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)
    if isinstance(frame, pa.Table):
        return table
    assert table.num_rows == len(frame), "a frame comes back with as many rows as it had"
    added = table.select(table.column_names[len(frame.columns) :])
    if added.num_columns == 0:
        return frame
    if _is(frame, "polars"):
        return frame.hstack(sys.modules["polars"].from_arrow(added))
    new = added.to_pandas()
    new.index = frame.index
    return sys.modules["pandas"].concat([frame, new], axis=1)


def _is(value: Any, library: str) -> bool:
    module = sys.modules.get(library)
    return module is not None and isinstance(value, module.DataFrame)


def _refuse_twice(names: list[str]) -> None:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise TableError(f"the frame has two columns named {twice!r}; rename one.")
