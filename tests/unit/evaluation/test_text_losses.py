"""The report of a language model that is measured on texts: each text's loss, by length and by position."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny
import torchlake as tl
import training_runs as runs
from torchlake.errors import TableError, UsageError
from torchlake.evaluation.compare import compare
from torchlake.evaluation.evaluate import evaluate
from torchlake.evaluation.perplexity import POSITIONS
from torchlake.models.load import load_tokenizer
from torchlake.models.spec import load_spec
from torchlake.tasks import _chunked_loss
from torchlake.tasks.text_generation import TextGeneration

WORDS = ["good", "a good film", "bad " * 40, None, "so <b> it was a film", "film"]


@pytest.fixture(scope="module")
def table() -> pa.Table:
    texts = [WORDS[row % 6] for row in range(60)]
    return pa.table({"key": range(60), "kind": [f"k{row % 6}" for row in range(60)], "text": pa.array(texts)})


def test_each_text_has_the_loss_of_its_tokens(tiny_gpt2: Path, table: pa.Table, tmp_path: Path) -> None:
    """The reference concatenates the texts, cuts the stream into blocks, and takes each token's loss apart."""
    folder = tmp_path / "eval"
    found = evaluate(tiny_gpt2, table, report=folder, key="key", slices=["kind"], engine=tiny.Here())
    assert found.metrics == evaluate(tiny_gpt2, table, engine=tiny.Here()).metrics
    tokenizer, block = load_tokenizer(tiny_gpt2), load_spec(tiny_gpt2).max_length
    texts = [text for text in table["text"].to_pylist() if text is not None]
    each = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(texts)["input_ids"]]
    stream = torch.tensor(list(chain.from_iterable(each)))
    owner = np.repeat(np.arange(len(each)), [len(one) for one in each])
    place = np.concatenate([np.arange(len(one)) for one in each]) + 1
    model, losses = AutoModelForCausalLM.from_pretrained(tiny_gpt2), []
    for first in range(0, len(stream) - 1, block - 1):
        some = stream[first : first + block]
        with torch.inference_mode():
            logits = model(input_ids=some[None]).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, some[1:], reduction="none").numpy())
    flat = np.concatenate(losses)
    rows = pq.read_table(folder / "rows.parquet")
    assert rows["key"].to_pylist() == list(range(60))
    assert rows["text"].to_pylist() == table["text"].to_pylist()
    assert rows["error"].to_pylist() == ["null_input" if text is None else None for text in table["text"].to_pylist()]
    counts = np.bincount(owner[1:], minlength=len(each))
    assert rows["tokens"].drop_null().to_pylist() == counts.tolist()
    wanted = np.bincount(owner[1:], flat, len(each)) / counts
    assert rows["loss"].drop_null().to_numpy() == pytest.approx(wanted, rel=1e-4)
    assert (wanted * counts).sum() / counts.sum() == pytest.approx(found.metrics["loss"].value, rel=1e-5)
    sections = json.loads((folder / "eval.json").read_text())["sections"]
    part = np.searchsorted(POSITIONS, place[1:], side="right")
    assert [one["predicted"] for one in sections["positions"]] == np.bincount(part)[1:].tolist()
    by_part = (np.bincount(part, flat) / np.bincount(part).clip(min=1))[1:]
    assert [one["loss"] for one in sections["positions"]] == pytest.approx(by_part.tolist(), rel=1e-4)
    assert {one["slice"] for one in sections["slices"]["slices"]} == {"kind", "length"}
    assert sections["worst"][0] == int(np.nanargmax(rows["loss"].to_pandas()))


def test_the_page_has_the_sections_of_texts(tiny_gpt2: Path, table: pa.Table, tmp_path: Path) -> None:
    evaluate(tiny_gpt2, table, report=tmp_path / "eval", engine=tiny.Here())
    page = (tmp_path / "eval" / "eval.html").read_text()
    for words in ("Loss by position in the text", "1 to 8", "By slice", "perplexity", "The worst rows", "null_input"):
        assert words in page
    assert "so &lt;b&gt; it was" in page
    assert "label" not in {*page.split("<h2>The worst rows")[1].split("<i>")}
    evaluate(tiny_gpt2, table, report=tmp_path / "plain", no_texts=True, engine=tiny.Here())
    assert "it was a film" not in (tmp_path / "plain" / "eval.html").read_text()
    with pytest.raises(UsageError, match="text_generation without labels is not compared row by row"):
        compare(tmp_path / "eval", tmp_path / "plain")


def test_what_does_not_fit_is_refused(tiny_gpt2: Path, table: pa.Table, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="label_hints: text_generation is measured on the texts only"):
        evaluate(tiny_gpt2, table, report=tmp_path / "a", label_hints=True, engine=tiny.Here())
    with pytest.raises(TableError, match="the key 'kind'"):
        evaluate(tiny_gpt2, table, report=tmp_path / "b", key="kind", engine=tiny.Here())


def test_a_column_with_the_name_of_the_row_id_is_left_out(tiny_gpt2: Path, tmp_path: Path) -> None:
    named = pa.table({"row_id": ["a", "b"], "text": ["a good film", "bad"]})
    evaluate(tiny_gpt2, named, report=tmp_path / "eval", slices=["row_id"], engine=tiny.Here())
    rows = pq.read_table(tmp_path / "eval" / "rows.parquet")
    assert rows["row_id"].to_pylist() == ["input.parquet:0", "input.parquet:1"]


class Smoothed(TextGeneration):
    """A language model that learns by a loss of its own."""

    def loss_sum(self, outputs: torch.Tensor, targets: Any, spec: Any, objective: Any = None) -> torch.Tensor:
        flat = outputs.float().flatten(0, 1), targets.long().flatten()
        return torch.nn.functional.cross_entropy(*flat, ignore_index=-100, reduction="sum", label_smoothing=0.5)


@pytest.mark.parametrize(
    "columns",
    [pytest.param({"text": "text"}, marks=pytest.mark.slow), {"text": "kind", "completion": "text"}],
    ids=["stream", "whole"],
)
def test_a_task_with_a_loss_of_its_own_has_the_loss_of_validation(
    tiny_gpt2: Path, table: pa.Table, columns: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a model so large that the loss of a language model would be computed in chunks."""
    monkeypatch.setattr(_chunked_loss, "CHUNK_BYTES", 7 * 4 * 400)
    texts = table.filter(table["text"].is_valid())
    pq.write_table(texts, tmp_path / "texts.parquet")
    files = {"train": str(tmp_path / "texts.parquet"), "validation": str(tmp_path / "texts.parquet")}
    done = tl.train(
        run=tmp_path / "run",
        engine=runs.Inline(),
        task=Smoothed(),
        data={**files, **columns},
        model={"base": str(tiny_gpt2), "max_length": 24},
        train={"max_steps": 2, "batch_size": 4, "precision": "fp32"},
    )
    whole = {"inputs": {"completion": "text"}} if "completion" in columns else {}
    chosen: dict[str, Any] = {"text": columns["text"], "task": "smoothed", "engine": tiny.Here(), **whole}
    found = evaluate(tmp_path / "run" / "model", texts, report=tmp_path / "eval", **chosen)
    assert found.metrics["loss"].value == pytest.approx(done.metrics["loss"], rel=1e-5)
    rows = pq.read_table(tmp_path / "eval" / "rows.parquet").to_pandas()
    sections = json.loads((tmp_path / "eval" / "eval.json").read_text())["sections"]
    by_position = np.array([(one["loss"], one["predicted"]) for one in sections["positions"]]).T
    for losses, counts in (by_position, (rows["loss"].fillna(0), rows["tokens"])):
        assert np.average(losses, weights=counts) == pytest.approx(found.metrics["loss"].value, rel=1e-5)
