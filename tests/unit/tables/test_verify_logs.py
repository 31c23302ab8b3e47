"""What a table's log says about torchlake's files, and the hash of a commit record, are compared by `verify`."""

import datetime
import decimal
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyiceberg.catalog
import pytest
from deltalake import write_deltalake
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.utils.config import Config

import tiny
import torchlake as tl
from torchlake.outputs.targets import iceberg
from torchlake.tables.verification.verify import verify

NOON = datetime.datetime(2024, 1, 1, 12, 0, 0, 123456)
COLUMNS: dict[str, pa.Array] = {
    "n": pa.array([3, None, -5, 7]),
    "f": pa.array([0.5, -0.0, 1e300, None]),
    "t": pa.array(["a" * 50, "\U0010ffff" * 40, "", None]),
    "at": pa.array([NOON, NOON.replace(year=1600), None, NOON], pa.timestamp("us", "UTC")),
    "day": pa.array([datetime.date(2024, 1, 1), datetime.date(1, 1, 1), None, None]),
    "d": pa.array([decimal.Decimal("1.25"), decimal.Decimal("-7.50"), None, None], pa.decimal128(38, 2)),
    "b": pa.array([True, False, None, True]),
    "raw": pa.array([b"\0", b"", None, b"x"]),
    "l": pa.array([[1, None], None, [], [2]]),
    "s": pa.array([{"x": 1}, None, {"x": None}, {"x": 2}]),
    "nothing": pa.nulls(4, pa.int64()),
    "p": pa.array(["a", "b", "a", None]),
}
ROWS = pa.table({"id": [1, 2, 3, 4], **COLUMNS})
SCHEMA = {name: column.type for name, column in COLUMNS.items()}


def make() -> Callable[[pa.Table], pa.Table]:
    return lambda batch: batch.select([*SCHEMA])


def write(output: str | Path, rows: pa.Table = ROWS, **options: Any) -> None:
    tl.map(
        make, rows, output, schema=SCHEMA, key="id", engine=tiny.Here(), version="1", columns=["id", *SCHEMA], **options
    )


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


PARTITIONS = ["p", "n", "at", "day", "d", "b"]


@pytest.mark.parametrize(
    "partition",
    [None, PARTITIONS, *(pytest.param([name], marks=pytest.mark.slow) for name in PARTITIONS)],
    ids=lambda names: "+".join(names or ["none"]),
)
@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_a_log_that_says_what_the_files_have_is_sound(
    tmp_path: Path, lake: SqlCatalog, kind: str, partition: list[str] | None
) -> None:
    output = str(tmp_path / "t") if kind == "delta" else "iceberg:lake.db.t"
    rows = ROWS
    if "d" in (partition or []):  # the library cannot read negative decimals of a partition
        rows = ROWS.set_column(
            ROWS.column_names.index("d"), "d", pa.array([decimal.Decimal(1)] * 4, pa.decimal128(38, 2))
        )
    write(output, rows, format=kind, **({"partition_by": partition} if partition else {}))
    write(output, rows.set_column(0, "id", pa.array([5, 6, 7, 8])), mode="append")
    found = verify(output)
    assert (found.problems, found.rows_out) == ([], 8)


def test_rows_of_others_and_deleted_rows_are_no_problem(tmp_path: Path) -> None:
    write(tmp_path / "t", format="delta")
    write_deltalake(tmp_path / "t", pa.table({"id": [9]}), mode="append", schema_mode="merge")
    assert verify(tmp_path / "t").problems == []


def edit_log(table: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    for file in sorted(table.glob("_delta_log/*.json")):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line in lines:
            if "add" in line:
                change(line["add"])
        file.write_text("\n".join(map(json.dumps, lines)))


def stats(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    def change(add: dict[str, Any]) -> None:
        known = json.loads(add["stats"])
        for name, value in changes.items():
            known[name] = {**known.get(name, {}), **value} if isinstance(value, dict) else value
        add["stats"] = json.dumps(known)

    return change


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (stats(numRecords=3), "3 rows"),
        (stats(minValues={"n": 0}), "the statistics of n"),
        (stats(maxValues={"n": 6}), "the statistics of n"),
        (stats(maxValues={"t": "b"}), "the statistics of t"),
        (stats(maxValues={"at": "2020-01-01T00:00:00.000Z"}), "the statistics of at"),
        (stats(minValues={"day": "2020-01-01"}), "the statistics of day"),
        (stats(minValues={"d": -7}), "the statistics of d"),
        (stats(nullCount={"n": 0}), "the statistics of n"),
        (lambda add: add.update(size=add["size"] + 1), "bytes"),
    ],
)  # fmt: skip
def test_a_changed_log_of_delta(tmp_path: Path, change: Callable[[dict[str, Any]], Any], match: str) -> None:
    write(tmp_path / "t", format="delta")
    edit_log(tmp_path / "t", change)
    (problem,) = verify(tmp_path / "t").problems
    assert "the table's log has wrong values" in problem
    assert match in problem


def test_a_changed_partition_of_delta(tmp_path: Path) -> None:
    write(tmp_path / "t", format="delta", partition_by="p")
    edit_log(tmp_path / "t", lambda add: add["partitionValues"].update(p="z"))
    assert len([one for one in verify(tmp_path / "t").problems if "partition {'p': 'z'}" in one]) == 3


@pytest.mark.parametrize("change", ["rows", "bounds", "nulls", "partition"])
def test_a_changed_entry_of_iceberg(lake: SqlCatalog, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """The entry is changed while it is made, because manifests are not edited by hand."""
    real = iceberg.files.data_file

    def changed(table: Any, path: str, part: Any) -> Any:
        entry = real(table, path, part)
        if change == "rows":
            entry._data[entry_place(entry, "record_count")] = 99
        elif change == "bounds":
            entry.upper_bounds.update({2: (0).to_bytes(8, "little", signed=True)})
        elif change == "nulls":
            entry.null_value_counts.update({2: 3})
        else:
            entry.partition[0] = "z"
        return entry

    monkeypatch.setattr(iceberg.files, "data_file", changed)
    write("iceberg:lake.db.t", **({"partition_by": "p"} if change == "partition" else {}))
    problems = verify("iceberg:lake.db.t").problems
    words = {"rows": "99 rows", "bounds": "statistics of n", "nulls": "statistics of n", "partition": "'p': 'z'"}
    assert problems
    assert all(words[change] in one for one in problems)


def entry_place(entry: Any, name: str) -> int:
    return next(place for place in range(len(entry._data)) if entry._data[place] == getattr(entry, name))


@pytest.mark.parametrize("kind", ["folder", "delta"])
def test_a_record_that_was_edited(tmp_path: Path, kind: str) -> None:
    output = tmp_path / "t"
    write(output, format="delta" if kind == "delta" else None)
    (record,) = [one for one in output.glob("_torchlake/**/*.json") if "plan" not in one.name]
    content = json.loads(record.read_text())
    for name, value in {
        "provenance": {"function": "other"},
        "fingerprint": {},
        "committed": "never",
        "more": 1,
    }.items():
        record.write_text(json.dumps({**content, name: value}))
        assert any("record was edited" in one for one in verify(output).problems)
    earlier = {name: value for name, value in content.items() if name != "record_sha256"}
    record.write_text(json.dumps(earlier))
    assert verify(output).problems == []
    record.write_text(json.dumps(content, sort_keys=True, indent=3))  # only its layout
    assert verify(output).problems == []
    shutil.rmtree(output)
