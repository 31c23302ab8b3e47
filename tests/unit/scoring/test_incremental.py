"""Incremental scoring: what is new is added once, changed rows are followed by key, a killed call is continued."""

import os
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyiceberg.catalog
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.utils.config import Config

import forked
import tiny
import torchlake as tl
from sweeps import sweep
from torchlake.errors import FingerprintError, OutputError, TableError, UsageError

FEED = {"delta.enableChangeDataFeed": "true"}
CALL = "import sys, torchlake as tl; tl.predict(*sys.argv[1:4], key='id', format='delta', incremental=True)"


def rows(first: int, stop: int, text: str = "good film") -> pa.Table:
    return pa.table({"id": range(first, stop), "text": [f"{text} {number}" for number in range(first, stop)]})


def add(table: Path, first: int, stop: int, **options: Any) -> None:
    write_deltalake(table, rows(first, stop), mode="append", **options)


def score(model: Path, table: Path, output: Path, **options: Any) -> int:
    """The rows that an incremental call reads."""
    given = {"key": "id", "format": "delta", **options}
    return tl.predict(model, table, output, incremental=True, **given).rows_in


def ids(output: Path) -> list[int]:
    return sorted(tl.open(output).to_table(columns=["id"])["id"].to_pylist())


def test_versions_are_added_once_and_a_compaction_is_nothing_new(tiny_model: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    add(source, 0, 10)
    assert [score(tiny_model, source, out), score(tiny_model, source, out)] == [10, 0]
    add(source, 10, 14)
    add(source, 14, 20)
    DeltaTable(source).optimize.compact()
    assert [score(tiny_model, source, out), score(tiny_model, source, out)] == [10, 0]
    DeltaTable(source).optimize.compact()
    assert score(tiny_model, source, out) == 0
    assert ids(out) == list(range(20))
    assert tl.verify(out).problems == []


def test_changed_and_deleted_rows_are_followed_by_key(tiny_model: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    add(source, 0, 10, configuration=FEED)
    score(tiny_model, source, out, columns=["text"])
    DeltaTable(source).delete("id < 3")
    DeltaTable(source).update(predicate="id = 7", updates={"text": "'bad bad bad'"})
    DeltaTable(source).update(predicate="id = 8", updates={"text": "'bad'"})
    DeltaTable(source).update(predicate="id = 8", updates={"text": "'the last one'"})
    add(source, 20, 22)
    DeltaTable(source).delete("id = 21")
    assert score(tiny_model, source, out, columns=["text"]) == 3
    assert score(tiny_model, source, out, columns=["text"]) == 0
    found = {row["id"]: row["text"] for row in tl.open(out).to_table().to_pylist()}
    expected = {row["id"]: row["text"] for row in DeltaTable(source).to_pyarrow_table().to_pylist()}
    assert found == expected
    assert tl.open(out).count_rows() == len(expected)


@pytest.mark.parametrize(("key", "feed"), [("id", {}), (None, FEED)], ids=["without a feed", "without a key"])
def test_changed_rows_are_refused_without_a_feed_or_a_key(
    tiny_model: Path, tmp_path: Path, key: str | None, feed: dict[str, str]
) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    add(source, 0, 10, configuration=feed)
    score(tiny_model, source, out, key=key)
    DeltaTable(source).delete("id = 3")
    with pytest.raises(TableError, match=r"version 1 removed or changed rows .*mode overwrite"):
        score(tiny_model, source, out, key=key)
    assert tl.open(out).count_rows() == 10


def test_new_files_of_a_folder_are_added_and_changed_ones_refused(tiny_model: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    for number, (first, stop) in enumerate(((0, 5), (5, 9), (9, 12))):
        pq.write_table(rows(first, stop), source / f"{number}.parquet")
        assert [score(tiny_model, source, out), score(tiny_model, source, out)] == [stop - first, 0]
    assert ids(out) == list(range(12))
    pq.write_table(rows(0, 5, "another"), source / "0.parquet")
    with pytest.raises(FingerprintError, match=r"0.parquet: has changed since its rows were added"):
        score(tiny_model, source, out)


@pytest.mark.parametrize(
    "site",
    sweep(
        ["plan.done", "part.done", "commit.ready", "commit.before_publish", "commit.publish", "commit.cleanup"],
        quick=["commit.publish"],
    ),
)
def test_a_killed_call_is_continued_after_the_table_has_moved_on(tiny_model: Path, tmp_path: Path, site: str) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    add(source, 0, 10)
    score(tiny_model, source, out)
    add(source, 10, 20)
    variables = {**os.environ, "TORCHLAKE_FAILPOINT": f"{site}:1:kill9"}
    done = forked.run_script(CALL, [str(tiny_model), str(source), str(out)], environment=variables)
    assert done.returncode == -signal.SIGKILL
    add(source, 20, 25)
    score(tiny_model, source, out)
    assert ids(out) == list(range(25))
    assert score(tiny_model, source, out) == 0


def test_a_whole_table_can_be_scored_first(tiny_model: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    add(source, 0, 10)
    tl.predict(tiny_model, source, out, key="id", format="delta")
    add(source, 10, 15)
    assert score(tiny_model, source, out) == 5
    add(source, 15, 18)
    tl.predict(tiny_model, source, out, key="id", mode="overwrite")
    assert score(tiny_model, source, out) == 0
    assert ids(out) == list(range(18))


def test_what_cannot_be_followed_is_refused_before_any_work(tiny_model: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    add(source, 0, 4)
    for options, match in (
        ({"format": "parquet"}, "incremental adds to a Delta or Iceberg table"),
        ({"mode": "overwrite"}, "use mode create or append"),
        ({"sample": 0.5}, "leave out sample and limit"),
    ):
        with pytest.raises(UsageError, match=match):
            score(tiny_model, source, out, **options)
    with pytest.raises(UsageError, match="without a version"):
        score(tiny_model, f"{source}@v0", out)
    with pytest.raises(UsageError, match="reads one Delta or Iceberg table"):
        score(tiny_model, [source, source], out)
    add(out, 0, 2)
    with pytest.raises(OutputError, match="has rows that this job did not write"):
        score(tiny_model, source, out)


def test_the_versions_in_between_are_a_table(tmp_path: Path) -> None:
    source = tmp_path / "in"
    for first in (0, 10, 20):
        add(source, first, first + 10)
    from torchlake.tables.table import open_table

    table = open_table(f"{source}@v0..v1")
    assert [pq.read_table(file)["id"].to_pylist() for file in table.files] == [list(range(10, 20))]
    assert table.sources[0]["since"] == 0


def test_snapshots_of_an_iceberg_table_are_added_once(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__URI", f"sqlite:///{tmp_path}/catalog.db")
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__WAREHOUSE", f"file://{tmp_path}/warehouse")
    monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())  # it is read once, when pyiceberg is imported
    lake = pyiceberg.catalog.load_catalog("lake")
    lake.create_namespace("films")
    source = lake.create_table("films.reviews", rows(0, 1).schema)
    out = tmp_path / "out"
    assert score(tiny_model, "iceberg:lake.films.reviews", out) == 0
    for first, stop in ((0, 10), (10, 14), (14, 20)):
        source.append(rows(first, stop))
        assert score(tiny_model, "iceberg:lake.films.reviews", out) == stop - first
        assert score(tiny_model, "iceberg:lake.films.reviews", out) == 0
    source.append(rows(20, 22))
    source.append(rows(22, 25))
    assert score(tiny_model, "iceberg:lake.films.reviews", out) == 5
    assert ids(out) == list(range(25))
    source.delete("id = 3")
    with pytest.raises(TableError, match=r"changed or deleted rows .*mode overwrite"):
        score(tiny_model, "iceberg:lake.films.reviews", out)
    lake.close()


@pytest.fixture(scope="module")
def tiny_model(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build_model(tmp_path_factory.mktemp("model") / "model", encoder=tiny_bert)
