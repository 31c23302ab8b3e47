"""CSV and JSON lines: what was written is read, however it is quoted and cut; a bad record costs only itself."""

import csv
import io
import json
import string
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.csv
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sweeps import examples
from torchlake.errors import FingerprintError, TableError
from torchlake.storage.spread import in_process
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.formats import scanning
from torchlake.tables.keys import row_ids
from torchlake.tables.reading import ChunkReader
from torchlake.tables.table import open_table

quick = settings(max_examples=examples(80, quick=15), suppress_health_check=[HealthCheck.function_scoped_fixture])
TEXT = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("\",\n\r\t 'é🙂\0"), max_size=12)


def read_all(
    path: Path, columns: list[str], chunk_rows: int | None = None
) -> tuple[list[dict[str, Any]], dict[int, str]]:
    table = open_table(path, columns=columns)
    plan = plan_chunks(table, columns=columns, chunk_rows=chunk_rows)
    reader = ChunkReader(columns)
    rows: list[dict[str, Any]] = []
    errors: dict[int, str] = {}
    for chunk in plan.chunks:
        part, bad = reader.read(chunk)
        assert part.num_rows == chunk.rows
        assert part.schema == plan.schema
        errors.update({len(rows) + row: reason for row, reason in bad.items()})
        rows += part.to_pylist()
    assert len(rows) == plan.rows
    return rows, errors


@quick
@given(
    rows=st.lists(st.tuples(TEXT, TEXT), max_size=30),
    end=st.sampled_from(["\n", "\r\n"]),
    bom=st.booleans(),
    blank=st.sets(st.integers(0, 30)),
    last_newline=st.booleans(),
    chunk_rows=st.integers(1, 12) | st.none(),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    suffix=st.sampled_from(["csv", "tsv"]),
)
def test_csv_gives_back_what_was_written(
    tmp_path: Path,
    rows: list[tuple[str, str]],
    end: str,
    bom: bool,
    blank: set[int],
    last_newline: bool,
    chunk_rows: int | None,
    quoting: Any,
    suffix: str,
) -> None:
    records = []
    for place, row in enumerate([("a", "b b"), *rows]):
        line = io.StringIO()
        if any("\r" in value for value in row):
            quoting = csv.QUOTE_ALL  # csv.writer leaves a bare CR unquoted, which no reader can tell from a line's end
        delimiter = "\t" if suffix == "tsv" else ","
        csv.writer(line, quoting=quoting, lineterminator=end, delimiter=delimiter).writerow(row)
        records += [end] * (place in blank) + [line.getvalue()]
    text = "".join(records)
    text = text if last_newline else text.removesuffix(end)
    path = tmp_path / f"t.{suffix}"
    path.write_bytes((b"\xef\xbb\xbf" if bom else b"") + text.encode())
    got, errors = read_all(path, ["a", "b b"], chunk_rows)
    assert errors == {}
    assert [(row["a"], row["b b"]) for row in got] == rows


VALUE = st.none() | st.integers(-(2**63), 2**63 - 1)
RECORDS = st.lists(
    st.fixed_dictionaries({}, optional={"i": VALUE, "f": st.none() | st.floats(allow_nan=False), "s": TEXT}),
    max_size=30,
)


@quick
@given(
    rows=RECORDS, ascii_only=st.booleans(), end=st.sampled_from(["\n", "\r\n", "\n\n", "\n  \n"]), cut=st.integers(1, 9)
)
def test_jsonl_gives_back_what_was_written(
    tmp_path: Path, rows: list[dict[str, Any]], ascii_only: bool, end: str, cut: int
) -> None:
    rows = [{"i": 1, "f": 0.5, "s": "x"}, *rows]
    path = tmp_path / "t.jsonl"
    path.write_bytes(end.join(json.dumps(row, ensure_ascii=ascii_only) for row in rows).encode())
    got, errors = read_all(path, ["i", "f", "s"], cut)
    assert errors == {}
    assert got == [{name: row.get(name) for name in ("i", "f", "s")} for row in rows]
    assert all(type(row["i"]) is int for row in got if row["i"] is not None)


@quick
@given(garbage=st.binary(max_size=200), format=st.sampled_from(["csv", "jsonl"]), cut=st.integers(1, 4))
def test_any_bytes_are_read_without_losing_a_row(tmp_path: Path, garbage: bytes, format: str, cut: int) -> None:
    path = tmp_path / f"t.{format}"
    head = b"a,b\n1,2\n" if format == "csv" else b'{"a": "1", "b": 2}\n'
    path.write_bytes(head + garbage)
    whole, errors = read_all(path, ["a", "b"], 1_000)
    assert read_all(path, ["a", "b"], cut) == (whole, errors)
    assert whole[0] == ({"a": "1", "b": "2"} if format == "csv" else {"a": "1", "b": 2})


def test_a_malformed_csv_line_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b'k,t\n1,fine\n2\n3,a,b\n4,\xff\xfe\n5,"a"b\n6,007\n')
    rows, errors = read_all(path, ["k", "t"])
    assert errors == {
        1: "bad_csv: 1 fields, expected 2 (row 1 of t.csv)",
        2: "bad_csv: 3 fields, expected 2 (row 2 of t.csv)",
        3: "bad_utf8",
        4: "bad_csv: ',' expected after '\"' (row 4 of t.csv)",
    }
    assert rows[3] == {"k": "4", "t": None}, "the key of a row with bad text is kept"
    assert rows[5] == {"k": "6", "t": "007"}


def test_a_null_in_a_file_of_one_column_is_a_row(tmp_path: Path) -> None:
    texts = ["good film", None, "", "bad film", None]
    pl.DataFrame({"text": texts}).write_csv(tmp_path / "polars.csv")
    pyarrow.csv.write_csv(pa.table({"text": texts}), tmp_path / "pyarrow.csv")
    for path in tmp_path.iterdir():
        rows, errors = read_all(path, ["text"], 2)
        assert errors == {}
        assert [row["text"] for row in rows] == ["good film", "", "", "bad film", ""], path


@pytest.mark.parametrize("name", ["t.tsv", "t.TSV", "t.Tsv"])
def test_tab_separated_files_are_known_by_their_names(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("a\tb,c\n1\t2,3\n")
    assert read_all(tmp_path / name, ["a", "b,c"]) == ([{"a": "1", "b,c": "2,3"}], {})


@pytest.mark.parametrize("header", [",b", ",Unnamed: 0,b", ",Unnamed: 0.1,b", ",b,Unnamed: 0.1,Unnamed: 0"])
def test_the_index_that_pandas_writes_is_named_as_pandas_names_it(tmp_path: Path, header: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(header + "\n" + "x," * header.count(",") + "y\n")
    assert open_table(path).schema.names == list(pd.read_csv(path).columns)
    assert read_all(path, ["b"])[1] == {}


def test_a_long_field_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    text = "x" * 2_000_000
    path.write_text(f"k,t\n1,{text}\n2,y\n")
    rows, errors = read_all(path, ["t"])
    assert errors == {}
    assert [len(row["t"]) for row in rows] == [2_000_000, 1]


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("a,b,a\n", "'a' twice"),
        ("a,,b\n", "column 2 of the header has no name"),
        (",,b\n", "column 2 of the header has no name"),
        (" ,b\n", "column 1 of the header has no name"),
        ('""\n1\n', "column 1 of the header has no name"),
        ('a,"b\n1,2\n', "header line cannot be read .*ends inside quotes"),
        ("\n\n", "no header line"),
        ("a\rb\r1\r2\r", "header line cannot be read"),
    ],
)
def test_a_bad_header_is_refused(tmp_path: Path, header: str, words: str) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(header.encode())
    with pytest.raises(TableError, match=words):
        open_table(path)


@pytest.mark.parametrize("name", ["t.csv.xz", "t.parquet.gz", "t.csv", "t.jsonl"])
def test_compressed_text_is_refused_with_a_remedy(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x1f\x8b\x08\x00 gzip")
    with pytest.raises(TableError, match=r"(?i)decompress it"):
        open_table(tmp_path / name)
    with pytest.raises(TableError, match=r"(?i)decompress it"):
        open_table(tmp_path)


def test_utf16_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes("a,b\n1,2\n".encode("utf-16"))
    with pytest.raises(TableError, match="--csv encoding=utf-16"):
        open_table(tmp_path / "t.csv")


def test_jsonl_never_converts_silently(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    lines = [json.dumps({"i": n, "s": "x", "f": 0.5, "l": [1], "o": {"p": 1}}) for n in range(1000)]
    odd = [
        {"i": "1"}, {"i": True}, {"i": 2**63}, {"s": 7}, {"f": 2**53 + 1}, {"l": ["a"]}, {"o": {"p": "a"}}, {"o": [1]},
        {"f": 3, "i": 5, "l": [], "o": {"p": None}},
    ]  # fmt: skip
    path.write_text("\n".join(lines + [json.dumps(row) for row in odd]))
    rows, errors = read_all(path, ["i", "s", "f", "l", "o"])
    assert list(errors) == list(range(1000, 1008))
    assert errors[1000] == "bad_json: column 'i': '1' does not fit int64 (row 1,000 of t.jsonl)"
    assert rows[1008] == {"i": 5, "s": None, "f": 3.0, "l": [], "o": {"p": None}}


def test_types_of_jsonl_come_from_all_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    first = {"price": 1, "tags": [], "o": {"a": 1}, "other": 1}
    last = [{"price": 1.5}, {"price": 2**53 + 1}, {"tags": [None, "x"]}, {"o": {"b": [{"c": 2}]}}, {"new": True}]
    path.write_text("\n".join(map(json.dumps, [first] * 1500 + last)))
    rows, errors = read_all(path, ["price", "tags", "o", "new"])
    assert list(errors) == [1501], "no double equals this int"
    assert rows[0] == {"price": 1.0, "tags": [], "o": {"a": 1, "b": None}, "new": None}
    assert [rows[1500]["price"], rows[1502]["tags"]] == [1.5, [None, "x"]]
    assert [rows[1503]["o"], rows[1504]["new"]] == [{"a": None, "b": [{"c": 2}]}, True]
    assert open_table(path).schema.names == ["price", "tags", "o", "other"], "of columns that nobody named: 1,000 lines"
    with pytest.raises(TableError, match="no column 'news'. Did you mean 'new'"):
        open_table(path, columns=["new", "news"])


def test_names_in_jsonl_that_are_not_utf8_matter_only_where_they_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"t": "a", "o": {"p": 1}}\n{"t": "b", "caf\xe9": 1}\n{"t": "c", "o": {"p": 2, "caf\xe9": 1}}\n')
    assert open_table(path).schema.names == ["t", "o"]
    rows, errors = read_all(path, ["t"])
    assert (rows, errors) == ([{"t": "a"}, {"t": "b"}, {"t": "c"}], {})
    rows, errors = read_all(path, ["o"])
    assert (rows, errors) == ([{"o": {"p": 1}}, {"o": None}, {"o": None}], {2: "bad_utf8"})
    with pytest.raises(TableError, match=r"the column name 'caf\\udce9' is not UTF-8"):
        open_table(path, columns=["caf\udce9"])


@pytest.mark.parametrize("late", [False, True])
def test_values_that_no_file_could_hold_are_errors(tmp_path: Path, late: bool) -> None:
    path = tmp_path / "t.jsonl"
    deep = "[" * 40 + "]" * 40
    many = ", ".join(f'"{n}": 1' for n in range(10_001))
    path.write_text('{"o": {"p": 1}, "l": []}\n' * (1000 if late else 1) + f'{{"o": {{{many}}}, "l": {deep}}}\n')
    for name, words in (("l", "nested more than 32 deep"), ("o", "more than 10,000 different fields")):
        if late:
            assert list(read_all(path, [name])[1]) == [1000]
        else:
            with pytest.raises(TableError, match=words):
                open_table(path, columns=[name])


def test_malformed_json_lines_cost_only_themselves(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(
        b'{"k": 1, "t": "fine"}\n{"k": 2, "t": \n[1]\n{"k": 4, "t": "\xff"}\n{"k": 5, "t": "\\ud800"}\n'
        + b"[" * 100_000
        + b'\n{"k": 7, "t": "last"}'
    )
    rows, errors = read_all(path, ["k", "t"])
    assert list(errors) == [1, 2, 3, 4, 5]
    assert errors[2] == "bad_json: list, expected an object (row 2 of t.jsonl)"
    assert errors[3] == errors[4] == "bad_utf8"
    assert [row["k"] for row in rows] == [1, None, None, 4, 5, None, 7]


def test_jsonl_types_that_disagree_early_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"a": 1, "b": 1}\n{"a": "x", "b": 2}\n')
    with pytest.raises(TableError, match=r"line 2: the column 'a' has string where int64 was before"):
        open_table(path, columns=["a"])
    assert open_table(path, columns=["b"]).schema.field("b").type == pa.int64()


def test_a_column_that_begins_with_nulls_gets_its_type_from_later_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"a": null}\n' * 1500 + '{"a": "text"}\n')
    rows, errors = read_all(path, ["a"])
    assert errors == {}
    assert rows[-1] == {"a": "text"}


def test_a_json_array_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text('[{"a": 1}]')
    with pytest.raises(TableError, match="one object per line"):
        open_table(tmp_path / "t.json")


def test_a_file_that_shrank_since_the_plan_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a\n" + "\n".join(string.ascii_lowercase))
    plan = plan_chunks(open_table(path), columns=["a"])
    path.write_text("a\nb\n")
    with pytest.raises(FingerprintError, match="changed while it was being read"):
        ChunkReader(["a"]).read(plan.chunks[0])


def test_row_ids_name_file_and_row(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.csv", "sub/a.csv"):
        (tmp_path / name).write_text("x\n1\n2\n3\n")
    plan = plan_chunks(open_table(tmp_path), columns=["x"], chunk_rows=2)
    ids = [one for chunk in plan.chunks for one in row_ids(chunk).to_pylist()]
    assert ids == ["b.csv:0", "b.csv:1", "b.csv:2", "sub/a.csv:0", "sub/a.csv:1", "sub/a.csv:2"]


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl", "t.csv.gz"])
def test_ranges_of_a_file_that_are_scanned_apart_give_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Texts have quotes, commas and line ends, so that most ranges begin inside a field."""
    texts = [f'{number},"\n\n"{number}",\r\n' * (number % 5) + str(number) for number in range(300)]
    table = pd.DataFrame({"id": range(300), "text": texts})
    if name.endswith("jsonl"):
        table.to_json(tmp_path / name, orient="records", lines=True)
    else:
        table.to_csv(tmp_path / name, index=False)
    apart: list[int] = []

    def spread(function: Any, items: Any, *, size: int, name: str) -> Any:
        apart.append(len(items))
        return in_process(function, [*items], size=size)

    opened = open_table(tmp_path / name, columns=["text"])
    whole = plan_chunks(opened, columns=["text"], chunk_rows=7)
    monkeypatch.setattr(scanning, "RANGE_BYTES", 500)
    plan = plan_chunks(opened, columns=["text"], chunk_rows=7, spread=spread)
    assert apart[0] > 10 or name.endswith("gz")
    for one in (whole, plan):
        reader = ChunkReader(["text"])
        assert [text for chunk in one.chunks for text in reader.read(chunk)[0]["text"].to_pylist()] == texts
