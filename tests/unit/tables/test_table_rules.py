"""Rules of a table that rows are added to: kept, or refused by name before any row is computed."""

import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyiceberg.catalog
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError, DeltaError, SchemaMismatchError
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.schema import Schema
from pyiceberg.types import ListType, LongType, NestedField, StringType, StructType
from pyiceberg.utils.config import Config

import tiny
import torchlake as tl
from torchlake.errors import OutputError, TorchlakeError
from torchlake.outputs.target import CommitUnknown, Conflict
from torchlake.outputs.targets._delta_rules import WRITABLE, commit_error

FIELDS = {"n": pa.int64()}


class Untouched(tiny.Here):
    """An engine that nothing may be run on."""

    def run_chunks(self, *args: Any, **options: Any) -> Any:
        raise AssertionError("a chunk was run")


def column(name: str, kind: Any = "long", nullable: bool = True, **metadata: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, "nullable": nullable, "metadata": metadata}


def delta(
    folder: Path, columns: list[dict[str, Any]], *, writer: int = 2, features: list[str] | None = None,
    configuration: dict[str, str] | None = None, partitions: list[str] | None = None,
) -> Path:  # fmt: skip
    """Write the log of an empty Delta table."""
    (folder / "_delta_log").mkdir(parents=True)
    both = {*(features or ())} & {"columnMapping", "deletionVectors", "timestampNtz", "v2Checkpoint", "typeWidening"}
    protocol: dict[str, Any] = {"minReaderVersion": 3 if both else 1, "minWriterVersion": writer}
    protocol |= {} if features is None else {"writerFeatures": features}
    protocol |= {"readerFeatures": [*both]} if both else {}
    meta = {
        "id": str(uuid.uuid4()), "format": {"provider": "parquet", "options": {}}, "createdTime": 1,
        "schemaString": json.dumps({"type": "struct", "fields": columns}),
        "partitionColumns": partitions or [], "configuration": configuration or {},
    }  # fmt: skip
    log = folder / "_delta_log" / f"{0:020d}.json"
    log.write_text(json.dumps({"protocol": protocol}) + "\n" + json.dumps({"metaData": meta}) + "\n")
    return folder


PLAIN = [column("id"), column("n"), column("error", "string")]
SMALL = {"delta.invariants": json.dumps({"expression": {"expression": "n < 5"}})}
GENERATED = {"delta.generationExpression": "id * 2"}
IDENTITY = {"delta.identity.start": 1, "delta.identity.step": 1, "delta.identity.allowExplicitInsert": False}


def nines(schema: dict[str, Any] = FIELDS) -> Callable[[], Callable[[pa.RecordBatch], pa.Table]]:
    def make() -> Callable[[pa.RecordBatch], pa.Table]:
        return lambda batch: pa.table({name: pa.nulls(len(batch), kind) for name, kind in schema.items()})

    return make


def add(
    table: str | Path, engine: type = tiny.Here, schema: dict[str, Any] = FIELDS, rows: Any = None, **options: Any
) -> Any:
    rows = pa.table({"id": [1, 2]}) if rows is None else rows
    options = {"key": "id", "mode": "append", **options}
    return tl.map(nines(schema), rows, table, schema=schema, engine=engine(), version="1", **options)


def refused(table: str | Path, match: str, **options: Any) -> None:
    with pytest.raises(TorchlakeError, match=match):
        add(table, Untouched, **options)


@pytest.mark.parametrize(
    ("columns", "protocol", "match"),
    [
        ([column("n", **SMALL)], {"writer": 2}, r"'n' that has an invariant \(delta.invariants"),
        ([column("n", **SMALL)], {"writer": 7, "features": ["invariants"]}, "'n' that has an invariant"),
        ([column("s", {"type": "struct", "fields": [column("n", **SMALL)]})], {"writer": 3}, r"'s\.n' that has an inv"),
        ([column("n", **GENERATED)], {"writer": 4}, "'n' that is generated from other columns"),
        ([column("n", **GENERATED)], {"writer": 7, "features": ["generatedColumns"]},
         "'n' that is generated"),
        ([column("n", CURRENT_DEFAULT="5")], {"writer": 2}, "'n' that has a default value"),
        ([column("n", **IDENTITY)], {"writer": 6}, "writer version 6"),
        ([column("n", **IDENTITY)], {"writer": 5}, "'n' that is an identity column"),
        ([column("n")], {"writer": 6}, "writer version 6"),
        ([column("n", "string", __CHAR_VARCHAR_TYPE_STRING="varchar(3)")], {"writer": 2}, "'n' that takes texts of a"),
        ([column("n")], {"writer": 2, "configuration": {"delta.setTransactionRetentionDuration": "interval 1 day"}},
         r"forgets the ids of commits.* \(delta\.setTransactionRetentionDuration\)"),
        ([column("n")], {"writer": 3, "configuration": {"delta.constraints.small": "n < 5"}},
         r"constraints \(delta\.constraints\.small\)"),
        ([column("n")], {"writer": 7, "features": ["checkConstraints"], "configuration": {"delta.constraints.c": "1"}},
         "constraints"),
        *(
            ([column("n")], {"writer": 7, "features": [feature]}, f"writer feature {feature}, which")
            for feature in (
                "allowColumnDefaults", "clustering", "domainMetadata", "icebergCompatV2", "identityColumns",
                "inCommitTimestamp", "materializePartitionColumns", "rowTracking", "typeWidening", "unknownThing",
            )
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("mode", ["append", "overwrite"])
def test_a_delta_table_with_rules_is_refused_by_name(
    tmp_path: Path, columns: list[dict[str, Any]], protocol: Any, match: str, mode: str
) -> None:
    table = delta(tmp_path / "t", [column("id"), *columns, column("error", "string")], **protocol)
    refused(table, match, mode=mode)


def test_an_append_only_table(tmp_path: Path) -> None:
    table = delta(tmp_path / "t", PLAIN, configuration={"delta.appendOnly": "true"})
    add(table)
    other = pa.table({"id": [3]})
    refused(table, "append-only.*mode append", mode="overwrite", rows=other)
    refused(table, "append-only", mode="replace-where", rows=other)


@pytest.mark.parametrize("feature", sorted(WRITABLE - {"variantType", "variantType-preview"}))
def test_features_without_a_rule_are_written_to(tmp_path: Path, feature: str) -> None:
    table = delta(tmp_path / "t", PLAIN, writer=7, features=[feature])
    add(table)
    assert len(DeltaTable(table).file_uris()) == 1


MAP = {"type": "map", "keyType": "string", "valueType": "long", "valueContainsNull": False}
STRUCT = {"type": "struct", "fields": [column("a", nullable=False)]}


@pytest.mark.parametrize("mode", ["append", "overwrite", "replace-where"])
@pytest.mark.parametrize(
    ("columns", "schema", "place"),
    [
        ([column("n", nullable=False)], FIELDS, "'n'"),
        ([column("n"), column("v", STRUCT)], {**FIELDS, "v": pa.struct([("a", pa.int64())])}, r"'v\.a'"),
        ([column("n"), column("v", {"type": "array", "elementType": "long", "containsNull": False})],
         {**FIELDS, "v": pa.list_(pa.int64())}, r"'v\.element'"),
        ([column("n"), column("v", MAP)],
         {**FIELDS, "v": pa.map_(pa.string(), pa.int64())}, r"'v\.value'"),
    ],
)  # fmt: skip
def test_null_is_not_written_where_a_value_is_needed(
    tmp_path: Path, columns: list[dict[str, Any]], schema: dict[str, Any], place: str, mode: str
) -> None:
    table = delta(tmp_path / "t", [column("id"), *columns, column("error", "string")])
    refused(table, f"NOT NULL.* in {place}.*DROP NOT NULL", mode=mode, schema=schema)


def test_the_error_and_partition_columns_may_be_null(tmp_path: Path) -> None:
    table = delta(tmp_path / "t", [column("id"), column("n"), column("error", "string", nullable=False)])
    refused(table, "NOT NULL.*'error'")
    columns = [column("id"), column("n"), column("p", "string", nullable=False), column("error", "string")]
    table = delta(tmp_path / "p", columns, partitions=["p"])
    refused(table, "NOT NULL.*'p'", schema={**FIELDS, "p": pa.string()})


@pytest.mark.parametrize("mode", ["append", "overwrite", "replace-where"])
def test_a_needed_column_that_the_rows_lack(tmp_path: Path, mode: str) -> None:
    refused(delta(tmp_path / "t", [*PLAIN, column("more", nullable=False)]), "NOT NULL.*'more'", mode=mode)


def test_a_key_without_nulls_is_written_to_a_column_that_needs_values(tmp_path: Path) -> None:
    columns = [column("id", nullable=False), column("n"), column("error", "string")]
    table = delta(tmp_path / "t", columns)
    add(table)
    add(table, rows=pa.table({"id": [2, 3]}), mode="replace-where")
    assert sorted(DeltaTable(table).to_pyarrow_table()["id"].to_pylist()) == [1, 2, 3]
    assert not DeltaTable(table).schema().fields[0].nullable
    (tmp_path / "in.jsonl").write_text('{"id": 4}\nnot json\n')
    refused(table, "NOT NULL.*'id'", rows=tmp_path / "in.jsonl", max_error_rate=1.0)
    generated = delta(tmp_path / "r", [column("row_id", "string", nullable=False), *columns[1:]])
    add(generated, key=None)
    assert DeltaTable(generated).to_pyarrow_table().num_rows == 2


def test_names_that_differ_only_by_case(tmp_path: Path) -> None:
    for name in ("N", "n"):
        table = delta(tmp_path / name, [column("id"), column(name), column("error", "string")])
        other = {name.swapcase(): pa.int64()}
        refused(table, f"'{name}' differs from '{name.swapcase()}' only by case", schema=other, add_columns=True)
        refused(table, "only by case", schema=other)


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SqlCatalog]:
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__URI", f"sqlite:///{tmp_path}/catalog.db")
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__WAREHOUSE", f"file://{tmp_path}/warehouse")
    monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())
    catalog = pyiceberg.catalog.load_catalog("lake")
    assert isinstance(catalog, SqlCatalog)
    catalog.create_namespace("db")
    yield catalog
    catalog.close()


def fields(*given: tuple[str, Any, bool]) -> list[NestedField]:
    return [
        NestedField(number, name, kind, required=required) for number, (name, kind, required) in enumerate(given, 1)
    ]


@pytest.mark.parametrize("mode", ["append", "overwrite"])
def test_required_fields_of_an_iceberg_table(lake: SqlCatalog, mode: str) -> None:
    number, text = LongType(), StringType()
    inner = StructType(NestedField(9, "a", LongType(), required=True))
    items = ListType(8, LongType(), element_required=True)
    given = ("id", number, False), ("n", number, True), ("error", text, False)
    lake.create_table("db.n", Schema(*fields(*given)))
    refused("iceberg:lake.db.n", "NOT NULL.*'n'", mode=mode)
    plain = ("id", number, False), ("n", number, False), ("error", text, False)
    lake.create_table("db.s", Schema(*fields(*plain, ("v", inner, False), ("w", items, False))))
    nested = {**FIELDS, "v": pa.struct([("a", pa.int64())]), "w": pa.list_(pa.int64())}
    refused("iceberg:lake.db.s", r"NOT NULL.*'v\.a', 'w\.element'", mode=mode, schema=nested)


def test_identifier_fields_of_an_iceberg_table(lake: SqlCatalog) -> None:
    given = fields(("id", LongType(), True), ("n", LongType(), False), ("error", StringType(), False))
    lake.create_table("db.t", Schema(*given, identifier_field_ids=[1]))
    add("iceberg:lake.db.t")
    assert lake.load_table("db.t").scan().to_arrow().num_rows == 2
    refused("iceberg:lake.db.t", "only by case", schema={"N": pa.int64()}, add_columns=True)
    given = fields(("id", LongType(), False), ("n", LongType(), True), ("error", StringType(), False))
    lake.create_table("db.o", Schema(*given, identifier_field_ids=[2]))
    refused("iceberg:lake.db.o", "NOT NULL.*'n'")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (CommitFailedError("Failed to commit transaction: 0"), Conflict),
        (CommitFailedError("Failed to commit transaction: Concurrent transaction failed."), Conflict),
        (CommitFailedError("Tried committing existing table version: 3"), Conflict),
        (CommitFailedError("Failed to commit transaction: Delta-rs does not support writer version 9"), OutputError),
        (CommitFailedError("Unsupported table features required: [RowTracking]"), OutputError),
        (CommitFailedError("Table features must be specified, please specify: TimestampWithoutTimezone"), OutputError),
        (CommitFailedError("The transaction includes Remove action with data change but Delta table is append-only"),
         OutputError),
        (CommitFailedError("Log storage error: Generic S3 error"), CommitUnknown),
        (CommitFailedError("Transaction failed: timeout"), CommitUnknown),
        (DeltaError("Kernel error: Error interacting with object store: Generic S3 error"), CommitUnknown),
        (SchemaMismatchError("Invalid data found"), OutputError),
        (DeltaError("Invalid table version"), CommitUnknown),
        (OSError("Generic S3 error"), CommitUnknown),
        (Exception("External error: Schema error: Duplicate field name (case-insensitive): 'N'"), OutputError),
    ],
)  # fmt: skip
def test_only_conflicts_and_unclear_answers_are_retried(error: Exception, kind: type) -> None:
    assert type(commit_error("t", error)) is kind


def test_an_error_of_the_library_is_reported_after_one_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = delta(tmp_path / "t", PLAIN)
    tries = []

    def fail(*args: Any, **options: Any) -> None:
        tries.append(1)
        raise CommitFailedError("Unsupported table features required: [SomethingNew]")

    monkeypatch.setattr(DeltaTable, "create_write_transaction", fail)
    with pytest.raises(OutputError, match="refuses the rows.*SomethingNew.*Finished work is kept"):
        add(table)
    assert len(tries) == 1
    monkeypatch.undo()
    add(table)
    assert DeltaTable(table).to_pyarrow_table().num_rows == 2


def test_a_null_that_gets_through_is_not_written(tmp_path: Path) -> None:
    """A text key of a Parquet file may hold a value that is not UTF-8, which is found when its row is read."""
    bad = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.array([0, 1, 2], pa.int32()).buffers()[1], pa.py_buffer(b"a\xff")]
    )
    pq.write_table(pa.table({"id": bad}), tmp_path / "in.parquet")
    table = delta(tmp_path / "t", [column("id", "string", nullable=False), *PLAIN[1:]])
    with pytest.raises(TorchlakeError, match="id"):
        add(table, rows=tmp_path / "in.parquet", max_error_rate=1.0)
    assert not DeltaTable(table).file_uris()


@pytest.mark.parametrize("error", [NoSuchTableError("gone"), TypeError("wrong"), NotImplementedError("not yet")])
def test_an_error_of_pyiceberg_is_reported_after_one_attempt(
    lake: SqlCatalog, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    given = ("id", LongType(), False), ("n", LongType(), False), ("error", StringType(), False)
    lake.create_table("db.t", Schema(*fields(*given)))
    tries = []

    def fail(*args: Any, **options: Any) -> None:
        tries.append(1)
        raise error

    monkeypatch.setattr(SqlCatalog, "commit_table", fail)
    with pytest.raises(OutputError, match="refuses the rows"):
        add("iceberg:lake.db.t")
    assert len(tries) == 1
