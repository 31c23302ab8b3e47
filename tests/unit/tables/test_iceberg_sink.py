"""Writing Iceberg tables: what only they do. What every sink keeps is in tests/conformance/test_sinks.py."""

import datetime
import decimal
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyiceberg.catalog
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import BucketTransform
from pyiceberg.types import DoubleType, LongType, NestedField, StringType
from pyiceberg.utils.config import Config

import duck
import iceberg_rest
from iceberg_rest import Fault
from sink_jobs import job, source_rows, write_source
from sweeps import sweep
from torchlake.errors import OutputError, StorageError, TableError, UsageError
from torchlake.outputs.find import open as open_output
from torchlake.outputs.find import output_of
from torchlake.outputs.parts import Part, part_name
from torchlake.outputs.staging.spool import spooled
from torchlake.outputs.target import Change, Conflict, target_options
from torchlake.outputs.targets import iceberg
from torchlake.outputs.transaction import WriteRequest
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.sources.files import local_path
from torchlake.tables.table import open_table
from torchlake.tables.verification.verify import verify

NAME, REST = "iceberg:lake.db.t", "iceberg:remote.db.t"
COMMIT = "torchlake.commit"


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SqlCatalog]:
    """The catalog `lake` in a SQLite file, with the namespace `db`."""
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__URI", f"sqlite:///{tmp_path}/catalog.db")
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__WAREHOUSE", f"file://{tmp_path}/warehouse")
    monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())  # it is read once, when pyiceberg is imported
    catalog = pyiceberg.catalog.load_catalog("lake")
    assert isinstance(catalog, SqlCatalog)
    catalog.create_namespace("db")
    yield catalog
    catalog.close()


def test_frames_for_two_catalogs_of_one_name_wait_in_folders_of_their_own(
    lake: SqlCatalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frame is stored before its table exists, and so before the table has a location."""
    frame = source_rows(3)
    with spooled(frame, output_of(NAME).place) as first:
        monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__URI", f"sqlite:///{tmp_path}/other.db")
        monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())
        with pyiceberg.catalog.load_catalog("lake") as other:
            other.create_namespace("db")
        with spooled(frame, output_of(NAME).place) as second:
            assert first.path != second.path
        assert first.path.is_file()


@pytest.fixture
def faults(lake: SqlCatalog, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Fault]]:
    """The wrong answers that the REST catalog `remote`, with the tables of `lake`, gives to commits."""
    faults: list[Fault] = []
    with iceberg_rest.serving(lake, faults=faults) as address:
        monkeypatch.setenv("PYICEBERG_CATALOG__REMOTE__URI", address)
        monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())
        yield faults


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "in.parquet", source_rows(7))


@pytest.fixture
def more(tmp_path: Path) -> Path:
    return write_source(tmp_path / "more.parquet", source_rows(4, first=100))


def rows(table: Table) -> pa.Table:
    """The rows as DuckDB reads them."""
    query = f"SELECT * FROM iceberg_scan('{table.metadata_location}') ORDER BY id"
    return duck.shared("avro", "iceberg").sql(query).to_arrow_table()


def ids(lake: SqlCatalog) -> list[int]:
    found: list[int] = rows(lake.load_table("db.t"))["id"].to_pylist()
    return found


def written(target: iceberg.IcebergTarget, commit: str, source: Path) -> Part:
    """A part with the rows of a file."""
    rows = pq.read_table(source)
    folder = target.part_folder(commit, rows.schema)
    Path(folder.location).mkdir(parents=True)
    return folder.write("part.parquet", rows, chunk=0)


def edit_metadata(table: Table, **changes: Any) -> None:
    """Change the metadata file: pyiceberg runs the code that it is asked to store."""
    path = Path(table.metadata_location.removeprefix("file://"))
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def manifests(tmp_path: Path) -> int:
    return len([*tmp_path.rglob("*-m*.avro")])


@pytest.mark.parametrize("status", sweep([500, 504, 409], quick={500}))
def test_a_commit_whose_success_was_lost_is_made_once(
    lake: SqlCatalog, faults: list[Fault], source: Path, more: Path, status: int
) -> None:
    """409: the request was sent twice, by a client or a proxy, and the second answer arrived."""
    assert job(source, REST, mode="append") == 4
    faults[:] = [Fault(status, made=True)]
    assert job(more, REST, mode="append") == 2
    assert faults == []
    assert ids(lake) == [*range(7), 100, 101, 102, 103]
    assert job(source, REST, mode="append") == job(more, REST, mode="append") == 0


@pytest.mark.parametrize("status", sweep([409, 500, 502, 503, 504], quick={409}))
def test_a_commit_that_was_not_made_is_tried_again(
    lake: SqlCatalog, faults: list[Fault], source: Path, status: int
) -> None:
    faults[:] = [Fault(status, made=False)] * 3
    assert job(source, REST) == 4
    assert ids(lake) == [*range(7)]
    assert len(lake.load_table("db.t").snapshots()) == 1


@pytest.mark.parametrize("status", sweep([400, 403], quick={403}))
def test_a_catalog_that_refuses_a_commit_is_an_error_and_work_is_kept(
    lake: SqlCatalog, faults: list[Fault], source: Path, status: int
) -> None:
    faults[:] = [Fault(status, made=False)]
    with pytest.raises(StorageError, match=r"db\.t: the catalog refused the change: .*asked for by the test"):
        job(source, REST)
    assert ids(lake) == []
    assert job(source, REST) == 0
    assert ids(lake) == [*range(7)]


def test_commits_are_known_after_their_snapshots_expired_and_with_few_properties(
    lake: SqlCatalog, source: Path
) -> None:
    for version in range(5):
        assert job(source, NAME, mode="append", version=version) == 4
    table = lake.load_table("db.t")
    table.maintenance.expire_snapshots().by_ids([one.snapshot_id for one in table.snapshots()[:-1]]).commit()
    assert len(lake.load_table("db.t").snapshots()) == 1
    for version in range(5):
        assert job(source, NAME, mode="append", version=version) == 0
    table = lake.load_table("db.t")
    assert len(ids(lake)) == 35
    assert [name for name in table.properties if name.startswith("torchlake")] == [COMMIT]
    assert len(verify(NAME).problems) == 0


def test_rows_that_were_rolled_back_can_be_written_again(lake: SqlCatalog, source: Path, more: Path) -> None:
    job(source, NAME, mode="append")
    job(more, NAME, mode="append")
    table = lake.load_table("db.t")
    table.manage_snapshots().rollback_to_snapshot(table.snapshots()[0].snapshot_id).commit()
    assert ids(lake) == [*range(7)]
    assert job(source, NAME, mode="append") == 0
    job(more, NAME, mode="append")
    assert ids(lake) == [*range(7), 100, 101, 102, 103]


def test_a_table_that_was_dropped_and_created_again_gets_its_rows(lake: SqlCatalog, source: Path, more: Path) -> None:
    for one in (source, more):
        job(one, NAME, mode="append")
    location = lake.load_table("db.t").location()
    lake.drop_table("db.t")
    for one in (source, more):
        assert job(one, NAME, mode="append") > 0
    assert lake.load_table("db.t").location() == location
    assert ids(lake) == [*range(7), 100, 101, 102, 103]


def test_a_table_that_is_replaced_during_the_job_is_an_error(lake: SqlCatalog, source: Path) -> None:
    target = iceberg.open_target(NAME, target_options({}))
    schema = pq.read_schema(source)
    target.prepare(schema)
    change = Change(id="a" * 32, files=[written(target, "a" * 32, source)], schema=schema, mode="create", record={})
    lake.drop_table("db.t")
    lake.create_table("db.t", schema)
    with pytest.raises(OutputError, match="dropped during the job"):
        target.commit(target.snapshot(), change)


def test_a_refused_commit_leaves_no_manifests(lake: SqlCatalog, tmp_path: Path, source: Path) -> None:
    target = iceberg.open_target(NAME, target_options({"mode": "append"}))
    schema, name = pq.read_schema(source), "a" * 32
    target.prepare(schema)
    files = [written(target, name, source)]
    change = Change(id=name, files=files, schema=schema, mode="append", record={}, positions={"orders": 7})
    before = target.snapshot()
    lake.load_table("db.t").append(pq.read_table(source))
    found = manifests(tmp_path)
    with pytest.raises(Conflict):
        target.commit(before, change)
    assert manifests(tmp_path) == found
    assert not target.has(target.snapshot(), name)
    target.commit(target.snapshot(), change)
    now = target.snapshot()
    assert target.has(now, name)
    assert target.position(now, "orders") == 7
    assert target.position(now, "others") is None
    assert len(ids(lake)) == 14


def test_an_overwrite_is_one_snapshot(lake: SqlCatalog, source: Path, more: Path) -> None:
    job(source, NAME)
    assert job(more, NAME, mode="overwrite") == 2
    assert ids(lake) == [100, 101, 102, 103]
    assert len(lake.load_table("db.t").snapshots()) == 2
    assert job(more, NAME, mode="overwrite") == 0
    lake.load_table("db.t").delete("id = 100")
    assert job(more, NAME, mode="overwrite") == 2
    assert ids(lake) == [100, 101, 102, 103]


def test_a_percent_sign_in_a_location_is_one(lake: SqlCatalog, tmp_path: Path, source: Path) -> None:
    fields = [("row_id", pa.string()), *pq.read_schema(source), ("error", pa.string())]
    lake.create_table("db.t", pa.schema(fields), location=f"file://{tmp_path}/my%20lake/t")
    assert job(source, NAME, mode="append") == 4
    assert ids(lake) == [*range(7)]
    assert verify(NAME).problems == []
    assert not (tmp_path / "my lake").exists()


def test_columns_are_added_if_asked_and_types_are_widened(lake: SqlCatalog, source: Path) -> None:
    fields = [NestedField(5, "p", StringType()), NestedField(3, "id", LongType(), required=True)]
    lake.create_table("db.t", Schema(*fields, NestedField(9, "n", DoubleType())))
    table = pq.read_table(source)
    pq.write_table(table.append_column("n", pa.array([0.1] * 7, pa.float32())), source)
    with pytest.raises(OutputError, match=r"no column 'row_id' \(string\).*add_columns adds the missing ones"):
        job(source, NAME)
    assert job(source, NAME, add_columns=True) == 4
    found = rows(lake.load_table("db.t"))
    assert {*found.column_names} == {"p", "id", "n", "row_id", "t", "error"}
    assert found.select(["id", "t", "p"]).to_pylist() == table.to_pylist()
    assert found["n"].to_pylist() == [pa.scalar(0.1, pa.float32()).as_py()] * 7
    assert len(lake.load_table("db.t").schemas()) == 2
    pq.write_table(table.set_column(0, "id", pa.array([None] * 7, pa.int64())), source)
    with pytest.raises(TableError, match="a value cannot be stored in the table's format: Casting field 'id'"):
        job(source, NAME, mode="append", add_columns=True)


def test_other_columns_are_refused(lake: SqlCatalog, source: Path) -> None:
    lake.create_table("db.t", pa.schema([("id", pa.string()), ("t", pa.string()), ("p", pa.string())]))
    with pytest.raises(OutputError, match="its column 'id' is string, but the rows have int64"):
        job(source, NAME, add_columns=True)


def test_every_type_is_written_with_field_ids(lake: SqlCatalog, tmp_path: Path) -> None:
    day, time = datetime.date(2024, 2, 29), datetime.datetime(2024, 2, 29, 12, 30, 1, 234567)
    columns = {
        "id": pa.array([1, 2, 3], pa.uint32()),
        "small": pa.array([-1, None, 1], pa.int8()),
        "half": pa.array([-0.0, 1.5, None], pa.float16()),
        "score": pa.array([0.25, -0.5, None], pa.float32()),
        "number": pa.array([float("nan"), 1.0, 2.0]),
        "none": pa.array([None, None, None], pa.string()),
        "text": pa.array(["z" * 40, "e", "a"]),
        "bytes": pa.array([b"a", b"", None]),
        "yes": pa.array([True, False, None]),
        "day": pa.array([day, None, day]),
        "time": pa.array([time, time, None], pa.timestamp("us")),
        "zoned": pa.array([time, None, time], pa.timestamp("us", "Europe/Berlin")),
        "clock": pa.array([datetime.time(1, 2, 3), None, None], pa.time32("s")),
        "money": pa.array([decimal.Decimal("1.25"), decimal.Decimal("-2.50"), None], pa.decimal128(38, 2)),
        "large": pa.array([2**64 - 1, 0, None], pa.uint64()),
        "vector": pa.array([[1.0, 2.0], [0.0, 0.0], [3.0, 4.0]], pa.list_(pa.float32(), 2)),
        "int8s": pa.array([[1, -2], [], None], pa.list_(pa.int8())),
        "struct": pa.array([{"a": 1, "b": ["x"]}, None, {"a": None, "b": None}]),
        "map": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int16())),
        "word": pa.array(["a", "b", None]).dictionary_encode(),
    }
    source = write_source(tmp_path / "in.parquet", pa.table({**columns, "t": ["a", "b", "c"]}))
    job(source, NAME, chunk_rows=3)
    table = lake.load_table("db.t")
    expected = pq.read_table(source).to_pylist()
    for found in (rows(table), table.scan().to_arrow(), open_output(NAME).to_table()):
        assert found.drop_columns(["row_id", "error", "number", "zoned"]).to_pylist() == [
            {name: value for name, value in row.items() if name not in ("number", "zoned")} for row in expected
        ]
        assert pc.equal(found["zoned"].cast(pa.int64()), pq.read_table(source)["zoned"].cast(pa.int64())).to_pylist()
    (task,) = table.scan().plan_files()
    stored = pq.read_schema(local_path(task.file.file_path))
    for name in columns:
        number = stored.field(name).metadata[b"PARQUET:field_id"]
        assert int(number) == table.schema().find_field(name).field_id


def test_bounds_prune_files_and_lose_no_row(lake: SqlCatalog, tmp_path: Path) -> None:
    day, time = datetime.date(2024, 2, 29), datetime.datetime(2024, 2, 29, 12, 30, 1, 234567)
    columns = {
        "id": pa.array([1, 2, 3], pa.uint32()),
        "small": pa.array([-1, None, 1], pa.int8()),
        "half": pa.array([-0.0, 1.5, None], pa.float16()),
        "score": pa.array([0.25, -0.5, None], pa.float32()),
        "none": pa.array([None, None, None], pa.string()),
        "text": pa.array(["z" * 40, "e", "a"]),
        "yes": pa.array([True, None, True]),
        "day": pa.array([day, None, day]),
        "time": pa.array([time, time, None], pa.timestamp("us")),
        "money": pa.array([decimal.Decimal("1.25"), decimal.Decimal("-2.50"), None], pa.decimal128(38, 2)),
        "large": pa.array([2**64 - 1, 0, None], pa.uint64()),
    }
    source = write_source(tmp_path / "in.parquet", pa.table({**columns, "t": ["a", "b", "c"]}))
    job(source, NAME, chunk_rows=3)
    table = lake.load_table("db.t")
    (task,) = table.scan().plan_files()
    field = {name: table.schema().find_field(name).field_id for name in columns}
    assert task.file.null_value_counts[field["none"]] == 3
    assert {*task.file.lower_bounds} >= {field[name] for name in columns if name != "none"}
    assert task.file.lower_bounds[field["text"]] == b"a"
    assert b"z" * 40 < task.file.upper_bounds[field["text"]] < b"z" * 32 + b"\xff"
    for condition in (
        "id > 3",
        "small > 1",
        "day > '2024-02-29'",
        "yes = false",
        "money > 1.25",
        "text > 'zzzzzzzzzz{'",
    ):
        assert [*table.scan(row_filter=condition).plan_files()] == [], condition
    for condition, count in {
        "id > 2": 1,
        "small < 0": 1,
        "half < 0.1": 1,
        "score > 0.0": 1,
        "day = '2024-02-29'": 2,
        "time > '2024-02-29T12:30:01.234566'": 2,
        "money < 0.00": 1,
        "large > 9223372036854775807": 1,
    }.items():
        assert table.scan(row_filter=condition).to_arrow().num_rows == count, condition


def test_partitions_of_several_types(lake: SqlCatalog, tmp_path: Path) -> None:
    time = datetime.datetime(2024, 2, 29, 12, 30, 1, 234567)
    keys = {
        "number": pa.array([1, None, 1, -2]),
        "yes": pa.array([True, False, None, True]),
        "day": pa.array([time.date(), time.date(), None, None]),
        "time": pa.array([time, None, time, time], pa.timestamp("us")),
        "money": pa.array([decimal.Decimal("1.25"), None, decimal.Decimal("1.25"), decimal.Decimal("-3.00")]),
    }
    source = write_source(tmp_path / "in.parquet", pa.table({"id": range(4), "t": [*"abcd"], **keys}))
    job(source, NAME, partition_by=[*keys], chunk_rows=4)
    expected = pq.read_table(source).to_pylist()
    for found in (rows(lake.load_table("db.t")), open_output(NAME).to_table().sort_by("id")):
        assert found.select(["id", "t", *keys]).to_pylist() == expected
    table = open_table(NAME)
    assert sorted(table.schema.names) == sorted(["row_id", "id", "t", "error", *keys])
    day = lake.load_table("db.t").scan(row_filter="day = '2024-02-29'").to_arrow()
    assert sorted(day["id"].to_pylist()) == [0, 1]
    assert verify(NAME).problems == []


def test_what_cannot_be_written_to_is_refused_before_any_row(lake: SqlCatalog, source: Path) -> None:
    with pytest.raises(
        OutputError, match=r"has no namespace 'other'. Create it: pyiceberg --catalog lake create namesp"
    ):
        job(source, "iceberg:lake.other.t")
    with pytest.raises(UsageError, match="a snapshot cannot be written to"):
        job(source, f"{NAME}@main")
    with pytest.raises(UsageError, match="a metadata file cannot be written to"):
        output_of("/somewhere/v1.metadata.json")
    with pytest.raises(UsageError, match="rows cannot be partitioned by 'n', which is double"):
        pq.write_table(pq.read_table(source).append_column("n", pa.array([0.5] * 7)), source)
        job(source, NAME, partition_by=["n"])
    with pytest.raises(UsageError, match="mode replace-where replaces the rows with the same key: give a key"):
        job(source, NAME, mode="replace-where")
    with pytest.raises(TableError, match="the catalog 'none' cannot be read"):
        job(source, "iceberg:none.db.t")
    assert lake.list_tables("db") == []
    schema = Schema(NestedField(1, "id", LongType()))
    bucket = PartitionSpec(PartitionField(1, 1000, BucketTransform(4), "id_bucket"))
    lake.create_table("db.bucket", schema, partition_spec=bucket)
    with pytest.raises(OutputError, match=r"is partitioned by bucket\[4\]\(id\), which is not supported"):
        job(source, "iceberg:lake.db.bucket", add_columns=True)
    edit_metadata(lake.create_table("db.code", schema), properties={"write.py-location-provider.impl": "os.system"})
    with pytest.raises(OutputError, match=r"names code that pyiceberg would run .*impl = os\.system"):
        job(source, "iceberg:lake.db.code", add_columns=True)


def test_a_table_of_a_newer_format_is_refused(lake: SqlCatalog, source: Path) -> None:
    edit_metadata(lake.create_table("db.t", pa.schema([("id", pa.int64())])), **{"format-version": 3, "next-row-id": 0})
    with pytest.raises(OutputError, match="has format version 3; pyiceberg writes versions 1 and 2"):
        job(source, NAME, add_columns=True)


def test_a_dataset_of_what_arrow_cannot_find_is_refused(lake: SqlCatalog, source: Path) -> None:
    with pytest.raises(OutputError, match="the table does not exist yet"):
        open_output(NAME)
    job(source, NAME)
    assert sorted(open_output(NAME).to_table()["id"].to_pylist()) == [*range(7)]
    table = lake.load_table("db.t")
    with table.update_schema() as update:
        update.rename_column("t", "text")
    with pytest.raises(OutputError, match="the table has a column that was named 't'"):
        open_output(NAME)
    assert sorted(open_table(NAME).schema.names) == ["error", "id", "p", "row_id", "text"]


def test_the_library_is_never_asked_to_try_again(
    lake: SqlCatalog, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own retry adds the files a second time, if another process made the same commit."""
    calls: list[Any] = []
    original = SqlCatalog.commit_table

    def commit(self: SqlCatalog, *arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 1:
            self.load_table("db.t").append(pa.table({"id": [999]}))
            assert len(calls) == 2
        return original(self, *arguments)

    monkeypatch.setattr(SqlCatalog, "commit_table", commit)
    assert job(source, NAME, mode="append") == 4
    assert len(calls) == 3  # ours, the other one, ours
    assert ids(lake) == [*range(7), 999]


def scored(output: str, rows: pa.Table, folder: Path, **options: Any) -> None:
    """Write rows with the key `id`."""
    source = write_source(folder / "keyed.parquet", rows)
    place = output_of(output, target_options(options))
    plan = plan_chunks(open_table(source), columns=rows.schema.names, chunk_rows=100)
    with place.begin(WriteRequest(plan=plan, fingerprint={"version": 1}, schema=rows.schema, key="id")) as write:
        (chunk,) = write.pending
        write.commit([write.parts.write(part_name(plan, chunk, write.job.fingerprint), rows, chunk=0)], {})


@pytest.mark.parametrize("partition_by", [pytest.param((), marks=pytest.mark.slow), ("p",)])
def test_rows_are_replaced_by_key_in_one_snapshot(
    lake: SqlCatalog, tmp_path: Path, partition_by: tuple[str, ...]
) -> None:
    scored(NAME, source_rows(6), tmp_path, partition_by=partition_by)
    lake.load_table("db.t").append(source_rows(3, first=50))
    new = pa.table({"id": [1, 51, 99], "t": ["new"] * 3, "p": ["p0", None, "p1"]})
    scored(NAME, new, tmp_path, mode="replace-where")
    table = lake.load_table("db.t")
    before = [*source_rows(6).to_pylist(), *source_rows(3, first=50).to_pylist()]
    expected = [row for row in before if row["id"] not in (1, 51)] + new.to_pylist()
    for found in (rows(table), open_output(NAME).to_table()):
        assert found.sort_by("id").to_pylist() == sorted(expected, key=lambda row: row["id"])
    assert len(table.snapshots()) == 3
    with table.update_schema() as update:
        update.rename_column("t", "text")
    with pytest.raises(OutputError, match="a column that was named 't', so rows cannot be replaced in it"):
        scored(NAME, new.rename_columns(["id", "text", "p"]), tmp_path, mode="replace-where")
