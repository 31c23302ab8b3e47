"""Batches of rows of similar length, with little padding.

Rows are sorted by length and cut by a budget of padded tokens: one argsort, and no Python per row. The batches depend
on the lengths alone, so every rank computes the same ones without communication.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

PARTS = 2
"About how many micro-batches a rank's share is cut into."


@dataclass(frozen=True, slots=True)
class Ragged:
    """N rows of token ids, concatenated."""

    values: np.ndarray
    "(T,) int32, possibly memory-mapped."
    offsets: np.ndarray
    "(N + 1,) int64: row i is values[offsets[i]:offsets[i + 1]]."

    @property
    def lengths(self) -> np.ndarray:
        """Return the number of tokens of each row, (N,) int64."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def lengths_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return the number of tokens of each of the rows `numbers` (B,), as (B,) int64."""
        lengths: np.ndarray = self.offsets[numbers + 1] - self.offsets[numbers]
        return lengths

    def padded(self, numbers: np.ndarray, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows `numbers` (B,), padded; see `pad`."""
        return pad(self, numbers, pad_id)


def pad(tokens: Ragged, rows: np.ndarray, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the token ids (B, L) int64 of the rows (B,), padded on the right with `pad_id`, and their mask (B, L)
    int64.

    L is the longest row's length, at least 1.
    """
    lengths = tokens.lengths_of(rows)
    return rectangle(tokens.values[ranges(tokens.offsets[rows], lengths)], lengths, pad_id)


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """Return 0 and the cumulative sums of the lengths (N,), as (N + 1,) int64."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return, concatenated, the consecutive numbers from each start (B,), as many as its length (B,)."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    numbers: np.ndarray = np.arange(total) + np.repeat(starts - (ends - lengths), lengths)
    return numbers


def rectangle(values: np.ndarray, lengths: np.ndarray, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut values (T,) into lines of these lengths (B,), padded on the right: (B, L) int64, and their mask (B, L)
    int64."""
    mask = np.arange(int(lengths.max(initial=1))) < lengths[:, None]
    ids = np.full(mask.shape, pad_id, dtype=np.int64)
    ids[mask] = values
    return ids, mask.astype(np.int64)


def length_batches(lengths: np.ndarray, *, batch_tokens: int, max_rows: int) -> list[np.ndarray]:
    """Return batches of row numbers, longest rows first, of at most `batch_tokens` padded tokens and `max_rows` rows.

    lengths: (N,). Every row is in exactly one batch; a row longer than the budget is alone. The longest rows come first
    so that a lack of memory shows at once.
    """
    return _cut(np.asarray(lengths), ranks=1, batch_tokens=batch_tokens, max_rows=max_rows)


def micro_batches(
    lengths: np.ndarray,
    *,
    world_size: int,
    micro_batch_tokens: int,
    equal_lengths: bool = False,
    save_padding: bool = False,
) -> list[list[np.ndarray]]:
    """Split one batch among the ranks: `[rank][k]` holds the positions in the batch of the rows of micro-batch k.

    lengths: (B,), of the whole batch. Every position is in one micro-batch. Sorted rows go to the ranks in turn, so
    that ranks have about the same work. All ranks have the same number of micro-batches, each of at most
    `micro_batch_tokens` padded tokens (or one row), and without padding if `equal_lengths`. The last micro-batches, or
    the last of a length, may be empty.

    `save_padding`: cut shares into about PARTS where that saves a quarter of the computed tokens. Several
    micro-batches of coupled rows may need a second forward pass, which costs about as much.
    """
    lengths = np.asarray(lengths)
    cut = partial(_cut, lengths, ranks=world_size, max_rows=max(1, len(lengths)), equal_lengths=equal_lengths)
    groups = cut(batch_tokens=micro_batch_tokens)
    if save_padding:
        finer = cut(batch_tokens=min(micro_batch_tokens, int(lengths.sum()) // (PARTS * world_size)))
        if 4 * padded_tokens(lengths, finer) < 3 * padded_tokens(lengths, groups):
            groups = finer
    return [[group[rank::world_size] for group in groups] for rank in range(world_size)]


def padded_tokens(lengths: np.ndarray, groups: Sequence[np.ndarray]) -> int:
    """Return the tokens of groups (B,) of rows of these lengths (N,), padding included."""
    return sum(len(group) * int(lengths[group].max(initial=0)) for group in groups)


def _cut(
    lengths: np.ndarray, *, ranks: int, batch_tokens: int, max_rows: int, equal_lengths: bool = False
) -> list[np.ndarray]:
    """Return positions, longest first, in groups; each of the `ranks` equal shares of a group is within the limits."""
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
