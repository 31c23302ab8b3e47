"""A commit that the caller names is made once, whatever becomes of the order of its rows and of its first attempt."""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyiceberg.catalog
import pytest
from deltalake import DeltaTable, TableFeatures
from pyiceberg.utils.config import Config

import tiny
import torchlake as tl
from delta_vectors import delete_by_vector
from sweeps import sweep
from torchlake.errors import FingerprintError, TableError, TorchlakeError, UsageError
from torchlake.outputs.find import output_of
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.reading import ChunkReader
from torchlake.tables.table import open_table

TABLES = ["delta", "iceberg"]


def rows(batch: int, order: int = 1) -> pa.Table:
    ids = list(range(batch * 20, batch * 20 + 20))[::order]
    return pa.table({"id": pa.array(ids, pa.int64()), "text": [f"film {number}" for number in ids]})


def make_function() -> Callable[[pa.Table], pa.Table]:
    return lambda batch: pa.table({"same": batch["text"]})


def dying_function() -> Callable[[pa.Table], pa.Table]:
    def run(batch: pa.Table) -> pa.Table:
        if 27 in batch["id"].to_pylist():
            raise KeyboardInterrupt
        return pa.table({"same": batch["text"]})

    return run


def write(output: str, table: pa.Table | Path, name: str | None, function: Any = make_function, **options: Any) -> int:
    given: dict[str, Any] = {"version": "1", "batch_rows": 5, "chunk_rows": 5, **options}
    if "columns" not in given:
        given["columns"] = ["id", "text"]
    if name is not None:
        given["commit_id"] = name
    schema = {"same": pa.string()}
    # A function's name is a part of its identity: both are called the same here.
    function.__qualname__ = "make_function"
    return tl.map(function, table, output, schema=schema, key="id", engine=tiny.Here(), **given).rows_out


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], tuple[str, dict[str, Any]]]]:
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__URI", f"sqlite:///{tmp_path}/catalog.db")
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__WAREHOUSE", f"file://{tmp_path}/warehouse")
    monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # frames wait in a folder named after the table
    lake = pyiceberg.catalog.load_catalog("lake")
    lake.create_namespace("films")

    def found(kind: str) -> tuple[str, dict[str, Any]]:
        if kind == "iceberg":
            return "iceberg:lake.films.out", {}
        return str(tmp_path / "out"), {"format": "delta"}

    yield found
    lake.close()


def ids(output: str) -> Counter[int]:
    return Counter(tl.open(output).to_table(columns=["id"])["id"].to_pylist())


@pytest.mark.parametrize(
    ("kind", "mode"),
    sweep(product(TABLES, ["append", "replace-where"]), quick=[("delta", "append"), ("iceberg", "replace-where")]),
)
def test_a_batch_that_is_repeated_in_another_order_is_written_once(place: Any, kind: str, mode: str) -> None:
    output, options = place(kind)
    for batch, order in ((0, 1), (1, 1), (1, 1), (1, -1), (0, -1), (2, -1)):
        assert write(output, rows(batch, order), f"query-{batch}", mode=mode, **options) == 20
    assert ids(output) == Counter(range(60))
    assert tl.verify(output).problems == []
    with pytest.raises(FingerprintError, match=r"the commit 'query-1' was made by another job:\n  version: '1' -> '2'"):
        write(output, rows(1), "query-1", mode=mode, **{**options, "version": "2"})


@pytest.mark.parametrize("kind", TABLES)
def test_a_batch_whose_first_attempt_was_interrupted_goes_on_in_any_order(place: Any, kind: str) -> None:
    output, options = place(kind)
    write(output, rows(0), "query-0", mode="append", **options)
    with pytest.raises(KeyboardInterrupt):
        write(output, rows(1), "query-1", dying_function, mode="append", **options)
    assert ids(output) == Counter(range(20))
    write(output, rows(1, -1), "query-1", mode="append", **options)
    write(output, rows(1), "query-1", mode="append", **options)
    assert ids(output) == Counter(range(40))


@pytest.mark.parametrize("kind", TABLES)
def test_an_append_that_is_repeated_in_other_chunks_adds_nothing(place: Any, kind: str, tmp_path: Path) -> None:
    output, options = place(kind)
    pq.write_table(rows(0), tmp_path / "in.parquet")
    selected: Any = {"mode": "append", "where": "id < 3 or id = 9", **options}
    for chunk_rows in (5, 4):
        write(output, tmp_path / "in.parquet", None, **{**selected, "chunk_rows": chunk_rows})
    assert ids(output) == Counter([0, 1, 2, 9])


def test_a_folder_is_one_commit(tmp_path: Path) -> None:
    output = str(tmp_path / "out")
    for order in (1, -1):
        assert write(output, rows(0, order), "query-0") == 20
    assert ids(output) == Counter(range(20))
    with pytest.raises(FingerprintError, match="the input has changed"):
        write(output, rows(1), "query-1")
    with pytest.raises(FingerprintError, match="has the commit 'query-0'"):
        write(output, rows(0), "query-7")
    assert write(output, rows(1), "query-1", overwrite=True) == 20
    assert ids(output) == Counter(range(20, 40))
    assert write(output, rows(0), None, overwrite=True) == 20
    with pytest.raises(FingerprintError, match="has a commit without an id"):
        write(output, rows(0), "query-1")


@pytest.mark.parametrize("kind", TABLES)
def test_rows_are_replaced_again_if_they_are_not_there(place: Any, kind: str) -> None:
    """Without a name the table has the rows of the last call, whatever others did since; a repeated call is nothing."""
    output, options = place(kind)
    options |= {"mode": "replace-where", "chunk_rows": 50}
    new = rows(0).set_column(1, "text", [["new"] * 20])

    def check(table: pa.Table, *, version: str = "") -> str:
        """Return the version that a call has left, which a second one leaves."""
        for _ in range(2):
            assert write(output, table, None, **options) == len(table)
            found = tl.open(output).to_table(columns=["id", "same"])
            both = found.filter(pc.is_in(found["id"], value_set=table["id"].combine_chunks())).sort_by("id")
            assert both["same"].to_pylist() == table["text"].to_pylist()
            now = output_of(output).target.snapshot().version
            assert version in ("", now)
            version = now
        assert tl.verify(output).problems == []
        return version

    first = check(rows(0))
    check(new.slice(0, 5))
    check(rows(0))
    check(new)
    between = check(rows(0))
    assert check(rows(1)) != between
    check(rows(0), version=output_of(output).target.snapshot().version)
    write(output, new.slice(3, 2), None, mode="append")
    check(rows(0))
    if kind == "delta":
        DeltaTable(output).delete("id = 3")
        check(rows(0))
        DeltaTable(output).restore(int(first))
    else:
        with lake_table() as table:
            table.delete("id = 3")
            check(rows(0))
            with table.refresh().manage_snapshots() as manage:
                manage.set_current_snapshot(int(first))
    check(rows(0))
    check(rows(1))


def test_a_commit_lives_as_long_as_its_rows(place: Any) -> None:
    """After a RESTORE or a deletion by others the rows of a commit are gone: the job writes them again."""
    output, options = place("delta")
    write(output, rows(0), "query-0", mode="append", **options)
    first = DeltaTable(output).version()
    write(output, rows(1), "query-1", mode="append", **options)
    DeltaTable(output).optimize.compact()
    assert write(output, rows(1), "query-1", mode="append", **options) == 20
    assert ids(output) == Counter(range(40)), "a compaction moves rows"
    DeltaTable(output).restore(first)
    assert ids(output) == Counter(range(20))
    for _ in range(2):
        write(output, rows(1), "query-1", mode="append", **options)
        assert ids(output) == Counter(range(40))
    DeltaTable(output).delete("id >= 20")
    for _ in range(2):
        write(output, rows(1), "query-1", mode="append", **options)
        assert ids(output) == Counter(range(40))
    assert tl.verify(output).problems == []
    DeltaTable(output).delete()
    for _ in range(2):
        for batch in (0, 1):
            write(output, rows(batch), f"query-{batch}", mode="append", **options)
        assert ids(output) == Counter(range(40))


def test_iceberg_commits_live_as_long_as_their_rows(place: Any) -> None:
    output, options = place("iceberg")
    lake = pyiceberg.catalog.load_catalog("lake")
    for batch in (0, 1):
        write(output, rows(batch), f"query-{batch}", mode="append", **options)
    first = lake.load_table("films.out").history()[0].snapshot_id
    with lake.load_table("films.out").manage_snapshots() as manage:
        manage.set_current_snapshot(first)
    assert ids(output) == Counter(range(20))
    for _ in range(2):
        write(output, rows(1), "query-1", mode="append", **options)
        assert ids(output) == Counter(range(40))
    lake.load_table("films.out").delete("id >= 20")
    for _ in range(2):
        write(output, rows(1), "query-1", mode="append", **options)
        assert ids(output) == Counter(range(40))
    lake.close()


@pytest.mark.parametrize("mode", ["append", "overwrite", "replace-where"])
def test_rows_are_written_after_each_rollback_to_the_same_snapshot(place: Any, mode: str) -> None:
    output, _ = place("iceberg")
    write(output, rows(0), None)
    with lake_table() as table:
        first = table.current_snapshot().snapshot_id
    for _ in range(3):
        write(output, rows(1), None, mode=mode)
        assert ids(output) == Counter(range(20 if mode == "overwrite" else 0, 40))
        with lake_table() as table, table.manage_snapshots() as manage:
            manage.set_current_snapshot(first)


def test_rows_that_vectors_deleted_are_gone(place: Any) -> None:
    output, options = place("delta")
    for batch in (0, 1):
        write(output, rows(batch), f"query-{batch}", mode="append", **options)
    features = TableFeatures.DeletionVectors
    DeltaTable(output).alter.add_feature(features, allow_protocol_versions_increase=True)

    def delete(first: int, end: int) -> None:
        """As a writer does that marks deleted rows, and leaves the files."""
        for one in pa.table(DeltaTable(output).get_add_actions()).to_pylist():
            low, high = one["min"]["id"], one["max"]["id"]
            if gone := [number - low for number in range(low, high + 1) if first <= number < end]:
                delete_by_vector(Path(output), one["path"], gone)

    def seen() -> list[int]:
        table = open_table(output, columns=["id"])
        reader = ChunkReader(["id"])
        read = [reader.read(one)[0]["id"].to_pylist() for one in plan_chunks(table, columns=["id"]).chunks]
        reader.close()
        return sorted(chain(*read))

    delete(3, 5)
    write(output, rows(0), "query-0", mode="append", **options)
    assert seen() == [0, 1, 2, *range(5, 40)], "a commit some of whose rows are there is made"
    found = tl.verify(output)
    assert found.rows_out == 38
    assert any("2 rows of its files are deleted" in one for one in found.notes)
    delete(20, 40)
    found = tl.verify(output)
    assert found.rows_out == 18
    for _ in range(2):
        write(output, rows(1), "query-1", mode="append", **options)
        assert seen() == [0, 1, 2, *range(5, 40)]


@pytest.mark.parametrize("kind", TABLES)
def test_rows_that_were_deleted_with_half_a_file_are_gone(place: Any, kind: str) -> None:
    """The file with the other half of its rows is written again, so the history alone does not say what it has."""
    output, options = place(kind)
    for batch in (0, 1):
        write(output, rows(batch), f"query-{batch}", mode="append", **options)
    if kind == "delta":
        DeltaTable(output).delete("id >= 18")
    else:
        delete_and_expire("id >= 18")
    for _ in range(2):
        write(output, rows(1), "query-1", mode="append", **options)
        assert ids(output) == Counter({*range(18), *range(20, 40)})


def test_iceberg_commits_whose_snapshots_expired(place: Any) -> None:
    output, options = place("iceberg")
    for batch in (0, 1):
        write(output, rows(batch), f"query-{batch}", mode="append", **options)
    delete_and_expire("id >= 20")
    for _ in range(2):
        write(output, rows(1), "query-1", mode="append", **options)
        assert ids(output) == Counter(range(40))
    delete_and_expire("id >= 0")
    with pytest.raises(TableError, match="the records or rows of its commits were deleted"):
        tl.verify(output)
    for _ in range(2):
        write(output, rows(1), "query-1", mode="append", **options)
        assert ids(output) == Counter(range(20, 40))


def test_compacted_iceberg_rows_are_there_after_their_snapshots_expired(place: Any) -> None:
    output, options = place("iceberg")
    write(output, rows(0), "query-0", mode="append", **options)
    with lake_table() as table:
        table.overwrite(table.scan().to_arrow())
    expire()
    write(output, rows(0), "query-0", mode="append", **options)
    assert ids(output) == Counter(range(20))


@contextmanager
def lake_table() -> Iterator[Any]:
    lake = pyiceberg.catalog.load_catalog("lake")
    yield lake.load_table("films.out")
    lake.close()


def delete_and_expire(rows: str) -> None:
    with lake_table() as table:
        table.delete(rows)
    expire()


def expire() -> None:
    with lake_table() as table:
        old = {one.snapshot_id for one in table.snapshots()} - {table.current_snapshot().snapshot_id}
        table.maintenance.expire_snapshots().by_ids([*old]).commit()


def test_names_are_given_and_not_for_increments(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="commit_id names one commit"):
        write(str(tmp_path / "out"), rows(0), "", format="delta")
    with pytest.raises(TorchlakeError, match="commit_id names one commit"):
        write(str(tmp_path / "out"), rows(0), "a", format="delta", incremental=True)
