"""Values come out in a Delta table's types, at every depth, by every way in: whole table, increment, change feed."""

import datetime
import decimal
import json
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from torchlake.errors import TableError
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.reading import ChunkReader
from torchlake.tables.sources import delta
from torchlake.tables.table import open_table

UTC = datetime.UTC
NOON = datetime.datetime(2024, 1, 1, 12, 0, 0, 123456)


def read(source: Any, *columns: str) -> pa.Table:
    table = open_table(source, columns=columns)
    columns = columns or tuple(table.schema.names)
    reader = ChunkReader(columns)
    try:
        found = [reader.read(chunk)[0] for chunk in plan_chunks(table, columns=columns, chunk_rows=5).chunks]
    finally:
        reader.close()
    return pa.concat_tables(found)


def log(folder: Path, version: int, actions: list[dict[str, Any]]) -> None:
    (folder / "_delta_log").mkdir(parents=True, exist_ok=True)
    (folder / "_delta_log" / f"{version:020d}.json").write_text("\n".join(map(json.dumps, actions)) + "\n")


def field(name: str, kind: Any, **metadata: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, "nullable": True, "metadata": metadata}


def table_of(folder: Path, columns: list[dict[str, Any]], **configuration: str) -> None:
    """Write version 0: the columns, and no rows."""
    features = ["timestampNtz", "typeWidening", *(["columnMapping"] if configuration else [])]
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": features, "writerFeatures": features}
    meta = {
        "id": str(uuid.uuid4()), "format": {"provider": "parquet", "options": {}}, "partitionColumns": [],
        "schemaString": json.dumps({"type": "struct", "fields": columns}), "configuration": configuration,
        "createdTime": 1,
    }  # fmt: skip
    log(folder, 0, [{"protocol": protocol}, {"metaData": meta}])


def add(folder: Path, version: int, rows: pa.Table) -> None:
    name = f"{version}.parquet"
    pq.write_table(rows, folder / name)
    size = (folder / name).stat().st_size
    entry = {"path": name, "partitionValues": {}, "size": size, "modificationTime": 1, "dataChange": True}
    log(folder, version, [{"add": entry}])


WIDENINGS: list[tuple[str, pa.DataType, Any, Any]] = [
    ("short", pa.int8(), 1, 1),
    ("integer", pa.int8(), 1, 1),
    ("long", pa.int32(), -5, -5),
    ("double", pa.int8(), 1, 1.0),
    ("double", pa.int16(), 1, 1.0),
    ("double", pa.int32(), 7, 7.0),
    ("double", pa.float32(), 0.5, 0.5),
    ("decimal(10,0)", pa.int8(), 3, decimal.Decimal(3)),
    ("decimal(12,2)", pa.int32(), 3, decimal.Decimal("3.00")),
    ("decimal(20,0)", pa.int64(), 3, decimal.Decimal(3)),
    ("decimal(10,3)", pa.decimal128(5, 2), decimal.Decimal("1.25"), decimal.Decimal("1.250")),
    ("timestamp_ntz", pa.date32(), datetime.date(2024, 1, 2), datetime.datetime(2024, 1, 2)),
    ("timestamp", pa.timestamp("us"), NOON, NOON.replace(tzinfo=UTC)),
    ("timestamp", pa.timestamp("ms", "UTC"), NOON.replace(microsecond=0), NOON.replace(microsecond=0, tzinfo=UTC)),
]


@pytest.mark.parametrize(("kind", "stored", "value", "expected"), WIDENINGS)
def test_a_column_that_was_widened_at_every_depth(
    tmp_path: Path, kind: str, stored: pa.DataType, value: Any, expected: Any
) -> None:
    struct = {"type": "struct", "fields": [field("x", kind), field("later", "string")]}
    columns = [
        field("id", "long"), field("v", kind), field("s", struct),
        field("l", {"type": "array", "elementType": struct, "containsNull": True}),
        field("m", {"type": "map", "keyType": "string", "valueType": struct, "valueContainsNull": True}),
    ]  # fmt: skip
    table_of(tmp_path, columns)
    inner = pa.struct([("X", stored)])
    arrays = {
        "id": pa.array([1, 2]), "v": pa.array([value, None], stored),
        "s": pa.array([{"X": value}, None], inner), "l": pa.array([[{"X": value}, None], None], pa.list_(inner)),
        "m": pa.array([[("k", {"X": value})], None], pa.map_(pa.string(), inner)),
    }  # fmt: skip
    add(tmp_path, 1, pa.table(arrays))
    one = {"x": expected, "later": None}
    rows = [
        {"id": 1, "v": expected, "s": one, "l": [one, None], "m": [("k", one)]},
        {"id": 2, "v": None, "s": None, "l": None, "m": None},
    ]
    whole = read(str(tmp_path))
    assert whole.to_pylist() == rows
    assert read(f"{tmp_path}@v0..v1").equals(whole)
    types = pa.schema(DeltaTable(tmp_path).schema().to_arrow())
    assert [one.type for one in whole.schema] == [types.field(name).type for name in whole.column_names]


@pytest.mark.parametrize(
    ("kind", "stored"),
    [("integer", pa.int64()), ("float", pa.float64()), ("decimal(9,0)", pa.int32()), ("long", pa.string()),
     ("decimal(5,3)", pa.decimal128(5, 2)), ("date", pa.timestamp("us")), ("timestamp_ntz", pa.timestamp("us", "UTC"))],
)  # fmt: skip
def test_a_type_that_no_widening_leads_to_is_refused_if_the_column_is_needed(
    tmp_path: Path, kind: str, stored: pa.DataType
) -> None:
    table_of(tmp_path, [field("id", "long"), field("v", kind)])
    add(tmp_path, 1, pa.table({"id": [1], "v": pa.nulls(1, stored)}))
    with pytest.raises(TableError, match=r"'v' is .*, but .* in the table"):
        read(str(tmp_path))
    assert read(str(tmp_path), "id").to_pylist() == [{"id": 1}]


def test_views_inside_of_other_types(tmp_path: Path) -> None:
    """As delta-rs writes them when it rewrites a file."""
    struct = {"type": "struct", "fields": [field("x", "string"), field("b", "binary")]}
    columns = [field("s", struct), field("l", {"type": "array", "elementType": struct, "containsNull": True})]
    table_of(tmp_path, columns)
    inner = pa.struct([("x", pa.string_view()), ("b", pa.binary_view())])
    row = {"s": {"x": "a", "b": b"b"}, "l": [{"x": None, "b": b""}, None]}
    add(tmp_path, 1, pa.table({"s": pa.array([row["s"]], inner), "l": pa.array([row["l"]], pa.list_(inner))}))
    assert read(str(tmp_path)).to_pylist() == [row]


def test_bytes_that_a_table_reads_as_text(tmp_path: Path) -> None:
    table_of(tmp_path, [field("t", "string"), field("b", "binary")])
    add(tmp_path, 1, pa.table({"t": [b"a"], "b": pa.array([b"ab"], pa.binary(2))}))
    assert read(str(tmp_path)).to_pylist() == [{"t": "a", "b": b"ab"}]


def test_columns_are_found_in_any_case(tmp_path: Path) -> None:
    table_of(tmp_path, [field("Id", "long"), field("Text", "string"), field("both", "string")])
    add(tmp_path, 1, pa.table({"ID": [1], "text": ["a"], "both": ["x"], "BOTH": ["y"]}))
    assert read(str(tmp_path)).to_pylist() == [{"Id": 1, "Text": "a", "both": "x"}]
    assert read(f"{tmp_path}@v0..v1", "Text", "Id").to_pylist() == [{"Text": "a", "Id": 1}]
    for where, count in (("Text = 'a'", 1), ("Text = 'b'", 0)):
        assert _selected(tmp_path, where) == count


def _selected(folder: Path, where: str) -> int:
    from torchlake.tables.selection.options import Selection
    from torchlake.tables.sources._options import ReadOptions

    table = open_table(str(folder), columns=["Id"], options=ReadOptions(selection=Selection(where=where)))
    return plan_chunks(table, columns=["Id"]).rows


def test_columns_are_found_by_id(tmp_path: Path) -> None:
    def mapped(name: str, number: int) -> dict[str, Any]:
        metadata = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": f"col-{number}"}
        return field(name, "long", **metadata)

    columns = [mapped("a", 1), mapped("b", 2)]
    table_of(tmp_path, columns, **{"delta.columnMapping.mode": "id", "delta.columnMapping.maxColumnId": "2"})
    ids = [pa.field("b", pa.int64(), metadata={"PARQUET:field_id": "1"}),
           pa.field("col-1", pa.int64(), metadata={"PARQUET:field_id": "2"})]  # fmt: skip
    add(tmp_path, 1, pa.table([pa.array([10]), pa.array([20])], schema=pa.schema(ids)))
    assert read(str(tmp_path)).to_pylist() == [{"a": 10, "b": 20}]


def test_two_columns_of_one_name_in_a_file(tmp_path: Path) -> None:
    rows = pa.Table.from_arrays([pa.array([1]), pa.array(["a"]), pa.array(["b"])], names=["id", "x", "x"])
    table_of(tmp_path / "t", [field("id", "long"), field("x", "string")])
    add(tmp_path / "t", 1, rows)
    pq.write_table(rows, tmp_path / "a.parquet")
    for source in (tmp_path / "t", tmp_path / "a.parquet"):
        for columns in ((), ("x",)):
            with pytest.raises(TableError, match="has 2 columns named 'x'"):
                read(str(source), *columns)
        assert read(str(source), "id").to_pylist() == [{"id": 1}]


VALUES = {
    "timestamp": pa.array([NOON, NOON.replace(microsecond=0), None], pa.timestamp("us", "UTC")),
    "timestamp_ntz": pa.array([NOON, NOON.replace(year=1600), None], pa.timestamp("us")),
    "date": pa.array([datetime.date(2024, 2, 29), datetime.date(1, 1, 1), None]),
    "decimal": pa.array([decimal.Decimal("1.50"), decimal.Decimal("0.25"), None], pa.decimal128(10, 2)),
    "long": pa.array([-(2**63), 2**63 - 1, None]),
    "byte": pa.array([-1, 127, None], pa.int8()),
    "double": pa.array([0.1, float("inf"), None]),
    "boolean": pa.array([True, False, None]),
    "string": pa.array(["a b/=%:é", "2024-01-01", None]),
}  # fmt: skip


@pytest.mark.parametrize("partitioned", [True, False])
@pytest.mark.parametrize("kind", sorted(VALUES))
def test_a_value_is_the_same_by_every_way(tmp_path: Path, kind: str, partitioned: bool) -> None:
    values = VALUES[kind]
    rows = pa.table({"id": pa.array([1, 2, 3]), "v": values})
    config = {"delta.enableChangeDataFeed": "true"}
    by = ["v"] if partitioned else None
    write_deltalake(tmp_path, rows.slice(0, 0), configuration=config, partition_by=by)
    write_deltalake(tmp_path, rows, mode="append", partition_by=by)
    whole, added = read(str(tmp_path)).sort_by("id"), read(f"{tmp_path}@v0..v1").sort_by("id")
    assert whole["v"].to_pylist() == values.to_pylist()
    assert added.equals(whole)
    followed = delta.follow(tmp_path)
    assert followed is not None
    if partitioned and kind.startswith(("string", "timestamp")):
        # deltalake looks for the files of escaped folders under another name.
        with pytest.raises(TableError, match="cannot be read.*Score the whole table again"):
            followed.changed_rows(0, 1, "id")
        return
    changed = followed.changed_rows(0, 1, "id")
    assert changed is not None
    assert changed.rows.select(["id", "v"]).sort_by("id").equals(whole.select(["id", "v"]))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2024-01-01 02:00:00", NOON.replace(hour=2, microsecond=0)), ("2024-01-01 12:00:00.123456", NOON),
     ("2024-01-01T12:00:00.123456Z", NOON), ("", None)],
)  # fmt: skip
def test_both_ways_to_write_a_time_of_a_partition(tmp_path: Path, text: str, expected: Any) -> None:
    rows = pa.table({"id": [1], "v": pa.array([NOON.replace(tzinfo=UTC)], pa.timestamp("us", "UTC"))})
    write_deltalake(tmp_path, rows.slice(0, 0), partition_by=["v"])
    write_deltalake(tmp_path, rows, mode="append", partition_by=["v"])
    path = tmp_path / "_delta_log" / f"{1:020d}.json"
    actions = [json.loads(line) for line in path.read_text().splitlines()]
    for action in actions:
        if "add" in action:
            action["add"]["partitionValues"]["v"] = text
    path.write_text("\n".join(map(json.dumps, actions)))
    value = None if expected is None else expected.replace(tzinfo=UTC)
    for source in (str(tmp_path), f"{tmp_path}@v0..v1"):
        assert read(source)["v"].to_pylist() == [value]


def test_a_value_of_a_partition_that_its_type_does_not_have(tmp_path: Path) -> None:
    rows = pa.table({"id": [1], "v": pa.array([3])})
    write_deltalake(tmp_path, rows.slice(0, 0), partition_by=["v"])
    write_deltalake(tmp_path, rows, mode="append", partition_by=["v"])
    path = tmp_path / "_delta_log" / f"{1:020d}.json"
    path.write_text(path.read_text().replace('"v":"3"', '"v":"three"'))
    for source in (str(tmp_path), f"{tmp_path}@v0..v1"):
        with pytest.raises(TableError, match="three"):
            read(source)
