"""Deaths while a chunk is read or tokenized: they cost no row of another chunk anything, and one row of their own."""

from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import reading_crashes
import scoring_runs
import tiny
import torchlake as tl
from misbehaving import misbehave
from reading_crashes import WORD, Crashing
from torchlake.errors import DataError, TableError
from torchlake.preparation.prepare import prepare

BAD, FIRST, LAST = 15, 10, 19
"The row that crashes, and the first and last row of its chunk: the second of three."
TEXTS = [
    f"{tiny.OTHER[row % len(tiny.OTHER)]} good film {row % 7} {WORD if row == BAD else 'bad'}" for row in range(30)
]
KILLED = "killed_process: twice, while it was tokenized"
HUNG = "timeout: gave no answer, twice, while it was tokenized"
UNREADABLE = f"in.parquet: the rows {FIRST} to {LAST} cannot be read: 3 processes died while reading"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return tiny.build_model(folder / "model", encoder=tiny.build_encoder(folder / "encoder"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    labels = ["good", "bad"] * (len(TEXTS) // 2)
    path = tmp_path_factory.mktemp("source") / "in.parquet"
    pq.write_table(pa.table({"id": range(len(TEXTS)), "text": TEXTS, "label": labels}), path)
    return path


@pytest.fixture(scope="module")
def whole(model: Path, source: Path, tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    """The predictions of a job that nothing happens to."""
    output = tmp_path_factory.mktemp("whole") / "out"
    tl.predict(model, source, output, key="id", chunk_rows=10, runtime=misbehave, engine=tl.Local(processes=1))
    return pq.read_table(output)


def but_the_bad_row(table: pa.Table) -> pa.Table:
    return table.filter(pa.array([row != BAD for row in range(len(table))]))


def predicted(model: Path, source: Path, output: Path, engine: Crashing, **options) -> pa.Table:
    options = {"chunk_rows": 10, "batch_tokens": 32, "runtime": reading_crashes.scored_until_the_first_crash, **options}
    tl.predict(model, source, output, key="id", engine=engine, **options)
    return pq.read_table(output)


@pytest.mark.parametrize(
    ("how", "times"),
    [
        pytest.param("kill", 1, marks=pytest.mark.slow),
        pytest.param("abort", 4, marks=pytest.mark.slow),
        ("kill", 99),
    ],
)
def test_a_row_whose_tokenizing_kills_costs_itself(
    model: Path, source: Path, whole: pa.Table, tmp_path: Path, how: str, times: int
) -> None:
    engine = Crashing("tokenize", how, times, tmp_path / "log")
    table = predicted(model, source, tmp_path / "out", engine)
    assert reading_crashes.crashes(tmp_path / "log") == min(times, 2)
    if times == 1:
        assert table.equals(whole)
    else:
        assert scoring_runs.errors(tmp_path / "out") == {BAD: KILLED}
        assert but_the_bad_row(table).equals(but_the_bad_row(whole))


@pytest.mark.parametrize(
    ("how", "times"),
    [
        pytest.param("abort", 1, marks=pytest.mark.slow),
        ("kill", 4),
        pytest.param("kill", 99, marks=pytest.mark.slow),
    ],
)
def test_a_chunk_whose_reading_kills_ends_the_job_and_costs_no_row_of_another(
    model: Path, source: Path, whole: pa.Table, tmp_path: Path, how: str, times: int
) -> None:
    engine = Crashing("read", how, times, tmp_path / "log")
    if times > 1:
        with pytest.raises(TableError, match=UNREADABLE):
            predicted(model, source, tmp_path / "out", engine)
        assert reading_crashes.crashes(tmp_path / "log") == 3
        (part,) = (tmp_path / ".out.staging" / "table").iterdir()
        assert pq.read_table(part).equals(whole.slice(0, FIRST))
    if times == 99:
        with pytest.raises(TableError, match=UNREADABLE):
            predicted(model, source, tmp_path / "out", engine)
        engine = Crashing("read", how, 0, tmp_path / "log")
    assert predicted(model, source, tmp_path / "out", engine).equals(whole)


@pytest.mark.slow
@pytest.mark.parametrize("step", ["tokenize", "read"])
def test_a_hang_is_a_death(model: Path, source: Path, whole: pa.Table, tmp_path: Path, step: str) -> None:
    engine = Crashing(step, "hang", 99, tmp_path / "log")
    job = partial(predicted, model, source, tmp_path / "out", engine, runtime=misbehave, row_timeout_s=1.0)
    if step == "read":
        with pytest.raises(TableError, match=r"3 processes died while reading, or took longer than 1 s\."):
            job()
        return
    table = job()
    assert scoring_runs.errors(tmp_path / "out") == {BAD: HUNG}
    assert but_the_bad_row(table).equals(but_the_bad_row(whole))


@pytest.mark.slow
def test_prepare_sets_a_row_aside_whose_tokenizing_kills(model: Path, source: Path, tmp_path: Path) -> None:
    kept = {"tokenizer": model, "spec": tiny.SPEC, "bad_rows": "drop"}
    prepare(source, tmp_path / "whole", engine=tl.Local(processes=1), **kept)
    record = prepare(source, tmp_path / "out", engine=Crashing("tokenize", "kill", 99, tmp_path / "log"), **kept)
    table = pq.read_table(tmp_path / "out")
    assert (record["rows"], record["failed"]) == (len(TEXTS), 1)
    assert [(row, reason) for row, reason in enumerate(table["error"].to_pylist()) if reason] == [(BAD, KILLED)]
    assert table["length"][BAD].as_py() == 0
    assert but_the_bad_row(table).equals(but_the_bad_row(pq.read_table(tmp_path / "whole")))


@pytest.mark.slow
def test_prepare_names_a_row_whose_tokenizing_kills(model: Path, source: Path, tmp_path: Path) -> None:
    engine = Crashing("tokenize", "abort", 99, tmp_path / "log")
    with pytest.raises(DataError, match=f"row {BAD}: {KILLED}"):
        prepare(source, tmp_path / "out", tokenizer=model, spec=tiny.SPEC, engine=engine)


@pytest.mark.slow
def test_prepare_names_the_rows_whose_reading_kills(model: Path, source: Path, tmp_path: Path) -> None:
    engine = Crashing("read", "kill", 99, tmp_path / "log")
    with pytest.raises(
        TableError, match=r"in\.parquet: the rows 0 to 29 cannot be read: 3 processes died while reading"
    ):
        prepare(source, tmp_path / "out", tokenizer=model, spec=tiny.SPEC, engine=engine)
