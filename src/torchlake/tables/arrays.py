"""Arrow arrays from numpy arrays and lists of strings; text columns as one string array.

`pyarrow.array` gives the same arrays, but imports pandas if it is installed, to recognize its objects. That takes
longer than scoring a small table.
"""

from collections.abc import Collection, Sequence
from itertools import accumulate

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

MAX_STRING_BYTES = 2**31 - 1


def from_numpy(values: np.ndarray, *, null: np.ndarray | None = None) -> pa.Array:
    """Return an array of numbers or booleans (N,); `null` (N,) bool marks null values."""
    valid = None if null is None or not null.any() else _bits(~null)
    data = _bits(values) if values.dtype == np.bool_ else pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [valid, data])


def from_strings(texts: Sequence[str | None]) -> pa.Array:
    """Return an array of strings, `large_string` above 2 GiB. Raises UnicodeEncodeError for unpaired surrogates."""
    encoded = [b"" if text is None else text.encode() for text in texts]
    ends = np.fromiter(accumulate(map(len, encoded), initial=0), dtype=np.int64, count=len(texts) + 1)
    null = np.fromiter((text is None for text in texts), dtype=bool, count=len(texts))
    large = ends[-1] > MAX_STRING_BYTES
    offsets = pa.py_buffer(ends if large else ends.astype(np.int32))
    buffers = [_bits(~null) if null.any() else None, offsets, pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.large_string() if large else pa.string(), len(texts), buffers)


def string_column(column: pa.ChunkedArray) -> pa.Array:
    """Return a text column as one string array without dictionaries; conversations stay as they are."""
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], column.type)
    as_it_is = pa.types.is_string(array.type) or pa.types.is_nested(array.type)
    return array if as_it_is else pc.cast(array, pa.large_string())


def plain_column(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return a column as one array, without dictionary encoding and string views."""
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    array = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
    return array.cast(pa.string()) if pa.types.is_string_view(array.type) else array


def is_text(kind: pa.DataType) -> bool:
    """Return whether a type is one of Arrow's three types of strings."""
    types = pa.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def without_rows(column: pa.Array, rows: Collection[int]) -> pa.Array:
    """Return the column with null in these rows."""
    if not rows:
        return column
    places = np.arange(len(column))
    return column.take(from_numpy(places, null=np.isin(places, [*rows])))


def nulls_as_empty(texts: pa.Array) -> pa.Array:
    """Replace nulls by the empty string."""
    if not texts.null_count:
        return texts
    return pc.fill_null(texts, from_strings([""]).cast(texts.type)[0])  # a Python value would import pandas


def is_blank(texts: pa.Array) -> pa.BooleanArray:
    """Return (N,) bool: which texts are null, empty or only whitespace."""
    return pc.invert(pc.utf8_length(pc.utf8_trim_whitespace(nulls_as_empty(texts))).cast(pa.bool_()))


def _bits(values: np.ndarray) -> pa.Buffer:
    return pa.py_buffer(np.packbits(values, bitorder="little"))


def without_dictionaries(kind: pa.DataType) -> pa.DataType:
    """Return a type with strings in place of dictionaries."""
    if pa.types.is_dictionary(kind):
        return kind.value_type
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(without_dictionaries(field.type)) for field in kind])
    return pa.list_(without_dictionaries(kind.value_type)) if pa.types.is_list(kind) else kind
