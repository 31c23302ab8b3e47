"""Models that write: answers do not depend on the batch, the attempt or the number of processes."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM

import tiny
import torchlake as tl
from sweeps import sweep
from torchlake.errors import FingerprintError, UsageError
from torchlake.models import load
from torchlake.models.generation import generation_options
from torchlake.runtimes._writing.row import draws
from torchlake.runtimes._writing.static import padded

TEXTS = ["the film", "a", "the plot of this movie is " * 3, "good", "not a film , but a story of all of it", "we"]
CHAT = [{"role": "user", "content": "is it a good film ?"}]


def answers(model: Path, texts: list[Any], **options: Any) -> list[dict[str, Any]]:
    """What the model writes for each text, in this process."""
    options = {"max_new_tokens": 10, "max_error_rate": 1.0, **options}
    table: pa.Table = tl.predict(model, pa.table({"text": texts}), engine=tiny.Here(), **options)
    return table.drop(["text"]).to_pylist()  # type: ignore[no-any-return]


@pytest.fixture(params=sweep(["gpt2", "llama"], quick={"llama"}))
def model(request: pytest.FixtureRequest, tiny_gpt2: Path, tiny_llama: Path) -> Path:
    return tiny_gpt2 if request.param == "gpt2" else tiny_llama


def test_prompts_of_unequal_length_are_continued_as_if_each_were_alone(model: Path) -> None:
    """And as transformers continues them, one at a time and without padding."""
    together = answers(model, TEXTS)
    assert together == [answers(model, [text])[0] for text in TEXTS] == answers(model, TEXTS, batch_tokens=30)
    tokenizer, stock = load.load_tokenizer(model), AutoModelForCausalLM.from_pretrained(model)
    for text, answer in zip(TEXTS, together, strict=True):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        whole = stock.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False, pad_token_id=0
        )
        written = whole[0, ids.shape[1] :]
        assert answer["generated_text"] == tokenizer.decode(written, skip_special_tokens=True)
        assert answer["finish_reason"] == ("stop" if tokenizer.eos_token_id in written else "length")
        assert answer["generated_tokens"] == int((written != tokenizer.eos_token_id).sum())


def test_what_is_drawn_depends_on_the_row_and_the_seed_alone(model: Path) -> None:
    drawn = answers(model, TEXTS, temperature=1.5, seed=3)
    assert drawn == answers(model, TEXTS, temperature=1.5, seed=3, batch_tokens=30)
    assert drawn[::-1] == answers(model, TEXTS[::-1], temperature=1.5, seed=3)
    assert drawn == [answers(model, [text], temperature=1.5, seed=3)[0] for text in TEXTS]
    assert drawn != answers(model, TEXTS, temperature=1.5, seed=4)
    assert drawn != answers(model, TEXTS)


def test_drawing_among_the_likeliest_alone_is_taking_it(model: Path) -> None:
    greedy = answers(model, TEXTS)
    assert greedy == answers(model, TEXTS, temperature=1.0, top_k=1)
    assert greedy == answers(model, TEXTS, temperature=1.0, top_p=1e-6)
    assert greedy == answers(model, TEXTS, temperature=1e-3)


def test_tokens_are_drawn_as_often_as_they_are_likely(tiny_gpt2: Path) -> None:
    """Over 2,000 seeds the first token's shares are the model's, within four standard errors."""
    tokenizer = load.load_tokenizer(tiny_gpt2)
    ids = tokenizer("the film", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        shares = AutoModelForCausalLM.from_pretrained(tiny_gpt2)(ids).logits[0, -1].softmax(-1).numpy()
    options = [generation_options("text_generation", writes=True, temperature=1.0, seed=seed) for seed in range(2000)]
    uniform = np.array([draws(ids.numpy()[0], each)[0] for each in options if each is not None])
    found = np.bincount(np.searchsorted(np.cumsum(shares, dtype=np.float64), uniform), minlength=len(shares)) / 2000
    assert (np.abs(found - shares) <= 4 * np.sqrt(shares * (1 - shares) / 2000) + 1e-3).all()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"temperature": 0.6, "top_k": 40}, {"temperature": 1.4, "min_p": 0.1}])
def test_20000_answers_are_drawn_as_the_softmax_says(tiny_gpt2: Path, options: dict[str, Any]) -> None:
    """Chi-square of their first tokens; what is expected fewer than five times is one cell."""
    rows, options = 20_000, {"temperature": 1.0, **options}
    tokenizer = load.load_tokenizer(tiny_gpt2)
    ids = tokenizer("the film", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        scores = AutoModelForCausalLM.from_pretrained(tiny_gpt2)(ids).logits[0, -1] / options["temperature"]
    kept = scores >= scores.topk(options.get("top_k", len(scores))).values[-1]
    kept &= scores.softmax(-1) >= options.get("min_p", 0.0) * scores.softmax(-1).max()
    shares = scores.masked_fill(~kept, -torch.inf).softmax(-1).double()
    expected: Counter[str] = Counter()
    for token, share in enumerate(shares.tolist()):
        expected[tokenizer.decode([token], skip_special_tokens=True)] += share * rows
    table = pa.table({"text": ["the film"] * rows, "options": [{"seed": seed} for seed in range(rows)]})
    written: pa.Table = tl.predict(
        tiny_gpt2, table, max_new_tokens=1, engine=tiny.Here(), max_error_rate=0.0, **options
    )
    found = Counter(written["generated_text"].to_pylist())
    assert found.keys() <= {text for text, times in expected.items() if times > 0}
    often = [text for text, times in expected.items() if times >= 5]
    cells = [(found[text], expected[text]) for text in often]
    cells.append((rows - sum(seen for seen, _ in cells), rows - sum(times for _, times in cells)))
    seen, times = zip(*(cell for cell in cells if cell[1] > 1e-6), strict=True)
    assert len(seen) > 10
    assert stats.chisquare(seen, times, sum_check=False).pvalue > 0.001


def test_prompts_of_unequal_length_are_padded_on_the_left() -> None:
    ids, mask = padded([np.array([5, 6, 7]), np.array([8])], 0, left=True)
    assert (ids.tolist(), mask.tolist()) == ([[5, 6, 7], [0, 0, 8]], [[1, 1, 1], [0, 0, 1]])


def test_a_stop_string_ends_its_row_and_no_other(tiny_gpt2: Path) -> None:
    free = answers(tiny_gpt2, TEXTS)
    text = free[0]["generated_text"]
    stop = [text[4:7], "never written"]
    stopped = answers(tiny_gpt2, TEXTS, stop=stop)
    assert stopped == [answers(tiny_gpt2, [text], stop=stop)[0] for text in TEXTS]
    first = stopped[0]
    assert first["generated_text"] == text[: text.index(stop[0])]
    assert first["finish_reason"] == "stop"
    assert first["generated_tokens"] < free[0]["generated_tokens"]
    for with_stop, without in zip(stopped, free, strict=True):
        assert stop[0] not in with_stop["generated_text"]
        assert with_stop == without or stop[0] in without["generated_text"]


def test_rows_that_cannot_be_answered_are_errors_of_their_own(tiny_gpt2: Path) -> None:
    """The model has 128 positions; a prompt of one token more than fits beside the new ones is no prompt."""
    fits, too_long = "x" * 118, "x" * 119
    texts = ["the film", None, "  ", fits, too_long]
    found = answers(tiny_gpt2, texts)
    errors = [row["error"] for row in found]
    assert errors[:4] == [None, "null_input", "null_input", None]
    assert errors[4].startswith("prompt_too_long: 119 tokens, and there is room for 118")
    assert [row["generated_text"] is None for row in found] == [False, True, True, False, True]
    assert found[0] == answers(tiny_gpt2, texts[:1])[0]
    assert answers(tiny_gpt2, [""], null="score")[0]["error"] is None


def test_a_model_that_gives_nan_gives_error_rows(tiny_gpt2: Path, tmp_path: Path) -> None:
    broken = AutoModelForCausalLM.from_pretrained(tiny_gpt2)
    broken.transformer.wte.weight.data[load.load_tokenizer(tiny_gpt2)("?")["input_ids"]] = np.nan
    broken.save_pretrained(tmp_path / "model")
    load.load_tokenizer(tiny_gpt2).save_pretrained(tmp_path / "model")
    assert {row["error"] for row in answers(tmp_path / "model", TEXTS[:2])} == {
        "non_finite: the model gave NaN or infinity"
    }


def test_conversations_go_through_the_template(tiny_gpt2: Path) -> None:
    expected = answers(tiny_gpt2, ["<user> is it a good film ? <assistant>"])
    assert answers(tiny_gpt2, [CHAT]) == expected == answers(tiny_gpt2, [json.dumps(CHAT)], chat=True)
    wrong: list[Any] = ["no JSON", "[]", '[{"role": "user"}]', '{"role": "user"}', None, " "]
    found = answers(tiny_gpt2, [*wrong, json.dumps(CHAT)], chat=True)
    assert [row["error"].partition(":")[0] for row in found[:6]] == ["bad_chat"] * 4 + ["null_input"] * 2
    assert found[6] == expected[0]


def test_a_conversation_needs_a_template(tiny_gpt2: Path, tmp_path: Path) -> None:
    tokenizer = load.load_tokenizer(tiny_gpt2)
    tokenizer.chat_template = None
    AutoModelForCausalLM.from_pretrained(tiny_gpt2).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(UsageError, match="no chat template"):
        answers(tmp_path / "model", [CHAT])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_k": 5}, "top_k: there is no sampling at temperature 0"),
        ({"seed": 5}, "seed: there is no sampling"),
        ({"temperature": -1.0}, "temperature: must be at least 0"),
        ({"temperature": float("nan")}, "temperature: must be at least 0"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p is a share"),
        ({"max_new_tokens": 0}, "max_new_tokens: must be at least 1"),
        ({"max_new_tokens": 128}, "no tokens for a prompt"),
        ({"stop": ["a", ""]}, "must not contain an empty string"),
        ({"all_probabilities": True}, "no classes"),
        ({"runtime": "int8"}, "cannot run text_generation: it has no key-value cache"),
    ],
)
def test_options_that_mean_nothing_are_refused(tiny_gpt2: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        answers(tiny_gpt2, ["the film"], **options)


def test_a_classifier_does_not_write(tiny_model: Path) -> None:
    with pytest.raises(UsageError, match="max_new_tokens, stop: for text generation only"):
        tl.predict(tiny_model, pa.table({"text": ["a"]}), max_new_tokens=3, stop="x")


def test_a_stored_table_is_answered_once_on_any_number_of_processes(tiny_gpt2: Path, tmp_path: Path) -> None:
    """Two processes, chunks of three rows, rows in other batches: the same texts; other options are another job."""
    table = pa.table({"id": range(len(TEXTS)), "text": TEXTS})
    pq.write_table(table, tmp_path / "prompts.parquet")
    options: dict[str, Any] = {"max_new_tokens": 10, "temperature": 1.5, "seed": 3, "key": "id"}
    done = tl.predict(
        tiny_gpt2, tmp_path / "prompts.parquet", tmp_path / "out", engine=tl.Local(processes=2), chunk_rows=3, **options
    )
    found = pq.read_table(tmp_path / "out").sort_by("id")
    counts = ["prompt_tokens", "generated_tokens", "finish_reason"]
    assert found.column_names == ["id", "generated_text", *counts, "truncated", "error"]
    assert (done.rows_in, done.rows_out, done.rows_failed) == (6, 6, 0)
    assert found.drop(["id"]).to_pylist() == answers(tiny_gpt2, TEXTS, temperature=1.5, seed=3)
    assert tl.verify(tmp_path / "out").problems == []
    with pytest.raises(FingerprintError, match="generation"):
        tl.predict(tiny_gpt2, tmp_path / "prompts.parquet", tmp_path / "out", **{**options, "seed": 4})
