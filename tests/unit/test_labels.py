"""Labels: which problem a column of them is, and what cannot be one."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiny
from torchlake.errors import DataError
from torchlake.tasks import text_classification as task


def find(*pieces: pa.Array, problem: Any = None, drop_bad: bool = False) -> tuple[str, tuple[object, ...]]:
    found = task.find_labels(iter(pieces), problem, drop_bad=drop_bad)
    return found.problem, found.labels


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["1", "0", "10"], ("single_label", (0, 1, 10))),
        (["-1", "0"], ("single_label", (-1, 0))),
        (["007", "008"], ("single_label", ("007", "008"))),
        (["007", "bond"], ("single_label", ("007", "bond"))),
        (["1", "0.5"], ("regression", ())),
        (["1e3", "-.5", "2."], ("regression", ())),
        (["nan", "inf"], ("single_label", ("inf", "nan"))),
        (["1", "x"], ("single_label", ("1", "x"))),
        (["true", "false"], ("single_label", ("false", "true"))),
        (["x", "", "y"], ("single_label", ("x", "y"))),  # an empty cell is no label
        (["1\n", "2"], ("single_label", ("1\n", "2"))),
    ],
)
def test_text_is_read_as_what_it_writes(values: list[str], expected: tuple[str, tuple[object, ...]]) -> None:
    assert find(pa.array(values)) == expected
    assert find(pa.array(values[:1]), pa.array(values[1:], pa.large_string()).dictionary_encode()) == expected


@given(st.lists(st.one_of(st.integers(-5, 5).map(str), st.floats(-5, 5, width=16).map(str), st.text(max_size=3))))
def test_what_was_found_can_be_encoded(values: list[str]) -> None:
    values = [value for value in values if value]
    try:
        problem, labels = find(pa.array(values, pa.string()))
    except DataError:
        assert len(set(values)) < 2
        return
    spec = tiny.spec_for(problem, labels)
    targets = task.encode_labels(pa.array(values, pa.string()), spec)
    assert targets.null_count == 0
    if problem == "single_label":
        read = [labels[index] for index in targets.to_pylist()]
        assert read == [float(value) if isinstance(labels[0], int) else value for value in values]
    else:
        assert targets.to_pylist() == [pytest.approx(float(value), rel=1e-6) for value in values]


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([], "empty, or null"),
        ([pa.nulls(3)], "empty, or null"),
        ([pa.array(["a", "a"])], "only 'a' in every row"),
        ([pa.array([1, 1])], "only 1 in every row"),
        ([pa.array([[], []], pa.list_(pa.string()))], "no label at all"),
        ([pa.array([1]), pa.array(["a"])], "integers and strings"),
        ([pa.array(range(1001))], "distinct integers.*data.problem to regression"),
        ([pa.array(map(str, range(1001)))], "distinct integers"),
        ([pa.array(f"text {row}" for row in range(10_001))], "Is it the right column"),
        ([pa.array(f"{row}.5" for row in range(10_001)), pa.array(["word"])], "'word' among them"),
        ([pa.array([1.0, float("nan")])], "1 numbers that are NaN, infinite"),
        ([pa.array([[1, 2]])], r"list<.*int64"),
        ([pa.array([b"a", b"b"])], "binary"),
        ([pa.array([{"a": 1}])], "struct"),
    ],
)
def test_what_cannot_be_learned_is_said(pieces: list[pa.Array], message: str) -> None:
    with pytest.raises(DataError, match=message):
        find(*pieces)


def test_very_many_numbers_as_text_are_regression() -> None:
    numbers = pa.array([f"{row / 4}" for row in range(25_000)])
    assert find(numbers.slice(0, 12_000), numbers.slice(12_000), pa.array(["3"])) == ("regression", ())


@pytest.mark.parametrize(
    ("labels", "column", "expected"),
    [
        ((0, 1), pa.array(["1", "0", None]), [1, 0, None]),
        ((0, 1), pa.array([1.0, 0.0, None]), [1, 0, None]),
        ((0, 1), pa.array([True, False]), [1, 0]),
        ((False, True), pa.array(["true", "false"]), [1, 0]),
        ((False, True), pa.array([1, 0]), [1, 0]),
        (("0", "x"), pa.array([0, None]), [0, None]),
        (("a", "b"), pa.chunked_array([["a"], ["b"]]), [0, 1]),
    ],
)
def test_the_same_label_in_another_type(labels: tuple[object, ...], column: pa.Array, expected: list[int]) -> None:
    assert task.encode_labels(column, tiny.spec_for("single_label", labels)).to_pylist() == expected


@pytest.mark.parametrize(
    ("problem", "labels", "column", "message"),
    [
        (
            "single_label",
            ("a", "b"),
            pa.array(["c", "a", "c", "d"]),
            r"'c' \(2 rows\), 'd' \(1 rows\). Its classes: 'a', 'b'",
        ),
        ("single_label", (0, 1), pa.array([2]), r"2 \(1 rows\). Its classes: 0, 1"),
        ("single_label", (0, 1), pa.array(["good"]), "'label'.*0, 1"),
        ("single_label", (0, 1), pa.array([0.5]), "'label'.*0, 1"),
        ("single_label", (False, True), pa.array([5]), "False, True"),
        ("multi_label", ("a", "b"), pa.array([["a"], ["c"]]), r"'c' \(1 rows\)"),
        ("multi_label", ("a", "b"), pa.array([["a", None]]), "null in them"),
        ("multi_label", ("a", "b"), pa.array(["a"]), "expects lists"),
        ("regression", (), pa.array(["1.5", "word"]), "no number.*word"),
        ("regression", (), pa.array([1.5, float("inf")]), "infinite"),
        ("regression", (), pa.array([["a"]]), "predicts numbers"),
    ],
)
def test_labels_that_the_model_does_not_know(
    problem: str, labels: tuple[object, ...], column: pa.Array, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        task.encode_labels(column, tiny.spec_for(problem, labels))


def test_lists_of_any_kind_become_ones_and_zeros() -> None:
    spec = tiny.spec_for("multi_label", ("a", "b", "c"))
    column = pa.array([["c"], None, ["b", "a", "a"], []])
    expected = [[0, 0, 1], None, [1, 1, 0], [0, 0, 0]]
    for kind in (pa.list_(pa.string()), pa.large_list(pa.large_string())):
        assert task.encode_labels(column.cast(kind), spec).to_pylist() == expected
        assert task.encode_labels(column.cast(kind).slice(2), spec).to_pylist() == expected[2:]


def test_the_chosen_labels_and_the_score() -> None:
    many = tiny.spec_for("multi_label", ("a", "b"))
    table = task.output_columns(np.array([[0.9, 0.6], [0.1, 0.4], [0.5, 0.2]], np.float32), many, False)
    assert table["label"].to_pylist() == [["a", "b"], [], ["a"]]
    assert table["score"].to_pylist() == pytest.approx([0.9, 0.4, 0.5])
    one = task.output_columns(np.array([[0.3, 0.7]], np.float32), tiny.spec_for("single_label", (5, 9)), True)
    assert one.to_pylist() == [
        {"label": 9, "score": pytest.approx(0.7), "prob_5": pytest.approx(0.3), "prob_9": pytest.approx(0.7)}
    ]


def test_probabilities_of_large_logits() -> None:
    logits = np.array([[1000.0, -1000.0], [-1000.0, -1000.0]], np.float32)
    assert task.probabilities(logits, tiny.spec_for("single_label", ("a", "b"))).tolist() == [[1.0, 0.0], [0.5, 0.5]]
    assert task.probabilities(logits, tiny.spec_for("multi_label", ("a", "b"))).tolist() == [[1.0, 0.0], [0.0, 0.0]]
