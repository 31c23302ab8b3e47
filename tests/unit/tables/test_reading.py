"""Chunks of Parquet and Arrow files: every row once, bad text isolated, damage named, memory constant."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from torchlake.errors import FingerprintError, TableError
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.plan import Chunk
from torchlake.tables.reading import ChunkReader
from torchlake.tables.table import open_table


def bad_strings(values: list[bytes | None]) -> pa.Array:
    """A string array that holds `values` unchecked."""
    binary = pa.array(values, pa.binary())
    return pa.StringArray.from_buffers(len(values), binary.buffers()[1], binary.buffers()[2], binary.buffers()[0])


def write(path: Path, table: pa.Table, rows: int) -> None:
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=rows, write_page_checksum=True)
        return
    if path.suffix == ".csv":
        csv.write_csv(table, path)
        return
    if path.suffix == ".jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in table.to_pylist()))
        return
    with (pa.ipc.new_file if path.stem == "file" else pa.ipc.new_stream)(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)


@pytest.mark.parametrize("name", ["t.parquet", "file.arrow", "stream.arrow"])
@pytest.mark.parametrize("group_rows", [7, 100, 25_000])
@pytest.mark.parametrize("order", ["forward", "every other", "backward"])
def test_every_row_is_read_once(tmp_path: Path, name: str, group_rows: int, order: str) -> None:
    count = 25_000 if group_rows > 100 else 1_000
    table = pa.table({"n": range(count), "t": [f"text {n}" for n in range(count)], "other": [0.5] * count})
    write(tmp_path / name, table, group_rows)
    plan = plan_chunks(open_table(tmp_path / name), columns=["t", "n"], chunk_rows=3_000 if count > 1_000 else 30)
    assert len(plan.chunks) > 2
    chunks = {
        "forward": plan.chunks,
        "every other": plan.chunks[::2] + plan.chunks[1::2],
        "backward": plan.chunks[::-1],
    }
    reader = ChunkReader(["t", "n"])
    got = []
    for chunk in chunks[order]:
        rows, errors = reader.read(chunk)
        assert errors == {}
        assert rows.column_names == ["t", "n"]
        assert rows["n"].to_pylist() == list(range(chunk.first_row, chunk.first_row + chunk.rows))
        got += rows["t"].to_pylist()
    assert sorted(got) == sorted(table["t"].to_pylist())
    reader.close()


@pytest.mark.parametrize("name", ["t.parquet", "file.arrow", "stream.arrow"])
def test_bad_utf8_is_isolated_by_row(tmp_path: Path, name: str) -> None:
    texts = [b"fine"] * 5000
    texts[0] = texts[4097] = b"\xff\xfe"
    texts[17] = b"caf\xe9"
    table = pa.table(
        {"k": range(5000), "t": bad_strings(list(texts)), "c": bad_strings(list(texts)).dictionary_encode()}
    )
    write(tmp_path / name, table, 5000)
    plan = plan_chunks(open_table(tmp_path / name), columns=["k", "t", "c"])
    rows, errors = pa.Table, {}
    first = 0
    got = []
    reader = ChunkReader(["k", "t", "c"])
    for chunk in plan.chunks:
        rows, bad = reader.read(chunk)
        errors.update({first + row: reason for row, reason in bad.items()})
        first += chunk.rows
        rows.validate(full=True)
        got += rows.to_pylist()
    assert errors == {0: "bad_utf8", 17: "bad_utf8", 4097: "bad_utf8"}
    assert got[17] == {"k": 17, "t": None, "c": None}
    assert got[18] == {"k": 18, "t": "fine", "c": "fine"}
    reader.close()


def test_a_flipped_bit_in_a_page_is_an_error_that_names_file_and_rows(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(
        pa.table({"t": [f"text {n}" for n in range(3000)]}), path, compression="none", write_page_checksum=True
    )
    content = bytearray(path.read_bytes())
    content[content.index(b"text 2000")] ^= 1
    path.write_bytes(content)
    plan = plan_chunks(open_table(path), columns=["t"])
    with pytest.raises(TableError, match=r"t.parquet: rows [\d,]+ to [\d,]+: .*The file is damaged"):
        reader = ChunkReader(["t"])
        for chunk in plan.chunks:
            reader.read(chunk)


@pytest.mark.parametrize("dictionary", [True, False])
@pytest.mark.parametrize("checksums", [True, False])
def test_missing_checksums_are_recorded(tmp_path: Path, checksums: bool, dictionary: bool) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"t": ["a"] * 300}), path, write_page_checksum=checksums, use_dictionary=dictionary)
    assert plan_chunks(open_table(path), columns=["t"]).inputs[0].checksums is checksums


def test_a_file_that_changed_since_the_plan_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"t": ["a"] * 30}), path)
    (chunk,) = plan_chunks(open_table(path), columns=["t"]).chunks
    for other in ({"t": ["a"] * 20}, {"t": [1] * 30}, {"u": [1] * 30}, {"t": ["b"] * 30}):
        pq.write_table(pa.table(other), path)
        with pytest.raises(FingerprintError, match=r"t.parquet: changed while it was being read"):
            ChunkReader(["t"]).read(chunk)
    path.unlink()
    with pytest.raises(FingerprintError, match=r"can no longer be read \(.*No such file"):
        ChunkReader(["t"]).read(chunk)


@pytest.mark.parametrize("kind", ["t.parquet", "file.arrow", "stream.arrow", "t.csv", "t.jsonl"])
def test_a_file_that_is_replaced_by_one_of_the_same_size_and_time_is_an_error(tmp_path: Path, kind: str) -> None:
    path, other = tmp_path / kind, tmp_path / "other" / kind
    other.parent.mkdir()
    for where, text in ((path, "aa"), (other, "bb")):
        write(where, pa.table({"t": [text] * 2000}), 1000)
    plan = plan_chunks(open_table(path), columns=["t"], chunk_rows=1000)
    reader = ChunkReader(["t"])
    assert reader.read(plan.chunks[0])[0]["t"].unique().to_pylist() == ["aa"]
    status = path.stat()
    assert other.stat().st_size == status.st_size
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    path.rename(tmp_path / "backup")
    other.rename(path)
    with pytest.raises(FingerprintError, match="changed while it was being read"):
        reader.read(plan.chunks[1])
    path.unlink()
    (tmp_path / "backup").rename(path)
    assert reader.read(plan.chunks[1])[0]["t"].unique().to_pylist() == ["aa"], "what was planned is back"


@pytest.mark.parametrize("kind", ["t.parquet", "file.arrow", "stream.arrow", "t.csv", "t.jsonl"])
def test_a_file_that_is_written_to_while_a_chunk_is_read_is_an_error(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / kind
    write(path, pa.table({"t": ["aa"] * 2000}), 1000)
    (chunk, *_) = plan_chunks(open_table(path), columns=["t"], chunk_rows=1000).chunks
    reader = ChunkReader(["t"])
    schema_of = reader._schema

    def written_to(chunk: Chunk) -> pa.Schema:  # between the check before and the first byte
        content = path.read_bytes()
        status = path.stat()
        path.write_bytes(content.replace(b"aa", b"bb"))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        return schema_of(chunk)

    monkeypatch.setattr(reader, "_schema", written_to)
    with pytest.raises(FingerprintError, match="changed while it was being read"):
        reader.read(chunk)


def test_rows_that_were_read_do_not_change_with_their_file(tmp_path: Path) -> None:
    path = tmp_path / "t.arrow"
    write(path, pa.table({"t": ["aa"] * 2000}), 1000)
    (chunk, *_) = plan_chunks(open_table(path), columns=["t"]).chunks
    table, _ = ChunkReader(["t"]).read(chunk)
    with path.open("r+b") as file:
        content = file.read()
        file.seek(0)
        file.write(content.replace(b"aa", b"bb"))
    assert table["t"].unique().to_pylist() == ["aa"]


def test_a_file_that_was_copied_back_or_touched_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("t\na\nb\n")
    (chunk,) = plan_chunks(open_table(path), columns=["t"]).chunks
    shutil.copy(path, tmp_path / "copy")
    (tmp_path / "copy").rename(path)
    os.utime(path, (0, 0))
    assert ChunkReader(["t"]).read(chunk)[0]["t"].to_pylist() == ["a", "b"]


def test_a_table_without_rows_has_no_chunks(tmp_path: Path) -> None:
    for name in ("t.parquet", "file.arrow", "stream.arrow"):
        write(tmp_path / name, pa.table({"t": pa.array([], pa.string())}), 10)
    (tmp_path / "t.csv").write_text("t\n")
    for name in ("t.parquet", "file.arrow", "stream.arrow", "t.csv"):
        plan = plan_chunks(open_table(tmp_path / name, columns=["t"]), columns=["t"])
        assert (plan.rows, plan.chunks) == (0, ())


def test_a_row_group_of_any_size_streams_in_constant_memory(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    schema = pa.schema([("t", pa.string())])
    count = 400_000
    with pq.ParquetWriter(path, schema, use_dictionary=False, write_page_checksum=True) as writer:
        text = "".join(f"{n * 7919 % 1_000_003:>20}" for n in range(20))
        writer.write_table(pa.table({"t": [f"{n}{text}"[:400] for n in range(count)]}), row_group_size=count)
    script = f"""
import pyarrow as pa
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.plan import Chunk
from torchlake.tables.reading import ChunkReader
from torchlake.tables.table import open_table
plan = plan_chunks(open_table({str(path)!r}), columns=["t"])
reader = ChunkReader(["t"])
rows = sum(reader.read(chunk)[0].num_rows for chunk in plan.chunks)
assert rows == {count}
print(max(chunk.rows for chunk in plan.chunks), pa.default_memory_pool().max_memory())
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": "src"},
        capture_output=True,
        text=True,
        check=True,
    )
    rows, peak = map(int, done.stdout.split())
    assert rows <= 6250
    assert peak < 40 << 20, "the row group holds 160 MB"
