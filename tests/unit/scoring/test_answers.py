"""What a row can ask for: several answers, options of its own, penalties, beams, log-probabilities."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pyiceberg.catalog
import pytest
import torch
from pyiceberg.utils.config import Config
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiny
import torchlake as tl
from sweeps import sweep
from torchlake.errors import FingerprintError, StorageError, UsageError
from torchlake.jobs.worker import writing
from torchlake.models.generation import GenerationOptions
from torchlake.scoring.rows import RowReader, ScoringSettings

TEXTS = ["the film was good", "boring", "a bad one and long", "the film was good"]
DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 3}


def written(model: Path, table: pa.Table | None = None, **options: Any) -> pa.Table:
    table = pa.table({"text": TEXTS}) if table is None else table
    return tl.predict(model, table, **{"max_new_tokens": 6, "engine": tiny.Here(), "max_error_rate": 1.0, **options})


def answers(model: Path, table: pa.Table | None = None, **options: Any) -> list[Any]:
    found: list[Any] = written(model, table, **options)["generated_text"].to_pylist()
    return found


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"repetition_penalty": 1.5}, marks=pytest.mark.slow),
        pytest.param({"min_new_tokens": 6}, marks=pytest.mark.slow),
        {"num_beams": 3, "repetition_penalty": 1.3, "min_new_tokens": 2},
    ],
)
def test_answers_are_those_of_generate_alone(tiny_gpt2: Path, options: dict[str, Any]) -> None:
    tokenizer, stock = AutoTokenizer.from_pretrained(tiny_gpt2), AutoModelForCausalLM.from_pretrained(tiny_gpt2).eval()

    def alone(text: str) -> str:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        about: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": tokenizer.eos_token_id}
        made = stock.generate(ids, attention_mask=torch.ones_like(ids), **about, **options)[0, ids.shape[1] :]
        return str(tokenizer.decode(made, skip_special_tokens=True))

    assert answers(tiny_gpt2, **options) == [alone(text) for text in TEXTS]


def test_penalties_count_tokens_of_the_answer(tiny_gpt2: Path) -> None:
    """A large penalty leaves no token twice; a negative one repeats the first; min_p 1 is greedy."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_gpt2)
    for text, count in zip(answers(tiny_gpt2, presence_penalty=100.0), [6] * 4, strict=True):
        ids = tokenizer(text)["input_ids"]
        assert len(set(ids)) == len(ids) or len(ids) > count, "bytes of one character"
    once = written(tiny_gpt2, frequency_penalty=-100.0, logprobs="tokens")
    assert all(len(text.strip()) >= 6 for text in once["generated_text"].to_pylist())
    assert answers(tiny_gpt2, min_p=1.0, **DRAWN) == answers(tiny_gpt2)
    first = int(tokenizer(answers(tiny_gpt2)[0])["input_ids"][1])
    stopped = written(tiny_gpt2, stop_token_ids=[first])
    assert (stopped["generated_tokens"][0].as_py(), stopped["finish_reason"][0].as_py()) == (1, "stop")


def test_logprobs_are_those_of_the_model(tiny_gpt2: Path) -> None:
    tokenizer, stock = AutoTokenizer.from_pretrained(tiny_gpt2), AutoModelForCausalLM.from_pretrained(tiny_gpt2).eval()
    found = written(tiny_gpt2, logprobs="tokens", frequency_penalty=0.5).to_pylist()[0]
    prompt = tokenizer(TEXTS[0])["input_ids"]
    ids = torch.tensor([prompt + tokenizer(found["generated_text"])["input_ids"]])
    with torch.inference_mode():
        scores = stock(ids).logits[0].log_softmax(-1)
    wanted = [scores[place - 1, ids[0, place]].item() for place in range(len(prompt), ids.shape[1])]
    assert found["token_logprobs"] == pytest.approx(wanted, abs=1e-4)
    assert found["logprob"] == pytest.approx(np.mean(wanted), abs=1e-4)
    assert (found["prompt_tokens"], found["generated_tokens"]) == (len(prompt), len(wanted))
    beams = written(tiny_gpt2, num_beams=2, logprobs=True)["logprob"].to_pylist()
    assert beams[0] >= np.mean(written(tiny_gpt2, logprobs="tokens")["token_logprobs"].to_pylist()[0]) - 1e-4


def test_several_answers_do_not_depend_on_neighbors(tiny_gpt2: Path) -> None:
    several = answers(tiny_gpt2, n=3, **DRAWN)
    assert [row[0] for row in several] == answers(tiny_gpt2, **DRAWN)
    assert len(set(several[0])) == 3
    assert several[0] == several[3]
    backwards = answers(tiny_gpt2, pa.table({"text": TEXTS[:0:-1]}), n=3, **DRAWN)
    assert backwards == several[:0:-1]


@pytest.mark.parametrize("key", sweep(["id", None], quick=[None]))
def test_each_answer_may_have_a_row(tiny_gpt2: Path, tmp_path: Path, key: str | None) -> None:
    pq.write_table(pa.table({"id": range(5), "text": [*TEXTS, None]}), tmp_path / "rows.parquet")
    options: dict[str, Any] = {"key": key, "n": 3, "explode": True, "chunk_rows": 2, "max_new_tokens": 6, **DRAWN}
    options |= {"seed_by": "key"} if key else {}
    done = tl.predict(tiny_gpt2, tmp_path / "rows.parquet", tmp_path / "out", engine=tiny.Here(), **options)
    assert (done.rows_in, done.rows_out, done.rows_failed) == (5, 15, 3)
    assert done.example is not None
    assert "row 4: null_input" in done.example
    assert tl.verify(tmp_path / "out").problems == []
    found = pq.read_table(tmp_path / "out")
    assert found["sample"].to_pylist() == [0, 1, 2] * 5
    texts = [found["generated_text"].to_pylist()[row : row + 3] for row in range(0, 15, 3)]
    assert (texts[0] == texts[3]) == (key is None), "seeds by key"
    if key is None:
        assert texts[:4] == answers(tiny_gpt2, n=3, **DRAWN)
        frame = written(tiny_gpt2, n=3, explode=True, **DRAWN)
        assert frame["generated_text"].to_pylist() == [text for row in texts[:4] for text in row]
    part = max((tmp_path / "out").glob("part-*.parquet"))
    pq.write_table(pq.read_table(part).slice(1), part)
    assert any("rows" in problem for problem in tl.verify(tmp_path / "out").problems)


@pytest.mark.parametrize("kind", ["delta", pytest.param("iceberg", marks=pytest.mark.slow)])
def test_each_answer_may_have_a_row_of_a_table(
    kind: str, tiny_gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also rows that are added, and those of keys that are replaced."""
    output: Any = tmp_path / "out"
    if kind == "iceberg":
        monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__URI", f"sqlite:///{tmp_path}/catalog.db")
        monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__WAREHOUSE", f"file://{tmp_path}/warehouse")
        monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())  # it is read once, when pyiceberg is imported
        with closing(pyiceberg.catalog.load_catalog("lake")) as lake:
            lake.create_namespace("films")
        output = "iceberg:lake.films.answers"
    options: dict[str, Any] = {"key": "id", "n": 2, "explode": True, "max_new_tokens": 4, "engine": tiny.Here()}

    def write(first: int, texts: Sequence[str], **more: Any) -> list[dict[str, Any]]:
        pq.write_table(pa.table({"id": range(first, first + len(texts)), "text": texts}), tmp_path / "rows.parquet")
        given = {**options, **DRAWN, "format": kind, "mode": "append", **more}
        done = tl.predict(tiny_gpt2, tmp_path / "rows.parquet", output, **given)
        assert done.rows_out == 2 * done.rows_in == 2 * len(texts)
        assert tl.verify(output).problems == []
        rows = tl.open(output).to_table()
        found: list[dict[str, Any]] = rows.sort_by([("id", "ascending"), ("sample", "ascending")]).to_pylist()
        return found

    expected = answers(tiny_gpt2, n=2, **{**DRAWN, "max_new_tokens": 4})
    assert [row["generated_text"] for row in write(0, TEXTS[:2])] == [*expected[0], *expected[1]]
    assert [(row["id"], row["sample"]) for row in write(2, TEXTS[2:])] == [(row // 2, row % 2) for row in range(8)]
    found = write(1, TEXTS[2:3], mode="replace-where")
    assert [row["generated_text"] for row in found] == [
        text for row in (expected[0], expected[2], *expected[2:]) for text in row
    ]


def test_rows_have_options_of_their_own(tiny_gpt2: Path) -> None:
    kind = pa.struct(
        {"max_new_tokens": pa.int64(), "temperature": pa.float64(), "seed": pa.int64(), "stop": pa.list_(pa.string())}
    )
    given = [{"max_new_tokens": 2}, {"temperature": 1.0, "seed": 3}, {"max_new_tokens": 0}, None, {"temperature": -1.0}]
    table = pa.table({"text": [*TEXTS, "x"], "options": pa.array(given, kind)})
    found = written(tiny_gpt2, table)
    assert found["generated_tokens"].to_pylist()[:1] == [2]
    assert found["generated_text"][1].as_py() == answers(tiny_gpt2, **DRAWN)[1]
    assert found["generated_text"][3].as_py() == answers(tiny_gpt2)[3]
    reasons = found["error"].to_pylist()
    assert reasons[2] == "bad_options: max_new_tokens is 1 or more; 0 was given."
    assert reasons[4].startswith("bad_options: temperature is a number from 0")
    with pytest.raises(UsageError, match="has the field 'max_tokens'.*Did you mean 'max_new_tokens'"):
        written(tiny_gpt2, pa.table({"text": TEXTS, "options": [{"max_tokens": 1}] * 4}))
    cut = pa.table({"text": TEXTS[:1], "how": [{"stop": answers(tiny_gpt2)[0][3:5]}]})
    assert answers(tiny_gpt2, cut, inputs={"options": "how"}) == [answers(tiny_gpt2)[0][:3]]


def test_options_of_rows_may_be_json_text(tiny_gpt2: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = ['{"max_new_tokens": 2, "seed": null}', " ", "[1]", '{"max_new_tokens"', '{"max_tokens": 3}', "null"]
    texts = [*TEXTS, *TEXTS[:2]]
    plain = answers(tiny_gpt2, pa.table({"text": texts}))
    for kind in (pa.array(given), pa.array(given, pa.large_string()), pa.array(given).dictionary_encode()):
        found = written(tiny_gpt2, pa.table({"text": texts, "options": kind}))
        assert found["generated_tokens"].to_pylist()[0] == 2
        assert [found["generated_text"][row].as_py() for row in (1, 5)] == [plain[row] for row in (1, 5)]
        reasons = found["error"].to_pylist()
        assert reasons[2] == "bad_options: it is not a JSON object of max_new_tokens, temperature, seed, stop"
        assert reasons[3].startswith("bad_options: it is not JSON: ")
        assert reasons[4].endswith("Did you mean 'max_new_tokens'?")
    assert not caplog.records
    large = pa.table({"text": TEXTS[:2], "options": [f'{{"max_new_tokens": 1{"0" * 30}}}', None]})
    assert str(written(tiny_gpt2, large)["error"][0]).startswith("bad_options: max_new_tokens is 10000000")
    choices = pa.table({"text": TEXTS, "options": ["A) red B) blue", '{"color": 1}', "[]", None]})
    assert answers(tiny_gpt2, choices) == answers(tiny_gpt2)
    assert "has no option of a row" in caplog.text
    found = written(tiny_gpt2, choices, inputs={"options": "options"})
    assert [reason is None for reason in found["error"].to_pylist()] == [False, False, False, True]


def test_options_that_the_runtime_does_not_compute_are_errors_of_their_rows(tiny_gpt2: Path) -> None:
    given = pa.array([{"temperature": 0.7, "seed": 1}, {"temperature": 0.0, "seed": None}, None, None])
    options = {"keep": (), "key": None, "text": "text", "inputs": {"options": "options"}}
    reader = RowReader(
        settings=ScoringSettings(
            model=str(tiny_gpt2),
            runtime="ctranslate2",
            generation=GenerationOptions(),
            **options,  # type: ignore[arg-type]
        )
    )
    made = reader.read(pa.table({"text": TEXTS, "options": given}), {})
    assert made.errors.keys() == {0}
    assert made.errors[0].startswith("bad_options: it takes the most likely token, and does not compute ")


def test_a_struct_of_other_options_is_no_option(tiny_gpt2: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = pa.table({"text": TEXTS, "options": [{"color": "red"}] * 4})
    assert answers(tiny_gpt2, table) == answers(tiny_gpt2)
    assert "has no option of a row" in caplog.text


def test_what_is_of_a_row_is_no_list(tiny_gpt2: Path, tmp_path: Path) -> None:
    frame = written(tiny_gpt2, n=2, token_counts=True, **DRAWN)
    assert frame["tokens"].to_pylist() == frame["prompt_tokens"].to_pylist()
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "rows.parquet")
    options: dict[str, Any] = {"n": 2, "token_counts": True, "max_new_tokens": 6, "engine": tiny.Here(), **DRAWN}
    tl.predict(tiny_gpt2, tmp_path / "rows.parquet", tmp_path / "out", **options)
    assert pq.read_table(tmp_path / "out")["tokens"].to_pylist() == frame["tokens"].to_pylist()
    with pytest.raises(UsageError, match="a DataFrame keeps its rows"):
        tl.predict(tiny_gpt2, pd.DataFrame({"text": TEXTS}), explode=True, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n": 2}, "n: there is no sampling at temperature 0"),
        ({"num_beams": 2, "temperature": 1.0}, "num_beams and temperature"),
        ({"num_beams": 2, "frequency_penalty": 1.0}, "repetition_penalty only"),
        ({"explode": True}, "set n"),
        ({"seed_by": "key", "temperature": 1.0}, "there is no key"),
        ({"logprobs": "all"}, "one of mean, tokens"),
        ({"stop_token_ids": [100_000]}, "has the tokens 0 to"),
        ({"min_new_tokens": -1}, "min_new_tokens: must be at least 0"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens is from 0 to max_new_tokens, 8; 9 was given"),
        ({"n": 1000, "temperature": 1.0}, "n is from 1 to 256"),
        ({"repetition_penalty": 0.0}, "above 0"),
    ],
)
def test_answers_that_cannot_be_are_refused(tiny_gpt2: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        written(tiny_gpt2, **options)


def test_an_interrupted_job_goes_on_with_its_answers_and_logprobs(
    tmp_path: Path, tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "rows.parquet")
    options: dict[str, Any] = {"n": 2, "logprobs": "tokens", "max_new_tokens": 6, "engine": tiny.Here(), **DRAWN}
    tl.predict(tiny_gpt2, tmp_path / "rows.parquet", tmp_path / "whole", **options)
    monkeypatch.setattr(writing, "PIECE_S", 0.0)
    with monkeypatch.context() as context:
        context.setenv("TORCHLAKE_FAILPOINT", "journal.write:9:enospc")
        context.setattr("torchlake.failpoints._hits", {})
        with pytest.raises(StorageError, match="No space left"):
            tl.predict(tiny_gpt2, tmp_path / "rows.parquet", tmp_path / "out", **options)
    with pytest.raises(FingerprintError, match="generation"):
        tl.predict(tiny_gpt2, tmp_path / "rows.parquet", tmp_path / "out", **{**options, "n": 3})
    tl.predict(tiny_gpt2, tmp_path / "rows.parquet", tmp_path / "out", **options)
    whole, out = (pq.read_table(tmp_path / name).to_pylist() for name in ("whole", "out"))
    for one, other in zip(whole, out, strict=True):
        assert one["generated_text"] == other["generated_text"]
        for mine, theirs in zip(one["token_logprobs"], other["token_logprobs"], strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4)
