"""Arrow streams, lazy frames and datasets are stored once and then read as any table."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import adbc_driver_sqlite.dbapi as sqlite
import datasets
import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import forked
import tiny
import torchlake as tl
import training_runs as runs
from sweeps import sweep
from torchlake.errors import FingerprintError, Locked, TableError, UsageError
from torchlake.outputs.staging.spool import spooled
from torchlake.storage.lease import acquire
from torchlake.tables.sources import streams
from torchlake.tables.sources.streams import GROUP_ROWS, store
from torchlake.tables.table import open_table

ROWS = 60


class Exporter:
    """Somebody's own object with the interface, and nothing else."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self._table.__arrow_c_stream__(requested_schema)


def relation(table: pa.Table) -> Any:
    return duckdb.connect().from_arrow(table)


@contextmanager
def adbc_result(table: pa.Table) -> Iterator[Any]:
    with sqlite.connect() as connection, connection.cursor() as cursor:
        cursor.adbc_ingest("reviews", table)
        cursor.execute("SELECT id, text, label FROM reviews ORDER BY id")
        yield cursor.fetch_record_batch()


def reader(table: pa.Table) -> pa.RecordBatchReader:
    return table.to_reader(max_chunksize=7)


def iterable_dataset(table: pa.Table) -> Any:
    return datasets.Dataset(table).to_iterable_dataset()


STREAMS: dict[str, Callable[[pa.Table], Any]] = {
    "reader": reader,
    "duckdb": relation,
    "polars lazy": lambda table: pl.from_arrow(table).lazy(),  # type: ignore[union-attr]
    "datasets": datasets.Dataset,
    "datasets streamed": iterable_dataset,
    "own": Exporter,
}
FRAMES: dict[str, Callable[[pa.Table], Any]] = {
    "pyarrow": lambda table: table,
    "pandas": lambda table: table.to_pandas(),
    "polars": pl.from_arrow,
}


def predict(model: Path, table: Any, output: Path, **options: Any) -> pa.Table:
    scored = tl.predict(model, table, output, key="id", engine=tiny.Here(), **options)
    assert scored.rows_in == scored.rows_out
    return pq.read_table(output)


@pytest.mark.parametrize("kind", [*STREAMS, *FRAMES])
def test_a_stream_is_scored_like_a_file_of_its_rows(tmp_path: Path, tiny_model: Path, kind: str) -> None:
    rows = tiny.reviews(ROWS)
    pq.write_table(rows, tmp_path / "reviews.parquet")
    expected = predict(tiny_model, tmp_path / "reviews.parquet", tmp_path / "of_file")
    assert predict(tiny_model, {**STREAMS, **FRAMES}[kind](rows), tmp_path / "of_stream").equals(expected)
    assert {path.name for path in tmp_path.iterdir()} == {"reviews.parquet", "of_file", "of_stream"}


def test_the_result_of_a_query_is_scored(tmp_path: Path, tiny_model: Path) -> None:
    rows = tiny.reviews(ROWS)
    with adbc_result(rows) as result:
        scored = predict(tiny_model, result, tmp_path / "scored")
    assert scored.equals(predict(tiny_model, rows, tmp_path / "of_frame"))


@pytest.mark.parametrize("kind", STREAMS)
def test_streams_and_frames_are_not_taken_for_each_other(kind: str) -> None:
    stream = STREAMS[kind](tiny.reviews(3))
    assert streams.recognizes(stream)
    for source in (*[make(tiny.reviews(3)) for make in FRAMES.values()], "reviews.parquet", Path("a"), None, 3, ["a"]):
        assert not streams.recognizes(source)


def test_rows_can_be_selected_from_a_stream(tmp_path: Path, tiny_model: Path) -> None:
    rows = tiny.reviews(ROWS)
    scored = predict(tiny_model, reader(rows), tmp_path / "scored", where="id >= 20 and label = 'good'", limit=10)
    good = [row["id"] for row in rows.to_pylist() if row["id"] >= 20 and row["label"] == "good"]
    assert scored["id"].to_pylist() == good[:10]


def test_streams_beside_files_have_names_of_their_own(tmp_path: Path, tiny_model: Path) -> None:
    rows = tiny.reviews(ROWS)
    pq.write_table(rows.slice(0, 20), tmp_path / "first.parquet")
    given = [tmp_path / "first.parquet", reader(rows.slice(20, 30)), pl.from_arrow(rows.slice(50))]
    tl.predict(tiny_model, given, tmp_path / "scored", engine=tiny.Here())
    ids = pq.read_table(tmp_path / "scored")["row_id"].to_pylist()
    assert {one.rpartition(":")[0] for one in ids} == {"first.parquet", "input-1.parquet", "input-2.parquet"}
    assert len({*ids}) == ROWS


@pytest.mark.parametrize("kind", sweep(["reader", "polars"], quick=["reader"]))
def test_evaluate_takes_a_stream_and_a_list_with_a_frame(tmp_path: Path, tiny_model: Path, kind: str) -> None:
    rows = tiny.reviews(ROWS)
    pq.write_table(rows, tmp_path / "reviews.parquet")
    expected = tl.evaluate(tiny_model, tmp_path / "reviews.parquet", engine=tiny.Here())
    whole = reader(rows) if kind == "reader" else [pl.from_arrow(rows.slice(0, 11)), reader(rows.slice(11))]
    found = tl.evaluate(tiny_model, whole, engine=tiny.Here())
    assert (found.rows, found.failed, found.confusion) == (expected.rows, expected.failed, expected.confusion)
    assert found.metrics["log_loss"].value == pytest.approx(expected.metrics["log_loss"].value)


def test_training_reads_streams(tmp_path: Path, tiny_bert: Path) -> None:
    sections = runs.job(tmp_path, tiny_bert, epochs=1)
    rows = pq.read_table(sections["data"]["train"])
    tl.train(run=tmp_path / "file", engine=runs.Inline(), **sections)
    streamed = {
        **sections,
        "data": {**sections["data"], "train": [relation(rows.slice(0, 50)), reader(rows.slice(50))]},
    }
    tl.train(run=tmp_path / "stream", engine=runs.Inline(), **streamed)
    assert runs.losses(tmp_path / "stream") == runs.losses(tmp_path / "file")
    assert sorted(path.name for path in (tmp_path / "stream" / "input").iterdir()) == [
        "train-0.parquet",
        "train-1.parquet",
    ]
    # Read again from new streams, the run is complete; with other rows it is refused.
    streamed["data"]["train"] = [relation(rows.slice(0, 50)), reader(rows.slice(50))]
    assert tl.train(run=tmp_path / "stream", engine=runs.Inline(), **streamed).complete
    streamed["data"]["train"] = [relation(rows.slice(0, 50)), reader(rows.slice(51))]
    with pytest.raises(FingerprintError):
        tl.train(run=tmp_path / "stream", engine=runs.Inline(), **streamed)


def test_plan_and_optimize_take_streams(tmp_path: Path, tiny_bert: Path, tiny_model: Path) -> None:
    sections = runs.job(tmp_path, tiny_bert)
    rows = pq.read_table(sections["data"]["train"])
    expected = tl.plan(**sections, flops="1G", bandwidth="1GB", latency=1e-4)
    streamed = {**sections, "data": {**sections["data"], "train": reader(rows)}}
    assert tl.plan(**streamed, flops="1G", bandwidth="1GB", latency=1e-4).rows == expected.rows
    model = shutil.copytree(tiny_model, tmp_path / "model")  # it gets a file with the choice
    chosen = tl.optimize(model, relation(rows), budget=1e-9, rows=20, engine=tiny.Here())
    assert chosen.runtime == "eager"


def test_a_stream_without_an_output_is_refused(tiny_model: Path) -> None:
    with pytest.raises(UsageError, match="a stream needs an output folder"):
        tl.predict(tiny_model, reader(tiny.reviews(3)))


def test_another_stream_does_not_continue_an_output(tmp_path: Path, tiny_model: Path) -> None:
    rows, output = tiny.reviews(ROWS), tmp_path / "scored"
    predict(tiny_model, reader(rows), output)
    before = {path.name: path.stat().st_mtime_ns for path in output.iterdir()}
    again = tl.predict(tiny_model, rows.to_reader(max_chunksize=13), output, key="id", engine=tiny.Here())
    assert again.rows_per_s == 0
    with pytest.raises(FingerprintError, match=r"input\.parquet"):
        predict(tiny_model, reader(rows.slice(1)), output)
    assert {path.name: path.stat().st_mtime_ns for path in output.iterdir()} == before
    assert tl.verify(output).problems == []
    assert {path.name for path in tmp_path.iterdir()} == {"scored"}


def test_one_process_stores_the_rows_of_an_output(tmp_path: Path) -> None:
    output = tmp_path / "scored"
    held = acquire(tmp_path / ".scored.input", 60.0, name="scored")
    with pytest.raises(Locked, match=str(output)), spooled(reader(tiny.reviews(3)), output):
        pass
    held.release()
    with spooled(reader(tiny.reviews(3)), output) as stored:
        assert pq.read_table(stored).num_rows == 3
    assert list(tmp_path.iterdir()) == []


KILLED = """
import sys
import pyarrow.parquet as pq
import tiny, torchlake as tl
model, table, output = sys.argv[1:]
rows = pq.read_table(table).to_reader(max_chunksize=7)
tl.predict(model, rows, output, key="id", chunk_rows=10, engine=tiny.Here())
"""


@pytest.mark.parametrize(
    ("site", "scored"),
    sweep([("spool.rename:1", 60), ("part.rename:3", 40), ("commit.fence:1", 0)], quick=[("part.rename:3", 40)]),
)
def test_a_killed_job_continues_with_the_same_rows(tmp_path: Path, tiny_model: Path, site: str, scored: int) -> None:
    rows, output = tiny.reviews(ROWS), tmp_path / "out" / "scored"
    pq.write_table(rows, tmp_path / "reviews.parquet")
    given = [str(tiny_model), str(tmp_path / "reviews.parquet"), str(output)]
    variables = {**os.environ, "TORCHLAKE_FAILPOINT": f"{site}:kill9"}
    killed = forked.run_script(KILLED, given, environment=variables)
    assert killed.returncode == -9, killed.stderr
    assert not output.exists()
    if scored < ROWS:  # other rows do not continue it
        with pytest.raises(FingerprintError, match=r"input\.parquet"):
            predict(tiny_model, reader(rows.slice(1)), output, chunk_rows=10)
    done = tl.predict(tiny_model, reader(rows), output, key="id", chunk_rows=10, engine=tiny.Here())
    assert done.record["provenance"]["rows_scored"] == scored
    assert pq.read_table(output)["id"].to_pylist() == rows["id"].to_pylist()
    assert [path.name for path in output.parent.iterdir()] == ["scored"]


def failing(rows: int) -> pa.RecordBatchReader:
    schema = pa.schema([("id", pa.int64()), ("text", pa.string())])

    def batches() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch([range(rows), ["good"] * rows], schema=schema)
        raise ValueError("the connection was lost")

    return pa.RecordBatchReader.from_batches(schema, batches())


@pytest.mark.parametrize("rows", [3, GROUP_ROWS + 1])
def test_a_stream_that_fails_leaves_nothing(tmp_path: Path, tiny_model: Path, rows: int) -> None:
    with pytest.raises(TableError, match=f"RecordBatchReader failed after {rows:,} rows: .*the connection was lost"):
        predict(tiny_model, failing(rows), tmp_path / "scored")
    with pytest.raises(TableError):
        store(failing(rows), tmp_path / "stored.parquet")
    assert list(tmp_path.iterdir()) == []


def test_errors_of_a_query_are_those_of_the_library(tmp_path: Path) -> None:
    query = duckdb.connect().sql("SELECT error('no such price') AS text FROM range(3)")
    with pytest.raises(TableError, match="DuckDBPyRelation failed after 0 rows: .*no such price"):
        store(query, tmp_path / "stored.parquet")
    lazy = pl.LazyFrame({"a": ["x"]}).with_columns(pl.col("a").str.to_integer(strict=True))
    with pytest.raises(TableError, match="LazyFrame failed after 0 rows"):
        store(lazy, tmp_path / "stored.parquet")
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pytest.raises(TableError, match="two columns named 'a'"):
        store(Exporter(twice), tmp_path / "stored.parquet")
    union = pa.table(
        {"odd": pa.UnionArray.from_dense(pa.array([0], pa.int8()), pa.array([0], pa.int32()), [pa.array([1])])}
    )
    with pytest.raises(TableError, match="cannot be stored as Parquet"):
        store(Exporter(union), tmp_path / "stored.parquet")
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=25)
@given(sizes=st.lists(st.integers(0, GROUP_ROWS + 3), max_size=6))
def test_equal_rows_make_an_equal_file(tmp_path_factory: pytest.TempPathFactory, sizes: list[int]) -> None:
    folder = tmp_path_factory.mktemp("stored")
    total = sum(sizes)
    rows = pa.table(
        {"id": pa.array(range(total), pa.int64()), "text": pa.array([f"row {row % 97}" for row in range(total)])}
    )
    batches = [rows.slice(sum(sizes[:place]), size) for place, size in enumerate(sizes)]
    batched = pa.RecordBatchReader.from_batches(
        rows.schema, (batch for table in batches for batch in table.combine_chunks().to_batches())
    )
    assert store(rows, folder / "one.parquet") == store(batched, folder / "two.parquet") == total
    assert (folder / "one.parquet").read_bytes() == (folder / "two.parquet").read_bytes()
    assert pq.read_table(folder / "one.parquet").equals(rows)


def test_equal_rows_leave_the_file_as_it_is(tmp_path: Path) -> None:
    path, rows = tmp_path / "stored.parquet", tiny.reviews(40)
    store(rows, path)
    before = path.stat()
    store(reader(rows), path)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    store(rows.slice(1), path)
    assert pq.read_table(path).num_rows == 39


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    schema = pa.schema([("text", pa.string())])
    group = GROUP_ROWS * 1000
    held: list[int] = []

    def batches() -> Iterator[pa.RecordBatch]:
        for number in range(200):
            held.append(pa.total_allocated_bytes())
            yield pa.record_batch(
                [pa.array([f"{number:04d}{row:06d}" + "x" * 990 for row in range(2048)])], schema=schema
            )

    before = pa.total_allocated_bytes()
    assert store(pa.RecordBatchReader.from_batches(schema, batches()), tmp_path / "stored.parquet") == 200 * 2048
    assert max(held) - before < 4 * group  # of 25 groups
    assert open_table(tmp_path / "stored.parquet").schema == schema
