"""Frames go in and come back as what they were."""

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from torchlake.errors import TableError
from torchlake.tables.frames import is_frame, like, to_arrow

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
    back = like(frame, table.append_column("label", pa.array(["x", "y", "z"])))
    assert type(back) is type(frame)
    assert to_arrow(back).column_names == ["t", "n", "label"]
    if kind == "pandas":
        assert back.index.tolist() == [7, 5, 9]


@pytest.mark.parametrize("kind", FRAMES)
def test_a_frame_without_rows_comes_back(kind: str) -> None:
    frame = FRAMES[kind][:0] if kind != "batch" else FRAMES[kind].slice(0, 0)
    back = like(frame, to_arrow(frame))
    assert type(back) is type(frame)
    assert to_arrow(back).num_rows == 0


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
