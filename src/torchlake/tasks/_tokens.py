"""Texts and pairs of texts as flat arrays of token ids.

Tokenizing is the hot path. The Rust tokenizer gets a thousand rows at a time, because each encoded row also holds its
tokens as text and offsets, some 100 bytes per token, until it is converted to flat arrays.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

ROWS_AT_ONCE = 1_000
Tokens = tuple[np.ndarray, np.ndarray, np.ndarray]
"values (T,) int32, offsets (B+1,) int64, cut (B,) int64: tokens removed from each row."


def tokenize(
    tokenizer: Any,
    texts: Sequence[Any],
    max_length: int,
    *,
    types: list[np.ndarray] | None = None,
    strategy: str = "longest_first",
) -> Tokens:
    """Tokenize texts, or pairs of texts, into one flat array, with special tokens.

    Truncate to `max_length` on the tokenizer's side, of a pair by `strategy`. Append the tokens' types to `types`, for
    pairs.
    """
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    backend.enable_truncation(max_length, strategy=strategy, direction=tokenizer.truncation_side)
    pieces: list[np.ndarray] = []
    lengths = np.zeros(len(texts), dtype=np.int64)
    cut = np.zeros(len(texts), dtype=np.int64)
    for first in range(0, len(texts), ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        encodings = backend.encode_batch_fast(texts[rows])
        ids = [encoding.ids for encoding in encodings]
        lengths[rows] = [len(row) for row in ids]
        count = int(lengths[rows].sum())
        pieces.append(np.fromiter(chain.from_iterable(ids), dtype=np.int32, count=count))
        long = np.flatnonzero(lengths[rows] >= max_length)
        if types is None:
            for row in long:
                # Each overflowing piece has special tokens, too.
                cut[first + row] = sum(piece.special_tokens_mask.count(0) for piece in encodings[row].overflowing)
            continue
        kinds = chain.from_iterable(encoding.type_ids for encoding in encodings)
        types.append(np.fromiter(kinds, dtype=np.uint8, count=count))
        # The overflowing pieces of a pair repeat tokens.
        backend.no_truncation()
        whole = backend.encode_batch_fast([texts[first + row] for row in long.tolist()])
        cut[first + long] = [len(each.ids) for each in whole] - lengths[first + long]
        backend.enable_truncation(max_length, strategy=strategy, direction=tokenizer.truncation_side)
    offsets = np.zeros(len(texts) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int32), offsets, cut


def tokenize_pairs(
    tokenizer: Any, pairs: Sequence[tuple[str, str]], max_length: int, *, strategy: str = "longest_first"
) -> tuple[Tokens, np.ndarray]:
    """Tokenize pairs of texts like `tokenize`; also return each token's type (T,) uint8: 0 first text, 1 second."""
    types: list[np.ndarray] = []
    tokens = tokenize(tokenizer, pairs, max_length, types=types, strategy=strategy)
    return tokens, np.concatenate(types) if types else np.zeros(0, dtype=np.uint8)
