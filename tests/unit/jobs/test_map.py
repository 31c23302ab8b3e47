"""`map`: each row once, through any function; what the function may return, and what it costs when it fails."""

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mapping
import scoring_runs
import tiny
import torchlake as tl
from mapping import SCHEMA
from torchlake.errors import FingerprintError, RowErrors, TableError, TooManyErrors, UsageError
from torchlake.jobs.worker.isolation import run_isolated
from torchlake.tables.verification.verify import verify

HERE = tl.Local(processes=1)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return scoring_runs.write_rows(tmp_path / "in.parquet", [f"one{' more' * (row % 5)}" for row in range(100)])


def test_each_row_once_with_its_key(table: Path, tmp_path: Path) -> None:
    mapped = tl.map(mapping.make_counter, table, tmp_path / "out", schema=SCHEMA, columns=["text"], key="id")
    assert (mapped.rows_in, mapped.rows_out, mapped.rows_failed) == (100, 100, 0)
    output = pq.read_table(tmp_path / "out")
    assert output.schema == pa.schema({"id": pa.int64(), **SCHEMA, "error": pa.string()})
    assert output["id"].to_pylist() == list(range(100))
    assert output["words"].to_pylist() == [1 + row % 5 for row in range(100)]
    assert output["error"].null_count == 100
    assert verify(tmp_path / "out").problems == []
    assert mapped.record["provenance"]["function"] == "mapping:make_counter"


def test_without_a_key_rows_have_an_id_and_the_function_gets_all_columns(table: Path, tmp_path: Path) -> None:
    def make() -> Any:
        return lambda batch: pa.table({"sum": pa.array([sum(row["id"] for row in batch.to_pylist())] * len(batch))})

    tl.map(make, table, tmp_path / "out", schema={"sum": pa.int64()}, batch_rows=1, limit=3, engine=HERE)
    output = pq.read_table(tmp_path / "out").to_pylist()
    assert output == [{"row_id": f"in.parquet:{row}", "sum": row, "error": None} for row in range(3)]


def test_options_of_the_input_are_those_of_predict(table: Path, tmp_path: Path) -> None:
    options = {"schema": SCHEMA, "columns": ["text"], "engine": HERE}
    mapped = tl.map(mapping.make_counter, table, tmp_path / "out", where="id >= 90", chunk_rows=4, **options)
    assert mapped.rows_out == 10
    assert len(mapped.record["parts"]) == 3
    frame = pq.read_table(table).slice(0, 5)
    assert tl.map(mapping.make_counter, frame, tmp_path / "frame", **options).rows_out == 5
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_a_table_without_rows_has_the_columns(tmp_path: Path) -> None:
    source = scoring_runs.write_rows(tmp_path / "in.parquet", [])
    assert tl.map(mapping.make_counter, source, tmp_path / "out", schema=SCHEMA, key="id").rows_out == 0
    assert pq.read_table(tmp_path / "out").column_names == ["id", "words", "upper", "error"]


def test_a_class_is_made_once_in_each_process(table: Path, tmp_path: Path) -> None:
    class Counter:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, batch: pa.Table) -> pa.RecordBatch:
            self.calls += 1
            return pa.record_batch({"call": pa.array([self.calls] * len(batch), pa.int32())})

    tl.map(Counter, table, tmp_path / "out", schema={"call": pa.int64()}, batch_rows=30, engine=HERE)
    calls = pq.read_table(tmp_path / "out")["call"]
    assert calls.type == pa.int64(), "int32 is widened"
    assert calls.to_pylist() == [1 + row // 30 for row in range(100)]


def test_rows_that_raise_are_error_rows_and_others_are_not(tmp_path: Path) -> None:
    texts = [mapping.RAISER if row in (0, 17, 18, 99) else f"row {row}" for row in range(100)]
    source = scoring_runs.write_rows(tmp_path / "in.parquet", texts)
    make = mapping.make_misbehaving
    mapped = tl.map(make, source, tmp_path / "out", schema=SCHEMA, columns=["text"], key="id", chunk_rows=40)
    assert mapped.errors == {"ValueError": 4}
    assert mapped.example == f"{source} row 0: ValueError: this text raises"
    output = pq.read_table(tmp_path / "out").to_pylist()
    for row, text in enumerate(texts):
        failed = text == mapping.RAISER
        assert output[row]["upper"] == (None if failed else text.upper())
        assert output[row]["error"] == ("ValueError: this text raises" if failed else None)


def test_a_row_whose_error_is_not_unicode_fails_alone(tmp_path: Path) -> None:
    """With unpaired surrogates, as in a message with a file name that is not UTF-8."""
    bad = {1: ValueError("no file caf\udce9"), 3: RowErrors({0: "half \ud83d"})}

    def run(batch: pa.Table) -> pa.Table:
        for row in batch["id"].to_pylist():
            if row in bad:
                raise bad[row]
        return pa.table({"n": batch["id"]})

    pq.write_table(pa.table({"id": range(5)}), tmp_path / "in.parquet")
    given = {"schema": {"n": pa.int64()}, "key": "id", "version": "1", "max_error_rate": 1.0, "batch_rows": 1}
    tl.map(lambda: run, tmp_path / "in.parquet", tmp_path / "out", engine=tiny.Here(), **given)
    rows = pq.read_table(tmp_path / "out").to_pydict()
    assert rows["n"] == [0, None, 2, None, 4]
    assert rows["error"] == [None, "ValueError: no file caf\\udce9", None, "half \\ud83d", None]


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view()], ids=str)
def test_new_input_may_have_other_types_of_strings(tmp_path: Path, kind: pa.DataType) -> None:
    """As polars writes them, and deltalake where it deletes rows: it was taken for another job."""
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    given = {"schema": {"n": pa.int64()}, "key": "text", "columns": ["id"], "version": "1", "engine": tiny.Here()}
    for name, type in (("a", pa.string()), ("b", kind)):
        rows = {"id": range(3), "text": pa.array([f"{name}{row}" for row in range(3)], type)}
        pq.write_table(pa.table(rows), source / f"{name}.parquet")
        tl.map(mapping.make_numbers, source, out, accept_new_input=True, **given)
    assert not verify(out).problems
    assert sorted(tl.open(out).to_table()["text"].to_pylist()) == ["a0", "a1", "a2", "b0", "b1", "b2"]


def test_a_complete_job_shows_the_failed_rows_of_the_chunks_that_it_kept(tmp_path: Path) -> None:
    """Their numbers are those of the first call, when the input had another file before them."""
    source = tmp_path / "in"
    source.mkdir()
    pq.write_table(pa.table({"text": ["good film"]}), source / "a.parquet")
    pq.write_table(pa.table({"text": ["good film", mapping.RAISER]}), source / "b.parquet")
    given = {"schema": SCHEMA, "columns": ["text"], "engine": tiny.Here()}
    tl.map(mapping.make_misbehaving, source, tmp_path / "out", **given)
    (source / "a.parquet").unlink()
    for _ in range(2):
        made = tl.map(mapping.make_misbehaving, source, tmp_path / "out", accept_removed_input=True, **given)
        assert (made.rows_in, made.rows_failed) == (2, 1)
        assert made.example == f"{source}/b.parquet row 1: ValueError: this text raises"


def test_unreadable_rows_never_reach_the_function(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"text": "good"}\n{"text": \n{"text": "\xff"}\n{"text": "fine"}\n')
    mapped = tl.map(
        mapping.make_counter, tmp_path / "in.jsonl", tmp_path / "out", schema=SCHEMA, max_error_rate=1.0, engine=HERE
    )
    assert mapped.errors == {"bad_json": 1, "bad_utf8": 1}
    assert pq.read_table(tmp_path / "out")["upper"].to_pylist() == ["GOOD", None, None, "FINE"]


def test_too_many_errors_publish_nothing(table: Path, tmp_path: Path) -> None:
    def make() -> Any:
        return lambda batch: batch["no such column"]

    with pytest.raises(TooManyErrors, match="KeyError"):
        tl.map(make, table, tmp_path / "out", schema=SCHEMA)
    assert not (tmp_path / "out").exists()


def returning(value: Any, batch: pa.Table) -> Any:
    return value


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"words": [1]}, "returned a dict, not a pyarrow Table"),
        (pa.table({"words": [1, 2]}), r"rows 0 to 99: the function returned 2 rows for 100.*as a list"),
        (pa.table({"word": [1] * 100}), "returned the columns word, but schema has words"),
        (pa.table({"words": ["1"] * 100}), "'words' is string, but int64 in schema"),
        (pa.table({"words": [0.5] * 100}), "'words' is double, but int64 in schema"),
    ],
)
def test_a_wrong_result_ends_the_job_with_its_place(table: Path, tmp_path: Path, result: Any, message: str) -> None:
    def make() -> Any:
        return partial(returning, result)

    with pytest.raises(UsageError, match=message) as raised:
        tl.map(make, table, tmp_path / "out", schema={"words": pa.int64()}, version="1")
    assert "in.parquet" in str(raised.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"make_worker": mapping.count}, "cannot be called without arguments .*batch"),
        ({"make_worker": "count"}, "make_worker is a str"),
        ({"schema": {}}, "schema has no columns"),
        ({"schema": {"words": int}}, r"'words' is a type; give a type: pa.int64\(\)"),
        ({"schema": pa.schema([("a", pa.int8()), ("A", pa.int8())])}, "two columns 'a'"),
        ({"schema": {"error": pa.string()}}, "torchlake writes the column 'error'"),
        ({"schema": {"row_id": pa.string()}}, "torchlake writes the column 'row_id'"),
        ({"schema": {"id": pa.int64()}, "key": "id"}, "torchlake writes the column 'id'"),
        ({"batch_rows": 0}, "batch_rows: must be at least 1, got 0"),
        ({"batch_rows": -(10**400)}, "batch_rows: must be at least 1, got -1000"),  # no float is as large
        ({"gpus_per_process": -1}, "gpus_per_process: must be at least 0, got -1"),
        ({"on_bad_file": "skip"}, "on_bad_file: expected 'error' or 'quarantine'"),
    ],
)
def test_mistakes_are_found_before_any_work(table: Path, tmp_path: Path, options: dict, message: str) -> None:
    job = {"make_worker": mapping.make_counter, "table": table, "output": tmp_path / "out", "schema": SCHEMA}
    with pytest.raises(UsageError, match=message):
        tl.map(**{**job, **options})
    assert not (tmp_path / "out").exists()


def test_a_missing_column_and_an_unknown_option_name_the_nearest(table: Path, tmp_path: Path) -> None:
    job = {"table": table, "output": tmp_path / "out", "schema": SCHEMA}
    with pytest.raises(TableError, match="Did you mean 'text'"):
        tl.map(mapping.make_counter, columns=["texts"], **job)
    with pytest.raises(TableError, match="no column 'idd'"):
        tl.map(mapping.make_counter, key="idd", **job)
    with pytest.raises(TypeError, match=r"map\(\) got an unexpected keyword argument 'chunk_row'. Did you mean"):
        tl.map(mapping.make_counter, chunk_row=3, **job)


def test_a_worker_that_is_no_function_is_refused(table: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="returned a dict, not a function"):
        tl.map(dict, table, tmp_path / "out", schema=SCHEMA)


def test_other_code_is_refused_and_a_version_decides_when_given(table: Path, tmp_path: Path) -> None:
    job = {"table": table, "output": tmp_path / "out", "schema": {"words": pa.int64()}, "engine": HERE}

    def made_with(number: int) -> Any:
        def make() -> Any:
            return lambda batch: pa.table({"words": [number] * len(batch)})

        return make

    tl.map(made_with(1), **job)
    assert tl.map(made_with(1), **job).rows_per_s == 0.0, "complete: nothing was mapped"
    with pytest.raises(FingerprintError, match="code:"):
        tl.map(made_with(2), **job)
    tl.map(made_with(2), **job, overwrite=True)
    assert set(pq.read_table(tmp_path / "out")["words"].to_pylist()) == {2}
    versioned = {**job, "output": tmp_path / "versioned"}
    tl.map(made_with(1), version="1", **versioned)
    tl.map(made_with(2), version="1", **versioned)
    assert set(pq.read_table(tmp_path / "versioned")["words"].to_pylist()) == {1}
    with pytest.raises(FingerprintError, match="version: '1' -> '2'"):
        tl.map(made_with(2), version="2", **versioned)


def test_a_script_without_a_main_guard(table: Path, tmp_path: Path) -> None:
    """And a second process of the same script, with other comments, finds the job complete."""
    script = (
        "import pyarrow as pa, torchlake as tl\n"
        "STEP = 2\n"
        "def double(number):\n    return number * STEP\n"
        "class Doubled:\n    def __call__(self, batch):\n"
        "        return pa.table({'twice': [double(i) for i in batch['id'].to_pylist()]})\n"
        f"mapped = tl.map(Doubled, {str(table)!r}, {str(tmp_path / 'out')!r}, schema={{'twice': pa.int64()}})\n"
        "print(mapped.rows_per_s > 0)\n"
    )
    path = tmp_path / "script.py"
    for text, expected in ((script, "True"), (script.replace("STEP = 2", "# comment\nSTEP = 2"), "False")):
        path.write_text(text)
        done = subprocess.run([sys.executable, path], env=scoring_runs.environment(None, None, {}), capture_output=True)
        assert done.stdout.decode().strip() == expected, done.stderr.decode()
    assert pq.read_table(tmp_path / "out")["twice"].to_pylist() == [2 * row for row in range(100)]
    path.write_text(script.replace("STEP = 2", "STEP = 3"))
    done = subprocess.run([sys.executable, path], env=scoring_runs.environment(None, None, {}), capture_output=True)
    assert b"FingerprintError" in done.stderr
    assert b"code: " in done.stderr


@given(bad=st.sets(st.integers(0, 40)), memory=st.integers(1, 50))
def test_only_the_rows_that_raise_fail(bad: set[int], memory: int) -> None:
    """Whatever rows raise, and however many fit into memory."""
    errors: dict[int, str] = {}
    ran: list[int] = []
    shrunk: list[int] = []

    def run(rows: np.ndarray) -> None:
        if len(rows) > memory:
            raise MemoryError("not enough memory")
        if bad & set(rows.tolist()):
            raise ValueError("bad")
        ran.extend(rows.tolist())

    run_isolated(np.arange(41), run, errors, out_of_memory=lambda rows: shrunk.append(len(rows)))
    assert sorted(ran) == sorted(set(range(41)) - bad)
    assert errors == dict.fromkeys(bad, "ValueError: bad")
    assert all(rows > memory for rows in shrunk)
    assert bool(shrunk) == (memory < 41)
