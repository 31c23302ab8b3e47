"""Rows with the same inputs stay on one side of a split, and copies can be left out."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchlake.config.job import load_job
from torchlake.data import order
from torchlake.data.copies import divide, first_rows, is_shared
from torchlake.tables.hashes import column_hashes

ROWS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3)), min_size=2, max_size=120)
VALUES = st.one_of(
    st.none(), st.text(max_size=300), st.lists(st.one_of(st.none(), st.text("ab", max_size=2)), max_size=3)
)


@given(st.lists(st.integers(0, 9).map(lambda number: number * 2**60)), st.lists(st.integers(0, 9)))
def test_the_first_row_with_a_hash_is_found(numbers: list[int], others: list[int]) -> None:
    hashes = np.array(numbers, np.uint64)
    expected = [numbers.index(number) for number in numbers]
    found = first_rows(hashes)
    assert (list(range(len(numbers))) if found is None else found.tolist()) == expected
    assert (found is None) == (len(set(numbers)) == len(numbers))
    assert is_shared(hashes, np.array(others, np.uint64)).tolist() == [number in others for number in numbers]


@given(ROWS, st.floats(0.01, 0.9), st.integers(0, 99), st.booleans())
def test_equal_inputs_are_on_one_side(
    rows: list[tuple[int, int]], fraction: float, seed: int, stratified: bool
) -> None:
    inputs = [text for text, _ in rows]
    classes = np.array([label for _, label in rows]) if stratified else None
    first = np.array([inputs.index(text) for text in inputs])
    sides = order.split(len(rows), fraction, seed, classes, first)
    assert sorted(np.concatenate(sides)) == list(range(len(rows)))
    assert all(len(side) for side in sides)
    shared = {inputs[row] for row in sides[0]} & {inputs[row] for row in sides[1]}
    assert not shared or len(set(inputs)) == 1
    if len(set(inputs)) > 2:
        folds = [order.fold(len(rows), number, 3, seed, classes, first)[1] for number in (1, 2, 3)]
        assert sorted(np.concatenate(folds)) == list(range(len(rows)))
        texts = [{inputs[row] for row in fold} for fold in folds]
        assert all(texts)
        assert sum(map(len, texts)) == len(set(inputs))


@given(st.lists(st.integers(0, 3), min_size=3, max_size=120), st.floats(0.01, 0.9), st.integers(0, 99))
def test_without_copies_the_split_is_the_same(labels: list[int], fraction: float, seed: int) -> None:
    rows, every = len(labels), np.arange(len(labels))
    for classes in (None, np.array(labels)):
        for one, other in (
            (order.split(rows, fraction, seed, classes), order.split(rows, fraction, seed, classes, every)),
            (order.fold(rows, 2, 3, seed, classes), order.fold(rows, 2, 3, seed, classes, every)),
        ):
            assert all(map(np.array_equal, one, other))


def test_a_frequent_text_is_trained_on_and_the_share_is_kept() -> None:
    inputs = np.concatenate([np.zeros(400, np.int64), np.repeat(np.arange(400, 1000, 2), 2)])
    for seed in range(20):
        _, validation = order.split(1000, 0.1, seed, None, inputs)
        assert 100 <= len(validation) <= 101
        assert 0 not in inputs[validation]


@pytest.mark.parametrize(("deduplicate", "left"), [(False, [0, 1, 2, 3, 4]), (True, [0, 1, 3])])
def test_copies_are_left_out_and_other_labels_of_a_text_are_not(deduplicate: bool, left: list[int]) -> None:
    rows = pa.array(["a", "b", "a", "a", "b"]), pa.array([1, 1, 1, 2, 1])
    hashes = np.column_stack([column_hashes(each) for each in rows])
    data = {"train": "t", "validation": None, "deduplicate": deduplicate}
    training, validation = divide(load_job(None, data=data, model={"base": "b"}), None, hashes)
    assert training.tolist() == left
    assert validation is None


@given(st.lists(VALUES.filter(lambda value: not isinstance(value, list)), max_size=30), st.integers(0, 5))
def test_equal_texts_have_equal_hashes_wherever_they_are(texts: list[str | None], start: int) -> None:
    check_hashes(texts, pa.string(), start)


@given(st.lists(st.one_of(st.none(), VALUES.filter(lambda value: isinstance(value, list))), max_size=30))
def test_equal_lists_have_equal_hashes(lists: list[list[str] | None]) -> None:
    check_hashes(lists, pa.list_(pa.string()), 2)
    structs = [None if each is None else [{"role": "user", "content": one} for one in each] for each in lists]
    check_hashes(structs, pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})), 1)


def check_hashes(values: list, kind: pa.DataType, start: int) -> None:  # type: ignore[type-arg]
    array = pa.array(values, kind)
    found = column_hashes(array).tolist()
    assert column_hashes(array[start:]).tolist() == found[start:]
    assert [found.index(one) for one in found] == [values.index(one) for one in values]
