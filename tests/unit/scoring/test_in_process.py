"""`load`: a model as a function of texts, with the answers of `predict`; and small tables without a second process."""

import json
import shutil
import subprocess
import sys
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import scoring_runs
import tiny
import torchlake as tl
from misbehaving import KILLER, misbehave
from torchlake.engines.local import Local
from torchlake.errors import TableError, UsageError
from torchlake.outputs.staging.folders import staging_of
from torchlake.scoring.values import array_of
from torchlake.scoring.workers import chunks

TEXTS = [*tiny.reviews(30)["text"].to_pylist(), None, "", "  ", "good " * 500]


@pytest.fixture(scope="module")
def regression(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Path:
    spec = replace(tiny.SPEC, problem="regression", labels=(), mean=3.0, deviation=2.0)
    return tiny.build_model(tmp_path_factory.mktemp("regression") / "model", encoder=tiny_bert, spec=spec)


@pytest.fixture
def no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any job of child processes fails."""

    def refuse(self: Local, *args: Any, **options: Any) -> Generator[Any, None, None]:
        raise AssertionError("a child process was asked for")

    monkeypatch.setattr(Local, "run_chunks", refuse)


@pytest.mark.parametrize("options", [{}, {"all_probabilities": True}, {"null": "score"}, {"runtime": "eager"}], ids=str)
def test_the_answers_are_the_rows_that_predict_writes(
    tiny_model: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "in.parquet")
    tl.predict(tiny_model, tmp_path / "in.parquet", tmp_path / "out", **options)
    with tl.load(tiny_model, **options) as classify:
        answers = classify(TEXTS)
    assert answers == pq.read_table(tmp_path / "out").drop_columns("row_id").to_pylist()


def test_a_number_is_predicted_in_the_units_of_the_labels(regression: Path) -> None:
    predicted = tl.predict(regression, pa.table({"text": TEXTS[:5]})).drop_columns("text").to_pylist()
    # The batches differ, and so may the last bit.
    expected = [{**row, "prediction": pytest.approx(row["prediction"], rel=1e-6)} for row in predicted]
    assert tl.load(regression)(TEXTS[:5]) == expected


def test_one_string_has_one_answer_and_bad_texts_have_errors(tiny_model: Path) -> None:
    classify = tl.load(tiny_model)
    answer = classify("good film")
    assert answer.keys() == {"label", "score", "truncated", "error"}
    assert [answer] == classify(["good film"])
    assert [each["error"] for each in classify(["good", None, "", "\ud800"])] == [
        None,
        "null_input",
        "null_input",
        "bad_utf8",
    ]
    assert classify([]) == []
    assert classify("good " * 500)["truncated"]


@pytest.mark.parametrize("text", [("good", "bad"), 7, b"good", [{"role": "user", "content": "good"}]])
def test_other_values_are_refused_with_their_place(tiny_model: Path, text: Any) -> None:
    with pytest.raises(UsageError, match=rf"Text 1 is a {type(text).__name__}; this model takes a list of strings"):
        tl.load(tiny_model)(["good", text])


def test_frames_and_columns_are_scored_like_a_list(tiny_model: Path) -> None:
    classify = tl.load(tiny_model)
    texts = ["good film", None, "a bore"]
    answers = classify(texts)
    assert [answer["error"] for answer in answers] == [None, "null_input", None]
    columns = {"n": [1, 2, 3], "text": texts}
    frames = [pd.DataFrame(columns), pl.DataFrame(columns), pa.table(columns), pa.RecordBatch.from_pydict(columns)]
    categories = pd.DataFrame({"text": pd.Categorical(texts)})
    series = [
        pd.Series(texts),
        pd.Series(texts, dtype="string"),
        pl.Series(texts),
        pd.Series(["good film", np.nan, "a bore"]),
    ]
    arrays = [pa.array(texts), pa.chunked_array([texts[:1], texts[1:]]), np.array(texts, dtype=object), pd.Index(texts)]
    rows = [{"text": text, "n": number} for number, text in enumerate(["good film", float("nan"), "a bore"])]
    others = [iter(texts), (text for text in texts), tuple(texts), dict.fromkeys(texts).keys(), rows, iter(rows)]
    mappings = [{"text": texts, "n": [1, 2, 3]}, {"text": series[3], "n": (number for number in range(3))}]
    for given in [*frames, categories, *series, *arrays, *others, *mappings]:
        assert classify(given) == answers, type(given)
    assert tl.predict(tiny_model, frames[2]).drop_columns(["n", "text"]).to_pylist() == answers
    assert classify(pd.DataFrame({"text": []}, dtype=object)) == classify(np.array([])) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"text": "good"}, "but 'text' is one value. Give one row as a list"),
        ({"text": ["good"], "n": [1, 2]}, "but they have [1, 2] values"),
        ({"n": ["good"]}, "Row 0 has no 'text'"),
        ({"good", "bad"}, "or a frame, not set."),
        (frozenset({"good"}), "or a frame, not frozenset."),
        (b"good", "or a frame, not bytes."),
        (None, "or a frame, not NoneType."),
        (7, "or a frame, not int."),
        (np.array("good"), "or a frame, not ndarray."),
        (np.array([["good", "bad"]]), "Text 0 is a list"),
        (np.array([1.5]), "Text 0 is a float"),
        (pl.LazyFrame({"text": ["good"]}), "not this LazyFrame; use predict"),
        ([{"text": 7}], "the text column 'text' holds int64, not strings"),
        ([{"n": 7}], "Row 0 has no 'text'"),
        (pd.DataFrame({"n": [7]}), "there is no text column 'text'; the table has: n"),
        (pd.DataFrame({"text": [7]}), "the text column 'text' holds int64, not strings"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_rows_of_texts_is_refused(tiny_model: Path, given: Any, words: str) -> None:
    with pytest.raises((UsageError, TableError)) as raised:
        tl.load(tiny_model)(given)
    assert words in str(raised.value)


def test_numbers_and_words_of_any_kind_are_columns() -> None:
    """Arrow refuses whole numbers above those of int64, and beside fractions from 2^53 on."""
    for numbers in ([1 << 70, None], [(1 << 53) + 1, 0.5], [-(1 << 64)]):
        array, errors = array_of(numbers)
        assert (array.to_pylist(), errors) == ([None if each is None else float(each) for each in numbers], {})
    words, errors = array_of([["a"], ["b", "\ud800"], None])
    assert (words.to_pylist(), errors) == ([["a"], None, None], {1: "bad_utf8"})
    assert array_of([{"a": "\ud800"}, {"a": "b"}])[1] == {0: "bad_utf8"}
    with pytest.raises(OverflowError):
        array_of([1 << 70, True])


def test_a_loaded_model_reads_nothing_more_from_its_folder(tiny_bert: Path, tmp_path: Path) -> None:
    """Reading the folder at each call took ten times as long as one row's forward pass."""
    folder = tiny.build_model(tmp_path / "model", encoder=tiny_bert)
    classify = tl.load(folder)
    before = classify(TEXTS)
    shutil.rmtree(folder)
    assert classify(TEXTS) == before
    frame = pd.DataFrame({"text": TEXTS[:3]})
    assert [answer["label"] for answer in classify(frame)] == [answer["label"] for answer in before[:3]]


@pytest.mark.parametrize(
    "runtime",
    ["eager", "varlen", "openvino", *(pytest.param(name, marks=pytest.mark.slow) for name in ("onnx", "compiled"))],
)
def test_files_that_are_written_over_do_not_change_a_loaded_model(
    tiny_bert: Path, tmp_path: Path, runtime: Any
) -> None:
    """A memory map would show the other bytes, and end the process where the file is shorter."""
    folder = tiny.build_model(tmp_path / "model", encoder=tiny_bert)
    with tl.load(folder, runtime=runtime) as classify:
        before = classify(TEXTS[:3])
        weights = [path for path in folder.rglob("*") if path.suffix in (".safetensors", ".onnx", ".bin")]
        for path in weights:
            with path.open("r+b") as file:
                file.write(bytes(path.stat().st_size))
        assert classify(TEXTS[:3]) == before
        # More rows compute with tensors that the first ones did not touch.
        assert [row["error"] for row in classify(TEXTS)] == [None] * 30 + ["null_input"] * 3 + [None]


def test_a_closed_model_says_so(tiny_model: Path) -> None:
    classify = tl.load(tiny_model)
    classify.close()
    with pytest.raises(UsageError, match="closed. Load it again"):
        classify("good")


def test_a_language_model_gives_texts(tiny_gpt2: Path) -> None:
    write = tl.load(tiny_gpt2, max_new_tokens=4, temperature=1.0, seed=3)
    prompts = ["the film", "a good", None]
    rows = tl.predict(tiny_gpt2, pa.table({"text": prompts}), max_new_tokens=4, temperature=1.0, seed=3)
    assert write(prompts) == rows.drop_columns("text").to_pylist()
    chat = [{"role": "user", "content": "the film"}]
    column = pa.array([chat], pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})))
    rows = tl.predict(tiny_gpt2, pa.table({"text": column}), max_new_tokens=4, temperature=1.0, seed=3)
    assert write([chat]) == rows.drop_columns("text").to_pylist()


@pytest.mark.usefixtures("no_child")
def test_a_small_table_is_scored_in_this_process(tiny_model: Path, tmp_path: Path) -> None:
    source = scoring_runs.write_rows(tmp_path / "in.parquet", ["good film"] * chunks.SMALL_ROWS)
    done = tl.predict(tiny_model, source, tmp_path / "out", key="id")
    assert done.rows_out == chunks.SMALL_ROWS
    assert list(done.profile) == ["plan", "torch", "tokenizer", "model", "first batch", "other rows", "commit"]
    assert sum(done.profile.values()) <= done.seconds


@pytest.mark.usefixtures("no_child")
@pytest.mark.parametrize("rule", ["rows", "engine", "runtime", "crash"])
def test_other_tables_are_scored_in_child_processes(tiny_model: Path, tmp_path: Path, rule: str) -> None:
    rows = chunks.SMALL_ROWS + (rule == "rows")
    source = scoring_runs.write_rows(tmp_path / "in.parquet", ["good film"] * rows)
    options = {"engine": {"engine": Local()}, "runtime": {"runtime": misbehave}}.get(rule, {})
    if rule == "crash":
        staging = staging_of(tmp_path / "out")
        staging.mkdir()
        (staging / chunks.MARKER).touch()
    with pytest.raises(AssertionError, match="a child process was asked for"):
        tl.predict(tiny_model, source, tmp_path / "out", key="id", **options)  # type: ignore[arg-type]


PREDICT_WITH_A_CRASH = """
import sys
import misbehaving, torchlake as tl
from torchlake.runtimes import varlen

varlen.load = misbehaving.misbehave  # a kernel of this process that crashes; child processes have the real one
done = tl.predict(*sys.argv[1:], key="id")
print(done.rows_out, done.rows_failed)
"""


@pytest.mark.slow
def test_after_a_crash_in_this_process_the_same_call_uses_child_processes(tiny_model: Path, tmp_path: Path) -> None:
    source = scoring_runs.write_rows(tmp_path / "in.parquet", ["good film", f"a {KILLER} one"])
    command = [sys.executable, "-c", PREDICT_WITH_A_CRASH, str(tiny_model), str(source), str(tmp_path / "out")]
    runs = [
        subprocess.run(
            command,
            env=scoring_runs.environment(None, None, {}),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        for _ in range(2)
    ]
    assert runs[0].returncode == -9, runs[0].stderr
    assert runs[1].stdout == "2 0\n", runs[1].stderr
    assert not staging_of(tmp_path / "out").exists()


def test_an_error_or_interrupt_is_no_crash(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = scoring_runs.write_rows(tmp_path / "in.parquet", ["good film"])
    with monkeypatch.context() as context:
        context.setenv("TORCHLAKE_FAILPOINT", "part.write:1:raise")
        context.setattr("torchlake.failpoints._hits", {})
        with pytest.raises(Exception, match=r"part\.write"):
            tl.predict(tiny_model, source, tmp_path / "out", key="id")
    assert not (staging_of(tmp_path / "out") / chunks.MARKER).exists()


def test_an_output_keeps_its_runtime(tiny_model: Path, tmp_path: Path) -> None:
    """Outputs of versions whose default was eager continue; new ones have varlen."""
    table = tmp_path / "in"
    table.mkdir()
    scoring_runs.write_rows(table / "a.parquet", ["good film"] * 3)
    older = tl.predict(tiny_model, table, tmp_path / "out", key="id", runtime="eager")
    assert tl.predict(tiny_model, table, tmp_path / "out", key="id").record == older.record
    pq.write_table(pa.table({"id": [10], "text": ["bad film"]}), table / "b.parquet")
    done = tl.predict(tiny_model, table, tmp_path / "out", key="id", accept_new_input=True)
    assert (done.rows_out, done.record["provenance"]["runtime"]) == (4, "eager")
    assert tl.predict(tiny_model, table, tmp_path / "new", key="id").record["provenance"]["runtime"] == "varlen"


LOADED = """
import json, sys
import torchlake as tl
if len(sys.argv) == 2:
    tl.load(sys.argv[1])(["good film"])
else:
    tl.predict(*sys.argv[1:], key="id")
print(json.dumps([name for name in ("transformers", "pandas", "pydantic", "torch") if name in sys.modules]))
"""


@pytest.mark.parametrize(
    ("stored", "vectors"),
    [
        pytest.param(False, False, id="load", marks=pytest.mark.slow),
        pytest.param(False, True, id="load vectors", marks=pytest.mark.slow),
        pytest.param(True, False, id="predict"),
    ],
)
def test_the_first_answer_waits_for_no_library_but_torch(
    tiny_model: Path, tmp_path: Path, stored: bool, vectors: bool
) -> None:
    source = scoring_runs.write_rows(tmp_path / "in.parquet", ["good film"])
    model = tiny.build_embedder(tmp_path / "embedder") if vectors else tiny_model
    arguments = [str(model), *([str(source), str(tmp_path / "out")] if stored else [])]
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *arguments],
        env=scoring_runs.environment(None, None, {}),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert json.loads(done.stdout) == ["torch"]
