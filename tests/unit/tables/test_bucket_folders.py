"""Buckets as consoles, Hadoop and earlier jobs leave them, as inputs and as the place of outputs."""

import io
import json
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import mapping
import s3_server
import tiny
import torchlake as tl
import training_runs as runs
from s3_server import BUCKET, S3Server
from sweeps import sweep
from torchlake.errors import OutputError, TableError, UnsafeError
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.reading import ChunkReader
from torchlake.tables.record import COMMIT, PARTS
from torchlake.tables.table import open_table


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server.serving() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        # s3fs keeps its clients, even those of a server that another module has stopped.
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        yield server
        fsspec.get_filesystem_class("s3").clear_instance_cache()


def rows(*ids: int) -> bytes:
    stream = io.BytesIO()
    pq.write_table(pa.table({"id": pa.array(ids, pa.int64()), "text": [f"film {n}" for n in ids]}), stream)
    return stream.getvalue()


def put(s3: S3Server, objects: dict[str, bytes]) -> None:
    for key, content in objects.items():
        s3.put(urllib.parse.quote(key), content)


def ids(source: Any) -> list[int]:
    table = open_table(source, columns=["id"])
    read = ChunkReader(["id"]).read
    chunks = plan_chunks(table, columns=["id"], chunk_rows=100).chunks
    return sorted(n for chunk in chunks for n in read(chunk)[0]["id"].to_pylist())


A, B, OTHER = rows(1, 2), rows(3), rows(9)
LAYOUTS = {
    "console": {"/": b"", "/sub/": b"", "/a.parquet": A, "/sub/b.parquet": B},
    "hadoop": {"_$folder$": b"", "/sub_$folder$": b"", "/_SUCCESS": b"", "/a.parquet": A, "/sub/b.parquet": B},
    "unfinished": {"/_temporary/0/task/x.parquet": OTHER, "/__magic/x.parquet": OTHER, "/a.parquet": A, "/b.pq": B},
    "partitions": {"/y=1/": b"", "/y=1_$folder$": b"", "/y=1/a.parquet": A, "/y=2/b.parquet": B, "/y=3/": b""},
    "folder like a file": {"/a.parquet/": b"", "/a.parquet/part-0.parquet": A, "/b.parquet": B},
    "empty names": {"//a.parquet": A, "/s//b.parquet": B},
    "empty objects": {"/note": b"", "/v1.0_$folder$": b"", "/a.parquet": A, "/b.parquet": B},
    "object of the name": {"": b"", "/a.parquet": A, "/b.parquet": B},
}


@pytest.mark.parametrize("layout", sweep(LAYOUTS, quick=["hadoop", "unfinished"]))
def test_rows_are_those_of_the_table_files(layout: str, s3: S3Server) -> None:
    place = f"in/{layout}"
    put(s3, {f"{place}{key}": content for key, content in LAYOUTS[layout].items()})
    url = f"s3://{BUCKET}/{place}"
    assert ids(url) == ids(f"{url}/") == [1, 2, 3]
    if layout != "empty names":  # a pattern does not match them
        assert ids(f"{url}/**/*") == [1, 2, 3]


def test_a_slash_at_the_end_means_the_folder(s3: S3Server) -> None:
    put(s3, {"both": rows(7), "both/a.parquet": A, "one.parquet": B})
    assert ids(f"s3://{BUCKET}/both") == [7]
    assert ids(f"s3://{BUCKET}/both/") == [1, 2]
    assert ids(f"s3://{BUCKET}/one.parquet/") == [3]


def test_what_cannot_be_read_is_named(s3: S3Server) -> None:
    put(s3, {"bad/a.parquet": A, "bad/b.parquet": b"", "none/": b"", "none/sub_$folder$": b""})
    with pytest.raises(TableError, match=rf"s3://{BUCKET}/bad/b.parquet: empty \(0 bytes\)"):
        open_table(f"s3://{BUCKET}/bad")
    with pytest.raises(TableError, match=f"s3://{BUCKET}/none: has no table files"):
        open_table(f"s3://{BUCKET}/none")


def test_only_current_versions_are_read(s3: S3Server) -> None:
    status = "<Status>{}</Status></VersioningConfiguration>"
    opening = '<VersioningConfiguration xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
    s3._ask("PUT", "?versioning", (opening + status.format("Enabled")).encode())
    try:
        put(s3, {"ver/a.parquet": OTHER, "ver/b.parquet": B, "ver/gone.parquet": OTHER})
        put(s3, {"ver/a.parquet": A})
        s3.delete("ver/gone.parquet")
        assert ids(f"s3://{BUCKET}/ver") == [1, 2, 3]
    finally:
        s3._ask("PUT", "?versioning", (opening + status.format("Suspended")).encode())


def mapped(source: Any, output: str, **options: Any) -> Any:
    return tl.map(
        mapping.make_counter,
        source,
        output,
        schema=mapping.SCHEMA,
        columns=["text"],
        key="id",
        engine=tiny.Here(),
        **options,
    )


MARKERS = {
    "console": {"/": b"", "/sub/": b""},
    "hadoop": {
        "_$folder$": b"",
        "/_$folder$": b"",
        "/_SUCCESS": b"",
        "/_temporary/0/": b"",
        "/_temporary_$folder$": b"",
    },
    "record": {"/_torchlake/": b"", "/_torchlake_$folder$": b"", "/_torchlake/parts/": b""},
    "object of the name": {"": b""},
    "name with a dot": {".v2/": b""},
}


@pytest.mark.parametrize("layout", sweep(MARKERS, quick={"console", "record"}))
def test_a_folder_with_nothing_but_markers_takes_an_output(layout: str, s3: S3Server, tmp_path: Path) -> None:
    put(s3, {f"out-{layout}{key}": content for key, content in MARKERS[layout].items()})
    url = f"s3://{BUCKET}/out-{layout}{'.v2' if 'dot' in layout else ''}"
    (tmp_path / "in.parquet").write_bytes(rows(1, 2, 3))
    assert mapped(tmp_path / "in.parquet", url).rows_out == 3
    assert mapped(tmp_path / "in.parquet", url).rows_out == 3, "the same job again"
    assert tl.verify(url).problems == []
    assert ids(url) == tl.open(url).to_table()["id"].to_pylist() == [1, 2, 3]


@pytest.mark.parametrize("other", ["part-0.parquet", "_temporary/0/part-0.parquet"])
def test_a_folder_with_rows_takes_no_output(other: str, s3: S3Server, tmp_path: Path) -> None:
    put(s3, {f"full/{other}": A})
    (tmp_path / "in.parquet").write_bytes(B)
    with pytest.raises(OutputError, match="holds objects that torchlake did not write, such as"):
        mapped(tmp_path / "in.parquet", f"s3://{BUCKET}/full")


@pytest.mark.parametrize("name", sweep(["scored", "scored.v2", "scored.parquet"], quick={"scored.v2"}))
def test_an_output_is_the_next_input_with_its_committed_rows_alone(name: str, s3: S3Server, tmp_path: Path) -> None:
    url, again = f"s3://{BUCKET}/{name}", tmp_path / "again"
    (tmp_path / "in.parquet").write_bytes(rows(1, 2, 3))
    (tmp_path / "more.parquet").write_bytes(rows(4))
    mapped(tmp_path / "in.parquet", url)
    folder = json.loads(s3.get(f"{name}/{COMMIT}"))["parts"][0]["name"].partition("/")[0]
    put(s3, {f"{name}/{PARTS}/{folder}/stray.parquet": OTHER, f"{name}/stray.parquet": OTHER})
    assert ids(url) == ids(f"{url}/") == [1, 2, 3]
    count = {"columns": ["words"], "schema": {"n": pa.int64()}, "key": "id", "engine": tiny.Here()}
    tl.map(mapping.make_renamer, url, again, **count)
    assert pq.read_table(again)["n"].to_pylist() == [2, 2, 2]
    assert mapped([tmp_path / "in.parquet", tmp_path / "more.parquet"], f"{url}-2").rows_out == 4
    several = open_table([f"{url}-2", again], columns=["id"])
    assert len(several.files) == 3
    if name != "scored.parquet":  # in a list, a name like a file's is a file's
        table = open_table([url, f"{url}-2"], columns=["id"])
        assert {one.partition("/")[0] for one in table.names} == {name, f"{name}-2"}
        assert sorted(row for file in table.files for row in read_ids(s3, file)) == [1, 1, 2, 2, 3, 3, 4]


def read_ids(s3: S3Server, file: str) -> list[int]:
    return pq.read_table(io.BytesIO(s3.get(file.removeprefix(f"s3://{BUCKET}/"))))["id"].to_pylist()  # type: ignore[no-any-return]


def test_an_output_is_trained_on_and_scored(s3: S3Server, tmp_path: Path, tiny_bert: Path, tiny_model: Path) -> None:
    url = f"s3://{BUCKET}/prepared"
    pq.write_table(tiny.reviews(48), tmp_path / "in.parquet")
    columns = pq.read_schema(tmp_path / "in.parquet").names
    tl.map(mapping.make_copier, tmp_path / "in.parquet", url, columns=columns, schema=mapping.COPY, engine=tiny.Here())
    sections = runs.job(tmp_path, tiny_bert)
    sections["data"] = {"train": url, "validation": None}
    assert tl.train(run=tmp_path / "run", engine=runs.Inline(), **sections).steps > 0
    assert tl.predict(tiny_model, url, tmp_path / "out", engine=tiny.Here()).rows_out == 48


@pytest.mark.parametrize("name", ["../x.parquet", "a//x.parquet", "/x.parquet", "a/./x.parquet", ".x.parquet", "a/"])
def test_a_name_that_leads_out_of_the_output_is_refused(name: str, s3: S3Server, tmp_path: Path) -> None:
    (tmp_path / "in.parquet").write_bytes(A)
    url = f"s3://{BUCKET}/tampered"
    mapped(tmp_path / "in.parquet", url, overwrite=True)
    record = json.loads(s3.get(f"tampered/{COMMIT}"))
    record["parts"][0]["name"] = name
    s3.put(f"tampered/{COMMIT}", json.dumps(record).encode())
    with pytest.raises(UnsafeError, match="leads out of the folder"):
        open_table(url)
    s3.put(f"tampered/{COMMIT}", b"{")
    with pytest.raises(TableError, match=f"tampered/{COMMIT}: not a commit record"):
        open_table(url)
    s3.delete(f"tampered/{COMMIT}")
