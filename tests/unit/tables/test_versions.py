"""Which files are a table's: links, names without extension, tables of other formats, and objects that come and go."""

import io
import os
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from s3_server import BUCKET, S3Server, serving
from torchlake.errors import DataError, FingerprintError, TableError, Unavailable
from torchlake.outputs.parts import PartFolder
from torchlake.storage.versions import content_id, version_of
from torchlake.tables.chunks import MAX_BYTES, plan_chunks
from torchlake.tables.plan import ChunkPlan, plan_from_json, plan_to_json
from torchlake.tables.reading import ChunkReader
from torchlake.tables.table import Table, open_table


def put(path: Path, ids: list[int], kind: pa.DataType | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": pa.array(ids, kind or pa.int64())}), path)
    return path


def ids_of(source: object, **options: object) -> list[int]:
    """The ids that are read, in the rows' order."""
    table = open_table(source, columns=["id"], **options)  # type: ignore[arg-type]
    reader = ChunkReader(["id"])
    return [
        one for chunk in plan_chunks(table, columns=["id"]).chunks for one in reader.read(chunk)[0]["id"].to_pylist()
    ]


def test_linked_folders_are_read_and_a_loop_ends(tmp_path: Path) -> None:
    put(tmp_path / "in/2024/x.parquet", [2])
    put(tmp_path / "archive/y.parquet", [1])
    os.symlink(tmp_path / "archive", tmp_path / "in/2023")
    os.symlink(tmp_path / "in", tmp_path / "in/2024/again")
    assert ids_of(tmp_path / "in") == [1, 2]


@pytest.mark.parametrize("glob", ["", "/*.parquet"])
def test_a_link_beside_its_file_does_not_double_rows(
    tmp_path: Path, glob: str, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path / "part-1.parquet", [1, 2])
    os.symlink("part-1.parquet", tmp_path / "latest.parquet")
    assert ids_of(f"{tmp_path}{glob}") == [1, 2]
    assert "1 files are not read (links to files that are read anyway), for example" in caplog.text


def test_a_file_and_a_link_to_it_cannot_both_be_named(tmp_path: Path) -> None:
    put(tmp_path / "part-1.parquet", [1, 2])
    os.symlink("part-1.parquet", tmp_path / "latest.parquet")
    with pytest.raises(TableError, match=r"part-1.parquet is named twice"):
        open_table([tmp_path / "part-1.parquet", tmp_path / "latest.parquet"])


def test_files_without_extension_are_known_by_their_first_bytes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path / "000000_0", [1])
    put(tmp_path / "extra.parquet", [2])
    (tmp_path / "README").write_text("about these files")
    assert ids_of(tmp_path) == [1, 2]
    assert "1 files are not read (their names are not those of table files), for example" in caplog.text
    assert "README" in caplog.text


def test_quarantine_keeps_the_type_that_most_files_have(tmp_path: Path) -> None:
    put(tmp_path / "part-0.parquet", [0], pa.uint8())
    for number in range(1, 4):
        put(tmp_path / f"part-{number}.parquet", [number])
    with pytest.raises(TableError, match=r"part-1.parquet: the column 'id' is int64, but uint8 in .*part-0"):
        open_table(tmp_path, columns=["id"])
    assert ids_of(tmp_path, on_bad_file="quarantine") == [1, 2, 3]


def test_quarantine_takes_no_file_that_the_storage_does_not_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "a.parquet", [1])
    put(tmp_path / "b.parquet", [2])
    real = os.stat

    def throttled(path: object, *arguments: object, **options: object) -> os.stat_result:
        if str(path).endswith("b.parquet"):
            raise OSError(11, "Please reduce your request rate")
        return real(path, *arguments, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr("torchlake.storage.versions.os.stat", throttled)
        with pytest.raises(Unavailable, match=r"b.parquet: Please reduce your request rate"):
            open_table(tmp_path, columns=["id"], on_bad_file="quarantine")


def test_a_name_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = os.fsencode(put(tmp_path / "a.parquet", [1]))
    os.rename(path, path.replace(b"a.parquet", b"\xff.parquet"))
    with pytest.raises(TableError, match=r"\\xff.parquet': the file's name is not UTF-8; rename it"):
        open_table(tmp_path)


def test_a_file_url_may_be_quoted(tmp_path: Path) -> None:
    path = put(tmp_path / "my data" / "a.parquet", [1])
    for url in (path.as_uri(), f"file://{path}", f"file:{path}", f"file://localhost{path}"):
        assert ids_of(url) == [1]


@pytest.fixture(params=["Delta", "Iceberg", "Hudi"])
def lake(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A folder of tables; the files of one, in a partition, are an old and a new version of the same rows."""
    (tmp_path / "nothing.csv").write_text("id\n")
    root = tmp_path / "lake" / "reviews"
    put(root / "day=1" / "part-0.parquet", [1, 2, 3])
    put(root / "day=1" / "part-1.parquet", [1, 2, 3])
    log = {"Delta": "_delta_log/0.json", "Iceberg": "metadata/v1.metadata.json", "Hudi": ".hoodie/0.commit"}
    (root / log[request.param]).parent.mkdir()
    (root / log[request.param]).write_text("{}")
    if request.param == "Delta":
        put(root / "_delta_log" / "0.checkpoint.parquet", [7])
    return tmp_path / "lake"


NAMES: list[Callable[[Path], object]] = [
    lambda lake: lake / "reviews",
    lambda lake: f"file://{lake}/reviews",
    lambda lake: lake / "reviews" / "day=1",
    lambda lake: lake / "reviews" / "*" / "*.parquet",
    lambda lake: lake / "**" / "*.parquet",
    lambda lake: lake,
    lambda lake: [lake / "reviews" / "day=1" / "*", lake.parent / "nothing.csv"],
]


@pytest.mark.parametrize("name", NAMES)
def test_a_table_of_another_format_is_refused_however_it_is_named(lake: Path, name: Callable[[Path], object]) -> None:
    with pytest.raises(
        TableError, match=r"reviews: (is a table in (Delta|Iceberg|Hudi) format; .* Give the files of one|the Delta)"
    ):
        ids_of(name(lake))


def test_a_link_into_a_table_of_another_format_is_refused(lake: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    os.symlink(lake / "reviews" / "day=1", tmp_path / "in" / "today")
    with pytest.raises(TableError, match="reviews: is a table in"):
        ids_of(tmp_path / "in")


def test_files_of_one_version_may_be_named(lake: Path) -> None:
    assert ids_of([lake / "reviews" / "day=1" / "part-1.parquet"]) == [1, 2, 3]
    assert ids_of(lake / "reviews" / "day=1" / "part-1.parquet") == [1, 2, 3]


def test_a_table_of_another_format_is_refused_by_url(lake: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(lake), "/formats", recursive=True)
    try:
        for url in (
            "memory://formats",
            "memory://formats/reviews",
            "memory://formats/*/*/*.parquet",
            "memory://formats/reviews/day=1",
        ):
            with pytest.raises(TableError, match="reviews: (is a table in|the Delta table cannot be read)"):
                ids_of(url)
        assert ids_of("memory://formats/reviews/day=1/part-1.parquet") == [1, 2, 3]
    finally:
        memory.rm("/formats", recursive=True)


def test_int96_timestamps_of_any_year_are_read_as_they_are(tmp_path: Path) -> None:
    moments = [datetime(9999, 12, 31), datetime(1, 1, 1), datetime(2024, 1, 1, 0, 0, 0, 123456), None]
    table = pa.table({"id": pa.array(moments, pa.timestamp("us"))})
    pq.write_table(table, tmp_path / "t.parquet", use_deprecated_int96_timestamps=True)
    assert ids_of(tmp_path / "t.parquet") == moments


def test_int96_timestamps_with_nanoseconds_are_refused(tmp_path: Path) -> None:
    table = pa.table({"id": pa.array([1_700_000_000_123_456_789], pa.timestamp("ns"))})
    pq.write_table(table, tmp_path / "t.parquet", use_deprecated_int96_timestamps=True)
    with pytest.raises(TableError, match=r"'id' has INT96 timestamps with nanoseconds.*Write the column as TIMESTAMP"):
        ids_of(tmp_path / "t.parquet")


@pytest.mark.parametrize("length", [70_000, 20_000])
def test_chunks_of_shared_texts_are_no_larger_in_memory(tmp_path: Path, length: int) -> None:
    texts = [f"{number} {'x' * length}" for number in range(5)]
    column = pa.DictionaryArray.from_arrays(np.arange(20_000) % 5, texts)
    pq.write_table(pa.table({"t": column}), tmp_path / "t.parquet")
    plan = plan_chunks(open_table(tmp_path / "t.parquet", columns=["t"]), columns=["t"])
    table, _ = ChunkReader(["t"]).read(plan.chunks[len(plan.chunks) // 2])
    assert table.nbytes <= 1.5 * MAX_BYTES


def test_a_plan_of_another_format_says_what_to_do(tmp_path: Path) -> None:
    pq.write_table(pa.table({"t": ["a"]}), tmp_path / "t.parquet")
    value = plan_to_json(plan_chunks(open_table(tmp_path / "t.parquet"), columns=["t"]))
    for other in (1, 9):
        with pytest.raises(DataError, match=f"format {other}.*that wrote it.*--overwrite"):
            plan_from_json({**value, "format": other})


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    pytest.importorskip("s3fs")
    with serving() as server:
        yield server


@pytest.fixture
def bucket(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    yield server
    for key in server.keys("in"):
        server.delete(f"in/{key}")


def parquet(ids: list[int]) -> bytes:
    content = io.BytesIO()
    pq.write_table(pa.table({"id": ids}), content, row_group_size=2)
    return content.getvalue()


URL = f"s3://{BUCKET}/in"


def planned(**options: object) -> tuple[Table, ChunkPlan]:
    table = open_table(URL, columns=["id"], **options)  # type: ignore[arg-type]
    return table, plan_chunks(table, columns=["id"], chunk_rows=2)


def test_objects_that_come_change_and_go_between_runs(bucket: S3Server) -> None:
    bucket.put("in/a.parquet", parquet([1, 2]))
    assert ids_of(URL) == [1, 2]
    bucket.put("in/b.parquet", parquet([3]))
    assert ids_of(URL) == [1, 2, 3]
    bucket.put("in/a.parquet", parquet([4, 5, 6]))
    assert ids_of(URL) == [4, 5, 6, 3]
    bucket.delete("in/a.parquet")
    assert ids_of(URL) == [3]
    bucket.delete("in/b.parquet")
    with pytest.raises(TableError, match="no table files|no such file"):
        ids_of(URL)


def test_an_object_has_one_identity_however_it_is_looked_at(bucket: S3Server) -> None:
    bucket.put("in/a.parquet", parquet([1, 2]))
    url, storage = f"{URL}/a.parquet", fsspec.filesystem("s3")
    version, identity = version_of(url), content_id(url)
    assert version.mark
    storage.find(f"{BUCKET}/in")
    assert (version_of(url), content_id(url)) == (version, identity)
    bucket.put("in/a.parquet", parquet([1, 2]))
    assert content_id(url) == identity, "the same bytes again"
    bucket.put("in/a.parquet", parquet([1, 3]))
    assert content_id(url) != identity
    assert version_of(url) != version


@pytest.mark.parametrize("event", ["replaced", "deleted"])
def test_an_object_that_changes_while_a_job_reads_is_an_error(bucket: S3Server, event: str) -> None:
    bucket.put("in/a.parquet", parquet([1, 2, 3, 4]))
    _, plan = planned()
    reader = ChunkReader(["id"])
    assert reader.read(plan.chunks[0])[0]["id"].to_pylist() == [1, 2]
    if event == "replaced":
        bucket.put("in/a.parquet", parquet([5, 6, 7, 8]))
    else:
        bucket.delete("in/a.parquet")
    with pytest.raises(FingerprintError, match=r"a.parquet: (changed while it was being read|can no longer be read)"):
        reader.read(plan.chunks[1])
    bucket.put("in/a.parquet", parquet([1, 2, 3, 4]))
    assert ChunkReader(["id"]).read(plan.chunks[1])[0]["id"].to_pylist() == [3, 4], "what was planned is back"


def test_text_on_s3_is_read_in_ranges(bucket: S3Server) -> None:
    bucket.put("in/a.csv", b"id,t\n" + b"".join(b"%d,x\n" % number for number in range(3000)))
    table = open_table(URL, columns=["id"])
    plan = plan_chunks(table, columns=["id"], chunk_rows=1000)
    reader = ChunkReader(["id"])
    rows = [one for chunk in plan.chunks for one in reader.read(chunk)[0]["id"].to_pylist()]
    assert rows == [str(number) for number in range(3000)]
    bucket.put("in/a.csv", b"id,t\n" + b"".join(b"%d,y\n" % number for number in range(3000)))
    with pytest.raises(FingerprintError):
        reader.read(plan.chunks[0])


def test_lists_of_a_fixed_size_are_carried_with_their_nulls(tmp_path: Path) -> None:
    """Arrow reads no Parquet file in which such a list is null, so they are written as lists."""
    kind = pa.list_(pa.field("item", pa.struct([("a", pa.float32())])), 2)
    values = [[{"a": 1.5}, None], None, [{"a": None}, {"a": 4.5}], None] * 5
    table = pa.table({"id": pa.array(values, kind)})
    with pa.ipc.new_file(tmp_path / "t.arrow", table.schema) as writer:
        writer.write_table(table)
    plan = plan_chunks(open_table(tmp_path / "t.arrow"), columns=["id"], chunk_rows=3)
    (tmp_path / "table").mkdir()
    reader, read = ChunkReader(["id"]), []
    for chunk in plan.chunks:
        part = PartFolder(location=str(tmp_path / "table")).write(
            f"part-{chunk.index}.parquet", reader.read(chunk)[0], chunk=chunk.index
        )
        read += pq.read_table(tmp_path / "table" / part.name)["id"].to_pylist()
    assert read == values


def test_a_part_that_cannot_be_read_again_is_an_error(tmp_path: Path) -> None:
    kind = pa.struct([("v", pa.list_(pa.float32(), 2))])
    (tmp_path / "table").mkdir()
    with pytest.raises(TableError, match=r"part.parquet: cannot be read: Expected all lists to be of size"):
        PartFolder(location=str(tmp_path / "table")).write(
            "part.parquet", pa.table({"s": pa.array([{"v": [1, 2]}, {"v": None}], kind)}), chunk=0
        )
    assert not (tmp_path / "table" / "part.parquet").exists()
