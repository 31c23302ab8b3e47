import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchlake.data.batching import Ragged, length_batches, micro_batches, pad, padded_tokens

LENGTHS = st.lists(st.integers(1, 60), max_size=80).map(lambda values: np.array(values, dtype=np.int64))


def ragged(rows: list[list[int]]) -> Ragged:
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows], dtype=np.int64)]).astype(np.int64)
    return Ragged(np.array([token for row in rows for token in row], dtype=np.int32), offsets)


@given(st.lists(st.lists(st.integers(1, 99), max_size=9), min_size=1, max_size=20), st.randoms(use_true_random=False))
def test_padding_keeps_every_token_in_its_place(rows: list[list[int]], random) -> None:
    chosen = [random.randrange(len(rows)) for _ in range(random.randrange(1, 8))]
    ids, mask = pad(ragged(rows), np.array(chosen), 0)
    assert ids.dtype == mask.dtype == np.int64
    assert ids.shape == mask.shape == (len(chosen), max(1, *(len(rows[row]) for row in chosen), 0))
    for line, keep, row in zip(ids, mask, chosen, strict=True):
        assert line[keep == 1].tolist() == rows[row]
        assert (line[keep == 0] == 0).all()
        assert keep.tolist() == sorted(keep.tolist(), reverse=True), "padding is on the right"


def test_padding_no_rows_gives_an_empty_rectangle() -> None:
    ids, mask = pad(ragged([[1, 2]]), np.array([], dtype=np.int64), 0)
    assert ids.shape == mask.shape == (0, 1)


@given(LENGTHS, st.integers(1, 200), st.integers(1, 16))
def test_length_batches_hold_every_row_once_within_both_bounds(lengths, batch_tokens: int, max_rows: int) -> None:
    batches = length_batches(lengths, batch_tokens=batch_tokens, max_rows=max_rows)
    rows = np.concatenate(batches) if batches else np.array([], dtype=int)
    assert sorted(rows.tolist()) == list(range(len(lengths)))
    for batch in batches:
        assert 1 <= len(batch) <= max_rows
        assert len(batch) == 1 or len(batch) * lengths[batch].max() <= batch_tokens
    longest = [lengths[batch].max() for batch in batches]
    assert longest == sorted(longest, reverse=True)


@given(LENGTHS, st.integers(1, 7), st.integers(1, 300), st.booleans())
def test_micro_batches_hold_every_row_once_and_are_as_many_on_every_rank(
    lengths, world_size: int, budget: int, save_padding: bool
) -> None:
    shares = micro_batches(lengths, world_size=world_size, micro_batch_tokens=budget, save_padding=save_padding)
    assert len(shares) == world_size
    assert len({len(share) for share in shares}) == 1
    rows = [row for share in shares for positions in share for row in positions.tolist()]
    assert sorted(rows) == list(range(len(lengths)))
    for positions in (positions for share in shares for positions in share):
        assert len(positions) <= 1 or len(positions) * lengths[positions].max() <= budget


@given(LENGTHS, st.integers(1, 7), st.integers(1, 300))
def test_micro_batches_of_equal_lengths_need_no_padding(lengths, world_size: int, budget: int) -> None:
    shares = micro_batches(lengths, world_size=world_size, micro_batch_tokens=budget, equal_lengths=True)
    assert len({len(share) for share in shares}) == 1
    cuts = [positions for share in shares for positions in share]
    assert sorted(row for positions in cuts for row in positions.tolist()) == list(range(len(lengths)))
    for positions in cuts:
        assert len(set(lengths[positions].tolist())) <= 1
        assert len(positions) <= 1 or len(positions) * lengths[positions].max() <= budget


def test_padding_is_saved_where_there_is_much() -> None:
    for lengths, tokens in ((np.array([90, *[10] * 30]), 31 * 90), (np.full(31, 10), 31 * 10)):
        (plain,), (saving,) = (
            micro_batches(lengths, world_size=1, micro_batch_tokens=10_000, save_padding=each) for each in (False, True)
        )
        assert padded_tokens(lengths, plain) == tokens
        assert len(plain) == 1
        assert padded_tokens(lengths, saving) < 500
    assert len(saving) == 1, "there is nothing to save"


@given(LENGTHS.filter(lambda lengths: len(lengths) > 8), st.integers(1, 4))
def test_ranks_get_about_the_same_number_of_tokens(lengths, world_size: int) -> None:
    shares = micro_batches(lengths, world_size=world_size, micro_batch_tokens=10_000)
    tokens = [sum(int(lengths[positions].sum()) for positions in share) for share in shares]
    assert max(tokens) - min(tokens) <= lengths.max()


def test_fewer_rows_than_ranks_leave_ranks_empty_but_in_step() -> None:
    shares = micro_batches(np.array([5, 3]), world_size=4, micro_batch_tokens=100)
    assert [[positions.tolist() for positions in share] for share in shares] == [[[0]], [[1]], [[]], [[]]]


def test_sorting_saves_most_of_the_padding() -> None:
    lengths = np.random.default_rng(0).integers(3, 128, 2000)
    padded = sum(len(batch) * lengths[batch].max() for batch in length_batches(lengths, batch_tokens=2048, max_rows=64))
    assert padded < 1.05 * lengths.sum()


@pytest.mark.parametrize("lengths", [np.zeros(5, dtype=int), np.array([0, 7, 0])])
def test_rows_without_tokens_are_rows_too(lengths: np.ndarray) -> None:
    batches = length_batches(lengths, batch_tokens=8, max_rows=2)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
