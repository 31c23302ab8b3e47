import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from torchlake.data.order import WINDOW_BATCHES, epoch_batches, split
from torchlake.errors import DataError

SEEDS = st.integers(0, 2**63 - 1)


@given(st.lists(st.integers(1, 50), max_size=300), st.integers(1, 40), SEEDS, st.integers(0, 5))
def test_every_row_exactly_once_per_epoch(lengths: list[int], batch_size: int, seed: int, epoch: int) -> None:
    batches = epoch_batches(np.array(lengths, dtype=int), batch_size=batch_size, seed=seed, epoch=epoch)
    rows = np.concatenate(batches) if batches else np.array([], dtype=int)
    assert sorted(rows.tolist()) == list(range(len(lengths)))
    sizes = sorted(len(batch) for batch in batches)
    assert all(size == batch_size for size in sizes[1:])
    assert len(batches) == -(-len(lengths) // batch_size)


@given(st.integers(1, 300), SEEDS)
def test_the_order_is_a_function_of_its_arguments(rows: int, seed: int) -> None:
    lengths = np.arange(rows) % 17 + 1
    first, again = (epoch_batches(lengths, batch_size=8, seed=seed, epoch=3) for _ in range(2))
    assert all(np.array_equal(one, other) for one, other in zip(first, again, strict=True))


def test_the_order_is_this_one() -> None:
    """The stream of Philox is fixed: another order would make old checkpoints continue on other rows."""
    batches = epoch_batches(np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3]), batch_size=4, seed=7, epoch=1)
    assert [batch.tolist() for batch in batches] == [[2, 4, 8, 5], [3, 1, 6, 9], [0, 7]]


def test_epochs_and_seeds_differ() -> None:
    lengths = np.ones(1000, dtype=int)
    orders = {
        tuple(np.concatenate(epoch_batches(lengths, batch_size=8, seed=seed, epoch=epoch)).tolist())
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(orders) == 4


def test_rows_of_a_batch_are_of_about_one_length() -> None:
    lengths = np.random.default_rng(0).integers(3, 131, 64 * WINDOW_BATCHES)
    batches = epoch_batches(lengths, batch_size=64, seed=0, epoch=0)
    assert np.mean([np.ptp(lengths[batch]) for batch in batches]) <= 2 * 128 / WINDOW_BATCHES


def test_batches_without_regard_to_length_are_random() -> None:
    lengths = np.random.default_rng(0).integers(3, 131, 64 * WINDOW_BATCHES)
    batches = epoch_batches(lengths, batch_size=64, seed=0, epoch=0, by_length=False)
    assert sorted(np.concatenate(batches)) == list(range(len(lengths)))
    means = np.array([lengths[batch].mean() for batch in batches])
    assert abs(means - lengths.mean()).max() < 5 * lengths.std() / 64**0.5


def test_the_short_batch_does_not_gather_the_longest_rows() -> None:
    lengths = np.arange(100)
    means = [np.mean(min(epoch_batches(lengths, batch_size=16, seed=seed, epoch=0), key=len)) for seed in range(200)]
    assert 40 < np.mean(means) < 60


def test_batches_come_in_no_order_of_length() -> None:
    lengths = np.random.default_rng(0).integers(3, 131, 4096)
    means = [lengths[batch].mean() for batch in epoch_batches(lengths, batch_size=32, seed=0, epoch=0)]
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.3


@given(st.integers(2, 500), st.floats(0.001, 0.999), SEEDS)
def test_a_split_gives_each_row_to_one_side(rows: int, fraction: float, seed: int) -> None:
    training, validation = split(rows, fraction, seed)
    assert sorted([*training.tolist(), *validation.tolist()]) == list(range(rows))
    assert len(training) >= 1
    assert len(validation) >= 1
    assert abs(len(validation) - rows * fraction) <= 1
    assert (np.diff(training) > 0).all()


def test_one_row_cannot_be_split() -> None:
    with pytest.raises(DataError, match="at least 2 rows"):
        split(1, 0.1, 0)


SIZES = st.lists(st.one_of(st.integers(1, 4), st.integers(1, 200)), min_size=1, max_size=12)


@given(SIZES, st.floats(0.01, 0.9), SEEDS)
def test_a_split_gives_each_class_its_share_on_both_sides(sizes: list[int], fraction: float, seed: int) -> None:
    rows = sum(sizes)
    assume(rows > 1)
    classes = np.random.default_rng(seed % 2**32).permutation(np.repeat(np.arange(len(sizes)), sizes))
    training, validation = split(rows, fraction, seed, classes)
    assert sorted([*training.tolist(), *validation.tolist()]) == list(range(rows))
    assert (np.diff(training) > 0).all()
    assert (np.diff(validation) > 0).all()
    wanted = min(max(1, round(rows * fraction)), rows - 1)
    many = [number for number, size in enumerate(sizes) if size > 1]
    held_out = np.bincount(classes[validation], minlength=len(sizes))
    if many:
        assert len(validation) == min(wanted, sum(size - 1 for size in sizes))
        assert all(held_out[number] < sizes[number] for number in range(len(sizes)))
    # Every class of two rows or more is validated on, or as many of them as there are validation rows for.
    assert sum(held_out[number] > 0 for number in many) == min(len(many), len(validation)) or not many


def test_rare_classes_are_on_both_sides_for_every_seed() -> None:
    classes = np.random.default_rng(0).permutation(np.repeat([0, 1, 2, 3, 4], [900, 90, 6, 3, 1]))
    for seed in range(200):
        training, validation = split(1000, 0.1, seed, classes)
        assert np.bincount(classes[validation], minlength=5).tolist() == [89, 9, 1, 1, 0]
        assert np.bincount(classes[training]).tolist() == [811, 81, 5, 2, 1]


def test_a_stratified_split_is_this_one() -> None:
    """A resumed run has to find the same rows held out."""
    classes = np.array([0, 1, 0, 0, 1, 2, 0, 1, 0, 0])
    assert split(10, 0.3, 7, classes)[1].tolist() == [0, 1, 2]
    assert split(10, 0.3, 8, classes)[1].tolist() != [0, 1, 2]


def test_rows_of_one_class_are_split_as_without_classes() -> None:
    for seed in range(5):
        plain, stratified = split(50, 0.2, seed), split(50, 0.2, seed, np.zeros(50, dtype=np.int64))
        assert all(np.array_equal(one, other) for one, other in zip(plain, stratified, strict=True))
