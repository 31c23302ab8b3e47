"""Frames go in and come back as what they were."""

from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from torchlake.errors import TableError
from torchlake.tables.sources.frames import is_frame, to_arrow, to_original_frame

FRAMES = {
    "table": pa.table({"t": ["a", None, "c"], "n": [1, 2, 3]}),
    "batch": pa.record_batch({"t": ["a", None, "c"], "n": [1, 2, 3]}),
    "pandas": pd.DataFrame({"t": ["a", None, "c"], "n": [1, 2, 3]}, index=[7, 5, 9]),
    "polars": pl.DataFrame({"t": ["a", None, "c"], "n": [1, 2, 3]}),
}


@pytest.mark.parametrize("kind", FRAMES)
def test_a_frame_comes_back_as_its_kind(kind: str) -> None:
    frame = FRAMES[kind]
    assert is_frame(frame)
    table = to_arrow(frame)
    assert table.to_pylist() == [{"t": "a", "n": 1}, {"t": None, "n": 2}, {"t": "c", "n": 3}]
    back = to_original_frame(frame, table.append_column("label", pa.array(["x", "y", "z"])))
    assert type(back) is type(frame)
    assert to_arrow(back).column_names == ["t", "n", "label"]
    if kind == "pandas":
        assert back.index.tolist() == [7, 5, 9]


@pytest.mark.parametrize("kind", FRAMES)
def test_a_frame_without_rows_comes_back(kind: str) -> None:
    frame = FRAMES[kind][:0] if kind != "batch" else FRAMES[kind].slice(0, 0)
    table = to_arrow(frame)
    for given in (table, table.append_column("label", pa.array([], pa.string()))):
        back = to_original_frame(frame, given)
        assert type(back) is type(frame)
        assert to_arrow(back).column_names == given.column_names
        assert to_arrow(back).num_rows == 0


def with_label(frame: Any) -> pa.Table:
    return to_arrow(frame).append_column("label", pa.array(["x"] * len(frame)))


@pytest.mark.parametrize(
    "frame",
    [
        pd.DataFrame({"n": pd.array([1, None], "Int64"), "b": pd.array([True, None], "boolean")}),
        pd.DataFrame({"c": pd.Categorical(["u", "v"]), "d": pd.to_datetime(["2020-01-01", None])}, index=[3, 3]),
        pd.DataFrame([[1, "u"], [2, "v"]]),
        pd.DataFrame([[1, "u"], [2, "v"]], columns=pd.MultiIndex.from_tuples([("a", "n"), ("a", "t")])),
        pd.DataFrame([[1, "u"], [2, "v"]], index=pd.MultiIndex.from_tuples([("i", 0), ("i", 1)], names=["k", "l"])),
    ],
    ids=["nullable", "categorical", "numbered columns", "nested columns", "nested index"],
)
def test_the_own_columns_of_a_pandas_frame_stay_as_they_are(frame: pd.DataFrame) -> None:
    back = to_original_frame(frame, with_label(frame))
    assert back.columns.tolist() == [*frame.columns, "label"]
    assert back["label"].tolist() == ["x", "x"]
    own = back.iloc[:, : frame.shape[1]]
    pd.testing.assert_frame_equal(own.set_axis(frame.columns, axis="columns"), frame)
    pd.testing.assert_frame_equal(to_original_frame(frame, to_arrow(frame)), frame)


def test_the_own_columns_of_a_polars_frame_stay_as_they_are() -> None:
    enum = pl.Enum(["u", "v"])
    frame = pl.DataFrame({"e": pl.Series(["u", "v"], dtype=enum), "c": pl.Series(["u", None], dtype=pl.Categorical)})
    back = to_original_frame(frame, with_label(frame))
    assert back.select("e", "c").schema == frame.schema
    assert back.columns == ["e", "c", "label"]
    assert back.rows() == [("u", "u", "x"), ("v", None, "x")]
    assert to_original_frame(frame, to_arrow(frame)).equals(frame)


@pytest.mark.parametrize("value", ["reviews.parquet", {"a": [1]}, None, [1], pa.schema([])])
def test_other_values_are_no_frames(value: object) -> None:
    assert not is_frame(value)


def test_what_arrow_cannot_hold_names_the_column() -> None:
    with pytest.raises(TableError, match="mixed"):
        to_arrow(pd.DataFrame({"mixed": ["a", 1]}))
    with pytest.raises(TableError, match="two columns named 'a'"):
        to_arrow(pd.DataFrame([[1, 2]], columns=["a", "a"]))
    with pytest.raises(TableError, match="two columns named 'a'"):
        to_arrow(pa.table([[1], [2]], names=["a", "a"]))
