"""Damaged files cost the rows that are damaged, and no others: stray quotes and cut lines in CSV, bytes in columns."""

import csv
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sweeps import examples
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.formats import lines, scanning
from torchlake.tables.formats.layout import storage_type
from torchlake.tables.formats.lines import BadRecord, CountedLines, csv_records
from torchlake.tables.formats.streams import Dialect, TextRanges
from torchlake.tables.reading import ChunkReader, isolate_bad_text
from torchlake.tables.table import open_table

thorough = settings(max_examples=examples(400, quick=60), suppress_health_check=[HealthCheck.function_scoped_fixture])
NO_QUOTES = st.text(st.sampled_from("ab é\t'\\;0"), max_size=6)
ENDS = st.sampled_from(["\n", "\n", "\r\n"])


def read_all(path: Path, columns: list[str], chunk_rows: int | None = None) -> tuple[pa.Table, dict[int, str]]:
    """All rows, chunk by chunk, and {row: reason} of those that cannot be read."""
    plan = plan_chunks(open_table(path, columns=columns), columns=columns, chunk_rows=chunk_rows)
    reader, pieces, errors = ChunkReader(columns), [], {}
    for chunk in plan.chunks:
        piece, bad = reader.read(chunk)
        piece.validate(full=True)
        errors.update({chunk.first_row + row: reason for row, reason in bad.items()})
        pieces.append(piece)
    reader.close()
    return pa.concat_tables(pieces), errors


def records_in(content: list[str], width: int) -> Iterator[tuple[int, list[str] | None]]:
    """What a CSV file's lines mean: how many lines each record has, and its fields, None for a bad line.

    A record is the fewest lines that csv takes for a whole one. If it has not `width` fields, its first line is bad.
    """
    first = 0
    while first < len(content):
        count, fields = 1, None
        for stop in range(first + 1, len(content) + 1):
            try:
                fields = next(csv.reader(content[first:stop], strict=True))
            except csv.Error as error:
                if "unexpected end of data" in str(error):
                    continue
            break
        if fields is not None and len(fields) == width:
            count = stop - first
        elif fields == [] and width == 1:
            fields = [""]
        elif fields != []:
            fields = None
        if fields != []:
            yield count, fields
        first += count


def quoted(row: tuple[str, ...]) -> str:
    """A row as a program writes it, every field in quotes, without the line's end."""
    text = io.StringIO()
    csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="").writerow(row)
    return text.getvalue()


@st.composite
def damaged_csv(draw: st.DrawFn) -> tuple[int, bytes]:
    """The number of columns, and the lines behind the header: sound rows, then damaged."""
    width = draw(st.integers(1, 4))
    anything = st.text(st.sampled_from('ab,,""\n\r é\0'), max_size=8)
    kinds = [
        st.tuples(*[NO_QUOTES] * width).map(",".join),
        st.tuples(*[anything] * width).map(quoted),
        st.text(st.sampled_from('a,"\r\0'), max_size=8),
        st.sampled_from(['a","', '","', '"', '""', "", '"",""', ",", 'a"b']),
    ]
    body = "".join(row + end for row, end in draw(st.lists(st.tuples(st.one_of(kinds), ENDS), max_size=25)))
    content = bytearray(body.encode())
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, len(content)))
        match draw(st.sampled_from(["insert", "cut", "overwrite"])):
            case "insert":
                content[place:place] = draw(
                    st.sampled_from([b'"', b"\n", b",", b"\xff", b"\r\n", b'"\n', b"\xef\xbb\xbf"])
                )
            case "cut":
                del content[place : place + draw(st.integers(1, 20))]
            case "overwrite":
                content[place : place + 3] = draw(st.binary(max_size=3))
    return width, bytes(content)


@thorough
@given(
    damaged_csv(),
    st.booleans(),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.integers(1, 5),
    st.integers(1, 60) | st.just(1000),
)
@example((2, b'1,"open\n2,x\n3,y\n'), False, [1], 1, 1000)
@example((2, b'1,"a\n\n2,"b\n3,c\n'), True, [2], 1, 5)
@example((1, b'\n"\n\n"\n\n'), False, [1], 1, 3)
@example((2, b'"a\n1,2\n3,4\n5,6\n",b\n' * 5), False, [1], 2, 7)
def test_chunks_and_ranges_of_any_size_hold_the_records_that_the_lines_mean(
    tmp_path: Path, damaged: tuple[int, bytes], bom: bool, sizes: list[int], segment_rows: int, range_bytes: int
) -> None:
    width, content = damaged
    path = tmp_path / "t.csv"
    header = (b"\xef\xbb\xbf" if bom else b"") + ",".join("abcd"[:width]).encode() + b"\r\n"
    path.write_bytes(header + content)
    text = [line.decode("utf-8", "surrogateescape") for line in io.BytesIO(content)]
    meant = list(records_in(text, width))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scanning, "RANGE_BYTES", range_bytes)
        ranges = scanning.ranges_of(str(path), "csv", Dialect(), path.stat().st_size, segment_rows)
    start, segments = scanning.join_ranges(map(scanning.scan_range, ranges))
    assert start == len(header)
    assert sum(segment.rows for segment in segments) == len(meant)
    assert all(segment.rows <= segment_rows for segment in segments)
    found: list[Any] = []
    offset, segments = start, segments[::-1]
    while segments:
        chunk = [segments.pop() for _ in range(min(len(segments), sizes[len(found) % len(sizes)]))]
        size = sum(segment.bytes for segment in chunk)
        records = list(lines.read_records(TextRanges(), str(path), "csv", Dialect(), offset, size, width))
        assert len(records) == sum(segment.rows for segment in chunk)
        found += records
        offset += size
    whole = lines.read_records(TextRanges(), str(path), "csv", Dialect(), start, len(content), width)
    assert found == list(whole), "reasons too"
    assert [None if isinstance(record, BadRecord) else record for record in found] == [fields for _, fields in meant]
    blank = sum(not line.strip("\r\n") for line in text)
    assert sum(count for count, _ in meant) <= len(text) <= sum(count for count, _ in meant) + blank


@thorough
@given(
    rows=st.lists(st.tuples(NO_QUOTES, NO_QUOTES, NO_QUOTES), min_size=1, max_size=20),
    junk=st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n"), max_size=12), max_size=1)
    | st.lists(st.text(st.sampled_from('a"\r'), max_size=5).map('"{}'.format), max_size=1)
    | st.lists(st.sampled_from(['x,"y', '"', 'x","', 'x,"y,z', ',,"']), max_size=1),
    place=st.integers(0, 20),
    end=ENDS,
)
def test_a_damaged_line_leaves_all_other_rows_as_they_were(
    rows: list[tuple[str, str, str]], junk: list[str], place: int, end: str
) -> None:
    place = min(place, len(rows))
    content = [",".join(row) for row in rows]
    content[place:place] = junk
    source = CountedLines(io.BytesIO("".join(line + end for line in content).encode()))
    found = list(csv_records(source, "t.csv", Dialect(), 3))
    sound = [list(row) for row in rows]
    assert found[:place] == sound[:place]
    assert found[len(found) - len(rows) + place :] == sound[place:]
    assert len(found) == len(rows) + sum(bool(line.strip("\r\n")) for line in junk)


class CountingBytes(io.BytesIO):
    """Bytes that count how many of their lines are read."""

    read_lines = 0

    def __next__(self) -> bytes:
        line = super().__next__()
        self.read_lines += 1
        return line


@thorough
@given(st.integers(1, 4), st.lists(st.text(st.sampled_from('a,"'), max_size=7), max_size=60))
@example(2, ['a","'] * 5_000)
@example(3, ['a","b","'] * 5_000)
@example(4, ['a"",""","'] * 5_000)
@example(2, ['"'] + ["a,b"] * 5_000)
def test_damage_costs_no_more_than_a_few_looks_at_each_line(width: int, content: list[str]) -> None:
    source = CountingBytes("".join(line + "\n" for line in content).encode())
    for _ in csv_records(CountedLines(source), "t.csv", Dialect(), width):
        pass
    assert source.read_lines <= (2 * width + 3) * len(content)


def test_a_stray_quote_costs_its_own_row(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = [f"{n},good film {n}" for n in range(2_000)]
    rows[1_500] = '1500,"a quote that is never closed'
    rows[1_600] = 'a","b'
    path.write_text("id,text\n" + "\n".join(rows) + "\n")
    for chunk_rows in (None, 7):
        table, errors = read_all(path, ["id", "text"], chunk_rows)
        unclosed = "the line ends inside quotes, and the lines after it do not complete the record"
        assert errors == {row: f"bad_csv: {unclosed} (row {row:,} of t.csv)" for row in (1_500, 1_600)}
        assert table["id"].to_pylist() == [None if n in errors else str(n) for n in range(2_000)]


def test_a_quote_is_followed_only_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_FIELD", 1_000)
    path = tmp_path / "t.csv"
    path.write_text('id,text\n0,"open\n' + "1,some text\n" * 200 + '2,"the end"\n3,"and more"\n')
    table, errors = read_all(path, ["id"], 50)
    assert list(errors) == [0]
    assert table["id"].to_pylist() == [None, *["1"] * 200, "2", "3"]
    path.write_text("id,text\n0,short\n1," + "x" * 2_000 + "\n2,short\n")
    table, errors = read_all(path, ["id"])
    assert errors == {1: "bad_csv: field larger than field limit (1000) (row 1 of t.csv)"}


BAD_ROWS = [0, 17, 2_500, 4_999]
ROWS = 5_000


def texts(dictionary: bool = False) -> pa.Array:
    """Two strings a row; in the bad rows one is not UTF-8."""
    raw = [b"tag", b"caf\xc3\xa9"] * ROWS
    for row in BAD_ROWS:
        raw[2 * row + row % 2] = b"caf\xe9"
    if dictionary:
        values, indices = np.unique(raw, return_inverse=True)
        return pa.DictionaryArray.from_arrays(pa.array(indices, pa.int32()), unchecked(list(values)))
    return unchecked(raw)


def unchecked(raw: list[bytes], kind: pa.DataType = pa.string()) -> pa.Array:
    return pa.Array.from_buffers(
        kind, len(raw), pa.array(raw, pa.binary() if kind == pa.string() else pa.large_binary()).buffers()
    )


def by_two(item: pa.Array, kind: Callable[..., pa.Array] = pa.ListArray.from_arrays) -> pa.Array:
    offsets = pa.array(range(0, 2 * ROWS + 1, 2), pa.int64() if kind == pa.LargeListArray.from_arrays else pa.int32())
    return kind(offsets, item)


def message(content: pa.Array) -> pa.Array:
    return pa.StructArray.from_arrays([pa.array(["user", "assistant"] * ROWS), content], ["role", "content"])


NESTED: dict[str, Callable[[], pa.Array]] = {
    "list": lambda: by_two(texts()),
    "large list": lambda: by_two(texts(), pa.LargeListArray.from_arrays),
    "fixed size list": lambda: pa.FixedSizeListArray.from_arrays(texts(), 2),
    "map's values": lambda: pa.MapArray.from_arrays(range(0, 2 * ROWS + 1, 2), pa.array(["a", "b"] * ROWS), texts()),
    "map's keys": lambda: pa.MapArray.from_arrays(range(0, 2 * ROWS + 1, 2), texts(), pa.array([1, 2] * ROWS)),
    "struct": lambda: pa.StructArray.from_arrays([pa.array(range(ROWS)), by_two(texts())], ["n", "texts"]),
    "conversation": lambda: by_two(message(texts())),
    "list of lists": lambda: pa.ListArray.from_arrays(range(ROWS + 1), by_two(texts())),
    "list of dictionary values": lambda: by_two(texts(dictionary=True)),
    "conversation of dictionary values": lambda: by_two(message(texts(dictionary=True))),
}


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("name", NESTED)
def test_bad_bytes_in_nested_text_cost_their_own_rows(tmp_path: Path, name: str, suffix: str) -> None:
    column = NESTED[name]()
    table = pa.table({"n": range(ROWS), "c": column})
    path = tmp_path / f"t.{suffix}"
    if suffix == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    got, errors = read_all(path, ["n", "c"], 1_000)
    assert errors == dict.fromkeys(BAD_ROWS, "bad_utf8")
    assert got["n"].to_pylist() == list(range(ROWS))
    good = [row for row in range(ROWS) if row not in BAD_ROWS]
    assert got["c"].take(pa.array(BAD_ROWS)).null_count == len(BAD_ROWS)
    assert got["c"].type.equals(storage_type(column.type))
    assert got["c"].take(pa.array(good)).to_pylist() == column.take(pa.array(good)).to_pylist()


def test_a_row_is_not_blamed_for_its_neighbors_in_memory() -> None:
    for make in (*NESTED.values(), lambda: texts(dictionary=True)):
        column = make()
        table, errors = isolate_bad_text(pa.table({"c": column.slice(18, 1)}))
        assert errors == {}
        assert table["c"].to_pylist() == column.slice(18, 1).to_pylist()
        table.validate(full=True)


def test_a_null_has_no_bad_text() -> None:
    inner = unchecked([b"caf\xe9", b"fine"])
    hidden = pa.StructArray.from_arrays([inner], ["t"], mask=pa.array([True, False]))
    no_values = pa.array([None, None], pa.struct([("t", pa.dictionary(pa.int8(), pa.string()))]))  # points beyond them
    for column in (hidden, no_values):
        table, errors = isolate_bad_text(pa.table({"c": column}))
        assert errors == {}
        assert table["c"].to_pylist() == [None, column[1].as_py()]
        table.validate(full=True)


def test_damaged_offsets_are_never_followed() -> None:
    text = unchecked([b"caf\xe9", b"fine", b"fine", b"fine"])
    offsets = pa.array([0, 1, 1 << 30, 3, 4], pa.int32()).buffers()[1]
    lists = pa.Array.from_buffers(pa.list_(pa.string()), 4, [None, offsets], children=[text])
    broken = pa.Array.from_buffers(pa.string(), 4, [None, offsets, pa.py_buffer(b"abcd")])
    encoded = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), broken)
    for column in (lists, broken, encoded, pa.StructArray.from_arrays([encoded], ["d"])):
        table, errors = isolate_bad_text(pa.table({"c": column}))
        assert {1, 2} <= errors.keys()
        assert table["c"].null_count == len(errors)
        table.validate(full=True)
