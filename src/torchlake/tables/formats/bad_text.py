"""Find and remove strings that are not UTF-8, in columns of any type.

pyarrow does not check the strings that it reads. A slice of a nested column still contains the values of all rows, and
a dictionary is validated as a whole. So rows of such columns are copied, with dictionaries decoded, before they are
validated. Cost: one validation of a sound column; otherwise a few copies, and a few dozen validations per bad row.
"""

from collections.abc import Callable

import numpy as np
import pyarrow as pa


def without_bad_text(array: pa.Array) -> tuple[pa.Array, list[int]]:
    """Return the array with null in the rows that are not UTF-8, and these rows; the array itself if there are none."""
    if _is_valid(array):
        return array, []
    kind, part = array.type, pa.Array.slice
    # Any bytes are valid binary data. If even that is invalid, the offsets are damaged, and a copy would read beyond
    # the buffer.
    if (pa.types.is_nested(kind) or pa.types.is_dictionary(kind)) and _is_valid(array, _mapped(kind, _as_bytes)):
        array, part = array.cast(_mapped(kind, _decoded)), _copy
    found = np.isin(np.arange(len(array)), _search(array, part, 0, len(array)))
    sound = pa.nulls(len(array), kind) if found.all() else array.take(pa.array(np.arange(len(array)), mask=found))
    bad = np.flatnonzero(found & array.is_valid().to_numpy(zero_copy_only=False))  # values under a null do not count
    return sound if sound.type == kind else sound.cast(kind), bad.tolist()


def _search(array: pa.Array, part: Callable[[pa.Array, int, int], pa.Array], first: int, count: int) -> list[int]:
    """Return the rows that do not validate, among `count` rows from `first` on, by bisection."""
    if _is_valid(part(array, first, count)):
        return []
    if count <= 1:
        return [first] * count
    half = count // 2
    return _search(array, part, first, half) + _search(array, part, first + half, count - half)


def _copy(array: pa.Array, first: int, count: int) -> pa.Array:
    return array.take(pa.array(np.arange(first, first + count)))


def _is_valid(array: pa.Array, kind: pa.DataType | None = None) -> bool:
    """Return whether an array, viewed as the type `kind`, validates."""
    try:
        (array if kind is None else array.view(kind)).validate(full=True)
    except pa.ArrowException:
        return False
    return True


def _mapped(kind: pa.DataType, leaf: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """Return the type with `leaf` applied to each type inside it that is not nested."""
    if pa.types.is_map(kind):
        return pa.map_(_mapped(kind.key_type, leaf), _mapped(kind.item_type, leaf), keys_sorted=kind.keys_sorted)
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_mapped(field.type, leaf)) for field in kind])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        item = kind.value_field.with_type(_mapped(kind.value_type, leaf))
        if pa.types.is_fixed_size_list(kind):
            return pa.list_(item, kind.list_size)
        return pa.large_list(item) if pa.types.is_large_list(kind) else pa.list_(item)
    return leaf(kind)


def _as_bytes(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _mapped(kind.value_type, _as_bytes), kind.ordered)
    return {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}.get(kind, kind)


def _decoded(kind: pa.DataType) -> pa.DataType:
    return _mapped(kind.value_type, _decoded) if pa.types.is_dictionary(kind) else kind
