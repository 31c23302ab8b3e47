"""Conditions select the rows that DuckDB selects, statistics rule out none of them, and mistakes are shown in place."""

from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sweeps import examples
from torchlake.errors import DataError, TableError, UsageError
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.reading import ChunkReader
from torchlake.tables.selection.binding import bind
from torchlake.tables.selection.bounds import Bounds, outcomes
from torchlake.tables.selection.conditions import columns_of
from torchlake.tables.selection.grammar import parse
from torchlake.tables.selection.options import Selection
from torchlake.tables.selection.rows import evaluate
from torchlake.tables.sources._options import ReadOptions
from torchlake.tables.table import open_table

TYPES = {
    "n": pa.int32(),
    "big": pa.int64(),
    "u": pa.uint64(),
    "x": pa.float64(),
    "d": pa.decimal128(12, 3),
    "s": pa.string(),
    "ok": pa.bool_(),
    "day": pa.date32(),
    "moment": pa.timestamp("us"),
}
SCHEMA = pa.schema(list(TYPES.items()))
TEXTS = ["", "a", "ab", "b", "it's", "%", "É", "null"]
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "n": st.sampled_from([-3, 0, 1, 2, 5, 2**31 - 1]),
    "big": st.sampled_from([-(2**63), -1, 0, 2**53, 2**53 + 1, 2**63 - 1]),
    "u": st.sampled_from([0, 1, 2**53 + 1, 2**64 - 1]),
    "x": st.sampled_from([-1.5, -0.0, 0.0, 0.1, 1.0, 1e300, float("inf")]),
    "d": st.sampled_from([Decimal("-1.500"), Decimal(0), Decimal("0.100"), Decimal("2.000")]),
    "s": st.sampled_from(TEXTS),
    "ok": st.booleans(),
    "day": st.sampled_from([date(1969, 12, 31), date(2024, 2, 29), date(2024, 3, 1)]),
    "moment": st.sampled_from(
        [datetime(1969, 12, 31, 23, 59, 59, 1), datetime(2024, 2, 29), datetime(2024, 2, 29, 12, 30)]
    ),
}
NUMBERS = ["0", "1", "-3", "2", "0.1", "1.5", "-1.5", "1e2", "9007199254740993", "18446744073709551615"]
LITERALS = {
    **dict.fromkeys(("n", "big", "u", "d", "x"), st.sampled_from(NUMBERS)),
    "s": st.sampled_from(["'" + text.replace("'", "''") + "'" for text in TEXTS]),
    "ok": st.sampled_from(["true", "false"]),
    "day": st.sampled_from(["'2024-02-29'", "'1969-12-31'"]),
    "moment": st.sampled_from(["'2024-02-29'", "'2024-02-29 12:30:00'", "'1969-12-31 23:59:59.000001'"]),
}
ROWS = st.lists(st.tuples(*(st.none() | VALUES[name] for name in TYPES)), min_size=1, max_size=12)


@st.composite
def single_tests(draw: st.DrawFn) -> str:
    name = draw(st.sampled_from(sorted(TYPES)))
    column = draw(st.sampled_from([name, f'"{name}"']))
    literal = LITERALS[name]
    kind = draw(st.sampled_from(["compare", "flipped", "in", "null", "between", "like", "bare"]))
    negative = draw(st.sampled_from(["", "not "]))
    if kind == "null":
        return f"{column} is {negative}null"
    if kind == "in":
        return f"{column} {negative}in ({', '.join(draw(st.lists(literal, min_size=1, max_size=3)))})"
    if kind == "between":
        return f"{column} {negative}between {draw(literal)} and {draw(literal)}"
    if kind == "like":
        return f"s {negative}LIKE '{draw(st.text('ab%_', max_size=3))}'"
    if kind == "bare":
        return "ok"
    operator = draw(st.sampled_from(["=", "!=", "<>", "<", "<=", ">", ">="]))
    one, other = (column, draw(literal)) if kind == "compare" else (draw(literal), column)
    return f"{one}{draw(st.sampled_from(['', ' ']))}{operator} {other}"


CONDITIONS = st.recursive(
    single_tests(),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from([" and ", " OR "]), inner).map("".join),
        inner.map("not {}".format),
        inner.map("({})".format),
    ),
    max_leaves=5,
)


def table_of(rows: list[tuple[Any, ...]]) -> pa.Table:
    columns = zip(zip(*rows, strict=True), TYPES.values(), strict=True)
    return pa.table([pa.array(column, kind) for column, kind in columns], schema=SCHEMA)


def selected(text: str, table: pa.Table) -> list[bool | None]:
    found: list[bool | None] = evaluate(bind(parse(text), table.schema, text), table).to_pylist()
    return found


@settings(max_examples=examples(300, quick=25))
@given(rows=ROWS, text=CONDITIONS)
def test_a_condition_is_true_false_and_null_where_duckdb_says_so(rows: list[tuple[Any, ...]], text: str) -> None:
    table = table_of(rows)
    by_duckdb = duckdb.from_arrow(table).project(f"({text}) as found").fetchall()
    assert selected(text, table) == [found for (found,) in by_duckdb]


@settings(max_examples=examples(300, quick=25))
@given(groups=st.lists(ROWS, min_size=1, max_size=3), text=CONDITIONS, unknown=st.sets(st.sampled_from(sorted(TYPES))))
def test_statistics_allow_everything_that_occurs(
    groups: list[list[tuple[Any, ...]]], text: str, unknown: set[str]
) -> None:
    tables = [table_of(rows) for rows in groups]
    bounds = {name: bounds_of(tables, name) for name in TYPES if name not in unknown}
    may = outcomes(bind(parse(text), SCHEMA, text), bounds, len(tables))
    for place, table in enumerate(tables):
        allowed = {value for value, flags in zip((True, False, None), may, strict=True) if flags[place]}
        assert {*selected(text, table)} <= allowed


def bounds_of(tables: list[pa.Table], name: str) -> Bounds:
    values = [[value for value in table[name].to_pylist() if value is not None] for table in tables]
    return Bounds(
        lowest=pa.array([min(some, default=None) for some in values], TYPES[name]),
        highest=pa.array([max(some, default=None) for some in values], TYPES[name]),
        nulls=pa.array([table[name].null_count for table in tables]).to_numpy(),
        rows=pa.array([len(table) for table in tables]).to_numpy(),
    )


@settings(max_examples=examples(40, quick=20), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=ROWS, text=CONDITIONS, group=st.integers(1, 4), chunk=st.integers(1, 5))
def test_the_rows_of_a_parquet_file_are_those_of_duckdb(
    tmp_path: Path, rows: list[tuple[Any, ...]], text: str, group: int, chunk: int
) -> None:
    table = table_of(rows).append_column("id", pa.array(range(len(rows))))
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=group)
    # Projected: a filter of DuckDB on an Arrow table goes through pyarrow, which fails on the largest uint64.
    found = duckdb.from_arrow(table).project(f"id, ({text}) as found").fetchall()
    by_duckdb = [one for one, kept in found if kept]
    assert ids(tmp_path / "t.parquet", text, chunk) == by_duckdb


def ids(path: Path, where: str | None, chunk_rows: int | None = None, **options: Any) -> list[int]:
    options = {"options": ReadOptions(selection=Selection(where=where, **options))}
    plan = plan_chunks(open_table(path, columns=("id",), **options), columns=("id",), chunk_rows=chunk_rows)
    reader = ChunkReader(("id",))
    found = [one for chunk in plan.chunks for one in reader.read(chunk)[0]["id"].to_pylist()]
    reader.close()
    assert plan.rows == len(found)
    assert plan.rows + sum(plan.selection.get("left_out", {}).values()) == pq.read_metadata(path).num_rows
    return found


def test_a_nan_is_selected_as_ieee_says_whatever_the_statistics_are(tmp_path: Path) -> None:
    table = pa.table({"id": range(4), "x": [1.0, float("nan"), 1.0, None]})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=1)
    assert ids(tmp_path / "t.parquet", "x != 1") == [1]
    assert ids(tmp_path / "t.parquet", "not x <= 5") == [1]
    assert ids(tmp_path / "t.parquet", "x >= 1") == [0, 2]


def test_times_with_a_zone_are_compared_in_utc_unless_the_text_has_one() -> None:
    noon = datetime(2024, 5, 1, 12, tzinfo=UTC)
    table = pa.table({"at": pa.array([noon], pa.timestamp("ms", "America/New_York"))})
    for text in ("'2024-05-01 12:00:00'", "'2024-05-01T12:00:00Z'", "'2024-05-01 14:00:00+02:00'"):
        assert selected(f"at = {text}", table) == [True], text


def test_types_that_statistics_do_not_have_are_compared_too() -> None:
    table = pa.table(
        {
            "wide": pa.array([Decimal("12345678901234567890.5"), None], pa.decimal128(38, 10)),
            "half": pa.array([0.5, 2.0], pa.float16()),
            "fine": pa.array([1, 10**18 + 1], pa.timestamp("ns")),
            "long": pa.array(["a", "b"], pa.large_string()),
            "clock": pa.array([3_600_000_000_001, None], pa.time64("ns")),
            "second": pa.array([3600, None], pa.time32("s")),
        }
    )
    assert selected("wide > 12345678901234567890", table) == [True, None]
    assert selected("half < 1", table) == [True, False]
    assert selected("fine >= '2001-09-09 01:46:40.000000001'", table) == [False, True]
    assert selected("long in ('b', 'c')", table) == [False, True]
    assert selected("clock > '01:00'", table) == [True, None]
    assert selected("clock in ('01:00:00', '01:00:00.000000001')", table) == [True, None]
    assert selected("second = '01:00:00'", table) == [True, None]


def test_times_that_the_column_cannot_have_are_compared_exactly() -> None:
    latest = 2**63 - 1
    table = pa.table(
        {
            "fine": pa.array([-latest, None, latest], pa.timestamp("ns", "UTC")),
            "coarse": pa.array([0, None, 1], pa.timestamp("s")),
            "clock": pa.array([3600, None, 3601], pa.time32("s")),
        }
    )
    for column, below, above in (
        ("fine", "0001-01-01", "9999-12-31"), ("coarse", "1969-12-31 23:59:59.5", "1970-01-01 00:00:01.000000001"),
    ):  # fmt: skip
        assert selected(f"{column} between '{below}' and '{above}'", table) == [True, None, True]
        assert selected(f"{column} < '{below}' or {column} > '{above}'", table) == [False, None, False]
        assert selected(f"{column} in ('{above}')", table) == selected(f"{column} = '{above}'", table)
        assert selected(f"{column} != '{above}'", table) == [True, None, True]
    assert selected("coarse >= '1970-01-01 00:00:00.5'", table) == [False, None, True]
    assert selected("clock <= '01:00:00.5'", table) == [True, None, False]


@pytest.mark.parametrize(
    ("text", "message", "mark"),
    [
        ("stars >", "expected a number, a string in single quotes, true or false, but the condition ends", 7),
        ("stars == 3", "Compare with a single =.", 7),
        ("stars = en", "Write a string in single quotes, 'en'", 8),
        ("lang = 'en", "the closing quote of a string is missing", 7),
        ("stars ~ 3", "'~' cannot be used in a condition", 6),
        ("stars = null", "Write 'is null'", 8),
        ("(stars = 3", "expected and, or, or ')'", 10),
        ("stars = 3 lang = 'en'", "expected and, or, or the end, but got 'lang'", 10),
        ("stars in ()", "expected a number", 10),
        ("stars not 3", "expected in, like or between", 10),
        ("3 is null", "expected a comparison", 2),
        ("", "expected a column, not, or '('", 0),
        ("not " * 101 + "ok", "nested more than 100 deep", 400),
        ("stars = 3x", "'3' cannot be used in a condition", 8),
    ],
)
def test_a_mistake_is_shown_in_the_text(text: str, message: str, mark: int) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    first, line, pointer = str(caught.value).split("\n")
    assert message in first
    assert first.startswith(f"where, character {mark + 1}:")
    assert line == f"  {text}"
    assert pointer == " " * (mark + 2) + "^"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("star >= 3", "there is no column 'star'. Did you mean 'stars'"),
        ("stars >= '3'", "'3' cannot be compared with the int64 column 'stars'"),
        ("lang = 3", "3 cannot be compared with the string column 'lang'. Write it in single quotes, '3'"),
        ("day > 3", "Write '2024-01-31'"),
        ("clock > 3", "Write '12:00:00'"),
        ("day > 'May'", "'May' cannot be compared with the date32[day] column 'day'. Write '2024-01-31'"),
        ("made > '2024-01-31 12:00:00Z'", "Write '2024-01-31' or '2024-01-31 12:00:00', without a time zone"),
        ("lang = true", "true cannot be compared with"),
        ("stars", "true cannot be compared with the int64 column 'stars'"),
        ("tags = 'a'", "Only 'is null' and 'is not null' work with this column"),
        ("stars like '3%'", "'like' works only on strings"),
        ("stars > 0.12345678901234567890123", "it has too many digits"),
    ],
)
def test_what_does_not_fit_the_table_is_an_error_before_any_row_is_read(
    tmp_path: Path, text: str, message: str
) -> None:
    schema = {"stars": pa.int64(), "lang": pa.string(), "day": pa.date32(), "tags": pa.list_(pa.string())}
    schema |= {"clock": pa.time64("us"), "made": pa.timestamp("us")}
    pq.write_table(pa.schema(list(schema.items())).empty_table(), tmp_path / "t.parquet")
    with pytest.raises(TableError) as caught:
        open_table(tmp_path / "t.parquet", options=ReadOptions(selection=Selection(where=text)))
    assert message in str(caught.value)
    assert str(caught.value).endswith(f"\n  {text}\n  ^")


def test_the_columns_of_a_condition_are_named_once() -> None:
    assert columns_of(parse("a = 1 and (b > 2 or not \"a\" is null) and `c d` like 'x%'")) == ("a", "b", "c d")


@pytest.mark.parametrize("given", [{"sample": 0.0}, {"sample": 1.5}, {"limit": 0}, {"where": "a >"}])
def test_options_out_of_range_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Selection(**given)


def test_columns_of_csv_are_compared_as_numbers_and_a_text_that_is_none_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("id,stars\na,3\nb,10\nc,\nd, 2.5 \n")
    table = open_table(path, columns=("id",), options=ReadOptions(selection=Selection(where="stars >= 2.5")))
    plan = plan_chunks(table, columns=("id",))
    assert [ChunkReader(("id",)).read(chunk)[0]["id"].to_pylist() for chunk in plan.chunks] == [["a", "b", "d"]]
    assert plan.selection["left_out"] == {"where": 1}
    path.write_text("id,stars\na,3\nb,many\n")
    with pytest.raises(
        DataError, match=r"t\.csv, rows 0 to 1: where: the column 'stars' is compared with a number.*many"
    ):
        plan_chunks(open_table(path, columns=("id",), options=table.options), columns=("id",))
