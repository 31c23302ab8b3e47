"""Compressed text, other delimiters, quotes and encodings: the rows of the plain file, or a clear error."""

import bz2
import csv
import gzip
import io
import json
import tracemalloc
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sweeps import examples, sweep
from torchlake.errors import TableError, UsageError
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.formats import streams
from torchlake.tables.plan import ChunkPlan, plan_from_json, plan_to_json
from torchlake.tables.reading import ChunkReader
from torchlake.tables.sources._options import read_options
from torchlake.tables.table import open_table

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}


def rows_of(
    source: Any, columns: tuple[str, ...], *, chunk_rows: int | None = None, backwards: bool = False, **options: Any
) -> tuple[list[Any], dict[int, str], ChunkPlan]:
    table = open_table(source, columns=columns, options=read_options(options))
    plan = plan_chunks(table, columns=columns, chunk_rows=chunk_rows)
    plan = plan_from_json(json.loads(json.dumps(plan_to_json(plan))))
    reader, rows, errors = ChunkReader(columns), {}, {}
    for chunk in reversed(plan.chunks) if backwards else plan.chunks:
        found, bad = reader.read(chunk)
        rows |= {chunk.number(row): tuple(values.values()) for row, values in enumerate(found.to_pylist())}
        errors |= {chunk.number(row): reason for row, reason in bad.items()}
    reader.close()
    return [rows[number] for number in sorted(rows)], errors, plan


TEXTS = st.text(st.sampled_from("ab ,;\"'\n\r\té€"), max_size=8)


@settings(max_examples=examples(60, quick=15), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(TEXTS, min_size=1, max_size=30),
    compression=st.sampled_from([None, *COMPRESS]),
    delimiter=st.sampled_from([",", ";", "\t", "|"]),
    quote=st.sampled_from(['"', "'"]),
    encoding=st.sampled_from(["utf-8", "utf-8-sig", "cp1252", "utf-16", "utf-32-be"]),
    chunk_rows=st.integers(1, 12),
    backwards=st.booleans(),
)
def test_csv_of_any_dialect_gives_back_what_was_written(
    tmp_path: Path,
    texts: list[str],
    compression: str | None,
    delimiter: str,
    quote: str,
    encoding: str,
    chunk_rows: int,
    backwards: bool,
) -> None:
    out = io.StringIO(newline="")
    writer = csv.writer(out, delimiter=delimiter, quotechar=quote, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerows([["id", "text"], *([number, text] for number, text in enumerate(texts))])
    content = out.getvalue().encode(encoding)
    path = tmp_path / ("t.csv" if compression is None else f"t.csv.{compression}")
    path.write_bytes(content if compression is None else COMPRESS[compression](content))
    options = {"csv": {"delimiter": delimiter, "quote": quote, "encoding": encoding}}
    rows, errors, _ = rows_of(path, ("id", "text"), chunk_rows=chunk_rows, backwards=backwards, **options)
    assert rows == [(str(number), text) for number, text in enumerate(texts)]
    assert errors == {}
    path.unlink()


@pytest.mark.parametrize(
    ("members", "compression"),
    sweep(product([1, 3], COMPRESS), quick={(3, next(iter(COMPRESS)))}),
)
def test_compressed_json_lines_are_read_in_chunks(tmp_path: Path, compression: str, members: int) -> None:
    lines = [json.dumps({"id": number, "text": "é" * (number % 50)}) + "\n" for number in range(9_000)]
    size = len(lines) // members
    parts = ["".join(lines[start : start + size]).encode() for start in range(0, len(lines), size)]
    path = tmp_path / f"t.jsonl.{compression}"
    path.write_bytes(b"".join(map(COMPRESS[compression], parts)))
    rows, errors, plan = rows_of(path, ("id",), chunk_rows=1_000)
    assert rows == [(number,) for number in range(9_000)]
    assert errors == {}
    assert len(plan.chunks) > 8
    assert rows_of(tmp_path, ("id",), where="id >= 8990")[0] == rows[8_990:]


@pytest.mark.parametrize("compression", COMPRESS)
def test_a_damaged_line_costs_only_itself(tmp_path: Path, compression: str) -> None:
    content = b'a,b\n1,2\n3,"4\n5,6\n7,8,9\n10,11\n'
    (tmp_path / "plain.csv").write_bytes(content)
    (tmp_path / f"t.csv.{compression}").write_bytes(COMPRESS[compression](content))
    plain = rows_of(tmp_path / "plain.csv", ("a", "b"))
    packed = rows_of(tmp_path / f"t.csv.{compression}", ("a", "b"), chunk_rows=1)
    assert packed[0] == plain[0] == [("1", "2"), (None, None), ("5", "6"), (None, None), ("10", "11")]
    assert [*packed[1]] == [*plain[1]] == [1, 3]


@pytest.mark.parametrize("compression", COMPRESS)
def test_a_file_that_is_cut_short_or_damaged_is_an_error_before_any_row_is_read(
    tmp_path: Path, compression: str
) -> None:
    path = tmp_path / f"t.csv.{compression}"
    whole = COMPRESS[compression](("a,b\n" + "".join(f"{n},{n * 7919 % 1000}\n" for n in range(50_000))).encode())
    for content in (whole[: len(whole) // 2], b"no such format", whole[:9000] + b"\0" * 40 + whole[9040:]):
        path.write_bytes(content)
        with pytest.raises(TableError, match=r"t\.csv\..*: cannot be decompressed .* damaged or cut short"):
            rows_of(path, ("a",))


def test_a_line_that_does_not_end_is_refused_in_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_LINE", 8 << 20)
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(b"a,b\n" + bytes(64 << 20)))
    tracemalloc.start()
    try:
        with pytest.raises(TableError, match="has a line longer than 8 MiB"):
            rows_of(tmp_path / "t.csv.gz", ("a",))
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()


def test_compressed_text_is_read_by_url() -> None:
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe("/streams/t.csv.gz", gzip.compress(b"id,text\n1,a\n2,b\n"))
    try:
        rows, _, _ = rows_of("memory://streams/t.csv.gz", ("id",))
        assert rows == [("1",), ("2",)]
    finally:
        filesystem.rm("/streams", recursive=True)


def test_bytes_that_an_encoding_does_not_have_are_an_error_of_their_row(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"id,text\n1,a\n2,\x81\n")
    rows, errors, _ = rows_of(tmp_path / "t.csv", ("id", "text"), csv={"encoding": "cp1252"})
    assert rows == [("1", "a"), ("2", None)]
    assert errors == {1: "bad_utf8"}
    (tmp_path / "t.csv").write_bytes("id\n1\n".encode("utf-16")[:-1])
    with pytest.raises(TableError, match="is not utf-16"):
        rows_of(tmp_path / "t.csv", ("id",), csv={"encoding": "utf-16"})


def test_the_dialect_is_part_of_the_plan_and_of_its_record(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a;b\n1;2\n")
    _, _, plan = rows_of(tmp_path / "t.csv", ("a",), csv={"delimiter": ";"})
    assert plan.selection == {"csv": {"delimiter": ";"}}
    assert plan.asked == plan.selection
    whole, _, other = rows_of(tmp_path / "t.csv", ("a;b",))
    assert whole == [("1;2",)]
    assert plan.id != other.id


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"delimiter": ";;"}, "delimiter must be one character"),
        ({"delimiter": '"'}, "they must differ"),
        ({"quote": "\n"}, "quote must be one character"),
        ({"encoding": "latin-one"}, "there is no encoding 'latin-one'"),
        ({"encoding": "base64"}, "there is no encoding 'base64'"),
        ({"separator": ";"}, "there is no option 'separator'"),
    ],
)
def test_a_wrong_dialect_is_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_options({"csv": given})


def test_a_dialect_for_other_files_is_refused(tmp_path: Path) -> None:
    pa.parquet.write_table(pa.table({"a": [1]}), tmp_path / "t.parquet")
    with pytest.raises(TableError, match="csv options are only for CSV files"):
        open_table(tmp_path, options=read_options({"csv": {"delimiter": ";"}}))
