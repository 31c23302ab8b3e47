"""Iceberg tables: snapshots, partitions, changed columns, deletes, refusals; pyiceberg and DuckDB read them too."""

from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyiceberg.catalog
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.transforms import BucketTransform, IdentityTransform
from pyiceberg.types import DoubleType, LongType, StringType
from pyiceberg.utils.config import Config

import duck
from folder_writes import write_transaction
from iceberg_deletes import delete_rows
from torchlake.errors import TableError, Unavailable
from torchlake.outputs.parts import part_name
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.keys import row_ids
from torchlake.tables.plan import plan_from_json, plan_to_json
from torchlake.tables.reading import ChunkReader
from torchlake.tables.table import open_table
from torchlake.tables.verification.verify import verify

NAME = "iceberg:lake.films.reviews"


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SqlCatalog]:
    """The catalog `lake` in a SQLite file, configured by the environment."""
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__URI", f"sqlite:///{tmp_path}/catalog.db")
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__WAREHOUSE", f"file://{tmp_path}/warehouse")
    monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())  # it is read once, when pyiceberg is imported
    lake = pyiceberg.catalog.load_catalog("lake")
    assert isinstance(lake, SqlCatalog)
    lake.create_namespace("films")
    yield lake
    lake.engine.dispose()


def read(source: str, *columns: str) -> pa.Table:
    """All rows as torchlake reads them, after the plan went through JSON."""
    table = open_table(source, columns=columns)
    plan = plan_from_json(plan_to_json(plan_chunks(table, columns=table.schema.names, chunk_rows=3)))
    reader = ChunkReader(plan.schema.names)
    pieces = [reader.read(chunk)[0] for chunk in plan.chunks]
    reader.close()
    return pa.concat_tables(pieces) if pieces else plan.schema.empty_table()


def rows(table: pa.Table) -> list[str]:
    return sorted(map(repr, table.to_pylist()))


def test_a_snapshot_is_read_and_recorded(catalog: SqlCatalog) -> None:
    table = catalog.create_table("films.reviews", pa.schema([("id", pa.int64()), ("text", pa.string())]))
    assert read(NAME).schema.equals(pa.schema([("id", pa.int64()), ("text", pa.string())]))
    assert read(NAME).num_rows == 0
    table.append(pa.table({"id": [1, 2], "text": ["a", "b"]}))
    first = table.current_snapshot().snapshot_id  # type: ignore[union-attr]
    table.manage_snapshots().create_tag(first, "v1").commit()
    table.append(pa.table({"id": [3], "text": ["c"]}))
    assert sorted(read(NAME)["id"].to_pylist()) == [1, 2, 3]
    for ref in (first, "v1"):
        assert read(f"{NAME}@{ref}")["id"].to_pylist() == [1, 2]
    assert sorted(read(table.metadata_location)["id"].to_pylist()) == [1, 2, 3]
    plan = plan_chunks(open_table(f"{NAME}@v1"), columns=["id"])
    (source,) = plan.sources
    assert (source["kind"], source["table"], source["version"]) == ("iceberg", "lake.films.reviews", first)


def test_partition_columns_and_hidden_partitions(catalog: SqlCatalog) -> None:
    schema = pa.schema(
        [("id", pa.int64()), ("day", pa.date32()), ("at", pa.timestamp("us", "UTC")), ("lang", pa.string())]
    )
    table = catalog.create_table("films.reviews", schema)
    with table.update_spec() as spec:
        for name in ("day", "at", "lang"):
            spec.add_field(name, IdentityTransform(), f"by_{name}")
        spec.add_field("id", BucketTransform(4), "bucket")
    content = {
        "id": list(range(6)),
        "day": [date(2024, 1, 1), date(1969, 12, 31), None] * 2,
        "at": [datetime(2024, 1, 1, 12, 30, 0, 5, UTC), None, datetime(1960, 1, 1, tzinfo=UTC)] * 2,
        "lang": ["en", None, "a=b/ü"] * 2,
    }
    table.append(pa.table(content, schema=schema))
    assert rows(read(NAME)) == rows(pa.table(content, schema=schema))


def test_a_partition_column_that_its_files_lack(catalog: SqlCatalog) -> None:
    """As in the files of a Hive table that were added as they are."""
    schema = pa.schema([("id", pa.int64()), ("lang", pa.string())])
    table = catalog.create_table("films.reviews", schema)
    with table.update_spec() as spec:
        spec.add_field("lang", IdentityTransform(), "lang")
    table.append(pa.table({"id": [1, 2], "lang": ["en", "en"]}))
    path = Path(next(iter(table.scan().plan_files())).file.file_path.removeprefix("file://"))
    size, content = path.stat().st_size, pq.read_table(path).select(["id"])
    for padding in range(size):
        with pq.ParquetWriter(path, content.schema, store_schema=False) as writer:
            writer.write_table(content)
            writer.add_key_value_metadata({"padding": "x" * padding})
        if path.stat().st_size >= size:
            break
    assert path.stat().st_size == size
    assert read(NAME).to_pylist() == [{"id": 1, "lang": "en"}, {"id": 2, "lang": "en"}]


def evolve(table: Any) -> None:
    """Every change of columns that Iceberg allows on the top level."""
    with table.update_schema() as change:
        change.rename_column("text", "body")
        change.update_column("small", LongType())
        change.update_column("half", DoubleType())
        change.delete_column("gone")
    with table.update_schema() as change:
        change.add_column("gone", LongType())
        change.add_column("text", StringType())


def test_columns_are_found_by_id(catalog: SqlCatalog) -> None:
    before = pa.schema([("text", pa.string()), ("small", pa.int32()), ("half", pa.float32()), ("gone", pa.string())])
    table = catalog.create_table("films.reviews", before)
    table.append(pa.table({"text": ["a", "b"], "small": [1, 2], "half": [0.5, 1.5], "gone": ["x", "y"]}, schema=before))
    evolve(table)
    assert rows(read(NAME)) == rows(table.scan().to_arrow())
    assert read(f"{NAME}@{table.current_snapshot().snapshot_id}").column_names == before.names  # type: ignore[union-attr]
    after = pa.table({"small": [2**40], "half": [1e300], "body": ["c"], "text": ["new"], "gone": [5]})
    table.append(after.select([one.name for one in table.schema().fields]))
    found = read(NAME)
    assert rows(found) == rows(table.scan().to_arrow())
    assert sorted(found["body"].to_pylist()) == ["a", "b", "c"]
    assert sorted(map(str, found["text"].to_pylist())) == ["None", "None", "new"]
    assert sorted(map(str, found["gone"].to_pylist())) == ["5", "None", "None"]


def test_a_renamed_nested_field_is_refused(catalog: SqlCatalog) -> None:
    table = catalog.create_table("films.reviews", pa.schema([("who", pa.struct([("name", pa.string())]))]))
    table.append(pa.table({"who": [{"name": "a"}]}))
    assert read(NAME)["who"].to_pylist() == [{"name": "a"}]
    with table.update_schema() as change:
        change.rename_column("who.name", "called")
    with pytest.raises(TableError, match=r"the fields of the nested column 'who' have changed"):
        open_table(NAME)


@pytest.mark.parametrize(
    "values",
    [
        pa.array([Decimal("1.50"), None], pa.decimal128(12, 2)),
        pa.array([b"a", None], pa.binary()),
        pa.array([True, None]),
        pa.array([datetime(2020, 1, 1), None], pa.timestamp("us")),
        pa.array([["a", "b"], None], pa.list_(pa.string())),
        pa.array([{"a": 1, "b": ["x"]}, None], pa.struct([("a", pa.int64()), ("b", pa.list_(pa.string()))])),
        pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64())),
        pa.array([b"0123456789abcdef", None], pa.binary(16)),
    ],
    ids=lambda values: str(values.type)[:12],
)
def test_types_are_carried_through(catalog: SqlCatalog, values: pa.Array) -> None:
    table = catalog.create_table("films.reviews", pa.schema([("v", values.type)]))
    table.append(pa.table({"v": values}))
    found = read(NAME)
    assert found["v"].to_pylist() == values.to_pylist()
    assert found.schema.field("v").type == values.type


def other_readers(table: Any) -> list[list[str]]:
    """The rows by pyiceberg and by DuckDB."""
    connection = duck.shared("avro", "iceberg")
    read_by_duckdb = connection.execute(f"SELECT * FROM iceberg_scan('{table.metadata_location}')").to_arrow_table()
    return [rows(table.scan().to_arrow()), rows(read_by_duckdb)]


def with_deletes(catalog: SqlCatalog) -> Any:
    """40 rows in two files, of which eleven are deleted, some twice."""
    table = catalog.create_table("films.reviews", pa.schema([("id", pa.int64()), ("text", pa.string())]))
    for first in (0, 20):
        table.append(
            pa.table({"id": range(first, first + 20), "text": [f"text {n}" for n in range(first, first + 20)]})
        )
    one, other = sorted(
        (task.file.file_path for task in table.scan().plan_files()),
        key=lambda path: pq.read_table(path.removeprefix("file://"))["id"][0].as_py(),
    )
    delete_rows(table, one, [0, 3, 4, 19])
    delete_rows(table, one, [4, 5])
    delete_rows(table, other, list(range(6)))
    return table


def test_deleted_rows_are_left_out_for_every_reader(catalog: SqlCatalog) -> None:
    table = with_deletes(catalog)
    found = read(NAME)
    assert sorted(found["id"].to_pylist()) == sorted({*range(40)} - {0, 3, 4, 5, 19, *range(20, 26)})
    assert other_readers(table) == [rows(found)] * 2
    plan = plan_chunks(open_table(NAME), columns=["id"])
    assert plan.selection == {"left_out": {"deleted": 11}}


def test_an_output_has_the_remaining_rows_once_and_verifies(catalog: SqlCatalog, tmp_path: Path) -> None:
    with_deletes(catalog)
    plan = plan_chunks(open_table(NAME), columns=["id"], chunk_rows=4)
    reader = ChunkReader(["id"])
    with write_transaction(tmp_path / "out", plan=plan, fingerprint={}) as out:
        parts = [
            out.parts.write(
                part_name(plan, chunk, {}),
                pa.table({"row_id": row_ids(chunk), "id": reader.read(chunk)[0]["id"]}),
                chunk=chunk.index,
            )
            for chunk in out.pending
        ]
        out.commit(parts, {})
    reader.close()
    done = verify(tmp_path / "out")
    assert (done.problems, done.rows_in, done.rows_out) == ([], 29, 29)


def test_what_is_not_read_is_refused(catalog: SqlCatalog, tmp_path: Path) -> None:
    table = catalog.create_table("films.reviews", pa.schema([("id", pa.int64())]))
    table.append(pa.table({"id": [1, 2]}))
    snapshot = table.current_snapshot().snapshot_id  # type: ignore[union-attr]
    path = next(iter(table.scan().plan_files())).file.file_path
    refusals: dict[str, str] = {
        "iceberg:lake": r"write a table as iceberg:catalog\.namespace\.table",
        "iceberg:lake.films.other": r"the catalog 'lake' has no such table",
        "iceberg:lake.series.reviews": r"the catalog 'lake' has no such table",
        "iceberg:sea.films.reviews": r"the catalog 'sea' cannot be read: .*PYICEBERG_CATALOG__SEA__URI",
        f"{NAME}@12": r"there is no such snapshot, tag or branch; it may have expired. The table has: main, ",
        f"{tmp_path}/00001.metadata.json": r"the metadata file cannot be read",
    }
    for source, words in refusals.items():
        with pytest.raises(TableError, match=words):
            open_table(source)
    delete_rows(table, path, [0], equality=True)
    with pytest.raises(TableError, match="has equality deletes, which are not supported"):
        open_table(NAME)
    Path(path.removeprefix("file://")).unlink()
    with pytest.raises(Unavailable, match=f"Version {snapshot} of lake.films.reviews lists this file"):
        open_table(f"{NAME}@{snapshot}")


def test_a_server_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYICEBERG_CATALOG__SEA__URI", "http://127.0.0.1:9")
    monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())
    with pytest.raises(TableError, match=r"the catalog 'sea' cannot be read: .*127\.0\.0\.1"):
        open_table("iceberg:sea.films.reviews")
