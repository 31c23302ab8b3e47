"""prepare: token Parquet in which every input row keeps its place."""

import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import reading_crashes
import task_cases
import tiny
import torchlake as tl
import training_runs as runs
from sweeps import sweep
from torchlake.errors import DataError
from torchlake.jobs.worker.read_ahead import Workspace
from torchlake.models import load
from torchlake.outputs.parts import PartFolder
from torchlake.preparation.prepare import PrepareSettings, make_token_worker, prepare
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.table import open_table


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build_encoder(tmp_path_factory.mktemp("encoder") / "encoder")


def test_tokens_and_targets_of_every_row(encoder: Path, tmp_path: Path) -> None:
    table = tiny.reviews(50)
    pq.write_table(table, tmp_path / "in.parquet")
    record = prepare(
        tmp_path / "in.parquet", tmp_path / "out", tokenizer=encoder, spec=tiny.SPEC, engine=tl.Local(processes=1)
    )
    assert (record["rows"], record["failed"]) == (50, 0)
    tokens = pq.read_table(tmp_path / "out")
    tokenizer = load.load_tokenizer(encoder)
    expected = tokenizer(table["text"].to_pylist(), truncation=True, max_length=tiny.SPEC.max_length)["input_ids"]
    assert tokens["input_ids"].to_pylist() == expected
    assert tokens["length"].to_pylist() == [len(ids) for ids in expected]
    assert tokens["target"].to_pylist() == [("bad", "good").index(label) for label in table["label"].to_pylist()]
    assert tokens["row_id"].to_pylist()[:2] == ["in.parquet:0", "in.parquet:1"]


def test_rows_without_text_or_label_stop_it_or_are_left_out(encoder: Path, tmp_path: Path) -> None:
    texts, labels = ["good film", None, "bad film", "good"], ["good", "good", None, "bad"]
    pq.write_table(pa.table({"text": texts, "label": labels}), tmp_path / "in.parquet")
    engine = tl.Local(processes=1)
    with pytest.raises(DataError, match=r"row 1: null_input.*row 2: null_label.*bad_rows=drop"):
        prepare(tmp_path / "in.parquet", tmp_path / "out", tokenizer=encoder, spec=tiny.SPEC, engine=engine)
    record = prepare(
        tmp_path / "in.parquet",
        tmp_path / "out",
        tokenizer=encoder,
        spec=tiny.SPEC,
        engine=engine,
        bad_rows="drop",
        overwrite=True,
    )
    assert (record["rows"], record["failed"]) == (4, 2)
    tokens = pq.read_table(tmp_path / "out")
    assert tokens["error"].to_pylist() == [None, "null_input", "null_label", None]
    assert tokens["length"].to_pylist()[1:3] == [0, 0]
    assert tokens["target"].to_pylist() == [1, None, None, 0]


@pytest.mark.parametrize("packed", [False, True], ids=["texts", "conversations"])
def test_rows_that_are_tokenized_alone_make_the_same_bytes(
    encoder: Path, tiny_gpt2: Path, tmp_path: Path, packed: bool
) -> None:
    table = tiny.reviews(20).set_column(1, "text", [[None, *tiny.reviews(20)["text"].to_pylist()[1:]]])
    spec, tokenizer = tiny.SPEC, encoder
    if packed:
        chats = [[{"role": "user", "content": text}] if text else None for text in table["text"].to_pylist()]
        table, tokenizer = pa.table({"text": chats}), tiny_gpt2
        spec = replace(spec, task="text_generation", problem="next_token", labels=(), label=None)
    pq.write_table(table, tmp_path / "in.parquet")
    columns = list(spec.columns)
    (chunk,) = plan_chunks(open_table(tmp_path / "in.parquet", columns=columns), columns=columns).chunks
    parts = PartFolder(location=str(tmp_path / "table"))
    workspace = Workspace(journal=str(tmp_path / "journal"), parts=parts)
    settings = PrepareSettings(tokenizer=str(tokenizer), spec=spec, bad_rows="drop", workspace=workspace)
    (tmp_path / "table").mkdir()
    (tmp_path / "journal").mkdir()
    (whole,) = make_token_worker(settings)(iter([(chunk, "whole")]))
    reading_crashes.leave_dead(tmp_path / "journal", chunk.index, ["tokenize", None])
    (alone,) = make_token_worker(settings)(iter([(chunk, "alone")]))
    assert (alone.part.rows, alone.part.failed, alone.part.sha256) == (20, 1, whole.part.sha256)
    assert list((tmp_path / "journal").iterdir()) == []
    known = {"read": [], "tokenize": list(range(20)), "score": []}
    reading_crashes.leave_dead(tmp_path / "journal", chunk.index, ["tokenize", [7]], suspects=known)
    list(make_token_worker(settings)(iter([(chunk, "killed")])))
    errors = pq.read_table(tmp_path / "table" / "killed")["error"].to_pylist()
    assert {row: reason for row, reason in enumerate(errors) if reason} == {
        0: "null_input",
        7: "killed_process: twice, while it was tokenized",
    }


@pytest.mark.parametrize("words", sweep([0, 40, 300], quick=[300]))
def test_what_is_cut_is_counted_and_above_some_share_said(
    encoder: Path, tmp_path: Path, words: int, caplog: pytest.LogCaptureFixture
) -> None:
    """One row in ten, or every row, is longer than the model's 64 tokens; the count is that of transformers."""
    table = tiny.reviews(40)
    texts = [
        f"{text}{' good' * words * (words > 100 or row % 40 == 0)}"
        for row, text in enumerate(table["text"].to_pylist())
    ]
    pq.write_table(table.set_column(1, "text", pa.array(texts)), tmp_path / "in.parquet")
    record = prepare(
        tmp_path / "in.parquet", tmp_path / "out", tokenizer=encoder, spec=tiny.SPEC, engine=tl.Local(processes=1)
    )
    whole = [len(ids) for ids in load.load_tokenizer(encoder)(texts)["input_ids"]]
    lost = [max(0, length - tiny.SPEC.max_length) for length in whole]
    assert record["provenance"]["truncated"] == {
        "rows": sum(length > 0 for length in lost),
        "tokens": sum(lost),
        "of_rows": 40,
        "of_tokens": sum(whole),
        "max_length": tiny.SPEC.max_length,
    }
    assert pq.read_table(tmp_path / "out")["cut"].to_pylist() == lost
    assert ("40 of 40 rows (100.0%) are cut to 64 tokens" in caplog.text) == (words == 300)


def test_a_token_without_an_embedding_is_refused_where_it_is_used(encoder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "encoder"
    shutil.copytree(encoder, folder)
    tokenizer = load.load_tokenizer(folder)
    size = len(tokenizer)
    tokenizer.add_tokens(["superfilm"])
    tokenizer.save_pretrained(folder)
    table = tiny.reviews(20)
    pq.write_table(table, tmp_path / "in.parquet")
    engine = tl.Local(processes=1)
    # A larger tokenizer is no fault in itself: Gemma 3 has a token for images that its text models lack.
    prepare(tmp_path / "in.parquet", tmp_path / "out", tokenizer=folder, spec=tiny.SPEC, engine=engine)
    texts = [*table["text"].to_pylist()[:-1], "a superfilm"]
    pq.write_table(table.set_column(1, "text", pa.array(texts)), tmp_path / "other.parquet")
    with pytest.raises(
        DataError, match=rf"'superfilm' has the id {size}, .* {size} embeddings, .*tokenizer has {size + 1} t"
    ):
        prepare(tmp_path / "other.parquet", tmp_path / "other", tokenizer=folder, spec=tiny.SPEC, engine=engine)
    model = tiny.build_model(tmp_path / "model", encoder=folder)
    scored = tl.predict(model, pa.table({"text": texts[-2:]}), engine=tiny.Here())
    assert [error and error.partition(":")[0] for error in scored["error"].to_pylist()] == [None, "unknown_token"]


@pytest.mark.parametrize(
    ("name", "column"), [("embeddings_of_triplets", "other"), ("text2text_generation", "summary")], ids=str
)
def test_a_token_without_an_embedding_is_refused_in_every_text_of_a_row(tmp_path: Path, name: str, column: str) -> None:
    case = task_cases.CASES[name]
    folder = case.build(tmp_path / "base")
    tokenizer = load.load_tokenizer(folder)
    tokenizer.add_tokens(["superfilm"])
    tokenizer.save_pretrained(folder)
    sections = case.sections(tmp_path, folder, max_steps=1)
    table = pq.read_table(sections["data"]["train"])
    texts = [*table[column].to_pylist()[:-1], "a superfilm"]
    pq.write_table(table.set_column(table.column_names.index(column), column, [texts]), sections["data"]["train"])
    refused = runs.attempt(tmp_path / "run", sections)
    assert refused.exit_code == DataError.exit_code
    assert "'superfilm' has the id" in refused.error
