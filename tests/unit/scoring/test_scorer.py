"""The worker's half of predict, in process: isolation, order, batching, and what a frame comes back as."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import reading_crashes
import tiny
import torchlake as tl
from misbehaving import POISON, RAISER, misbehave, small_memory
from torchlake.errors import TableError, TooManyErrors, UsageError
from torchlake.jobs.worker.read_ahead import Workspace
from torchlake.models.spec import load_spec
from torchlake.outputs.parts import PartFolder
from torchlake.scoring.rows import ScoringSettings
from torchlake.scoring.runtime_choice import refuse_unable
from torchlake.scoring.scorer import Scorer
from torchlake.scoring.workers.chunks import make_chunk_worker
from torchlake.scoring.workers.output import output_schema
from torchlake.tables.arrays import without_rows
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.plan import Chunk
from torchlake.tables.reading import ChunkReader
from torchlake.tables.table import open_table
from torchlake.tasks import _tokens


def settings(model: Path, **changes) -> ScoringSettings:
    plain = ScoringSettings(
        model=str(model),
        runtime="eager",
        text="text",
        keep=(),
        key=None,
        prefix="",
        all_probabilities=False,
        null="error",
        row_timeout_s=60.0,
        batch_tokens=None,
    )
    return replace(plain, **changes)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return tiny.build_model(folder / "model", encoder=tiny.build_encoder(folder / "encoder"))


def score(model: Path, texts: list[str | None], **changes) -> pa.Table:
    scorer = Scorer(settings=settings(model, **changes))
    return scorer.score(scorer.read(pa.table({scorer.spec.text: pa.array(texts, pa.string())}), {}))


def test_order_is_kept_and_batches_change_no_answer(model: Path) -> None:
    texts = tiny.reviews(120)["text"].to_pylist()
    whole = score(model, texts)
    for batch_tokens in (1, 64, 100_000):
        small = score(model, texts, batch_tokens=batch_tokens)
        assert small["label"].to_pylist() == whole["label"].to_pylist()
        np.testing.assert_allclose(small["score"].to_numpy(), whole["score"].to_numpy(), atol=1e-6)


def test_equal_rows_are_computed_once_and_answered_as_alone(model: Path) -> None:
    """Also those that raise, or give no number."""
    texts = ["good film " * row for row in range(1, 21)]
    texts = [*texts, *texts[::3], f"a {RAISER}", POISON, None, *texts[5:9], POISON, f"a {RAISER}", texts[0]]
    scorer = Scorer(settings=settings(model, runtime=misbehave))
    table = scorer.score(scorer.read(pa.table({scorer.spec.text: pa.array(texts)}), {}))
    assert scorer.distinct == 22
    for row, text in enumerate(texts):
        alone = score(model, [text], runtime=misbehave)
        assert table["label"][row].as_py() == alone["label"][0].as_py()
        assert table["error"][row].as_py() == alone["error"][0].as_py()
        if text in texts[:row]:
            assert table.slice(row, 1).equals(table.slice(texts.index(text), 1))
        elif alone["score"][0].is_valid:
            assert table["score"][row].as_py() == pytest.approx(alone["score"][0].as_py(), abs=1e-6)


def test_rows_without_text(model: Path) -> None:
    texts = [None, "", " \t\n", "good film"]
    errors = score(model, texts)["error"].to_pylist()
    assert errors == ["null_input", "null_input", "null_input", None]
    scored = score(model, texts, null="score")
    assert scored["error"].null_count == 4
    assert scored["label"].null_count == 0


def test_a_row_that_raises_costs_itself_only(model: Path) -> None:
    texts = ["good film"] * 9 + [f"a {RAISER}"] + ["bad film"] * 9 + [POISON]
    table = score(model, texts, runtime=misbehave)
    errors = {row: reason for row, reason in enumerate(table["error"].to_pylist()) if reason}
    assert errors.keys() == {9, 19}
    assert errors[9] == "RuntimeError: this text raises"
    assert errors[19].startswith("non_finite")
    assert [row for row, label in enumerate(table["label"].to_pylist()) if label is None] == [9, 19]


def test_batches_shrink_when_memory_runs_out(model: Path) -> None:
    scorer = Scorer(settings=settings(model, runtime=small_memory))
    before = scorer.batch_tokens
    texts = [f"good film {row}" for row in range(50)]
    table = scorer.score(scorer.read(pa.table({scorer.spec.text: pa.array(texts)}), {}))
    assert table["error"].null_count == 50
    assert scorer.batch_tokens < before


def test_long_texts_are_cut_and_say_so(model: Path) -> None:
    table = score(model, ["good", "good " * 5000])
    assert table["truncated"].to_pylist() == [False, True]
    assert table["error"].null_count == 2


def test_no_rows(model: Path) -> None:
    table = score(model, [], all_probabilities=True)
    assert table.column_names == ["label", "score", "prob_bad", "prob_good", "truncated", "error"]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_a_pyarrow_frame_comes_back_with_predictions(model: Path, kind: pa.DataType) -> None:
    frame = pa.table({"n": [1, 2], "text": pa.array(["good film", None]).cast(kind)})
    scored = tl.predict(model, frame)
    assert scored.select(["n", "text"]).equals(frame)
    assert scored.column_names[2:] == ["label", "score", "truncated", "error"]
    assert scored["error"].to_pylist() == [None, "null_input"]


def test_a_frame_has_a_threshold_too_and_bad_text_is_a_row_of_its_own(model: Path) -> None:
    """Cases 17 and 20, in memory."""
    bad = pa.StringArray.from_buffers(2, pa.py_buffer(np.array([0, 4, 6], np.int32)), pa.py_buffer(b"good\xff\xfe"))
    assert tl.predict(model, pa.table({"text": bad}))["error"].to_pylist() == [None, "bad_utf8"]
    with pytest.raises(TooManyErrors, match="1 of 2 rows failed"):
        tl.predict(model, pa.table({"text": bad}), max_error_rate=0.1)


def test_pandas_keeps_its_index_and_polars_its_kind(model: Path) -> None:
    pandas = pd.DataFrame({"text": ["good film", "bad film"]}, index=[7, 9])
    scored = tl.predict(model, pandas)
    assert isinstance(scored, pd.DataFrame)
    assert list(scored.index) == [7, 9]
    polars = tl.predict(model, pl.DataFrame({"text": ["good film", "bad film"]}))
    assert isinstance(polars, pl.DataFrame)
    assert polars["label"].to_list() == scored["label"].to_list()


def test_a_frame_that_has_the_predicted_column_needs_a_prefix(model: Path) -> None:
    frame = tiny.reviews(5)
    with pytest.raises(UsageError, match="prefix="):
        tl.predict(model, frame)
    scored = tl.predict(model, frame, prefix="predicted_")
    assert scored.column_names[:4] == ["id", "text", "label", "predicted_label"]


def test_wrong_arguments_are_sentences(model: Path, tmp_path: Path) -> None:
    frame = pa.table({"body": ["good"], "n": [1]})
    with pytest.raises(TableError, match="body"):
        tl.predict(model, frame)
    with pytest.raises(TableError, match="int64, not strings"):
        tl.predict(model, frame, text="n")
    with pytest.raises(UsageError, match="key and columns are for an output folder"):
        tl.predict(model, frame, text="body", key="n")
    pq.write_table(frame, tmp_path / "in.parquet")
    with pytest.raises(UsageError, match="output folder"):
        tl.predict(model, tmp_path / "in.parquet")
    wrong = {
        "max_error_rate: must be at most 1": {"max_error_rate": 7},
        "row_timeout_s: must be at least 0.001": {"row_timeout_s": 0},
        "null: expected 'error' or 'score'": {"null": "skip"},
        "on_bad_file: expected 'error' or 'quarantine'": {"on_bad_file": "ignore"},
        "batch_tokens: must be at least 1": {"batch_tokens": 0},
        "chunk_rows: must be at least 1": {"chunk_rows": 0},
    }
    for words, options in wrong.items():
        with pytest.raises(UsageError, match=words):
            tl.predict(model, tmp_path / "in.parquet", tmp_path / "out", text="body", **options)
    with pytest.raises(UsageError, match="which the output would replace"):
        tl.predict(model, tmp_path / "in.parquet", tmp_path, text="body")
    with pytest.raises(UsageError, match="adds a column 'error' to every output"):
        tl.predict(model, pa.table({"text": ["good"], "error": ["x"]}), prefix="predicted_")
    with pytest.raises(UsageError, match="Did you mean 'eager'"):
        refuse_unable("eagre", "text_classification")


def scored(
    model: Path, folder: Path, *running: list, pulled: list[int] | None = None, **known: dict
) -> list[list[dict]]:
    """The rows of four chunks of five; an attempt at chunk 1 died that knew and did this."""
    texts = [f"{tiny.OTHER[row]} good film {row % 7} bad" for row in range(20)]
    folder.mkdir()
    (folder / "table").mkdir()
    pq.write_table(pa.table({"text": texts}), folder / "in.parquet")
    if running:
        reading_crashes.leave_dead(folder / "journal", 1, *running, **known)
    plan = plan_chunks(open_table(folder / "in.parquet", columns=["text"]), columns=["text"], chunk_rows=5)

    def items() -> Iterator[tuple[Chunk, str]]:
        for chunk in plan.chunks:
            if pulled is not None:
                pulled.append(len(list((folder / "table").iterdir())))
            yield chunk, f"part-{chunk.index}.parquet"

    written_to = Workspace(journal=str(folder / "journal"), parts=PartFolder(location=str(folder / "table")))
    worker = make_chunk_worker(settings(model, runtime=misbehave, workspace=written_to))
    made = [pq.read_table(folder / "table" / one.part.name).to_pylist() for one in worker(items())]
    assert list((folder / "journal").iterdir()) == []
    return made


@pytest.mark.parametrize("running", [["read", None], ["tokenize", None], ["score", [1, 4]]], ids=lambda one: one[0])
def test_a_chunk_with_suspects_is_alone_and_has_the_same_predictions(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, running: list
) -> None:
    readers: list[str] = []
    parts: list[int] = []
    read = ChunkReader.read

    def watched_read(self: ChunkReader, chunk: Chunk) -> tuple[pa.Table, dict[int, str]]:
        readers.append("main" if threading.current_thread() is threading.main_thread() else "thread")
        return read(self, chunk)

    monkeypatch.setattr(ChunkReader, "read", watched_read)
    whole = scored(model, tmp_path / "whole")
    assert readers == ["thread"] * 4
    readers.clear()
    assert scored(model, tmp_path / "alone", running, pulled=parts) == whole
    assert readers == ["thread", "main", "thread", "thread"]
    assert parts[2] == 2  # parts that were written when chunk 2 was pulled


def test_a_row_that_has_killed_is_in_no_step_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    tokenize = _tokens.tokenize
    monkeypatch.setattr(_tokens, "tokenize", lambda *given: texts.extend(given[1]) or tokenize(*given))
    whole = [row for chunk in scored(model, tmp_path / "whole") for row in chunk]
    every = list(texts)
    texts.clear()
    known = {"read": [], "tokenize": list(range(5)), "score": []}
    found = scored(model, tmp_path / "killed", ["tokenize", [2]], suspects=known)
    rows = [row for chunk in found for row in chunk]
    assert rows.pop(7)["error"] == "killed_process: twice, while it was tokenized"
    assert rows == whole[:7] + whole[8:]
    assert texts == every[:7] + every[8:]


def test_rows_that_are_left_out_are_null_in_texts_and_conversations() -> None:
    chats = pa.array([[{"role": "user", "content": "a"}], None, [{"role": "user", "content": "b"}]])
    assert without_rows(chats, {0: "killed"}).to_pylist() == [None, *chats.to_pylist()[1:]]
    assert without_rows(chats, {}) is chats


def test_the_schema_is_known_before_any_row(model: Path) -> None:
    source = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("text", pa.string())])
    schema = output_schema(settings(model, keep=("id",), key="id"), load_spec(model), source)
    assert schema.names == ["id", "label", "score", "truncated", "error"]
    assert all(field.nullable for field in schema)
