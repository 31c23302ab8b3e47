"""Conversations in blocks: each whole and once, with positions of its own, in as many blocks in every epoch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchlake.data import order
from torchlake.data.batching import Ragged
from torchlake.data.bins import one_per_block, pack_whole
from torchlake.data.packing import target_counts
from torchlake.errors import DataError
from torchlake.tasks import NO_TARGET
from torchlake.tasks.text_generation import task

PAD = 0
LENGTH = 12
LENGTHS = st.lists(st.integers(1, LENGTH), min_size=1, max_size=40)


def table(lengths: list[int], seed: int = 0) -> Ragged:
    """Rows whose tokens are numbered through from 1, about half of them not learned."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.arange(1, offsets[-1] + 1, dtype=np.int32)
    learned = np.random.default_rng(seed).random(len(ids)) < 0.5
    return Ragged(np.where(learned, ids, ~ids).astype(np.int32), offsets)


def read(ids: np.ndarray) -> np.ndarray:
    return np.where(ids < 0, ~ids, ids)


@given(LENGTHS, st.integers(0, 99))
def test_every_conversation_is_in_one_block_whole_with_positions_of_its_own(lengths: list[int], seed: int) -> None:
    tokens = table(lengths, seed)
    blocks = pack_whole(tokens, order.shuffled(np.arange(len(lengths)), seed=seed, epoch=0), LENGTH)
    every = np.arange(len(blocks))
    ids, mask = blocks.padded(every, PAD)
    positions = blocks.positions_of(every)
    assert ids.shape == mask.shape == positions.shape
    assert mask.sum(axis=1).tolist() == blocks.lengths_of(every).tolist()
    assert blocks.lengths_of(every).max() <= LENGTH
    found = []
    for line, kept, places in zip(read(ids), mask, positions, strict=True):
        begins = np.flatnonzero(places == 0)
        assert all(places[1:][np.diff(places) != 1] == 0), "positions go on or begin again"
        pieces = np.split(line, begins[1:])
        found += [piece.tolist() for piece, first in zip(pieces, begins, strict=True) if kept[first]]
    whole = [read(tokens.values[tokens.offsets[row] : tokens.offsets[row + 1]]).tolist() for row in range(len(lengths))]
    assert sorted(found) == sorted(whole)


@given(LENGTHS, st.integers(0, 99))
def test_what_is_learned_is_the_rows_own_and_never_their_first_token(lengths: list[int], seed: int) -> None:
    tokens = table(lengths, seed)
    firsts = set(read(tokens.values[tokens.offsets[:-1]]).tolist())
    wanted = sorted(token for token in tokens.values.tolist() if token >= 0 and token not in firsts)
    blocks = pack_whole(tokens, np.arange(len(lengths)), LENGTH)
    every = np.arange(len(blocks))
    for ids, mask in (
        blocks.padded(every, PAD),
        blocks.unpacked(every, PAD),
        one_per_block(tokens, LENGTH).padded(np.arange(len(lengths)), PAD),
    ):
        goals = task.targets(ids, mask)
        assert sorted(goals[goals != NO_TARGET].tolist()) == wanted
        # A target's own conversation is before it: tokens are numbered through.
        line, place = np.nonzero(goals != NO_TARGET)
        assert (read(ids)[line, place] + 1 == goals[line, place]).all()
    assert target_counts(blocks, every).sum() == len(wanted)


@given(LENGTHS, st.integers(0, 9))
def test_every_epoch_has_as_many_blocks_and_few_places_are_empty(lengths: list[int], seed: int) -> None:
    tokens = table(lengths)
    every = [
        pack_whole(tokens, order.shuffled(np.arange(len(lengths)), seed=seed, epoch=epoch), LENGTH)
        for epoch in range(3)
    ]
    assert len({len(blocks) for blocks in every}) == 1
    blocks = every[0]
    filled = np.sort(blocks.lengths_of(np.arange(len(blocks))))
    # No two blocks would fit into one.
    assert len(filled) < 2 or filled[0] + filled[1] > LENGTH
    again = pack_whole(tokens, order.shuffled(np.arange(len(lengths)), seed=seed, epoch=0), LENGTH)
    assert again.order.tolist() == blocks.order.tolist()


def test_a_row_that_is_too_long_is_read_to_the_length_of_a_block() -> None:
    blocks = pack_whole(table([20, 3]), np.arange(2), LENGTH)
    assert sorted(blocks.lengths_of(np.arange(2)).tolist()) == [3, LENGTH]


def test_without_rows_there_is_nothing_to_learn_from() -> None:
    with pytest.raises(DataError, match="no rows to train on"):
        pack_whole(table([1]), np.array([], dtype=np.int64), LENGTH)
