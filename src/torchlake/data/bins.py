"""Conversations packed whole into blocks: what a language model learns from that learns answers alone.

    conversations in some order -> longest first, each into the fullest block that has room for it -> blocks

An answer is learned after its own question, and after nothing else: no conversation is cut at the edge of a block, its
positions begin at 0, and what a token sees is its own conversation (`positions_of`; `models/probes.py` checks
whether a model keeps to that). The number of blocks depends on the lengths alone, so every epoch has as many; which of
two equally long conversations goes where depends on the order that is given.

Best fit leaves a few percent of a block empty, about as first fit does, and finds the block in one step: blocks are
listed by the room that they have left, and an integer has a bit for every list that is not empty. Price: some 2
microseconds for each conversation and epoch.
"""

from dataclasses import dataclass

import numpy as np

from torchlake.data.batching import Ragged
from torchlake.errors import DataError


@dataclass(frozen=True, slots=True)
class Bins:
    """Some rows of `tokens` in M blocks, whole; a row longer than a block is read to the block's length.

    A token that is to be read and not learned is ~id, below zero, in the rows and in what `padded` gives. The first of
    a row is never learned: nothing of its own row is before it.
    """

    tokens: Ragged
    order: np.ndarray
    "(N,) int64, the rows block after block."
    starts: np.ndarray
    "(M + 1,) int64: block b holds the rows order[starts[b]:starts[b + 1]]."
    ends: np.ndarray
    "(N + 1,) int64: tokens of the rows before each place of `order`."
    length: int
    "Tokens of a block, at most."

    def __len__(self) -> int:
        return len(self.starts) - 1

    def lengths_of(self, numbers: np.ndarray) -> np.ndarray:
        """(B,) int64, tokens of the blocks `numbers` (B,)."""
        lengths: np.ndarray = self.ends[self.starts[numbers + 1]] - self.ends[self.starts[numbers]]
        return lengths

    def padded(self, numbers: np.ndarray, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
        """The blocks `numbers` (B,) as token ids (B, L) int64 and their mask (B, L) int64, as `batching.pad` gives."""
        return _rectangle([self.rows_of(number) for number in numbers], self, pad_id)

    def unpacked(self, numbers: np.ndarray, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
        """The same of their rows, each in a line of its own: (R, L) int64 and (R, L) int64."""
        rows = [row for number in numbers for row in self.rows_of(number)]
        return _rectangle([np.array([row]) for row in rows], self, pad_id)

    def positions_of(self, numbers: np.ndarray) -> np.ndarray:
        """(B, L) int64, each token's place in its own row; those of padding begin at 0 as well."""
        lengths = self.lengths_of(numbers)
        positions = np.zeros((len(numbers), int(lengths.max(initial=1))), dtype=np.int64)
        for line, number in enumerate(numbers):
            parts = [*self._row_lengths(self.rows_of(number)), positions.shape[1] - lengths[line]]
            positions[line] = np.concatenate([np.arange(part) for part in parts])
        return positions

    def target_counts(self, numbers: np.ndarray) -> np.ndarray:
        """(B,) int64, tokens of the blocks `numbers` (B,) that are learned."""
        counts = np.zeros(len(numbers), dtype=np.int64)
        for place, number in enumerate(numbers):
            counts[place] = sum(int((self._row(row)[1:] >= 0).sum()) for row in self.rows_of(number))
        return counts

    def rows_of(self, number: int) -> np.ndarray:
        """The rows of a block."""
        rows: np.ndarray = self.order[self.starts[number] : self.starts[number + 1]]
        return rows

    def _row(self, row: int) -> np.ndarray:
        first, last = self.tokens.offsets[row], self.tokens.offsets[row + 1]
        ids: np.ndarray = self.tokens.values[first : min(last, first + self.length)]
        return ids

    def _row_lengths(self, rows: np.ndarray) -> np.ndarray:
        lengths: np.ndarray = np.minimum(self.tokens.lengths_of(rows), self.length)
        return lengths


def pack_whole(tokens: Ragged, order: np.ndarray, length: int) -> Bins:
    """The rows `order` (N,) of `tokens` in as few blocks of at most `length` tokens as best fit finds.

    Raises DataError when there is no row.
    """
    if not len(order):
        raise DataError("there is no conversation to learn from")
    lengths = np.minimum(tokens.lengths_of(order), length)
    blocks: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(length + 1)]
    rooms = 0  # bit r: by_room[r] is not empty
    for place in np.argsort(-lengths, kind="stable").tolist():
        needed = max(1, int(lengths[place]))
        fitting = rooms >> needed
        if fitting:
            room = needed + (fitting & -fitting).bit_length() - 1
            block = by_room[room].pop()
            rooms ^= 0 if by_room[room] else 1 << room
        else:
            room, block = length, len(blocks)
            blocks.append([])
        blocks[block].append(place)
        by_room[room - needed].append(block)
        rooms |= 1 << (room - needed)
    starts = np.zeros(len(blocks) + 1, dtype=np.int64)
    np.cumsum([len(block) for block in blocks], out=starts[1:])
    return _bins(tokens, order[np.array([place for block in blocks for place in block])], starts, length)


def one_per_block(tokens: Ragged, length: int) -> Bins:
    """Every row in a block of its own, in the order of the table."""
    return _bins(tokens, np.arange(len(tokens)), np.arange(len(tokens) + 1), length)


def _bins(tokens: Ragged, order: np.ndarray, starts: np.ndarray, length: int) -> Bins:
    ends = np.zeros(len(order) + 1, dtype=np.int64)
    np.cumsum(np.minimum(tokens.lengths_of(order), length), out=ends[1:])
    return Bins(tokens, order, starts, ends, length)


def _rectangle(lines: list[np.ndarray], bins: Bins, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and mask (B, L) of lines of rows, padded on the right; the first token of each row is not learned."""
    filled = []
    for rows in lines:
        parts = [bins._row(row).astype(np.int64) for row in rows]
        for part in parts:
            part[:1] = np.where(part[:1] < 0, part[:1], ~part[:1])
        filled.append(np.concatenate(parts))
    lengths = np.array([len(line) for line in filled], dtype=np.int64)
    mask = np.arange(int(lengths.max(initial=1))) < lengths[:, None]
    ids = np.full(mask.shape, pad_id, dtype=np.int64)
    ids[mask] = np.concatenate(filled) if filled else []
    return ids, mask.astype(np.int64)
