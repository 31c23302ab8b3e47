"""Rows of different lengths made into rectangles with little padding in them.

Sorting by length and cutting by a budget of padded tokens is the whole trick: one argsort, then a cut per batch and no
Python per row. A plan depends on the lengths alone, so every rank computes the same one and none has to be told.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Ragged:
    """N rows of token ids, end to end."""

    values: np.ndarray
    "(T,) int32, possibly memory-mapped."
    offsets: np.ndarray
    "(N + 1,) int64: row i is values[offsets[i]:offsets[i + 1]]."

    @property
    def lengths(self) -> np.ndarray:
        """(N,) int64, tokens of each row."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def lengths_of(self, numbers: np.ndarray) -> np.ndarray:
        """(B,) int64, tokens of the rows `numbers` (B,)."""
        lengths: np.ndarray = self.offsets[numbers + 1] - self.offsets[numbers]
        return lengths

    def padded(self, numbers: np.ndarray, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows `numbers` (B,) as `pad` gives them."""
        return pad(self, numbers, pad_id)


def pad(tokens: Ragged, rows: np.ndarray, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows (B,) as token ids (B, L) int64, padded on the right with `pad_id`, and their mask (B, L) int64.

    L is the longest row's length, at least 1.
    """
    starts = tokens.offsets[rows]
    lengths = tokens.offsets[rows + 1] - starts
    longest = int(lengths.max(initial=1))
    mask = np.arange(longest) < lengths[:, None]
    # Flat positions of all tokens wanted, row after row: a running count, shifted to where each row begins.
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    source = np.arange(total) + np.repeat(starts - (ends - lengths), lengths)
    ids = np.full(mask.shape, pad_id, dtype=np.int64)
    ids[mask] = tokens.values[source]
    return ids, mask.astype(np.int64)


def length_batches(lengths: np.ndarray, *, batch_tokens: int, max_rows: int) -> list[np.ndarray]:
    """Cut the rows, longest first, into batches of at most `batch_tokens` padded tokens and `max_rows` rows.

    lengths: (N,). Every row is in exactly one batch; a row longer than the budget is alone. Longest first shows at once
    whether a batch fits into memory.
    """
    return _cut(np.asarray(lengths), ranks=1, batch_tokens=batch_tokens, max_rows=max_rows)


def micro_batches(
    lengths: np.ndarray, *, world_size: int, micro_batch_tokens: int, equal_lengths: bool = False
) -> list[list[np.ndarray]]:
    """Share the rows of one batch among the ranks: `[rank][k]` are positions in the batch, each in exactly one place.

    lengths: (B,), of the whole batch. Rows are dealt like cards from the sorted deck, so ranks get about the same work,
    and the deck is cut for all ranks at once, so all have the same number of micro-batches: each within
    `micro_batch_tokens` padded tokens (or one row), and with `equal_lengths` without padding. Those of the last cut, or
    of the last of a length, may be empty.
    """
    lengths = np.asarray(lengths)
    cuts = _cut(
        lengths,
        ranks=world_size,
        batch_tokens=micro_batch_tokens,
        max_rows=max(1, len(lengths)),
        equal_lengths=equal_lengths,
    )
    return [[cut[rank::world_size] for cut in cuts] for rank in range(world_size)]


def _cut(
    lengths: np.ndarray, *, ranks: int, batch_tokens: int, max_rows: int, equal_lengths: bool = False
) -> list[np.ndarray]:
    """Positions sorted by length, longest first, cut so that each of `ranks` equal shares of a cut is within bounds."""
    order = np.argsort(-lengths, kind="stable")
    shortness = -lengths[order]
    cuts = []
    first = 0
    while first < len(order):
        longest = max(1, int(lengths[order[first]]))
        rows = ranks * max(1, min(max_rows, batch_tokens // longest))
        if equal_lengths:
            rows = min(rows, int(np.searchsorted(shortness, shortness[first], side="right")) - first)
        cuts.append(order[first : first + rows])
        first += rows
    return cuts
