"""Iceberg tables of a REST catalog, written by DuckDB; names of columns, pinned snapshots, a table that names code."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pyiceberg.catalog
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadataV3
from pyiceberg.typedef import IcebergBaseModel
from pyiceberg.types import DecimalType, LongType, NestedField, StringType
from pyiceberg.utils.config import Config

import duck
import iceberg_deletes
import iceberg_rest
import tiny
import torchlake as tl
from sweeps import sweep
from torchlake.errors import OutputError, TableError
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.reading import ChunkReader
from torchlake.tables.selection.options import Selection
from torchlake.tables.sources._find import pinned
from torchlake.tables.sources._options import ReadOptions
from torchlake.tables.table import open_table

TOKEN = "a-token-that-no-message-shows"


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SqlCatalog]:
    """The tables behind the REST catalog `remote`; `local` is the same without a server."""
    catalog = SqlCatalog("local", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"{tmp_path}/warehouse")
    catalog.create_namespace("db")
    monkeypatch.setenv("PYICEBERG_CATALOG__LOCAL__URI", f"sqlite:///{tmp_path}/catalog.db")
    with iceberg_rest.serving(catalog, token=TOKEN) as address:
        monkeypatch.setenv("PYICEBERG_CATALOG__REMOTE__URI", address)
        monkeypatch.setenv("PYICEBERG_CATALOG__REMOTE__TOKEN", TOKEN)
        monkeypatch.setenv("PYICEBERG_CATALOG__CLOSED__URI", address)
        monkeypatch.setenv("PYICEBERG_CATALOG__CLOSED__TOKEN", "wrong")
        monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())  # it is read once, when pyiceberg is imported
        yield catalog
    catalog.close()


def duckdb_on(address: str) -> duckdb.DuckDBPyConnection:
    """DuckDB with the REST catalog attached as `lake`."""
    connection = duck.connect("httpfs", "avro", "iceberg")
    connection.execute(f"ATTACH '' AS lake (TYPE ICEBERG, ENDPOINT '{address}', TOKEN '{TOKEN}')")
    return connection


def read(source: Any, *columns: str, **selection: Any) -> pa.Table:
    table = open_table(source, columns=columns, options=ReadOptions(selection=Selection(**selection)))
    plan = plan_chunks(table, columns=columns or table.schema.names, chunk_rows=50)
    reader = ChunkReader(plan.schema.names)
    pieces = [reader.read(chunk)[0] for chunk in plan.chunks]
    reader.close()
    return pa.concat_tables(pieces) if pieces else plan.schema.empty_table()


@pytest.mark.parametrize("version", sweep([2, 3], quick={3}))
def test_what_duckdb_writes_and_deletes_is_read_alike(
    lake: SqlCatalog, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    if version == 3:  # pyiceberg reads this version, and refuses to write its metadata; the server only stores it
        monkeypatch.setattr(
            TableMetadataV3,
            "model_dump_json",
            lambda self, **_: IcebergBaseModel.model_dump_json(self, exclude_none=True, by_alias=True),
        )
    modes = {f"write.{one}.mode": "merge-on-read" for one in ("delete", "update")}
    schema = pa.schema([("id", pa.int64()), ("text", pa.string())])
    lake.create_table("db.t", schema, properties={"format-version": str(version), **modes})
    address = pyiceberg.catalog.load_catalog("remote").properties["uri"]
    counts = []
    with duckdb_on(address) as connection:
        for statement in (
            "INSERT INTO lake.db.t SELECT range, 'text ' || range FROM range(500)",
            "DELETE FROM lake.db.t WHERE id % 7 = 3",
            "INSERT INTO lake.db.t SELECT range + 500, 'more ' || range FROM range(300)",
            "DELETE FROM lake.db.t WHERE id > 450 AND id < 560 OR id % 11 = 0",
        ):
            connection.execute(statement)
            expected = connection.sql("SELECT id, text FROM lake.db.t ORDER BY id").to_arrow_table()
            found = read("iceberg:remote.db.t").sort_by("id")
            assert found.to_pylist() == expected.to_pylist()
            counts.append(found.num_rows)
    assert sorted(counts) != counts, "rows were deleted"
    kinds = {one.file_format.name for task in lake.load_table("db.t").scan().plan_files() for one in task.delete_files}
    assert kinds == ({"PUFFIN"} if version == 3 else {"PARQUET"})
    assert read("iceberg:local.db.t").sort_by("id") == found


def made_for_deletes(lake: SqlCatalog) -> None:
    schema = pa.schema([("id", pa.int64()), ("same", pa.string()), ("error", pa.string())])
    lake.create_table("db.t", schema, properties={f"write.{one}.mode": "merge-on-read" for one in ("delete", "update")})


def write_batch(batch: int) -> tl.Scored:
    """Append ten rows as a commit of its own."""
    rows = pa.table({"id": [*range(batch * 10, batch * 10 + 10)]})
    given: dict[str, Any] = {"columns": ["id"], "version": "1", "chunk_rows": 5, "commit_id": str(batch)}
    schema = {"same": pa.string()}
    return tl.map(
        double, rows, "iceberg:local.db.t", schema=schema, key="id", mode="append", engine=tiny.Here(), **given
    )


@pytest.mark.parametrize("first", sweep([10, 8], quick={8}), ids={10: "whole files", 8: "half a file"}.get)
def test_rows_of_an_output_that_duckdb_deleted_are_written_again(lake: SqlCatalog, first: int) -> None:
    """DuckDB marks deleted rows, and leaves their files."""
    made_for_deletes(lake)
    write_batch(0)
    write_batch(1)
    with duckdb_on(pyiceberg.catalog.load_catalog("remote").properties["uri"]) as connection:
        connection.execute(f"DELETE FROM lake.db.t WHERE id >= {first}")
    assert tl.verify("iceberg:local.db.t").rows_out == first
    for _ in range(2):
        write_batch(1)
        assert sorted(read("iceberg:local.db.t")["id"].to_pylist()) == [*range(first), *range(10, 20)]


def test_an_output_with_equality_deletes_is_not_taken_for_complete(lake: SqlCatalog) -> None:
    """They name values, not rows: new batches are added, and a repeated one cannot be judged."""
    made_for_deletes(lake)
    write_batch(0)
    table = lake.load_table("db.t")
    iceberg_deletes.delete_rows(table, next(iter(table.scan().plan_files())).file.file_path, [0], equality=True)
    write_batch(1)
    for _ in range(2):
        with pytest.raises(OutputError, match=r"equality deletes.*Compact the table.*not known which rows"):
            write_batch(1)
    with pytest.raises(OutputError, match=r"equality deletes"):
        tl.verify("iceberg:local.db.t")


def double() -> Callable[[pa.Table], pa.Table]:
    return lambda batch: pa.table({"same": batch["id"].cast(pa.string())})


def test_a_catalog_that_refuses_is_an_error_without_the_token(lake: SqlCatalog) -> None:
    lake.create_table("db.t", pa.schema([("id", pa.int64())]))
    with pytest.raises(TableError, match="no such table"):
        open_table("iceberg:remote.db.other")
    with pytest.raises(
        TableError, match=r"the catalog 'closed' cannot be read: .*PYICEBERG_CATALOG__CLOSED__URI"
    ) as error:
        open_table("iceberg:closed.db.t")
    assert TOKEN not in str(error.value)
    assert "wrong" not in str(error.value)


def test_a_pinned_table_keeps_its_rows_and_columns(lake: SqlCatalog) -> None:
    table = lake.create_table("db.t", pa.schema([("text", pa.string())]))
    assert pinned("iceberg:local.db.t") == "iceberg:local.db.t"
    table.append(pa.table({"text": ["a"]}))
    first = table.current_snapshot().snapshot_id  # type: ignore[union-attr]
    assert pinned("iceberg:local.db.t") == f"iceberg:local.db.t@{first}"
    with table.update_schema() as change:
        change.rename_column("text", "body")
    now = pinned("iceberg:local.db.t")
    assert now == pinned(now) == f"iceberg:local.db.t@{first}:1"
    table.append(pa.table({"body": ["b"]}))
    table.manage_snapshots().create_branch(first, "side").commit()
    assert read(now).to_pylist() == [{"body": "a"}]
    assert read(f"iceberg:local.db.t@{first}").to_pylist() == [{"text": "a"}]
    assert read("iceberg:local.db.t@side").to_pylist() == [{"body": "a"}]
    assert pinned("iceberg:local.db.t@side") == now
    table.manage_snapshots().remove_branch("side").commit()
    table.maintenance.expire_snapshots().by_id(first).commit()
    with pytest.raises(TableError, match=r"no such snapshot, tag or branch; it may have expired"):
        read(now)


def test_files_without_ids_have_the_names_of_the_mapping(lake: SqlCatalog, tmp_path: Path) -> None:
    table = lake.create_table("db.t", pa.schema([("text", pa.string()), ("stars", pa.int64())]))
    pq.write_table(pa.table({"text": ["a", "b"], "stars": [1, 2]}), tmp_path / "foreign.parquet")
    table.add_files([str(tmp_path / "foreign.parquet")])
    with table.update_schema() as change:
        change.rename_column("text", "body")
        change.delete_column("stars")
    with table.update_schema() as change:
        change.add_column("stars", LongType())
    table.append(pa.table({"body": ["c"], "stars": [3]}))
    expected = table.scan().to_arrow().sort_by("body")
    assert read("iceberg:local.db.t").sort_by("body").to_pylist() == expected.to_pylist()
    with table.transaction() as change:
        change.remove_properties("schema.name-mapping.default")
    with pytest.raises(TableError, match="has no field ids, and .* has no name mapping"):
        read("iceberg:local.db.t")


def test_names_that_changed_places_and_a_condition_on_them(lake: SqlCatalog) -> None:
    table = lake.create_table("db.t", pa.schema([("a", pa.int64()), ("b", pa.int64())]))
    table.append(pa.table({"a": range(1000), "b": range(5000, 6000)}))
    with table.update_schema() as change:
        change.rename_column("a", "c")
    with table.update_schema() as change:
        change.rename_column("b", "a")
    with table.update_schema() as change:
        change.rename_column("c", "b")
    assert read("iceberg:local.db.t", "a", "b", limit=2).to_pylist() == [{"a": 5000, "b": 0}, {"a": 5001, "b": 1}]
    assert read("iceberg:local.db.t", "a", where="a >= 5990")["a"].to_pylist() == [*range(5990, 6000)]
    assert read("iceberg:local.db.t", "a", where="b < 3")["a"].to_pylist() == [5000, 5001, 5002]
    with table.update_schema() as change:
        change.delete_column("a")
    with table.update_schema() as change:
        change.add_column("a", LongType())
    assert read("iceberg:local.db.t", "b", where="a >= 0").num_rows == 0
    assert read("iceberg:local.db.t", "b", where="a is null").num_rows == 1000


def test_a_decimal_that_was_widened(lake: SqlCatalog) -> None:
    schema = Schema(NestedField(1, "price", DecimalType(5, 2)), NestedField(2, "who", StringType()))
    table = lake.create_table("db.t", schema)
    price = pa.array(["1.50", "2.25"]).cast(pa.decimal128(5, 2))
    table.append(pa.table({"price": price, "who": ["a", "b"]}))
    with table.update_schema() as change:
        change.update_column("price", DecimalType(9, 2))
    found = read("iceberg:local.db.t", "price")
    assert found.schema.field("price").type == pa.decimal128(9, 2)
    assert found["price"].cast(pa.decimal128(5, 2)).combine_chunks() == price


def test_a_nested_column_that_changed_is_refused_only_where_it_is_read(lake: SqlCatalog) -> None:
    table = lake.create_table("db.t", pa.schema([("who", pa.struct([("x", pa.int64())])), ("id", pa.int64())]))
    table.append(pa.table({"who": [{"x": 1}], "id": [1]}))
    with table.update_schema() as change:
        change.add_column(("who", "y"), LongType())
    assert read("iceberg:local.db.t", "id")["id"].to_pylist() == [1]
    with pytest.raises(TableError, match="the fields of the nested column 'who' have changed"):
        read("iceberg:local.db.t", "who")


@pytest.mark.parametrize("by", ["catalog", "metadata file"])
def test_a_class_that_a_table_names_is_not_imported(
    lake: SqlCatalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    table = lake.create_table("db.t", pa.schema([("id", pa.int64())]))
    table.append(pa.table({"id": [7]}))
    canary = tmp_path / "imported"
    (tmp_path / "canary.py").write_text(f"open({str(canary)!r}, 'w')\nclass FileIO:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    path = Path(table.metadata_location)
    metadata = json.loads(path.read_text())
    path.write_text(json.dumps({**metadata, "properties": {"py-io-impl": "canary.FileIO"}}))
    assert read("iceberg:local.db.t" if by == "catalog" else str(path))["id"].to_pylist() == [7]
    assert not canary.exists()
