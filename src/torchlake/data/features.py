"""The model inputs of rows as flat arrays, and the same arrays as Arrow columns.

    tokens of any length   Ragged           list<int32>, large_list<uint8>, binary
    numbers of each row    (N, D) or (N,)   fixed_size_list<float>[D], float

Both forms share their memory, so a table of rows crosses processes and files without a copy per row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from torchlake.data.batching import Ragged, offsets_of, ranges
from torchlake.data.bins import Bins
from torchlake.data.packing import Blocks
from torchlake.tables.arrays import from_numpy

Array = Ragged | np.ndarray
"One model input of N rows."
Tokens = Ragged | Blocks | Bins
"Tokens of rows as read from disk (Ragged), or packed into blocks."
FLOATS = {"halffloat": "float16", "float": "float32", "double": "float64"}
"Names of Arrow's types that NumPy's types do not have."
INPUT_IDS = "input_ids"
"The name of the input with the tokens of the text."


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """The model inputs of N rows."""

    arrays: Mapping[str, Array]
    "Arrays by the input's name; each has N rows, or none if every row has an error."
    lengths: np.ndarray
    "(N,) int64, what a row costs in a batch: the number of its tokens, or its equivalent."
    cut: np.ndarray
    "(N,) int64, tokens removed from each row."
    errors: Mapping[int, str] = field(default_factory=dict)
    "{row: reason} for rows that the model cannot compute; their arrays are ignored."

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, rows: np.ndarray) -> "Features":
        """Return the features of these rows; none of the rows may have an error."""
        return Features(
            arrays={name: take(array, rows) for name, array in self.arrays.items()},
            lengths=self.lengths[rows],
            cut=self.cut[rows],
        )


def first_equal(features: Features, rows: np.ndarray) -> np.ndarray:
    """Return, for each of the rows (B,), the first of them that has the same inputs; it may be the row itself."""
    if not len(rows):
        return rows
    codes = np.zeros(len(features), dtype=np.int64)
    for array in features.arrays.values():
        indices = _as_bytes(array).dictionary_encode().indices.buffers()[1]  # `to_numpy` would import pandas
        of_array = np.frombuffer(indices, dtype=np.int32, count=len(codes))
        codes = np.unique(codes * (int(of_array.max(initial=0)) + 1) + of_array, return_inverse=True)[1]
    _, first, group = np.unique(codes[rows], return_index=True, return_inverse=True)
    chosen: np.ndarray = rows[first[group]]
    return chosen


def text_features(tokens: tuple[np.ndarray, np.ndarray, np.ndarray], **others: Array) -> Features:
    """Return the features of tokenized rows: values (T,), offsets (N + 1,) and removed tokens (N,)."""
    values, offsets, cut = tokens
    return Features(arrays={INPUT_IDS: Ragged(values, offsets), **others}, lengths=np.diff(offsets), cut=cut)


def take(array: Array, rows: np.ndarray) -> Array:
    """Return the rows (B,) of an array."""
    if isinstance(array, np.ndarray):
        chosen: np.ndarray = array[rows]
        return chosen
    lengths = array.lengths_of(rows)
    return Ragged(array.values[ranges(array.offsets[rows], lengths)], offsets_of(lengths))


def joined(parts: Sequence[Features]) -> Features:
    """Join the features of consecutive rows; none of the rows may have an error."""
    if len(parts) == 1:
        return parts[0]
    arrays = {name: _concatenated([part.arrays[name] for part in parts]) for name in parts[0].arrays}
    lengths, cut = (np.concatenate([getattr(part, name) for part in parts]) for name in ("lengths", "cut"))
    return Features(arrays=arrays, lengths=lengths, cut=cut)


def to_arrow(array: Array, kind: pa.DataType) -> pa.Array:
    """Return an array as an Arrow column of type `kind`."""
    if isinstance(array, np.ndarray):
        if pa.types.is_fixed_size_list(kind):
            return pa.FixedSizeListArray.from_arrays(_numbers(array.ravel(), kind.value_type), type=kind)
        return _numbers(array, kind)
    large = pa.types.is_large_list(kind) or pa.types.is_large_binary(kind)
    offsets = _numbers(array.offsets, pa.int64() if large else pa.int32())
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        buffers = [None, offsets.buffers()[1], pa.py_buffer(np.ascontiguousarray(array.values, np.uint8))]
        return pa.Array.from_buffers(kind, len(array), buffers)
    lists = pa.LargeListArray if large else pa.ListArray
    return lists.from_arrays(offsets, _numbers(array.values, kind.value_type), type=kind)


def _numbers(values: np.ndarray, kind: pa.DataType) -> pa.Array:
    # Not by `pa.array`, which imports pandas: a start would take longer.
    return from_numpy(values.astype(FLOATS.get(str(kind), str(kind)), copy=False))


def from_arrow(column: pa.Array) -> Array:
    """Return an Arrow column without nulls as an array."""
    kind = column.type
    if pa.types.is_fixed_size_list(kind):
        return np.asarray(column.flatten().to_numpy(zero_copy_only=False)).reshape(len(column), kind.list_size)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        wide = column.cast(pa.large_binary())
        offsets = np.frombuffer(wide.buffers()[1], np.int64, len(wide) + 1, wide.offset * 8)
        content = wide.buffers()[2]
        values = np.zeros(0, np.uint8) if content is None else np.frombuffer(content, np.uint8)
        return Ragged(values[offsets[0] : offsets[-1]], offsets - offsets[0])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = np.asarray(column.value_lengths().to_numpy(zero_copy_only=False))
        return Ragged(column.flatten().to_numpy(zero_copy_only=False), offsets_of(lengths))
    return np.asarray(column.to_numpy(zero_copy_only=False))


def as_matrix(array: Array) -> Array:
    """Return targets that are lists of floats as a matrix with one column per class, (N, C)."""
    if isinstance(array, Ragged) and array.values.dtype.kind == "f":
        return array.values.reshape(len(array), -1)
    return array


def joined_outputs(
    pieces: Sequence[np.ndarray], shape: tuple[int, ...] | None = None, *, fill: float | None = None
) -> np.ndarray:
    """Join the outputs (B, ...) of several batches to those of all rows, (N, *shape).

    Narrower outputs are filled up with `fill`; None: with NaN, or with -1 if they are integers. `shape` None: the
    largest size of each dimension.
    """
    if shape is None:
        shape = tuple(np.max([piece.shape[1:] for piece in pieces], axis=0)) if pieces[0].ndim > 1 else ()
    if all(piece.shape[1:] == shape for piece in pieces):
        return np.concatenate(pieces)
    if fill is None:
        fill = -1 if pieces[0].dtype.kind == "i" else np.nan
    whole = np.full((sum(map(len, pieces)), *shape), fill, dtype=pieces[0].dtype)
    first = 0
    for piece in pieces:
        whole[(slice(first, first + len(piece)), *map(slice, piece.shape[1:]))] = piece
        first += len(piece)
    return whole


def _as_bytes(array: Array) -> pa.Array:
    """Return the bytes of each row, without a copy."""
    if isinstance(array, Ragged):
        values, offsets = array.values, array.offsets * array.values.itemsize
    else:
        values, offsets = array, np.arange(len(array) + 1) * (array.nbytes // max(1, len(array)))
    content = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    buffers = [None, pa.py_buffer(offsets.astype(np.int64)), pa.py_buffer(content)]
    return pa.Array.from_buffers(pa.large_binary(), len(array), buffers)


def _concatenated(arrays: Sequence[Array]) -> Array:
    ragged = [array for array in arrays if isinstance(array, Ragged)]
    if not ragged:
        return np.concatenate([array for array in arrays if isinstance(array, np.ndarray)])
    lengths = np.concatenate([array.lengths for array in ragged])
    return Ragged(np.concatenate([array.values for array in ragged]), offsets_of(lengths))
