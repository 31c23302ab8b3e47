"""Statistics of parts: a reader that skips files by them finds the rows that it finds without them."""

import json
import tempfile
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import deltalake
import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from deltalake.transaction import AddAction
from hypothesis import example, given, settings
from hypothesis import strategies as st

import duck
import torchlake
from sweeps import sweep
from torchlake.outputs.parts import PartFolder, delta_statistics, joined_statistics

NAN, INF = float("nan"), float("inf")
TEXT = st.text(max_size=40) | st.text(alphabet="a\U0010ffff", min_size=30, max_size=34)
TIME = st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 31, 23, 59, 59, 999_999))
KINDS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "bool": (pa.bool_(), st.booleans()),
    "int8": (pa.int8(), st.integers(-128, 127)),
    "int64": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "float": (pa.float32(), st.floats(width=32)),
    "double": (pa.float64(), st.floats() | st.sampled_from([0.0, -0.0, INF, -INF, NAN, 5e-324])),
    "string": (pa.string(), TEXT),
    "binary": (pa.binary(), st.binary(max_size=40)),
    "date": (pa.date32(), st.dates(date(1, 1, 2))),
    "timestamp": (pa.timestamp("us"), TIME),
    "timestamp of a zone": (pa.timestamp("us", "UTC"), TIME.map(lambda one: one.replace(tzinfo=UTC))),
    "decimal": (pa.decimal128(9, 2), st.decimals(Decimal("-9999999.99"), Decimal("9999999.99"), places=2)),
    "wide decimal": (pa.decimal128(38, 10), st.decimals(Decimal(-(10**27)), Decimal(10**27), places=10)),
}


@pytest.fixture(scope="module")
def connection() -> Iterator[duckdb.DuckDBPyConnection]:
    with duck.connect("delta") as connection:
        connection.execute("SET TimeZone = 'UTC'")
        yield connection


def write(folder: Path, kind: pa.DataType, parts: list[list[Any]]) -> tuple[str, list[str]]:
    """A Delta table with a file for each list, and the paths of the files."""
    schema = pa.schema([("x", kind)])
    place = PartFolder(location=str(folder / "t"), schema=schema, statistics=True)
    (folder / "t").mkdir()
    written = [
        place.write(f"{number}.parquet", pa.table({"x": pa.array(values, kind)}), chunk=number)
        for number, values in enumerate(parts)
    ]
    actions = [AddAction(part.name, part.bytes, {}, 0, True, part.statistics) for part in written]
    table = deltalake.DeltaTable.create(place.location, schema)
    table.create_write_transaction(actions, "append", table.schema())
    return place.location, [f"{place.location}/{part.name}" for part in written]


def rows_of(parts: Any) -> st.SearchStrategy[list[list[Any]]]:
    return st.lists(st.lists(st.none() | parts, max_size=4), min_size=1, max_size=4)


@pytest.mark.parametrize("name", sweep(KINDS, quick={"string"}))
@pytest.mark.parametrize("examples", [6, pytest.param(150, marks=pytest.mark.slow)])
def test_a_filter_finds_the_rows_that_are_there(
    connection: duckdb.DuckDBPyConnection, name: str, examples: int
) -> None:
    kind, values = KINDS[name]

    @settings(max_examples=examples)
    @given(parts=rows_of(values))
    @example(parts=[[0.0, NAN]] if pa.types.is_floating(kind) else [[]])
    def check(parts: list[list[Any]]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            table, files = write(Path(folder), kind, parts)
            searched = sorted({json.dumps(one, default=str): one for part in parts for one in part}.items())
            conditions: list[tuple[str, list[Any]]] = [("x IS NULL", []), ("x IS NOT NULL", [])]
            # Of a Parquet file with NaN DuckDB itself returns other rows than there are: its bounds leave NaN out.
            without_nan = not any(one != one for _, one in searched)
            conditions += [
                (f"x {sign} ?", [one])
                for _, one in searched
                for sign in ("=", "<", ">=")
                if one is not None and without_nan
            ]
            for condition, arguments in conditions:
                counted = f"SELECT count(*) FROM {{}} WHERE {condition}"
                found = connection.execute(counted.format(f"delta_scan('{table}')"), arguments).fetchone()
                loose = connection.execute(counted.format(f"read_parquet({files})"), arguments).fetchone()
                assert found == loose, (condition, arguments)
            dataset = deltalake.DeltaTable(table).to_pyarrow_dataset()
            plain = ds.dataset(files, format="parquet")
            for one in (one for _, one in searched if one is not None and name != "binary"):
                for chosen in (ds.field("x") == pa.scalar(one, kind), ds.field("x") > pa.scalar(one, kind)):
                    assert dataset.count_rows(filter=chosen) == plain.count_rows(filter=chosen), chosen
            for chosen in (ds.field("x").is_null(), ds.field("x").is_valid()):
                assert dataset.count_rows(filter=chosen) == plain.count_rows(filter=chosen), chosen

    check()


@settings(max_examples=100)
@given(parts=rows_of(TEXT))
@example(parts=[["a" * 40], ["b"]])
@example(parts=[[None, None], ["b"]])
@example(parts=[[], ["b"]])
def test_joined_statistics_are_those_of_all_rows_or_have_no_bound(parts: list[list[str | None]]) -> None:
    tables = [pa.table({"x": pa.array(part, pa.string())}) for part in parts]
    joined = json.loads(joined_statistics([delta_statistics(table) for table in tables]))
    whole = json.loads(delta_statistics(pa.concat_tables(tables)))
    assert (joined["numRecords"], joined["nullCount"]) == (whole["numRecords"], whole["nullCount"])
    if "minValues" in joined:
        assert joined == whole


def bounds(values: list[Any], kind: pa.DataType) -> tuple[Any, Any]:
    text = delta_statistics(pa.table({"x": pa.array(values, kind)}))
    found = json.loads(text, parse_float=Decimal)
    assert json.loads(joined_statistics([text, text]), parse_float=Decimal).get("minValues") == found.get("minValues")
    return found.get("minValues", {}).get("x"), found.get("maxValues", {}).get("x")


def test_bounds() -> None:
    assert bounds([3, None, -1], pa.int64()) == (-1, 3)
    assert bounds([True, False], pa.bool_()) == (False, True)
    assert bounds(["b", "a\U00020000"], pa.string()) == ("a\U00020000", "b")
    assert bounds(["b" * 33, "a" * 33], pa.string()) == ("a" * 32, "b" * 32 + "\U0010ffff")
    tiny, huge = Decimal("1E-10"), Decimal("1234567890123456789012345678.0123456789")
    assert bounds([tiny, huge], pa.decimal128(38, 10)) == (tiny, huge)
    assert "E" not in delta_statistics(pa.table({"x": pa.array([tiny], pa.decimal128(38, 10))})).partition("max")[2]
    zeros = json.dumps({"minValues": {"x": -0.0}, "maxValues": {"x": 0.0}})[1:-1]
    assert zeros in delta_statistics(pa.table({"x": [0.0, -0.0]}))
    assert zeros in delta_statistics(pa.table({"x": [0.0]}))


def test_bounds_that_a_log_cannot_hold_are_left_out() -> None:
    for values, kind in (
        ([1.0, NAN], pa.float64()),
        ([1.0, INF], pa.float64()),
        ([None], pa.int64()),
        ([b"a"], pa.binary()),
        (["\U0010ffff" * 40], pa.string()),
        ([2**62], pa.timestamp("us")),
        ([2**30], pa.date32()),
        ([datetime(9999, 12, 31, 23, 59, 59, 999_001)], pa.timestamp("us")),
    ):
        assert bounds(values, kind) == (None, None), (values, kind)


def test_all_columns_have_bounds_or_none_has() -> None:
    """delta-rs takes a bound that is missing beside others for null, and its dataset then has no such row."""
    with_binary = pa.table({"x": [1, 2], "y": pa.array([b"", None]), "z": pa.array([None, None], pa.string())})
    assert json.loads(delta_statistics(with_binary)) == {"numRecords": 2, "nullCount": {"x": 0, "y": 1, "z": 2}}
    nested = with_binary.drop_columns(["y"]).append_column("v", pa.array([[1.0], None]))
    assert json.loads(delta_statistics(nested)) == {
        "numRecords": 2,
        "minValues": {"x": 1},
        "maxValues": {"x": 2},
        "nullCount": {"x": 0, "z": 2},
    }
    joined = json.loads(joined_statistics([delta_statistics(with_binary), delta_statistics(nested)]))
    assert joined == {"numRecords": 4, "nullCount": {"x": 0, "y": 1, "z": 4}}


def test_milliseconds_are_rounded_outward() -> None:
    times = [datetime(2026, 1, 2, 3, 4, 5, 6_001)]
    assert bounds(times, pa.timestamp("us")) == ("2026-01-02T03:04:05.006", "2026-01-02T03:04:05.007")
    early = [datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)]
    assert bounds(early, pa.timestamp("us", "UTC")) == ("1969-12-31T23:59:59.999Z", "1970-01-01T00:00:00.000Z")


def test_an_opened_table_has_the_rows_of_files_whose_bounds_are_incomplete(tmp_path: Path) -> None:
    """Other writers leave out the bounds of some columns; delta-rs' own dataset finds nothing in such files."""
    schema = pa.schema([("x", pa.int64()), ("y", pa.float64()), ("p", pa.string())])
    table = deltalake.DeltaTable.create(str(tmp_path / "t"), schema, partition_by=["p"])
    actions = []
    for number, part in enumerate(["a b", None, "c%"]):
        pq.write_table(pa.table({"x": [number], "y": [float(number)]}), tmp_path / "t" / f"{number}.parquet")
        size = (tmp_path / "t" / f"{number}.parquet").stat().st_size
        statistics = {"numRecords": 1, "minValues": {"x": number}, "maxValues": {"x": number}, "nullCount": {"x": 0}}
        actions.append(AddAction(f"{number}.parquet", size, {"p": part}, 0, True, json.dumps(statistics)))
    table.create_write_transaction(actions, "append", table.schema(), partition_by=["p"])
    found = torchlake.open(tmp_path / "t")
    assert found.count_rows(filter=ds.field("y") == 1.0) == 1
    assert found.to_table(filter=ds.field("p") == "c%")["x"].to_pylist() == [2]
    assert found.to_table(filter=ds.field("p").is_null()).to_pylist() == [{"x": 1, "y": 1.0, "p": None}]
    assert sorted(found.to_table()["x"].to_pylist()) == [0, 1, 2]
