"""Labels: which problem a column of them is, and what cannot be one."""

import pickle
from dataclasses import replace
from datetime import date
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tiny
from torchlake.errors import DataError
from torchlake.labels.classes_or_numbers import NUMBER
from torchlake.labels.column import found_separator, label_warnings
from torchlake.labels.values import split_labels
from torchlake.tasks import ColumnOptions
from torchlake.tasks.text_classification import task


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
        assert len({float(value) if NUMBER.fullmatch(value) else value for value in values}) < 2
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
        ([pa.array([[], []], pa.list_(pa.string()))], "holds no label in any row"),
        ([pa.array([1]), pa.array(["a"])], "integers and strings"),
        ([pa.array(range(1001))], "distinct integers.*data.problem to regression"),
        ([pa.array(map(str, range(1001)))], "distinct integers"),
        ([pa.array([1]), pa.array([2**63], pa.uint64())], r"9223372036854775808, but .* at most 2\^63 - 1\. .*strings"),
        ([pa.array(f"text {row}" for row in range(10_001))], "Check that it is the right column"),
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
        ((False, True), pa.array([1, 0, None], pa.decimal128(9, 2)), [1, 0, None]),
        ((0, 2**60 + 1), pa.array([Decimal(2**60 + 1), Decimal(0)], pa.decimal128(38, 2)), [1, 0]),
        (("false", "true"), pa.array([True, False]), [1, 0]),
        (("2024-01-01", "2024-01-02"), pa.array([date(2024, 1, 2)]), [1]),
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
        ("single_label", (False, True), pa.array([Decimal("1.5")]), r"'label' holds decimal.*False, True"),
        *(
            ("single_label", labels, pa.array([0, 1]).cast(kind), rf"'label' holds {str(kind)[:4]}.*times")
            for labels in ((0, 1), (False, True))
            for kind in (pa.timestamp("s"), pa.duration("s"), pa.time64("us"), pa.date64())
        ),
        ("multi_label", ("a", "b"), pa.array([["a"], ["c"]]), r"'c' \(1 rows\)"),
        (
            "multi_label",
            ("a", "b"),
            pa.array([[1]]),
            r"'label' holds list<.*int64>, .*lists of its classes \('a', 'b'\)",
        ),
        ("multi_label", ("a", "b"), pa.array([["a", None]]), "lists that contain a null"),
        ("multi_label", ("a", "b"), pa.array(["a"]), "expects lists"),
        ("regression", (), pa.array(["1.5", "word"]), "not a number.*word"),
        ("regression", (), pa.array([1.5, float("inf")]), "'label' holds 1 numbers.*infinite"),
        ("regression", (), pa.array([["a"]]), "'label' holds .*predicts numbers"),
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
    table = task.output_columns(np.array([[0.9, 0.6], [0.1, 0.4], [0.5, 0.2]], np.float32), None, many)
    assert table["label"].to_pylist() == [["a", "b"], [], ["a"]]
    assert table["score"].to_pylist() == pytest.approx([0.9, 0.4, 0.5])
    one = task.output_columns(
        np.array([[0.3, 0.7]], np.float32),
        None,
        tiny.spec_for("single_label", (5, 9)),
        ColumnOptions(all_probabilities=True),
    )
    assert one.to_pylist() == [
        {"label": 9, "score": pytest.approx(0.7), "prob_5": pytest.approx(0.3), "prob_9": pytest.approx(0.7)}
    ]


def test_probabilities_of_large_logits() -> None:
    logits = np.array([[1000.0, -1000.0], [-1000.0, -1000.0]], np.float32)
    assert task.answers(logits, tiny.spec_for("single_label", ("a", "b"))).tolist() == [[1.0, 0.0], [0.5, 0.5]]
    assert task.answers(logits, tiny.spec_for("multi_label", ("a", "b"))).tolist() == [[1.0, 0.0], [0.0, 0.0]]


KINDS = st.sampled_from(
    ["strings", "whole text", "integers", "booleans", "floats", "whole floats", "decimals", "lists"]
)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "strings": st.sampled_from(["good", "bad", "none", "7 of 10", "007", " "]),
    "whole text": st.sampled_from(["1.0", "2.0", "-3.", "4"]),
    "integers": st.integers(-3, 3),
    "booleans": st.booleans(),
    "floats": st.floats(-1e6, 1e6, width=32),
    "whole floats": st.integers(-3, 3).map(float),
    "decimals": st.decimals(-9, 9, places=2),
    "lists": st.lists(st.sampled_from(["x", "y", "z"]), max_size=3),
}
TYPES: dict[str, list[pa.DataType]] = {
    "strings": [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())],
    "whole text": [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())],
    "integers": [pa.int8(), pa.int32(), pa.int64(), pa.dictionary(pa.int8(), pa.int64())],
    "booleans": [pa.bool_()],
    "floats": [pa.float64(), pa.float32()],
    "whole floats": [pa.float64(), pa.float32(), pa.float16()],
    "decimals": [pa.decimal128(9, 2)],
    "lists": [pa.list_(pa.string()), pa.large_list(pa.large_string())],
}


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_view(pa.string()),
        pa.large_list_view(pa.string()),
        pa.list_(pa.string_view()),
        pa.list_(pa.dictionary(pa.int32(), pa.string())),
    ],
    ids=str,
)
def test_lists_of_any_type_hold_the_same_labels(kind: pa.DataType) -> None:
    values = [["y"], ["x"], None, [], ["x", "y"]]
    found = task.encode_labels(pa.array(values, kind).slice(1), tiny.spec_for("multi_label", ("x", "y")))
    assert found.to_pylist() == [[1, 0], None, [0, 0], [1, 1]]


def test_lists_that_are_all_empty_hold_no_label() -> None:
    spec = tiny.spec_for("multi_label", ("x", "y"))
    assert task.encode_labels(pa.array([[], None]), spec).to_pylist() == [[0, 0], None]


@st.composite
def columns(draw: st.DrawFn) -> tuple[str, list[Any], pa.DataType]:
    """A kind of label, a column of it with nulls and rare values, and a type that holds it."""
    kind = draw(KINDS)
    values = draw(st.lists(st.none() | VALUES[kind], max_size=40))
    return kind, values, draw(st.sampled_from(TYPES[kind]))


def array_of(values: list[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(kind):
        return pa.array(values, kind.value_type).dictionary_encode()
    return pa.array(values, kind)


@given(columns(), st.sampled_from([None, "single_label", "multi_label", "regression"]), st.integers(0, 40))
def test_any_column_is_learned_or_refused_with_a_reason(
    column: tuple[str, list[Any], pa.DataType], problem: Any, cut: int
) -> None:
    """What is found in pieces is found in the whole; it encodes every row that has a label; counts are of rows."""
    kind, values, kind_of = column
    array = array_of(values, kind_of)
    pieces = [array[:cut], array[cut:]]
    labeled = [value for value in values if value is not None]
    try:
        found = task.find_labels(iter(pieces), problem)
    except DataError:
        with pytest.raises(DataError):
            task.decide_labels([task.count_labels(iter([piece]), problem) for piece in pieces], problem)
        unfit = labeled and problem is not None and (problem == "multi_label") != (kind == "lists")
        words = problem == "regression" and kind == "strings"
        odd = problem == "single_label" and kind in ("floats", "decimals")
        few = len({float(value) if "float" in kind or kind == "whole text" else str(value) for value in labeled}) < 2
        assert unfit or words or odd or few or not any(labeled)
        return
    assert found.rows == len(labeled)
    whole = task.find_labels(iter([array]), problem)
    parts = [pickle.loads(pickle.dumps(task.count_labels(iter([piece]), problem))) for piece in pieces]
    for other in (whole, task.decide_labels(parts, problem)):
        assert replace(other, mean=found.mean, deviation=found.deviation) == found
        assert (other.mean, other.deviation) == pytest.approx((found.mean, found.deviation))
    spec = replace(tiny.spec_for(found.problem, found.labels), mean=found.mean, deviation=found.deviation)
    targets = task.encode_labels(array, spec)
    assert targets.is_null().to_pylist() == [value is None for value in values]
    assert task.bad_labels(array, spec) == {}
    if found.problem == "regression":
        assert found.mean == pytest.approx(np.mean([float(value) for value in labeled]), rel=1e-6, abs=1e-6)
        spread = np.std([float(value) for value in labeled])
        assert found.deviation == pytest.approx(spread if found.deviation != 1.0 else 1.0, rel=1e-5, abs=1e-6)
    elif found.problem == "single_label":
        assert sum(found.counts) == found.rows
        assert np.bincount(targets.drop_null().to_numpy(), minlength=len(found.labels)).tolist() == [*found.counts]


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, None, float("nan"), float("inf"), 1e39]), max_size=20))
def test_numbers_that_are_none_are_dropped_where_that_is_wanted(values: list[float | None]) -> None:
    bad = {row for row, value in enumerate(values) if value is not None and not abs(value) < 1e38}
    array = pa.array(values, pa.float64())
    spec = tiny.spec_for("regression", ())
    assert task.bad_labels(array, spec).keys() == bad
    if bad:
        with pytest.raises(DataError, match="NaN, infinite or too large"):
            task.find_labels(iter([array]), "regression")
    fine = [value for row, value in enumerate(values) if value is not None and row not in bad]
    if fine:
        found = task.find_labels(iter([array]), "regression", drop_bad=True)
        assert (found.rows, found.mean) == (len(fine), pytest.approx(np.mean(fine)))


@given(st.lists(st.sampled_from(["a", "b", "c", "mixed", None]), max_size=30))
def test_labels_that_the_model_lacks_are_found_by_row(values: list[str | None]) -> None:
    spec = tiny.spec_for("single_label", ("a", "b", "c"))
    expected = {row: "bad_label: mixed" for row, value in enumerate(values) if value == "mixed"}
    assert task.bad_labels(pa.array(values, pa.string()), spec) == expected
    lists = pa.array([None if value is None else ["a", value] for value in values], pa.list_(pa.string()))
    assert task.bad_labels(lists, tiny.spec_for("multi_label", ("a", "b", "c"))).keys() == expected.keys()


def test_a_column_of_another_type_is_no_bad_row() -> None:
    with pytest.raises(DataError, match="expects lists"):
        task.bad_labels(pa.array(["a"]), tiny.spec_for("multi_label", ("a", "b")))


@pytest.mark.parametrize(
    ("values", "problem", "note"),
    [
        ([1.0, 2.0] * 3, "single_label", "Set data.problem to regression"),
        ([float(row % 20) for row in range(40)], "single_label", "Set data.problem to regression"),
        ([float(row % 21) for row in range(90)], "regression", "Set data.problem to single_label"),
        ([float(row) for row in range(12)], "regression", "Set data.problem to single_label"),
        ([100.0, 110.0, 120.0] * 9, "regression", "Set data.problem to single_label"),
        ([0.0, 100.0] * 9, "single_label", "Set data.problem to regression"),
        ([0.5, 1.0] * 3, "regression", None),
        ([2.0**60, 1.0] * 3, "regression", None),
        ([1, 2] * 3, "single_label", None),
        (["1.0", "2.0"] * 3, "single_label", "Set data.problem to regression"),
    ],
)
def test_a_guess_that_may_be_wrong_names_the_setting(values: list[Any], problem: str, note: str | None) -> None:
    found = task.find_labels(iter([pa.array(values)]), None)
    assert found.problem == problem
    assert found.note is None if note is None else note in str(found.note)
    assert task.find_labels(iter([pa.array(values)]), "regression").note is None


def test_a_predicted_number_is_in_the_units_of_the_labels() -> None:
    spec = replace(tiny.spec_for("regression", ()), mean=1000.0, deviation=50.0)
    assert task.answers(np.array([[0.0], [-2.0]], np.float32), spec).tolist() == [[1000.0], [900.0]]
    logits, targets = torch.tensor([[0.5], [0.0]]), torch.tensor([1050.0, 1000.0])
    assert float(task.loss_sum(logits, targets, spec)) == pytest.approx(0.25)


CELLS = st.lists(st.one_of(st.none(), st.text("ab| ", max_size=8)), max_size=20)


@given(CELLS, st.sampled_from(["|", " | "]))
def test_labels_in_one_cell_are_split(cells: list[str | None], separator: str) -> None:
    expected = [
        None if not cell else [part.strip() for part in cell.split(separator) if part.strip()] for cell in cells
    ]
    for kind in (pa.string(), pa.large_string()):
        assert split_labels(pa.array(cells, kind), separator).to_pylist() == expected
    assert split_labels(pa.array(cells, pa.string()), None).to_pylist() == cells


def test_split_labels_are_learned_as_lists() -> None:
    cells = pa.array(["late|damaged", "late", "|", " damaged | lost ", None])
    spec = replace(tiny.spec_for("multi_label", ("damaged", "late", "lost")), label_separator="|")
    hot = [[1, 1, 0], [0, 1, 0], [0, 0, 0], [1, 0, 1], None]
    assert task.encode_labels(cells, spec).to_pylist() == hot
    lists = pa.array([["damaged", "late"], ["late"], [], ["lost", "damaged"], None])
    assert task.encode_labels(lists, spec).to_pylist() == hot
    assert task.bad_labels(pa.array(["late|x", "late"]), spec) == {0: "bad_label: ['late', 'x']"}


@pytest.mark.parametrize(
    ("labels", "found"),
    [
        (["bad", "good", "good|bad"], "|"),
        (["a; b", "b; c", "c"], ";"),
        (["bad", "good", "good|odd|bad"], "|"),
        (["Home, Garden", "Sports, Outdoors", "Toys"], ""),
        (["a|b", "c|d"], ""),
        (["good", "bad"], ""),
        (["|", "good"], ""),
    ],
)
def test_a_separator_is_found_by_the_labels_that_it_separates(labels: list[str], found: str) -> None:
    column = task.find_labels(iter([pa.array(labels * 2)]), None)
    assert found_separator(column)[0] == found
    assert any(f'data.label_separator: "{found}"' in warning for warning in label_warnings(column)) == bool(found)
