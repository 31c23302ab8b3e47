"""The function of bench/map.py: keys of texts by which near duplicates are found (MinHash). Needs numpy and pyarrow."""

import zlib
from collections.abc import Callable

import numpy as np
import pyarrow as pa

HASHES, BANDS = 256, 16
BATCH = 1024


def make_worker() -> Callable[[pa.Table], pa.Table]:
    """Return the function from a table with `text` to one with `signature`, a key for each band."""
    signature = make_signature()
    return lambda batch: pa.table({"signature": [signature(text) for text in batch["text"].to_pylist()]})


def make_signature() -> Callable[[str], str]:
    """Return the function of one text."""
    chance = np.random.default_rng(0)
    factors = chance.integers(1, 2**31, HASHES, dtype=np.int64)[:, None] | 1
    offsets = chance.integers(0, 2**31, HASHES, dtype=np.int64)[:, None]

    def signature(text: str) -> str:
        shingles = {text[start : start + 5] for start in range(max(1, len(text) - 4))}
        hashes = np.array([zlib.crc32(one.encode()) for one in shingles], dtype=np.int64)
        smallest = ((factors * hashes + offsets) % (2**61 - 1)).min(axis=1)
        return " ".join(f"{zlib.crc32(band.tobytes()):08x}" for band in smallest.reshape(BANDS, -1))

    return signature
