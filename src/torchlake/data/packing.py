"""Rows of tokens laid end to end and cut into blocks of equal length: what a causal language model learns from.

    rows in some order -> one stream of tokens -> blocks, each beginning with the last token of the one before

The first token of a block is read and not predicted. It is the last of the block before, where it was: so every token
of the stream but its very first is predicted exactly once, wherever the cuts fall. The last block has what is left and
is shorter; nothing is dropped, and no other block has padding.

Blocks are not written anywhere. The places of their tokens are looked up in the memory-mapped rows when a batch wants
them, so another order costs no copy of the table. Price: one binary search per token (a batch of 64 blocks of 512
tokens takes some 3 ms), and one token of a block computed twice.
"""

import math
from dataclasses import dataclass

import numpy as np

from torchlake.data.batching import Ragged
from torchlake.errors import DataError

BLOCKS_PER_COUNT = 256


@dataclass(frozen=True, slots=True)
class Blocks:
    """Some rows of `tokens` as M blocks, numbered along the stream.

    A token that is to be read and not learned is ~id, below zero, in the rows and in what `padded` gives.
    """

    tokens: Ragged
    order: np.ndarray
    "(N,) int64, the rows as they follow one another in the stream."
    starts: np.ndarray
    "(N + 1,) int64: row order[i] begins at place starts[i] of the stream, which has starts[-1] tokens."
    length: int
    "Tokens of every block but the last, 2 or more."

    def __len__(self) -> int:
        return num_blocks(int(self.starts[-1]), self.length)

    def lengths_of(self, numbers: np.ndarray) -> np.ndarray:
        """(B,) int64, tokens of the blocks `numbers` (B,)."""
        lengths: np.ndarray = np.minimum(self.length, self.starts[-1] - numbers * (self.length - 1))
        return lengths

    def padded(self, numbers: np.ndarray, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
        """The blocks `numbers` (B,) as token ids (B, L) int64 and their mask (B, L) int64, as `batching.pad` gives."""
        lengths = self.lengths_of(numbers)
        along = np.arange(int(lengths.max(initial=1)))
        mask = along < lengths[:, None]
        places = (numbers[:, None] * (self.length - 1) + along)[mask]
        rows = np.searchsorted(self.starts, places, side="right") - 1
        ids = np.full(mask.shape, pad_id, dtype=np.int64)
        ids[mask] = self.tokens.values[self.tokens.offsets[self.order[rows]] + places - self.starts[rows]]
        return ids, mask.astype(np.int64)

    def target_counts(self, numbers: np.ndarray) -> np.ndarray:
        """(B,) int64, tokens of the blocks `numbers` (B,) that are learned; the first of a block is read at most."""
        counts = np.zeros(len(numbers), dtype=np.int64)
        for first in range(0, len(numbers), BLOCKS_PER_COUNT):
            ids, mask = self.padded(numbers[first : first + BLOCKS_PER_COUNT], 0)
            counts[first : first + BLOCKS_PER_COUNT] = ((ids >= 0) & (mask == 1))[:, 1:].sum(axis=1)
        return counts


def input_ids_of(ids: np.ndarray) -> np.ndarray:
    """The tokens as a model reads them, learned or not."""
    return np.where(ids < 0, ~ids, ids)


def pack(tokens: Ragged, order: np.ndarray, length: int) -> Blocks:
    """The rows `order` (N,) of `tokens`, laid end to end in that order, as blocks of `length` tokens.

    Raises DataError when they have not two tokens together: there is nothing to predict then.
    """
    starts = np.zeros(len(order) + 1, dtype=np.int64)
    np.cumsum(tokens.lengths_of(order), out=starts[1:])
    if starts[-1] < 2:
        raise DataError(f"the rows have {starts[-1]} tokens together; a text to learn from has 2 or more")
    return Blocks(tokens, order, starts, length)


def num_blocks(tokens: int, length: int) -> int:
    """Blocks that a stream of `tokens` tokens, 2 or more, is cut into."""
    return math.ceil((tokens - 1) / (length - 1))
