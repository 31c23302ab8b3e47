"""Arrow arrays from numpy arrays and lists of strings.

`pyarrow.array` gives the same arrays, but imports pandas if it is installed, to recognize its objects. That takes
longer than scoring a small table.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import pyarrow as pa

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


def _bits(values: np.ndarray) -> pa.Buffer:
    return pa.py_buffer(np.packbits(values, bitorder="little"))
