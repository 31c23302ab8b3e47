"""Blocks: every token once, whatever the lengths; the same on every rank."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchlake.data import batching, order
from torchlake.data.batching import Ragged
from torchlake.data.packing import Blocks, input_ids_of, num_blocks, pack, target_counts
from torchlake.errors import DataError
from torchlake.tasks import NO_TARGET
from torchlake.tasks.text_generation import task

PAD = -1
LENGTHS = st.lists(st.integers(0, 20), min_size=1, max_size=30).filter(lambda lengths: sum(lengths) >= 2)


def table(lengths: list[int]) -> Ragged:
    """Rows whose tokens are numbered through, so that each token is itself alone."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return Ragged(np.arange(offsets[-1], dtype=np.int32), offsets)


def predicted(blocks: Blocks, numbers: np.ndarray) -> list[tuple[int, int]]:
    """The pairs (token read, token to predict) of some blocks."""
    ids, mask = blocks.padded(numbers, PAD)
    assert (ids == PAD).tolist() == (mask == 0).tolist()
    assert mask.sum(axis=1).tolist() == blocks.lengths_of(numbers).tolist()
    return [
        (int(row[at]), int(row[at + 1]))
        for row, kept in zip(ids, mask.sum(axis=1), strict=True)
        for at in range(kept - 1)
    ]


@given(LENGTHS, st.integers(2, 9), st.integers(0, 99))
def test_every_token_but_the_first_is_predicted_once_from_the_one_before(
    lengths: list[int], block: int, seed: int
) -> None:
    tokens = table(lengths)
    laid = order.shuffled(np.arange(len(lengths)), seed=seed, epoch=0)
    stream = [token for row in laid for token in range(tokens.offsets[row], tokens.offsets[row + 1])]
    blocks = pack(tokens, laid, block)
    assert predicted(blocks, np.arange(len(blocks))) == list(pairwise(stream))
    assert blocks.lengths_of(np.arange(len(blocks)))[:-1].tolist() == [block] * (len(blocks) - 1)
    assert len(blocks) == num_blocks(sum(lengths), block)


@given(LENGTHS, st.integers(2, 9), st.integers(0, 99))
def test_what_is_learned_of_a_row_is_so_across_the_cuts_of_blocks(lengths: list[int], block: int, seed: int) -> None:
    plain = table(lengths)
    learned = np.random.default_rng(seed).random(len(plain.values)) < 0.5
    tokens = Ragged(np.where(learned, plain.values, ~plain.values), plain.offsets)
    laid = order.shuffled(np.arange(len(lengths)), seed=seed, epoch=0)
    stream = [token for row in laid for token in range(tokens.offsets[row], tokens.offsets[row + 1])]
    blocks = pack(tokens, laid, block)
    numbers = np.arange(len(blocks))
    ids, mask = blocks.padded(numbers, 0)
    goals = task.targets(ids, mask)
    assert goals[goals != NO_TARGET].tolist() == [token for token in stream[1:] if learned[token]]
    assert target_counts(blocks, numbers).tolist() == (goals != NO_TARGET).sum(axis=1).tolist()
    assert (input_ids_of(ids) == pack(plain, laid, block).padded(numbers, 0)[0]).all()


@given(LENGTHS, st.integers(2, 9), st.integers(1, 7), st.integers(1, 4), st.integers(1, 40))
def test_an_epoch_is_shared_out_whole_on_any_number_of_ranks(
    lengths: list[int], block: int, batch_size: int, ranks: int, budget: int
) -> None:
    tokens = table(lengths)
    blocks = pack(tokens, order.shuffled(np.arange(len(lengths)), seed=1, epoch=2), block)
    every = np.arange(len(blocks))
    found = []
    for batch in order.epoch_batches(blocks.lengths_of(every), batch_size=batch_size, seed=1, epoch=2):
        shares = batching.micro_batches(blocks.lengths_of(batch), world_size=ranks, micro_batch_tokens=budget)
        assert len({len(share) for share in shares}) == 1
        found += [pair for share in shares for cut in share if len(cut) for pair in predicted(blocks, batch[cut])]
    assert sorted(found) == sorted(predicted(blocks, every))


def test_a_long_row_goes_on_in_the_next_block_and_short_ones_share_one() -> None:
    blocks = pack(table([7, 2, 1]), np.arange(3), 4)
    ids, mask = blocks.padded(np.arange(len(blocks)), PAD)
    assert ids.tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    assert mask.all()


def test_every_epoch_lays_the_rows_in_an_order_of_its_own() -> None:
    rows = np.array([3, 5, 8, 9, 11, 20])
    orders = [order.shuffled(rows, seed=4, epoch=epoch).tolist() for epoch in range(5)]
    assert all(sorted(each) == rows.tolist() for each in orders)
    assert len({tuple(each) for each in orders}) == 5
    assert order.shuffled(rows, seed=4, epoch=0).tolist() == orders[0]


def test_a_single_token_is_nothing_to_learn_from() -> None:
    with pytest.raises(DataError, match="1 tokens in total"):
        pack(table([1, 0]), np.arange(2), 4)
