"""64-bit hashes of Arrow columns: equal values of one type have equal hashes, however they are stored.

A fixed-width value is one or more 64-bit words, a string the words of its bytes; one word is its own hash, several are
mixed (the finalizer of MurmurHash3). Different values may have the same hash; `identities` returns bytes that
distinguish them. Every process gets the same hashes. Cost: 3 to 20 ns per value; strings longer than 256 bytes are
hashed one by one. `column_hashes` also takes nulls and nested values.
"""

import hashlib

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Words = npt.NDArray[np.uint64]

LONG = 256
"Strings with more bytes are hashed one by one, by BLAKE2."
NULL = np.uint64(0x9E3779B97F4A7C15)
"The hash of a null."
_MASKS = np.array([(1 << 8 * length) - 1 for length in range(9)], np.uint64)
"Masks by the number of a word's bytes that belong to the string."
_DAY_MS = 86_400_000


def is_hashable(kind: pa.DataType) -> bool:
    """Return whether values of this storage type can be hashed: all but lists, structs, maps and unions."""
    wide = pa.types.is_decimal(kind) or pa.types.is_fixed_size_binary(kind)
    return wide or _is_bytes(kind) or pa.types.is_primitive(kind) or pa.types.is_null(kind)


def hashes(values: pa.Array) -> Words:
    """Return the hash of each value; no value may be null, and the type must be a `layout.storage_type`."""
    found = _stored(values)
    if isinstance(found, pa.Array):
        return _hash_bytes(found)
    return found[:, 0] if found.shape[1] == 1 else combined(found)


def combined(columns: Words) -> Words:
    """Return one hash for each row of (N, C) hashes."""
    state = np.zeros(len(columns), np.uint64)
    for column in columns.T:
        state = mixed(state ^ column)
    return state


def column_hashes(column: pa.Array) -> Words:
    """Return the hash of each value of a column of storage types, nulls, lists and structs included."""
    kind, types = column.type, pa.types
    if types.is_map(kind):
        column = pa.array([list(map(repr, value or ())) for value in column.to_pylist()], pa.list_(pa.string()))
        kind = column.type
    valid = np.asarray(column.is_valid())
    if types.is_list(kind) or types.is_large_list(kind):
        lengths = np.asarray(column.value_lengths().fill_null(0), np.int64)
        ends = np.cumsum(lengths)
        place = np.arange(lengths.sum()) - np.repeat(ends - lengths, lengths)
        values = mixed(column_hashes(column.flatten()) ^ mixed(place.astype(np.uint64)))
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(values, dtype=np.uint64)])
        found = mixed((sums[ends] - sums[ends - lengths]) ^ lengths.astype(np.uint64))
    elif types.is_struct(kind):
        found = combined(np.column_stack([np.zeros(len(column), np.uint64), *map(column_hashes, column.flatten())]))
    else:
        found = np.zeros(len(column), np.uint64)
        found[valid] = hashes(column.drop_null())
    found[~valid] = NULL
    return found


def identities(values: pa.Array) -> list[bytes]:
    """Return bytes that are equal only for equal values of one type, for the same arrays as `hashes`."""
    found = _stored(values)
    if isinstance(found, pa.Array):
        return [value.as_buffer().to_pybytes() for value in found]
    return [row.tobytes() for row in found]


def _stored(values: pa.Array) -> Words | pa.Array:
    """Return strings and binary values unchanged, others as (N, words) uint64."""
    kind = values.type
    if _is_bytes(kind):
        return values
    if pa.types.is_boolean(kind):
        values = values.cast(pa.uint8())
    if pa.types.is_floating(kind):  # 0.0 == -0.0
        return (values.to_numpy(zero_copy_only=False).astype(np.float64) + 0.0).view(np.uint64)[:, None]
    if pa.types.is_null(kind) or not len(values):
        return np.zeros((len(values), 1), np.uint64)
    width = values.type.bit_width // 8
    start = values.offset * width
    raw = np.frombuffer(values.buffers()[1], np.uint8)[start : start + len(values) * width].reshape(len(values), width)
    if pa.types.is_date64(kind):
        return (raw.view(np.int64) // _DAY_MS).view(np.uint64)
    if width in (1, 2, 4, 8):
        return raw.view(f"u{width}").astype(np.uint64, copy=False)
    padded = np.zeros((len(values), -(-width // 8) * 8), np.uint8)
    padded[:, :width] = raw
    return padded.view(np.uint64)


def _hash_bytes(values: pa.Array) -> Words:
    """Return the hashes of strings or binary values, one word at a time for all values that are long enough."""
    wide = values.type in (pa.large_string(), pa.large_binary())
    _, places, content = values.buffers()
    if not len(values):
        return np.zeros(0, np.uint64)
    offsets = np.frombuffer(places, np.int64 if wide else np.int32)[values.offset : values.offset + len(values) + 1]
    first, last = int(offsets[0]), int(offsets[-1])
    raw = np.frombuffer(content, np.uint8)[first:last] if last > first else np.zeros(0, np.uint8)
    starts, lengths = offsets[:-1].astype(np.int64) - first, np.diff(offsets).astype(np.int64)
    state = lengths.astype(np.uint64)
    for row in np.flatnonzero(lengths > LONG):
        text = raw[starts[row] : starts[row] + lengths[row]].data
        state[row] = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    rows = np.flatnonzero((lengths > 0) & (lengths <= LONG))
    padded = np.zeros(len(raw) * bool(len(rows)) + 8, np.uint8)  # images, all of them long, are not copied
    if len(rows):
        padded[:-8] = raw
    every_word = np.ndarray((len(padded) - 7,), np.uint64, padded, strides=(1,))  # one starting at each byte
    at = 0
    while len(rows):
        left = lengths[rows] - at
        words = every_word[starts[rows] + at] & _MASKS[np.minimum(left, 8)]
        state[rows] = mixed(state[rows] ^ words)
        rows = rows[left > 8]
        at += 8
    return state


def mixed(state: Words) -> Words:
    """Mix the bits: each bit of the result depends on all bits of the state, and no two states collide."""
    state = (state ^ (state >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    state = (state ^ (state >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    mixed: Words = state ^ (state >> np.uint64(33))
    return mixed


def _is_bytes(kind: pa.DataType) -> bool:
    return kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
