"""Concatenate rows and cut them into blocks of equal length, for causal language models.

    rows in some order -> one stream of tokens -> blocks, each beginning with the last token of the previous one

The first token of a block is context only; it was a target in the previous block. So every token of the stream except
the first is a target exactly once. The last block is shorter; nothing is dropped, and no other block has padding.

Blocks are not stored: tokens are looked up in the memory-mapped rows for each batch, so another order needs no copy of
the table. Cost: one binary search per token (a batch of 64 blocks of 512 tokens takes about 3 ms), and one token per
block computed twice.
"""

import math
from dataclasses import dataclass

import numpy as np

from torchlake.data.batching import Ragged, offsets_of, ranges, rectangle
from torchlake.data.bins import Bins
from torchlake.errors import DataError

BLOCKS_PER_COUNT = 256


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows of `tokens` as M blocks, numbered along the stream.

    A token that is not a target is stored as ~id, below zero, in the rows and in the result of `padded`.
    """

    tokens: Ragged
    order: np.ndarray
    "(N,) int64, the row numbers in the order of the stream."
    starts: np.ndarray
    "(N + 1,) int64: row order[i] begins at position starts[i] of the stream, which has starts[-1] tokens."
    length: int
    "Tokens of every block except the last, 2 or more."

    def __len__(self) -> int:
        return num_blocks(int(self.starts[-1]), self.length)

    def lengths_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return the number of tokens of each of the blocks `numbers` (B,), as (B,) int64."""
        lengths: np.ndarray = np.minimum(self.length, self.starts[-1] - numbers * (self.length - 1))
        return lengths

    def padded(self, numbers: np.ndarray, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the blocks `numbers` (B,), padded: token ids (B, L) int64 and mask (B, L) int64; see
        `batching.pad`."""
        lengths = self.lengths_of(numbers)
        places = ranges(numbers * (self.length - 1), lengths)
        rows = np.searchsorted(self.starts, places, side="right") - 1
        values = self.tokens.values[self.tokens.offsets[self.order[rows]] + places - self.starts[rows]]
        return rectangle(values, lengths, pad_id)


def target_counts(blocks: Blocks | Bins, numbers: np.ndarray) -> np.ndarray:
    """Return the number of targets in each of the blocks `numbers` (B,), as (B,) int64."""
    counts = np.zeros(len(numbers), dtype=np.int64)
    for first in range(0, len(numbers), BLOCKS_PER_COUNT):
        ids, _ = blocks.padded(numbers[first : first + BLOCKS_PER_COUNT], -1)
        counts[first : first + BLOCKS_PER_COUNT] = (ids[:, 1:] >= 0).sum(axis=1)
    return counts


def input_ids_of(ids: np.ndarray) -> np.ndarray:
    """Return the token ids for the model's input: each stored ~id is replaced by id."""
    return np.where(ids < 0, ~ids, ids)


def pack(tokens: Ragged, order: np.ndarray, length: int) -> Blocks:
    """Return the rows `order` (N,) of `tokens`, concatenated, as blocks of `length` tokens.

    Raises DataError if they have fewer than two tokens in all.
    """
    starts = offsets_of(tokens.lengths_of(order))
    if starts[-1] < 2:
        raise DataError(f"the rows have {starts[-1]} tokens in total; training needs at least 2")
    return Blocks(tokens, order, starts, length)


def num_blocks(tokens: int, length: int) -> int:
    """Return the number of blocks of a stream of `tokens` tokens, 2 or more."""
    return math.ceil((tokens - 1) / (length - 1))
