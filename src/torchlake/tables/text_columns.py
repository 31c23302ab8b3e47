"""Text columns: one string array of any string type; rows without text."""

from collections.abc import Collection

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchlake.tables.arrays import from_numpy, from_strings


def string_column(column: pa.ChunkedArray) -> pa.Array:
    """A text column as one string array, decoded; conversations stay as they are."""
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], column.type)
    as_it_is = pa.types.is_string(array.type) or pa.types.is_nested(array.type)
    return array if as_it_is else pc.cast(array, pa.large_string())


def without_rows(column: pa.Array, rows: Collection[int]) -> pa.Array:
    """The column with null in these rows."""
    if not rows:
        return column
    places = np.arange(len(column))
    return column.take(from_numpy(places, null=np.isin(places, [*rows])))


def nulls_as_empty(texts: pa.Array) -> pa.Array:
    """Replace null by the empty string."""
    return pc.fill_null(texts, from_strings([""]).cast(texts.type)[0])  # a Python value would import pandas


def is_blank(texts: pa.Array) -> pa.BooleanArray:
    """Which texts (N,) are null, empty or only whitespace."""
    return pc.invert(pc.utf8_length(pc.utf8_trim_whitespace(nulls_as_empty(texts))).cast(pa.bool_()))
