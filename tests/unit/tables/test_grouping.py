"""Files of a wanted size and of one partition each, made from parts."""

from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sweeps import examples
from torchlake.errors import StorageError
from torchlake.outputs.grouping import grouped
from torchlake.outputs.parts import Part, PartFolder
from torchlake.storage.spread import in_process


def write(folder: Path, tables: Sequence[pa.Table], **options: Any) -> tuple[PartFolder, list[Part]]:
    folder.mkdir(exist_ok=True)
    place = PartFolder(location=str(folder), **options)
    names = [f"part-{number:05d}.parquet" for number in range(len(tables))]
    return place, [place.write(name, rows, chunk=at) for at, (name, rows) in enumerate(zip(names, tables, strict=True))]


def numbers(count: int, rows: int = 2) -> list[pa.Table]:
    return [pa.table({"x": range(rows * at, rows * (at + 1))}) for at in range(count)]


def group(place: PartFolder, parts: Sequence[Part], **options: Any) -> list[Part]:
    return grouped(place, parts, **{"size": None, "spread": in_process, **options})


def read(place: PartFolder, files: Sequence[Part]) -> pa.Table:
    return pa.concat_tables([pq.read_table(f"{place.location}/{one.name}", partitioning=None) for one in files])


def test_without_a_size_the_parts_are_the_files(tmp_path: Path) -> None:
    place, parts = write(tmp_path / "out", numbers(3))
    assert group(place, parts) == parts
    assert group(place, [], size=1) == []


@pytest.mark.parametrize("factor", [0.5, 1, 2.5, 100])
def test_files_are_not_larger_than_asked_for_except_for_single_parts(tmp_path: Path, factor: float) -> None:
    place, parts = write(tmp_path / "out", numbers(10))
    size = int(parts[0].bytes * factor)
    files = group(place, parts, size=size)
    for file in files:
        assert len(file.all_chunks) == 1 or sum(parts[chunk].bytes for chunk in file.all_chunks) <= size
    assert len(files) == {0.5: 10, 1: 10, 2.5: 5, 100: 1}[factor]
    assert [chunk for file in files for chunk in file.all_chunks] == list(range(10))
    assert read(place, files)["x"].to_pylist() == list(range(20))
    assert sum(file.rows for file in files) == 20


def test_every_attempt_makes_the_same_files(tmp_path: Path) -> None:
    place, parts = write(tmp_path / "out", numbers(6))
    files = group(place, parts, size=parts[0].bytes * 3)
    damaged = tmp_path / "out" / files[0].name
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-10])
    (tmp_path / "out" / files[1].name).unlink()
    assert group(place, parts, size=parts[0].bytes * 3) == files
    assert damaged.read_bytes() == content


def test_a_sound_file_of_another_writer_stays(tmp_path: Path) -> None:
    """Another version of Arrow writes other bytes; a late writer must not change a file that may be committed."""
    place, parts = write(tmp_path / "out", numbers(4))
    (file,) = group(place, parts, size=1 << 20)
    path = tmp_path / "out" / file.name
    pq.write_table(pq.read_table(path), path, compression="none")
    other = path.read_bytes()
    (again,) = group(place, parts, size=1 << 20)
    assert path.read_bytes() == other
    assert (again.bytes, again.name, again.sha256 != file.sha256) == (len(other), file.name, True)


def test_a_file_of_an_earlier_commit_stays_as_it_is(tmp_path: Path) -> None:
    place, parts = write(tmp_path / "out", numbers(6))
    (first,) = group(place, parts[:3], size=1 << 20)
    before = (tmp_path / "out" / first.name).stat()
    files = group(place, [first, *parts[3:]], size=1 << 20)
    assert files[0] == first
    assert [file.all_chunks for file in files] == [(0, 1, 2), (3, 4, 5)]
    assert (tmp_path / "out" / first.name).stat() == before


@pytest.mark.parametrize("damage", ["gone", "changed"])
def test_a_part_that_is_gone_or_damaged_is_an_error(tmp_path: Path, damage: str) -> None:
    place, parts = write(tmp_path / "out", numbers(3))
    path = tmp_path / "out" / parts[1].name
    path.unlink() if damage == "gone" else path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(
        StorageError, match=f"{parts[1].name}: the part is missing or damaged; run the same command again"
    ):
        group(place, parts, size=1 << 20)


def test_failed_rows_are_counted(tmp_path: Path) -> None:
    tables = [pa.table({"x": [at], "error": pa.array(["bad" if at % 2 else None], pa.string())}) for at in range(5)]
    place, parts = write(tmp_path / "out", tables)
    assert [(file.rows, file.failed) for file in group(place, parts, size=1 << 20)] == [(5, 2)]


VALUES: dict[str, pa.Array] = {
    "bool": pa.array([True, False, None]),
    "int32": pa.array([-1, 0, None], pa.int32()),
    "string": pa.array(["a b/c=d%", "é\n", None]),
    "float64": pa.array([0.1, -2.0, None]),
    "date": pa.array([date(1, 1, 1), date(9999, 12, 31), None]),
    "timestamp": pa.array([datetime(1969, 12, 31, 23, 59, 59, 999_999), datetime(2026, 1, 1), None]),
    "zoned": pa.array([datetime(1969, 1, 1, 0, 0, 0, 1, UTC), datetime(2026, 1, 1, tzinfo=UTC), None]),
    "decimal": pa.array([Decimal("-0.01"), Decimal("99999.99"), None], pa.decimal128(7, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_the_values_of_partitions_are_read_by_delta(tmp_path: Path, name: str) -> None:
    """The text of a value in the log is one that delta-rs reads as this value."""
    from deltalake.transaction import AddAction

    rows = pa.table({"x": range(6), "p": pa.concat_arrays([VALUES[name], VALUES[name]])})
    place, parts = write(tmp_path / "out", [rows.slice(0, 4), rows.slice(4)], statistics=True)
    files = group(place, parts, partition_by=["p"])
    assert len(files) == 3
    table = deltalake.DeltaTable.create(place.location, rows.schema, partition_by=["p"])
    actions = [AddAction(one.name, one.bytes, dict(one.partition), 0, True, one.statistics) for one in files]
    table.create_write_transaction(actions, "append", table.schema(), partition_by=["p"])
    query = (
        deltalake.QueryBuilder()
        .register("t", deltalake.DeltaTable(place.location))
        .execute("select x, p from t order by x")
    )
    found = pa.table(query.read_all()).cast(rows.schema)
    assert found.equals(rows)


@settings(max_examples=examples(40, quick=20))
@example(values=[(float("nan"), None), (float("nan"), "")], cut=1)
@example(values=[(0.0, None), (-0.0, None), (0.0, None)], cut=2)
@given(
    values=st.lists(st.tuples(st.none() | st.floats(), st.none() | st.text(max_size=3)), min_size=1, max_size=8),
    cut=st.integers(0, 8),
)
def test_every_row_is_in_one_file_of_its_partition(
    tmp_path_factory: pytest.TempPathFactory, values: list[tuple[float | None, str | None]], cut: int
) -> None:
    schema = pa.schema([("x", pa.int64()), ("a", pa.float64()), ("b", pa.string())])
    columns = [range(len(values)), [one for one, _ in values], [one for _, one in values]]
    rows = pa.table(
        [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
    )
    place, parts = write(tmp_path_factory.mktemp("out") / "out", [rows.slice(0, cut), rows.slice(cut)])
    files = group(place, parts, partition_by=["a", "b"])
    found = sorted(number for file in files for number in read(place, [file])["x"].to_pylist())
    assert found == list(range(len(values)))
    partitions = [file.partition for file in files]
    assert len({*partitions}) == len(partitions), "a partition has one file"
