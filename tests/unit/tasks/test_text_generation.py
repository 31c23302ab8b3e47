"""Fine-tuning a causal language model: blocks, ranks, resuming, LoRA, and what comes of it."""

import json
import math
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import families
import tiny
import torchlake as tl
import training_runs as runs
from sweeps import sweep
from torchlake.data import order
from torchlake.errors import ConfigError, DataError, UsageError
from torchlake.models import load
from torchlake.models.spec import load_spec
from torchlake.preparation.prepare import prepare
from torchlake.tables.record import read_commit

BLOCK = 24


def job(folder: Path, model: Path, *, rows: int = 80, lora: bool = False, **train: Any) -> dict[str, Any]:
    """Sections of a job over generated texts of 5 to 32 tokens and longer ones."""
    sections = runs.job(folder, model, rows=rows, **train)
    pq.write_table(texts(rows), sections["data"]["train"])
    sections["model"] |= {"task": "text_generation", "max_length": BLOCK}
    if lora:
        sections["model"]["lora"] = {"rank": 4}
    return sections


def texts(rows: int) -> pa.Table:
    table = tiny.reviews(rows).select(["id", "text"])
    longer = [" ".join([text] * (1 + 3 * (row % 10 == 0))) for row, text in enumerate(table["text"].to_pylist())]
    return table.set_column(1, "text", pa.array(longer))


def tokens_of(model: Path, table: pa.Table) -> list[list[int]]:
    tokenizer = load.load_tokenizer(model)
    return [[*ids, tokenizer.eos_token_id] for ids in tokenizer(table["text"].to_pylist())["input_ids"]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_gpt2: Path) -> Path:
    """The folder of a finished job: reviews.parquet and run/."""
    folder = tmp_path_factory.mktemp("trained")
    runs.succeed(folder / "run", job(folder, tiny_gpt2, epochs=3, learning_rate=3e-3))
    return folder


@pytest.mark.slow
def test_every_token_is_a_target_once_an_epoch(trained: Path, tiny_gpt2: Path) -> None:
    """A step's tokens are those of its blocks; a block's first is the last of the block before."""
    lines = [line for line in runs.metrics(trained / "run") if "loss" in line]
    counts = np.array([len(ids) for ids in tokens_of(tiny_gpt2, texts(80))])
    learned = int(counts[order.split(80, 0.25, 0)[0]].sum())
    for epoch in (1, 2, 3):
        steps = [line for line in lines if line["epoch"] == epoch]
        blocks, tokens = sum(line["rows"] for line in steps), sum(line["tokens"] for line in steps)
        assert tokens - blocks == learned - 1
        assert blocks == math.ceil((learned - 1) / (BLOCK - 1))
        assert sum(line["padded_tokens"] for line in steps) - tokens < BLOCK
    first = [line["loss"] for line in lines if line["epoch"] == 1]
    last = [line["loss"] for line in lines if line["epoch"] == 3]
    assert np.mean(last) < np.mean(first)


def test_validation_and_evaluate_measure_blocks_in_the_order_of_the_table(tmp_path: Path, tiny_gpt2: Path) -> None:
    sections = job(tmp_path, tiny_gpt2, rows=30, epochs=1)
    test = tmp_path / "test.parquet"
    pq.write_table(texts(25), test)
    sections["data"]["validation"] = str(test)
    done = runs.succeed(tmp_path / "run", sections)
    assert done.metrics is not None
    model = tmp_path / "run" / "model"
    stream = list(chain.from_iterable(tokens_of(model, texts(25))))
    stock, losses = AutoModelForCausalLM.from_pretrained(model), []
    for first in range(0, len(stream) - 1, BLOCK - 1):
        block = torch.tensor([stream[first : first + BLOCK]])
        with torch.inference_mode():
            losses.append((stock(input_ids=block, labels=block).loss.item(), block.shape[1] - 1))
    loss = sum(mean * targets for mean, targets in losses) / (len(stream) - 1)
    assert done.metrics == pytest.approx({"loss": loss, "perplexity": math.exp(loss)}, rel=1e-5)
    for table in (test, texts(25)):
        found = tl.evaluate(model, table, engine=tiny.Here())
        assert (found.rows, found.failed, found.tokens) == (25, 0, len(stream) - 1)
        assert found.metrics["loss"].value == pytest.approx(loss, rel=1e-5)
        perplexity = found.metrics["perplexity"]
        assert perplexity.value == pytest.approx(math.exp(loss), rel=1e-5)
        assert perplexity.low < perplexity.value < perplexity.high


def test_evaluate_counts_rows_without_text_and_refuses_what_it_cannot_do(trained: Path) -> None:
    model = trained / "run" / "model"
    found = tl.evaluate(model, pa.table({"text": ["a good film", None, " ", "a bad film"]}), engine=tiny.Here())
    assert (found.rows, found.failed, found.errors) == (4, 2, {"null_input": 2})
    usable = tokens_of(model, pa.table({"text": ["a good film", "a bad film"]}))
    assert found.tokens == sum(map(len, usable)) - 1
    assert json.dumps(found.to_json())
    with pytest.raises(DataError, match="no row"):
        tl.evaluate(model, pa.table({"text": pa.array([None, ""], pa.string())}), engine=tiny.Here())
    with pytest.raises(UsageError, match="name a label, its answers"):
        tl.evaluate(model, texts(3), max_new_tokens=3)
    with pytest.raises(UsageError, match="no key-value cache"):
        tl.evaluate(model, texts(3), runtime="varlen")


def test_the_model_folder_is_one_of_transformers_and_of_torchlake(trained: Path, tiny_gpt2: Path) -> None:
    folder = trained / "run" / "model"
    spec = load_spec(folder)
    assert (spec.task, spec.problem, spec.labels, spec.label, spec.max_length) == (
        "text_generation",
        "next_token",
        (),
        None,
        BLOCK,
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert model.generation_config.eos_token_id == AutoTokenizer.from_pretrained(folder).eos_token_id
    assert load_spec(tiny_gpt2).task == "text_generation"
    card = (folder / "README.md").read_text()
    assert "AutoModelForCausalLM" in card
    assert "pipeline_tag: text-generation" in card
    written = tl.predict(folder, pa.table({"text": ["a good film"]}), engine=tiny.Here(), max_new_tokens=3)
    assert written["error"].to_pylist() == [None]


@pytest.mark.slow
def test_two_ranks_train_like_one_with_lora_too(tmp_path: Path, tiny_gpt2: Path) -> None:
    """The whole model: tests/conformance/test_strategies.py, under every strategy."""
    sections = job(tmp_path, tiny_gpt2, rows=40, epochs=1, batch_size=5, micro_batch_tokens=50, lora=True)
    one = runs.succeed(tmp_path / "one", sections)
    two = runs.succeed(tmp_path / "two", sections, ranks=2)
    assert runs.losses(tmp_path / "two") == pytest.approx(runs.losses(tmp_path / "one"), abs=1e-5)
    assert two.metrics == pytest.approx(one.metrics, rel=1e-4)


@pytest.mark.slow
def test_a_killed_run_goes_on_in_the_middle_of_an_epoch_with_the_same_bytes(tmp_path: Path, tiny_gpt2: Path) -> None:
    base = tiny.build_language_model(tmp_path / "base", dropout=0.1)
    sections = job(tmp_path, base, rows=60, epochs=2)
    stopped = runs.attempt(
        tmp_path / "run", sections, failpoint="rank0.step:5:raise", overrides=("train.max_restarts=0",)
    )
    assert stopped.exit_code == 70
    runs.succeed(tmp_path / "run", sections)
    runs.succeed(tmp_path / "whole", sections)
    assert runs.losses(tmp_path / "run") == runs.losses(tmp_path / "whole")
    assert runs.weights_sha256(tmp_path / "run") == runs.weights_sha256(tmp_path / "whole")


@pytest.mark.slow
def test_lora_leaves_the_words_alone_and_merges_the_rest(tmp_path: Path, tiny_gpt2: Path, tiny_llama: Path) -> None:
    for base in (tiny_gpt2, tiny_llama):
        folder = tmp_path / base.name
        runs.succeed(folder / "run", job(folder, base, rows=40, epochs=1, lora=True))
        before, after = (AutoModelForCausalLM.from_pretrained(each) for each in (base, folder / "run" / "model"))
        words = [model.get_output_embeddings().weight for model in (before, after)]
        assert torch.equal(*words)
        changed = [
            name
            for (name, one), other in zip(before.named_parameters(), after.parameters(), strict=True)
            if not torch.equal(one, other)
        ]
        assert changed
        assert all(".weight" in name and "norm" not in name and "ln_" not in name for name in changed)
        assert (folder / "run" / "model" / "adapter" / "adapter_config.json").exists()


def test_conversations_are_learned_as_the_template_writes_them(tmp_path: Path, tiny_gpt2: Path) -> None:
    chats = [[{"role": "user", "content": "good ?"}, {"role": "assistant", "content": "yes , all of it"}], None, []]
    pq.write_table(pa.table({"text": chats}), tmp_path / "chats.parquet")
    spec = load_spec(tiny_gpt2)
    record = prepare(
        tmp_path / "chats.parquet",
        tmp_path / "tokens",
        tokenizer=tiny_gpt2,
        spec=spec,
        engine=tiny.Here(),
        bad_rows="drop",
    )
    assert (record["rows"], record["failed"]) == (3, 2)
    tokens = pq.read_table(tmp_path / "tokens")
    expected = tokens_of(tiny_gpt2, pa.table({"text": ["<user> good ? <assistant> yes , all of it "]}))
    assert tokens["input_ids"].to_pylist()[:1] == expected
    assert tokens.column_names == ["row_id", "input_ids", "length", "cut", "hashes", "markup", "leak", "error"]
    assert [error and error.partition(":")[0] for error in tokens["error"].to_pylist()] == [
        None,
        "null_input",
        "bad_chat",
    ]


def conversations(rows: int) -> pa.Table:
    """Two or four turns each, of which the assistant has every second one."""
    said = tiny.reviews(4 * rows)["text"].to_pylist()
    chats = [
        [
            {"role": ("user", "assistant")[turn % 2], "content": said[4 * row + turn]}
            for turn in range(2 + 2 * (row % 2))
        ]
        for row in range(rows)
    ]
    return pa.table({"text": chats})


def marking(model: Path, folder: Path) -> Path:
    """The model with a chat template that marks the assistant's turns."""
    shutil.copytree(model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (
        "{% for message in messages %}{{ '<' + message.role + '>\\n' }}{% if message.role == 'assistant' %}"
        "{% generation %}{{ message.content + '\\n' }}{% endgeneration %}"
        "{% else %}{{ message.content + '\\n' }}{% endif %}{% endfor %}"
    )
    tokenizer.save_pretrained(folder)
    return folder


def learned_alone(tokenizer: Any, chat: list[dict[str, str]], length: int) -> tuple[list[int], list[int]]:
    """A conversation's tokens and its labels, -100 outside of answers, cut to a length."""
    pairs: list[tuple[int, int]] = []
    for turn in chat:
        # No token of this tokenizer reaches across the end of a line.
        role, said = (tokenizer(f"{words}\n")["input_ids"] for words in (f"<{turn['role']}>", turn["content"]))
        answer = turn["role"] == "assistant"
        pairs += [(token, -100) for token in role] + [(token, token if answer else -100) for token in said]
    pairs = [*pairs, (tokenizer.eos_token_id, tokenizer.eos_token_id)][:length]
    return [token for token, _ in pairs], [label for _, label in pairs]


@pytest.mark.parametrize("kind", sweep(["gpt2", "bloom"], quick={"gpt2"}))
def test_answers_are_learned_after_their_own_questions_alone(tmp_path: Path, kind: str) -> None:
    """Held to transformers' own loss over each conversation by itself, with every other token's label at -100.

    BLOOM takes no positions, so its blocks are taken apart.
    """
    length = 110
    plain = families.build(tmp_path / "plain", kind, kind="writer", dropout=False)
    sections = job(tmp_path, marking(plain, tmp_path / "base"))
    sections["train"] |= {"epochs": 1, "batch_size": 4, "micro_batch_tokens": 250}
    sections["model"]["max_length"] = length
    tables = {"train": tmp_path / "chats.parquet", "validation": tmp_path / "test.parquet"}
    pq.write_table(conversations(20), tables["train"])
    pq.write_table(conversations(9), tables["validation"])
    sections["data"] = {**{name: str(path) for name, path in tables.items()}, "learn": "assistant"}
    sections["data"]["too_long"] = "cut_end"
    one = runs.succeed(tmp_path / "one", sections)
    two = runs.succeed(tmp_path / "two", sections, ranks=2)
    model = tmp_path / "one" / "model"
    tokenizer, stock = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    loss, targets, cut = 0.0, 0, 0
    for chat in conversations(9)["text"].to_pylist():
        ids, labels = (torch.tensor([row]) for row in learned_alone(tokenizer, chat, length))
        number = int((labels[:, 1:] != -100).sum())
        with torch.inference_mode():
            loss += number and stock(input_ids=ids, labels=labels).loss.item() * number
        targets += number
        cut += len(learned_alone(tokenizer, chat, 10_000)[0]) > length
    assert cut
    blocks = sum(line["rows"] for line in runs.metrics(tmp_path / "one") if "rows" in line)
    assert blocks < 20, "some conversations share a block"
    planned = tl.plan(**sections, flops=1e12)
    assert (planned.blocks, planned.steps) == (blocks, len(runs.losses(tmp_path / "one")))
    assert read_commit(tmp_path / "one" / "prepared" / "validation")["provenance"]["truncated"]["rows"] == cut
    assert one.metrics == pytest.approx({"loss": loss / targets, "perplexity": math.exp(loss / targets)}, rel=1e-5)
    assert two.metrics == pytest.approx(one.metrics, rel=1e-4)
    assert runs.losses(tmp_path / "two") == pytest.approx(runs.losses(tmp_path / "one"), abs=1e-5)
    found = tl.evaluate(model, tables["validation"], engine=tiny.Here())
    assert (found.tokens, found.metrics["loss"].value) == (targets, pytest.approx(loss / targets, rel=1e-5))
    assert load_spec(model).problem == "next_answer_token"


def test_the_assistants_turns_have_to_be_there(tmp_path: Path, tiny_gpt2: Path, tiny_bert: Path) -> None:
    sections = job(tmp_path, tiny_gpt2)
    learned = {**sections["data"], "learn": "assistant"}
    with pytest.raises(UsageError, match=r"data\.learn is assistant, and 'text' holds text"):
        tl.train(run=tmp_path / "a", engine=tiny.Here(), **{**sections, "data": learned})
    sections["model"]["max_length"] = 64
    chats = [*conversations(3).to_pylist(), {"text": [{"role": "user", "content": "good ?"}]}]
    pq.write_table(pa.Table.from_pylist([{**chat, "kind": "chat"} for chat in chats]), tmp_path / "chats.parquet")
    learned["train"] = str(tmp_path / "chats.parquet")
    with pytest.raises(DataError, match="row 3: bad_chat: it has no turn of the assistant to learn"):
        tl.train(run=tmp_path / "c", engine=tiny.Here(), **{**sections, "data": learned})
    sections["model"] = {"base": str(tiny_bert), "task": "text_classification"}
    with pytest.raises(ConfigError, match=r"data\.learn: text_classification learns labels"):
        tl.train(run=tmp_path / "d", engine=tiny.Here(), **{**sections, "data": {**learned, "label": "kind"}})


def test_what_cannot_be_learned_is_refused_before_any_work(tmp_path: Path, tiny_gpt2: Path, tiny_bert: Path) -> None:
    sections = job(tmp_path, tiny_gpt2)
    with pytest.raises(ConfigError, match=r"data\.label: text_generation learns the text itself"):
        tl.train(run=tmp_path / "a", **{**sections, "data": {**sections["data"], "label": "id"}})
    with pytest.raises(ConfigError, match="choose from loss, perplexity"):
        tl.train(run=tmp_path / "b", **{**sections, "train": {"metric": "accuracy"}})
    with pytest.raises(DataError, match="positions for 128"):
        tl.train(run=tmp_path / "c", **{**sections, "model": {**sections["model"], "max_length": 129}})
