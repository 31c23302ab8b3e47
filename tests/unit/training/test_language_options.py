"""Noise on word embeddings, and validations that write."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import tiny
import torchlake as tl
import training_runs as runs
from golden_losses import check
from torchlake.data.batching import Ragged
from torchlake.data.bins import pack_whole
from torchlake.errors import ConfigError, UsageError
from torchlake.models.load import load_tokenizer
from torchlake.optim.noise import EmbeddingNoise, texts_of

SLOW = pytest.mark.slow


def questions(rows: int) -> pa.Table:
    words = [text.split() for text in tiny.reviews(rows)["text"].to_pylist()]
    asked = [" ".join(row[: 2 + number % 6]) for number, row in enumerate(words)]
    return pa.table({"id": range(rows), "asked": asked, "answer": [f" {row[0]} ." for row in words]})


def job(folder: Path, base: Path, *, rows: int = 40, lora: Any = None, **train: Any) -> dict[str, Any]:
    sections = runs.job(folder, base, rows=rows, **{"batch_size": 4, "learning_rate": 1e-2, **train})
    pq.write_table(questions(rows), sections["data"]["train"])
    sections["data"] |= {"text": "asked", "completion": "answer"}
    sections["model"] |= {"task": "text_generation", "max_length": 24}
    if lora is not None:
        sections["model"]["lora"] = lora
    return sections


def written(run: Path) -> list[Any]:
    return [json.loads(path.read_text()) for path in sorted((run / "written").iterdir())]


# Noise.


def test_noise_follows_the_formula_and_only_its_own_text(tiny_llama: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_llama)
    noise = EmbeddingNoise(model, alpha=5.0, seed=1)
    embed, width = model.get_input_embeddings(), model.config.hidden_size
    ids = torch.arange(30).reshape(2, 15)
    plain = nn.functional.embedding(ids, embed.weight)

    def added(texts: list[Any]) -> torch.Tensor:
        noise.texts = texts
        return (embed(ids) - plain).detach()

    model.train()
    one = added([(0, 0, 4, (7, 0)), (0, 4, 11, (7, 1)), (1, 2, 3, (8, 0))])
    for line, first, length in ((0, 0, 4), (0, 4, 11), (1, 2, 3)):
        part, size = one[line, first : first + length], 5.0 / math.sqrt(length * width)
        assert part.abs().max() <= size * 1.0001
        assert part.std() == pytest.approx(size / math.sqrt(3), rel=0.15)  # of a uniform distribution
        assert abs(part.mean()) < size / 4
    assert not one[1, :2].any()
    assert not one[1, 5:].any()
    # The same text elsewhere, alone: the same noise. Another step: another one.
    assert torch.equal(added([(1, 3, 11, (7, 1))])[1, 3:14], one[0, 4:]) or torch.allclose(
        added([(1, 3, 11, (7, 1))])[1, 3:14], one[0, 4:], atol=1e-6
    )
    noise.step = 1
    assert not torch.allclose(added([(0, 4, 11, (7, 1))])[0, 4:], one[0, 4:], atol=1e-3)
    model.eval()
    assert not added([(0, 0, 4, (7, 0))]).any()


def test_the_texts_of_blocks_are_the_same_packed_and_unpacked() -> None:
    lengths = np.array([5, 3, 9, 2, 4, 4])
    tokens = Ragged(np.arange(lengths.sum(), dtype=np.int32), np.append(0, lengths.cumsum()))
    blocks = pack_whole(tokens, np.arange(6), 10)
    numbers = np.arange(len(blocks))[::-1]
    positions, sizes = blocks.positions_of(numbers), blocks.lengths_of(numbers)
    packed, alone = (texts_of(positions, sizes, numbers, unpacked=unpacked) for unpacked in (False, True))
    assert [each[2:] for each in packed] == [each[2:] for each in alone]
    assert len({each[3] for each in packed}) == 6
    assert sorted(each[2] for each in packed) == sorted(lengths)
    assert [each[:2] for each in alone] == [(line, 0) for line in range(6)]
    rows, _ = blocks.unpacked(numbers, 0)
    ids, _ = blocks.padded(numbers, 0)
    for (line, first, length, _), row in zip(packed, rows, strict=True):
        assert ids[line, first : first + length].tolist() == row[:length].tolist()


@pytest.mark.slow
def test_noise_is_the_same_in_other_micro_batches_and_on_two_ranks(tmp_path: Path, tiny_gpt2: Path) -> None:
    sections = job(tmp_path, tiny_gpt2, rows=24, epochs=1, neftune=5.0)
    runs.succeed(tmp_path / "one", sections)
    losses = runs.losses(tmp_path / "one")
    sections["train"]["micro_batch_tokens"] = 24
    runs.succeed(tmp_path / "two", sections, ranks=2)
    assert runs.losses(tmp_path / "two") == pytest.approx(losses, abs=1e-5)
    del sections["train"]["neftune"]
    runs.succeed(tmp_path / "plain", sections)
    assert abs(runs.losses(tmp_path / "plain")[0] - losses[0]) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("fsdp", 2)])
def test_noise_goes_on_with_the_same_bytes(
    tmp_path: Path, tiny_llama: Path, whole: bool, strategy: str, ranks: int
) -> None:
    lora = {"rank": 2, "also_train": ["embed_tokens"]}
    sections = job(tmp_path, tiny_llama, neftune=5.0, strategy=strategy, checkpoint_every="1steps", lora=lora)
    if not whole:
        sections["data"] = {key: value for key, value in sections["data"].items() if key != "completion"}
    runs.succeed(tmp_path / "whole", sections, ranks=ranks)
    stopped = runs.attempt(tmp_path / "run", sections, ranks=ranks, failpoint="rank0.step:4:kill9")
    assert stopped.exit_code in (0, -9)
    runs.succeed(tmp_path / "run", sections, ranks=ranks)
    assert runs.losses(tmp_path / "run") == runs.losses(tmp_path / "whole")


# Validations that write.


def test_validations_write_what_predict_writes(tmp_path: Path, tiny_gpt2: Path) -> None:
    options = {"rows": 6, "max_new_tokens": 4, "metric": "token_f1"}
    sections = job(tmp_path, tiny_gpt2, epochs=2, validate_writing=options, metric="token_f1")
    done = runs.succeed(tmp_path / "run", sections)
    assert done.metrics is not None
    lines = [line for line in runs.metrics(tmp_path / "run") if "validation_loss" in line]
    assert len(lines) == 2
    values = [line["validation_token_f1"] for line in lines]
    assert done.metrics["token_f1"] == max(values)
    found = written(tmp_path / "run")
    assert [each["step"] for each in found] == [line["step"] for line in lines]
    assert {len(each["texts"]) for each in found} == {6}
    asked = {row["asked"]: row["answer"] for row in questions(40).to_pylist()}
    best = found[values.index(max(values))]["texts"]
    assert all(asked[text["prompt"]] == text["expected"] for text in best)
    table = pa.table({"asked": [text["prompt"] for text in best]})
    told = tl.predict(tmp_path / "run" / "model", table, text="asked", engine=tiny.Here(), max_new_tokens=4)
    assert told["generated_text"].to_pylist() == [text["written"] for text in best]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Written at the last validation" in page
    assert re.search(r"token.f1", page)


@pytest.mark.parametrize(
    ("strategy", "ranks", "train"),
    [
        pytest.param(*case, marks=SLOW)
        for case in (
            ("ddp", 2, {}),
            ("ddp", 3, {"precision": "bf16_weights"}),
            ("fsdp", 2, {}),
            ("fsdp", 3, {"ema": 0.9}),
            ("single", 1, {"compile": False, "activation_checkpointing": True}),
        )
    ],
)
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_ranks_write_what_one_writes(
    tmp_path: Path, tiny_gpt2: Path, tiny_llama: Path, model: str, strategy: str, ranks: int, train: dict[str, Any]
) -> None:
    base = {"gpt2": tiny_gpt2, "llama": tiny_llama}[model]
    options = {"rows": 7, "max_new_tokens": 5, "metric": "chrf"}
    for lora in (None, {"rank": 2}):
        folder = tmp_path / str(lora is None)
        sections = job(folder, base, epochs=2, validate_writing=options, lora=lora, **train)
        runs.succeed(folder / "one", {**sections, "train": {**sections["train"], "strategy": "single"}})
        sections["train"] |= {"strategy": strategy, "micro_batch_tokens": 60}
        runs.succeed(folder / "run", sections, ranks=ranks)
        # Training goes on as if nothing had been written.
        assert runs.losses(folder / "run") == pytest.approx(runs.losses(folder / "one"), abs=5e-2 if train else 1e-4)
        if not train.get("precision"):
            assert written(folder / "run") == written(folder / "one")
        else:
            assert [len(each["texts"]) for each in written(folder / "run")] == [7, 7]


@pytest.mark.slow
def test_validations_write_the_golden_texts(tmp_path: Path, tiny_llama: Path) -> None:
    """chrF of what an untrained language model writes, and how long its texts are, at each of five validations."""
    options = {"rows": 20, "max_new_tokens": 6, "metric": "chrf"}
    sections = job(tmp_path, tiny_llama, epochs=5, learning_rate=3e-3, validate_writing=options)
    runs.succeed(tmp_path / "run", sections)
    scores = [line["validation_chrf"] for line in runs.metrics(tmp_path / "run") if "validation_chrf" in line]
    sizes = [float(sum(len(text["written"]) for text in each["texts"])) for each in written(tmp_path / "run")]
    check("validate_writing", [*scores, *sizes])


@pytest.mark.slow
def test_an_encoder_decoder_writes_too(tmp_path: Path) -> None:
    base = tiny.build_encoder_decoder(tmp_path / "base")
    sections = job(tmp_path, base, epochs=2, validate_writing={"rows": 5, "max_new_tokens": 4}, metric="exact_match")
    sections["data"] = {key: value for key, value in sections["data"].items() if key != "completion"}
    sections["data"] |= {"text": "asked", "label": "answer"}
    sections["model"]["task"] = "text2text_generation"
    runs.succeed(tmp_path / "run", sections)
    lines = [line for line in runs.metrics(tmp_path / "run") if "validation_loss" in line]
    assert all("validation_exact_match" in line for line in lines)
    texts = written(tmp_path / "run")[-1]["texts"]
    tokenizer = load_tokenizer(base)
    answers = {
        tokenizer.decode(tokenizer(row["answer"])["input_ids"], skip_special_tokens=True)
        for row in questions(40).to_pylist()
    }
    assert {text["expected"] for text in texts} <= answers


@pytest.mark.parametrize(
    ("model", "train", "data", "error", "message"),
    [
        ({}, {"neftune": 5}, {}, UsageError, r"train\.neftune .* model\.task=text_classification"),
        ({}, {"validate_writing": {}}, {}, UsageError, r"train\.validate_writing: .* do not write texts"),
        (
            {"task": "text_generation"},
            {"validate_writing": {}},
            {"validation": None},
            ConfigError,
            r"data\.validation is null",
        ),
        ({"task": "text_generation"}, {"validate_writing": {"metric": "bleu"}}, {}, ConfigError, "exact_match"),
        ({"task": "text_generation"}, {"metric": "chrf"}, {}, ConfigError, "there is no 'chrf'"),
        ({"task": "text_generation"}, {"validate_writing": {}}, {}, ConfigError, "needs prompts and answers"),
    ],
)
def test_settings_that_do_not_apply(
    tmp_path: Path, tiny_bert: Path, tiny_gpt2: Path, model: Any, train: Any, data: Any, error: Any, message: str
) -> None:
    sections = runs.job(tmp_path, tiny_gpt2 if model else tiny_bert, **train)
    sections["model"] |= model
    sections["data"] |= data
    with pytest.raises(error, match=message):
        tl.train(run=tmp_path / "run", engine=tiny.Here(), **sections)
