"""The promise of a source: what every file in `tables/sources/` keeps, wherever its rows are."""

import json
import os
import signal
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyiceberg.catalog
import pytest
from pyiceberg.utils.config import Config

import forked
import source_tables as tables
import tiny
import torchlake as tl
import training_runs as runs
from source_tables import KINDS, SourceKind, stored
from sweeps import sweep
from torchlake import plugins
from torchlake.errors import DataError, FingerprintError, TableError
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.keys import row_ids
from torchlake.tables.plan import ChunkPlan, plan_from_json, plan_to_json
from torchlake.tables.reading import ChunkReader
from torchlake.tables.selection.options import Selection
from torchlake.tables.sources._find import pinned, source_of
from torchlake.tables.sources._options import ReadOptions
from torchlake.tables.table import open_table

ROWS = 23
TYPES: dict[str, pa.Array] = {
    str(array.type): array
    for array in (
        pa.array([True, None, False]),
        *(pa.array([-(2 ** (bits - 1)), None, 2 ** (bits - 1) - 1], f"int{bits}") for bits in (8, 16, 32, 64)),
        *(pa.array([0, None, 2**bits - 1], f"uint{bits}") for bits in (8, 16, 32, 64)),
        pa.array([1.5, None, float("inf")], pa.float32()),
        pa.array([-0.0, None, 5e-324], pa.float64()),
        pa.array(["", None, "é\n\x00"], pa.string()),
        pa.array(["", None, "long"], pa.large_string()),
        pa.array([b"", None, b"\xff\x00"], pa.binary()),
        pa.array([b"ab", None, b"\xff\x00"], pa.binary(2)),
        pa.array([date(1, 1, 1), None, date(9999, 12, 31)]),
        pa.array([time(0), None, time(23, 59, 59, 999_999)], pa.time64("us")),
        pa.array([datetime(1900, 1, 1), None, datetime(2999, 1, 1, 0, 0, 0, 1)], pa.timestamp("us")),
        pa.array([datetime(1900, 1, 1, tzinfo=UTC), None, datetime(2999, 1, 1, tzinfo=UTC)], pa.timestamp("us", "UTC")),
        pa.array([1, None, -1], pa.timestamp("ns")),
        pa.array([timedelta(0), None, timedelta(days=-1)], pa.duration("us")),
        pa.array([Decimal("-99999.99"), None, Decimal("0.01")], pa.decimal128(7, 2)),
        pa.array([Decimal(10) ** 37, None, Decimal(-1)], pa.decimal128(38, 0)),
        pa.array([[1, None], None, []], pa.list_(pa.int64())),
        pa.array([{"a": 1, "b": None}, None, {"a": None, "b": "x"}], pa.struct({"a": pa.int64(), "b": pa.string()})),
        pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int64())),
        pa.array(["a", None, "a"]).dictionary_encode(),
    )
}


QUICK_TYPES = {*product(KINDS.keys() - {"reader"}, TYPES.keys() - {"int16", "uint16", "uint32"})}
"Readers are stored as DuckDB's relations are, and all sizes of integers alike."


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SourceKind:
    """The source under test, with its catalog in the test's folder."""
    for name, value in tables.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())  # it is read once, when pyiceberg is imported
    return KINDS[request.param]


def read(source: Any, *columns: str, chunk_rows: int = 7, **selection: Any) -> tuple[pa.Table, ChunkPlan, list[str]]:
    """All rows, the plan as it is stored, and the row ids."""
    table = open_table(source, columns=columns, options=ReadOptions(selection=Selection(**selection)))
    names = columns or tuple(table.schema.names)
    plan = plan_from_json(
        json.loads(json.dumps(plan_to_json(plan_chunks(table, columns=names, chunk_rows=chunk_rows))))
    )
    reader = ChunkReader(names)
    pieces = [reader.read(chunk)[0] for chunk in plan.chunks]
    reader.close()
    found = pa.concat_tables(pieces) if pieces else plan.schema.empty_table()
    return found, plan, [one for chunk in plan.chunks for one in row_ids(chunk).to_pylist()]


def by_id(table: pa.Table) -> list[dict[str, Any]]:
    return sorted(table.to_pylist(), key=lambda row: row["id"])


def test_every_source_is_tested() -> None:
    assert {kind.source for kind in KINDS.values()} == {*plugins.names("sources")}


def test_it_is_recognized_by_one_source(kind: SourceKind, tmp_path: Path) -> None:
    kind.write(tmp_path, tiny.reviews(3))
    given = kind.give(tmp_path)
    sources = {name: plugins.load("sources", name) for name in plugins.names("sources") if name != "files"}
    assert [name for name, one in sources.items() if one.recognizes(given)] == [kind.source] * (kind.source != "files")
    assert source_of(given) is sources.get(kind.source)


def test_equal_tables_have_equal_plans_and_other_rows_another(kind: SourceKind, tmp_path: Path) -> None:
    kind.write(tmp_path, tiny.reviews(ROWS))
    source = pinned(stored(kind, tmp_path))
    _, plan, ids = read(source)
    assert (read(source)[1].id, read(source)[2]) == (plan.id, ids)
    kind.write(tmp_path, tiny.reviews(ROWS, seed=1))
    now = read(stored(kind, tmp_path))
    assert now[1].id != plan.id
    assert now[1].rows == 2 * ROWS
    if kind.versioned:
        assert read(source)[1].id == plan.id
        assert read(pinned(stored(kind, tmp_path)))[1].id == now[1].id


@pytest.mark.parametrize("chunk_rows", [1, 7, 1000])
def test_each_row_is_in_one_chunk(kind: SourceKind, tmp_path: Path, chunk_rows: int) -> None:
    kind.write(tmp_path, tiny.reviews(ROWS))
    kind.write(tmp_path, tiny.reviews(ROWS, seed=1))
    found, plan, ids = read(stored(kind, tmp_path), chunk_rows=chunk_rows)
    assert sorted(found.to_pylist(), key=repr) == sorted(kind.read(tmp_path).to_pylist(), key=repr)
    assert all(chunk.rows <= chunk_rows for chunk in plan.chunks)
    assert len({*ids}) == len(ids) == plan.rows == 2 * ROWS


def test_a_table_without_rows_has_its_columns(kind: SourceKind, tmp_path: Path) -> None:
    kind.write(tmp_path, tiny.reviews(3).slice(0, 0))
    found, plan, _ = read(stored(kind, tmp_path))
    assert (found.column_names, plan.rows) == (["id", "text", "label"], 0)


def test_the_columns_that_are_asked_for_are_read_in_that_order(kind: SourceKind, tmp_path: Path) -> None:
    kind.write(tmp_path, tiny.reviews(ROWS))
    found = read(stored(kind, tmp_path), "label", "id")[0]
    assert found.column_names == ["label", "id"]
    assert by_id(found) == by_id(kind.read(tmp_path).select(["label", "id"]))
    with pytest.raises(TableError, match="there is no column 'lable'. Did you mean 'label'"):
        open_table(stored(kind, tmp_path), columns=["lable"])


def test_the_rows_that_are_asked_for_are_read(kind: SourceKind, tmp_path: Path) -> None:
    kind.write(tmp_path, tiny.reviews(ROWS))
    kind.write(tmp_path, tiny.reviews(ROWS, seed=1))
    source, all_rows = pinned(stored(kind, tmp_path)), kind.read(tmp_path)
    wanted = [row for row in all_rows.to_pylist() if row["id"] >= 5 and row["label"] == "good"]
    found = read(source, where="id >= 5 and label = 'good'")[0]
    assert sorted(found.to_pylist(), key=repr) == sorted(wanted, key=repr)
    first = read(source, where="id >= 5", limit=4)
    assert first[0].equals(read(source, where="id >= 5")[0].slice(0, 4))
    sample = [read(source, sample=0.5, seed=seed) for seed in (1, 1, 2)]
    assert sample[0][2] == sample[1][2] != sample[2][2]
    assert {*sample[0][2]} < {*read(source)[2]}


@pytest.mark.parametrize(("kind", "name"), sweep(product(KINDS, TYPES), quick=QUICK_TYPES), indirect=["kind"])
def test_a_type_is_read_as_another_library_reads_it(kind: SourceKind, tmp_path: Path, name: str) -> None:
    rows = pa.table({"id": range(3), "x": TYPES[name]})
    try:
        kind.write(tmp_path, rows)
        expected = kind.read(tmp_path)
    except Exception as error:  # of the library that writes the table
        pytest.skip(f"{kind.source} has no {name}: {type(error).__name__}")
    try:
        source = stored(kind, tmp_path)
    except TableError as error:
        if "cannot be stored as Parquet" not in str(error):  # DuckDB makes intervals of durations, for example
            raise
        return
    found = read(source)[0]
    assert by_id(found.cast(pa.schema([("id", pa.int64()), ("x", found.schema.field("x").type)]))) == by_id(expected)


def test_a_file_that_is_gone_is_named(kind: SourceKind, tmp_path: Path) -> None:
    kind.write(tmp_path, tiny.reviews(ROWS))
    source = pinned(stored(kind, tmp_path))
    plan = read(source)[1]
    gone = Path(plan.chunks[0].file.removeprefix("file://"))
    gone.unlink()
    with pytest.raises(DataError, match=gone.name):
        ChunkReader(["id"]).read(plan.chunks[0])
    with pytest.raises(DataError, match=gone.name if kind.source != "files" else "has no table files"):
        open_table(source)


def test_a_file_that_changes_is_refused(kind: SourceKind, tmp_path: Path) -> None:
    kind.write(tmp_path, tiny.reviews(ROWS))
    source = pinned(stored(kind, tmp_path))
    plan = read(source)[1]
    changed = Path(plan.chunks[0].file.removeprefix("file://"))
    pq.write_table(tiny.reviews(ROWS, seed=1), changed)
    with pytest.raises(FingerprintError, match=f"{changed.name}: changed while it was being read"):
        ChunkReader(["id"]).read(plan.chunks[0])


RUN = """
import runpy, sys
sys.argv[:] = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def predict(name: str, folder: Path, model: Path, *, failpoint: str = "", **options: Any) -> Any:
    """`tl.predict` in a process of its own, which makes its own source."""
    variables = {**os.environ, **tables.environment(folder)}
    variables |= {"TORCHLAKE_FAILPOINT": failpoint} if failpoint else {}
    arguments = [tables.__file__, name, str(folder), str(model), str(folder / "scored"), json.dumps(options)]
    return forked.run_script(RUN, arguments, environment=variables)


@pytest.mark.parametrize("kind", sweep(KINDS, quick=["delta"]), indirect=True)
def test_a_killed_job_scores_each_row_once(
    kind: SourceKind, request: pytest.FixtureRequest, tmp_path: Path, tiny_model: Path
) -> None:
    name = next(name for name, one in KINDS.items() if one is kind)
    kind.write(tmp_path, tiny.reviews(ROWS))
    for failpoint in ("part.rename:2:kill9", "commit.fence:1:kill9"):
        killed = predict(name, tmp_path, tiny_model, failpoint=failpoint)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert not (tmp_path / "scored").exists()
    done = predict(name, tmp_path, tiny_model)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) == 0, "the second job had scored every row"
    scored = pq.read_table(tmp_path / "scored")
    assert sorted(scored["id"].to_pylist()) == list(range(ROWS))
    assert scored["error"].null_count == ROWS
    assert tl.verify(tmp_path / "scored").problems == []


@pytest.mark.slow
def test_a_training_resumes_in_the_middle_of_an_epoch(kind: SourceKind, tmp_path: Path, tiny_bert: Path) -> None:
    sections = runs.job(tmp_path, tiny_bert)
    kind.write(tmp_path, tiny.reviews(96))
    if kind.source == "streams":
        pytest.skip("a stream is read in the process that it was made in; test_arrow_streams trains on one")
    sections["data"] = {**sections["data"], "train": kind.give(tmp_path)}
    variables = tables.environment(tmp_path)
    runs.succeed(tmp_path / "whole", sections, **variables)
    assert runs.attempt(tmp_path / "run", sections, failpoint="rank0.step:5:kill9", **variables).exit_code == -9
    if kind.versioned:
        kind.write(tmp_path, tiny.reviews(7, seed=1))
    resumed = runs.succeed(tmp_path / "run", sections, **variables)
    assert 0 < resumed.steps < len(runs.losses(tmp_path / "run"))
    assert runs.weights_sha256(tmp_path / "run") == runs.weights_sha256(tmp_path / "whole")
