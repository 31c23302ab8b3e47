"""Delta tables: versions, partitions, later columns, deletion vectors, refusals; DuckDB is the other reader."""

import json
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest

import duck
from delta_vectors import delete_by_vector
from folder_writes import write_transaction
from torchlake.errors import TableError, Unavailable
from torchlake.outputs.parts import part_name
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.keys import row_ids
from torchlake.tables.plan import ChunkPlan, plan_from_json, plan_to_json
from torchlake.tables.reading import ChunkReader
from torchlake.tables.table import open_table
from torchlake.tables.verification.verify import verify

WITH_VECTORS = {"delta.enableDeletionVectors": "true"}


def paths(table: Path) -> list[str]:
    return sorted(pa.table(deltalake.DeltaTable(table).get_add_actions())["path"].to_pylist())


def read(source: Any, *columns: str, chunk_rows: int = 7) -> tuple[pa.Table, ChunkPlan, list[str]]:
    """All rows, the plan that was read as it is stored, and the row ids."""
    table = open_table(source, columns=columns)
    names = columns or tuple(table.schema.names)
    plan = plan_chunks(table, columns=names, chunk_rows=chunk_rows)
    stored = plan_from_json(json.loads(json.dumps(plan_to_json(plan))))
    assert stored == plan
    assert stored.id == plan.id
    reader = ChunkReader(names)
    rows = [reader.read(chunk) for chunk in stored.chunks]
    assert not any(errors for _, errors in rows)
    found = pa.concat_tables([one for one, _ in rows]) if rows else plan.schema.empty_table()
    assert found.num_rows == plan.rows
    return found, plan, [one for chunk in stored.chunks for one in row_ids(chunk).to_pylist()]


def test_a_version_is_read_and_recorded(tmp_path: Path) -> None:
    table = tmp_path / "t"
    deltalake.write_deltalake(table, pa.table({"x": [1, 2]}))
    deltalake.write_deltalake(table, pa.table({"x": [3]}), mode="append")
    deltalake.write_deltalake(table, pa.table({"x": [9]}), mode="overwrite")
    assert read(table)[0]["x"].to_pylist() == [9]
    commits = set()
    for version, rows in ((0, [1, 2]), (1, [1, 2, 3]), (2, [9])):
        found, plan, _ = read(f"{table}@v{version}")
        assert sorted(found["x"].to_pylist()) == rows
        own = {"id": deltalake.DeltaTable(table).metadata().id, "position": version}
        (source,) = plan.sources
        assert source == {"kind": "delta", "table": str(table), "version": version, **own, "commit": source["commit"]}
        assert read(f"{table}@v{version}")[1].sources == (source,)
        commits.add(source["commit"])
    assert len(commits - {""}) == 3
    with pytest.raises(TableError, match=r"@v7: the Delta table cannot be read.*Check that version 7 exists"):
        open_table(f"{table}@v7")


def test_partition_columns_have_the_values_of_the_log(tmp_path: Path) -> None:
    rows = pa.table(
        {
            "x": [1, 2, 3],
            "p": ["a b/c%=ü", "z", None],
            "d": [date(2020, 1, 2), None, date(1999, 12, 31)],
            "n": pa.array([-1, 2, None], pa.int32()),
            "t": pa.array([datetime(2020, 1, 1, 1, tzinfo=UTC), None, None], pa.timestamp("us", "UTC")),
        }
    )
    deltalake.write_deltalake(tmp_path / "t", rows, partition_by=["p", "d", "n", "t"])
    assert read(tmp_path / "t")[0].sort_by("x").to_pylist() == rows.to_pylist()
    assert read(tmp_path / "t", "p")[0]["p"].null_count == 1


def test_columns_that_were_added_later_are_null_before(tmp_path: Path) -> None:
    deltalake.write_deltalake(tmp_path / "t", pa.table({"x": [1]}))
    deltalake.write_deltalake(tmp_path / "t", pa.table({"x": [2], "y": ["b"]}), mode="append", schema_mode="merge")
    assert read(tmp_path / "t")[0].sort_by("x").to_pylist() == [{"x": 1, "y": None}, {"x": 2, "y": "b"}]


def test_mapped_column_names_are_read_by_their_logical_names(tmp_path: Path) -> None:
    deltalake.write_deltalake(tmp_path / "t", pa.table({"x": [1]}), configuration={"delta.columnMapping.mode": "name"})
    assert read(tmp_path / "t")[0].to_pylist() == [{"x": 1}]


@pytest.mark.parametrize("inline", [False, True])
def test_deleted_rows_are_left_out_and_row_ids_stay(tmp_path: Path, inline: bool) -> None:
    table = tmp_path / "t"
    rows = pa.table({"x": range(100), "p": ["a b"] * 50 + ["b"] * 50})
    deltalake.write_deltalake(table, rows, partition_by=["p"], configuration=WITH_VECTORS)
    first, second = paths(table)
    delete_by_vector(table, first, [0, 3, 49, *range(14, 21)], inline=inline)
    delete_by_vector(table, second, [1], inline=inline)
    found, plan, ids = read(table)
    assert sorted(found["x"].to_pylist()) == sorted({*range(100)} - {0, 3, 49, *range(14, 21), 51})
    assert plan.selection == {"left_out": {"deleted": 11}}
    numbers = [int(one.rpartition(":")[2]) + (0 if "b%2520" in one or "a%20b" in one else 50) for one in ids]
    assert numbers == found["x"].to_pylist()
    assert read(f"{table}@v0")[1].rows == 100
    assert read(table)[1].id != read(f"{table}@v1")[1].id


def test_duckdb_reads_the_same_rows(tmp_path: Path) -> None:
    table = tmp_path / "t"
    rows = pa.table({"x": range(3000), "p": ["a", "b", "c"] * 1000})
    deltalake.write_deltalake(table, rows, partition_by=["p"], configuration=WITH_VECTORS)
    for place, path in enumerate(paths(table)):
        delete_by_vector(table, path, [*range(place, 1000, 7 + place)], inline=place == 1)
    expected = duck.shared("delta").sql(f"SELECT x, p FROM delta_scan('{table}') ORDER BY x").fetchall()
    found = read(table, chunk_rows=100)[0].sort_by("x")
    assert list(zip(found["x"].to_pylist(), found["p"].to_pylist(), strict=True)) == expected
    assert len(expected) < 3000


def test_an_output_has_the_remaining_rows_once_and_verifies(tmp_path: Path) -> None:
    table, out = tmp_path / "t", tmp_path / "out"
    deltalake.write_deltalake(table, pa.table({"x": range(30)}), configuration=WITH_VECTORS)
    delete_by_vector(table, paths(table)[0], [2, 3, 29])
    _, plan, ids = read(table)

    def score(*, stop_after: int | None) -> None:
        with write_transaction(out, plan=plan, fingerprint={}) as write:
            parts, reader = list(write.done), ChunkReader(["x"])
            for chunk in write.pending[:stop_after]:
                rows = pa.table({"row_id": row_ids(chunk), "x": reader.read(chunk)[0]["x"]})
                parts.append(write.parts.write(part_name(write.plan, chunk, {}), rows, chunk=chunk.index))
            if stop_after is None:
                record = write.commit(parts, {})
                assert [one["version"] for one in record["sources"]] == [1]
                assert record["selection"] == {"left_out": {"deleted": 3}}

    score(stop_after=2)
    score(stop_after=None)
    done = verify(out)
    assert (done.rows_in, done.rows_out, done.problems, done.notes[1:]) == (27, 27, [], [])
    assert [int(one.rpartition(":")[2]) for one in ids] == sorted({*range(30)} - {2, 3, 29})


def test_an_empty_table_has_its_columns(tmp_path: Path) -> None:
    deltalake.write_deltalake(tmp_path / "t", pa.table({"x": [1], "s": ["a"]}))
    deltalake.DeltaTable(tmp_path / "t").delete()
    found, plan, _ = read(tmp_path / "t", "s")
    assert (plan.rows, found.schema.names) == (0, ["s"])
    with pytest.raises(TableError, match="no column 'y'"):
        open_table(tmp_path / "t", columns=["y"])


def test_several_tables_are_one(tmp_path: Path) -> None:
    for name, rows in (("a", [1]), ("b", [2])):
        deltalake.write_deltalake(tmp_path / name, pa.table({"x": rows}))
    found, plan, ids = read([tmp_path / "a", f"{tmp_path / 'b'}@v0"])
    assert found["x"].to_pylist() == [1, 2]
    assert [one.partition("/")[0] for one in ids] == ["a", "b"]
    assert [one["version"] for one in plan.sources] == [0, 0]


def test_a_vacuumed_version_and_a_changed_file_are_refused(tmp_path: Path) -> None:
    table = tmp_path / "t"
    deltalake.write_deltalake(table, pa.table({"x": [1]}))
    deltalake.write_deltalake(table, pa.table({"x": [2]}), mode="overwrite")
    deltalake.DeltaTable(table).vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    with pytest.raises(Unavailable, match=r"Version 0 of .* removed, for example by VACUUM"):
        open_table(f"{table}@v0")
    (table / paths(table)[0]).write_bytes(b"PAR1")
    with pytest.raises(TableError, match="has 4 bytes, .* in the table's log"):
        open_table(table)


def test_a_feature_that_is_not_read_is_refused_by_name(tmp_path: Path) -> None:
    table = tmp_path / "t"
    deltalake.write_deltalake(table, pa.table({"x": [1]}), configuration=WITH_VECTORS)
    (first,) = (table / "_delta_log").glob("*.json")
    log = first.read_text()
    for kind in ("reader", "writer"):
        log = log.replace(f'"{kind}Features":[', f'"{kind}Features":["futureFeature",')
    first.write_text(log)
    with pytest.raises(TableError, match="futureFeature"):
        open_table(table)
