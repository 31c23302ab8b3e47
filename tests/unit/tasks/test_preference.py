"""Preferences: columns as tokens, pairs in lines, losses by hand, and the reference beside the tokens."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import task_cases
import tiny
import torchlake as tl
import training_runs as runs
from sweeps import sweep
from torchlake import plugins
from torchlake.config.job import load_job
from torchlake.config.sections.preference import PreferenceOptions
from torchlake.config.task_spec import RowOptions, TaskSpec
from torchlake.data import pairs
from torchlake.data.batching import Ragged, offsets_of
from torchlake.data.copies import divide
from torchlake.errors import DataError, TableError, UsageError
from torchlake.models import load
from torchlake.preparation.problem import draft_spec
from torchlake.tasks import _chunked_loss
from torchlake.tasks._preference_pairs import tokenize_pairs

TASK = plugins.load("tasks", "preference")


def spec(**how: Any) -> TaskSpec:
    return TaskSpec(
        task="preference",
        problem="preference",
        labels=(),
        text="text",
        label=None,
        max_length=64,
        inputs={"chosen": "chosen", "rejected": "rejected"},
        preference=PreferenceOptions(**how).model_dump(),
    )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load.load_tokenizer(tiny.build_language_model(tmp_path_factory.mktemp("model")))


def by_hand(policy: np.ndarray, reference: np.ndarray, counts: np.ndarray, how: dict[str, Any]) -> np.ndarray:
    """The losses (B,) without cross entropy, from the definitions."""
    beta, smoothing = how.get("beta", 0.1), how.get("label_smoothing", 0.0)
    ratios = policy - reference
    if how["loss"] == "dpo":
        right = 1 / (1 + np.exp(-beta * (ratios[:, 0] - ratios[:, 1])))
        return -(1 - smoothing) * np.log(right) - smoothing * np.log(1 - right)
    if how["loss"] == "ipo":
        return (ratios[:, 0] / counts[:, 0] - ratios[:, 1] / counts[:, 1] - 1 / (2 * beta)) ** 2
    odds = [np.exp(mean) / (1 - np.exp(mean)) for mean in (policy / counts).T]
    return -beta * np.log(1 / (1 + odds[1] / odds[0]))


@pytest.mark.parametrize(
    "how",
    [
        {"loss": "dpo"},
        {"loss": "dpo", "beta": 0.5, "label_smoothing": 0.2},
        {"loss": "dpo", "sft_weight": 0.7},
        {"loss": "ipo", "beta": 0.3},
        {"loss": "ipo", "sft_weight": 1.5},
        {"loss": "orpo", "beta": 0.4},
    ],
    ids=str,
)
def test_losses_are_those_of_the_formulas(how: dict[str, Any]) -> None:
    draw = np.random.default_rng(0)
    counts = draw.integers(1, 9, (7, 2)).astype(np.float64)
    policy, reference = (-draw.uniform(0.05, 3, (7, 2)) * counts for _ in range(2))
    prompt = -draw.uniform(1, 5, 7)
    tokens = counts[:, 0] + (4 if how["loss"] == "orpo" else 0)
    entropy = -(policy[:, 0] + (prompt if how["loss"] == "orpo" else 0)).sum() / tokens.sum()
    weight = 1.0 if how["loss"] == "orpo" else how.get("sft_weight", 0.0)
    expected = by_hand(policy, reference, counts, how).mean() + weight * entropy
    outputs = torch.tensor(np.column_stack([policy, prompt]), requires_grad=True)
    targets = torch.tensor(np.column_stack([reference, counts, np.full(7, tokens.mean())]))
    parts = [TASK.loss_sum(outputs[some], targets[some], spec(**how)) for some in (slice(0, 3), slice(3, 7))]
    assert sum(parts).item() / 7 == pytest.approx(expected, rel=1e-12)
    sum(parts).backward()
    assert outputs.grad is not None
    assert outputs.grad.isfinite().all()


def test_orpo_has_a_gradient_where_an_answer_is_certain_or_impossible() -> None:
    outputs = torch.tensor([[-1e-7, -90.0, -1.0], [-90.0, -1e-7, -1.0]], requires_grad=True)
    targets = torch.tensor([[0.0, 0.0, 1.0, 1.0, 3.0]] * 2)
    TASK.loss_sum(outputs, targets, spec(loss="orpo")).backward()
    assert outputs.grad is not None
    assert outputs.grad.isfinite().all()


MESSAGES = [{"role": "user", "content": "is it good ?"}]
GOOD, BAD = ([{"role": "assistant", "content": text}] for text in ("good", "bad bad"))


@pytest.mark.parametrize(
    ("prompt", "chosen", "rejected"),
    [
        (MESSAGES, GOOD, BAD),
        (json.dumps(MESSAGES), json.dumps(GOOD), json.dumps(BAD)),
        ("is it good ?", GOOD, BAD),
        (MESSAGES, "good", "bad bad"),
        (MESSAGES, MESSAGES + GOOD, MESSAGES + BAD),
        ("is it good ?", MESSAGES + GOOD, MESSAGES + BAD),
        (None, MESSAGES + GOOD, MESSAGES + BAD),
    ],
)
def test_conversations_come_in_many_forms(tokenizer: Any, prompt: Any, chosen: Any, rejected: Any) -> None:
    inputs = {"chosen": pa.array([chosen]), "rejected": pa.array([rejected])}
    inputs |= {} if prompt is None else {"text": pa.array([prompt])}
    (pair,), _, errors = tokenize_pairs(tokenizer, inputs, RowOptions(), 64)
    assert errors == {}
    asked = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    for ids, answer in zip(pair, ("good", "bad bad"), strict=True):
        learned = [token for token in ids if token >= 0]
        assert [~token for token in ids if token < 0] == asked
        assert tokenizer.decode(learned[:-1]).strip() == answer
        assert learned[-1] == tokenizer.eos_token_id


def test_turns_of_others_within_an_answer_are_not_learned(tokenizer: Any) -> None:
    more = [{"role": "user", "content": "and the story ?"}, {"role": "assistant", "content": "fine"}]
    inputs = {"text": pa.array([MESSAGES]), "chosen": pa.array([GOOD + more]), "rejected": pa.array([BAD])}
    ((chosen, _),), _, errors = tokenize_pairs(tokenizer, inputs, RowOptions(), 64)
    assert errors == {}
    assert tokenizer.decode([token for token in chosen if token >= 0]).split() == ["good", "fine", "</s>"]


@given(
    start=st.text(st.characters(codec="utf-8"), max_size=8),
    ends=st.tuples(st.text(min_size=1, max_size=8), st.text(min_size=1, max_size=8)),
)
@settings(max_examples=60, deadline=None)
def test_what_both_texts_begin_with_is_the_prompt(tokenizer: Any, start: str, ends: tuple[str, str]) -> None:
    chosen, rejected = (start + end for end in ends)
    columns = {"chosen": pa.array([chosen]), "rejected": pa.array([rejected])}
    (pair,), _, errors = tokenize_pairs(tokenizer, columns, RowOptions(), 64)
    if errors:
        assert chosen == rejected or errors[0] == "null_input" or errors[0].startswith("no_preference")
        return
    for ids, text in zip(pair, (chosen, rejected), strict=True):
        assert tokenizer.decode([token if token >= 0 else ~token for token in ids]).removesuffix("</s>") == text
    prompts = [[token for token in ids if token < 0] for ids in pair]
    assert prompts[0] == prompts[1]


def test_rows_that_teach_nothing_say_why(tokenizer: Any) -> None:
    rows = [("a", "good", "good"), ("a", " ", "bad"), ("a", "good", None), (None, "good", "bad"), ("a", "good", "bad")]
    table = pa.table(dict(zip(("text", "chosen", "rejected"), zip(*rows, strict=True), strict=True)))
    from torchlake.preparation.row_checks import make_examples

    made = make_examples(TASK, tokenizer, table, {}, spec(), bad_rows="drop")
    assert made.errors == {0: "no_preference", 1: "null_input", 2: "null_input", 3: "null_input"}
    assert made.rows.tolist() == [4]
    mixed = {"chosen": pa.array(["good", " "]), "rejected": pa.array([json.dumps(BAD)] * 2)}
    assert tokenize_pairs(tokenizer, mixed, RowOptions(), 64).errors == {
        0: "bad_chat: one answer is a string, the other a conversation",
        1: "null_input",
    }
    empty = {"chosen": pa.array([MESSAGES + GOOD]), "rejected": pa.array([[]], pa.array([GOOD]).type)}
    assert tokenize_pairs(tokenizer, empty, RowOptions(), 64).errors == {0: "null_input"}


def test_long_pairs_lose_the_start_of_their_prompt(tokenizer: Any) -> None:
    columns = {"text": pa.array(["film " * 100]), "chosen": pa.array([" good"]), "rejected": pa.array([" bad" * 20])}
    (pair,), cut, _ = tokenize_pairs(tokenizer, columns, RowOptions(), 64)
    assert max(map(len, pair)) == 64
    learned = [[token for token in ids if token >= 0] for ids in pair]
    whole, _, _ = tokenize_pairs(tokenizer, {**columns, "text": pa.array(["film"])}, RowOptions(), 64)
    assert learned == [[token for token in ids if token >= 0] for ids in whole[0]]
    assert cut[0] > 0
    assert len(pair[0]) - len(learned[0]) == len(pair[1]) - len(learned[1])


def test_long_conversations_are_cut_before_a_question(tokenizer: Any) -> None:
    turns = [{"role": role, "content": f"{number} film"} for number in range(9) for role in ("user", "assistant")]
    prompt = [{"role": "system", "content": "be"}, *turns[:-1]]
    columns = {"text": pa.array([prompt]), "chosen": pa.array([GOOD]), "rejected": pa.array([BAD])}
    found = [tokenize_pairs(tokenizer, columns, RowOptions(), length) for length in (1000, 64)]
    assert found[0].cut == [0]
    assert found[1].errors == {}
    assert found[1].cut[0] > 0
    shown = [tokenizer.decode([max(token, ~token) for token in one.pairs[0][1]]) for one in found]
    start, _, kept = shown[1].partition("be")
    system, _, whole = shown[0].partition("be")
    assert start == system
    assert whole.endswith(kept)
    assert kept.startswith("<user>") or "<user>" in kept[:12]
    assert all(len(ids) <= 64 for ids in found[1].pairs[0])


def some_pairs(count: int, seed: int = 0) -> tuple[Ragged, np.ndarray]:
    """Pairs of random tokens, and the tokens of the chosen ones."""
    draw = np.random.default_rng(seed)
    rows, split = [], []
    for _ in range(count):
        prompt = ~draw.integers(5, 300, draw.integers(1, 7))
        answers = [np.concatenate([prompt, draw.integers(5, 300, draw.integers(1, 9))]) for _ in range(2)]
        rows.append(np.concatenate(answers))
        split.append(len(answers[0]))
    values = np.concatenate(rows).astype(np.int32)
    return Ragged(values, offsets_of(np.array([len(row) for row in rows]))), np.array(split)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("isolates", [True, False])
@pytest.mark.parametrize("each", [True, False])
def test_sums_are_those_of_each_answer_alone(tmp_path: Path, kind: Any, isolates: bool, each: bool) -> None:
    folder = tiny.build_language_model(tmp_path, kind=kind)
    model = load.load_model(folder, None, auto_class="AutoModelForCausalLM")
    tokens, split = some_pairs(9)

    def sums_of(rows: np.ndarray) -> torch.Tensor:
        from torchlake.data.features import take

        some = take(tokens, rows)
        assert isinstance(some, Ragged)
        lines = pairs.lines_of(pairs.answers_of(some, split[rows]), 64, isolates=isolates)
        made = pairs.pair_batch(lines, 0, with_prompts=True)
        options: dict[str, Any] = {"position_ids": torch.from_numpy(made.positions)} if isolates else {}
        options |= {} if isolates else {"attention_mask": torch.from_numpy(made.mask)}
        if each:
            options |= {"targets": torch.from_numpy(made.targets), "places": torch.from_numpy(made.places)}
        answer = model(input_ids=torch.from_numpy(made.ids), use_cache=False, **options)
        layout = (made.places, made.targets, made.slots, made.columns)
        found: torch.Tensor = TASK.sums(answer, dict(zip(TASK.kept_back, layout, strict=False)), len(rows))
        return found

    plain = [torch.zeros(3) for _ in range(9)]
    with torch.no_grad():
        for row in range(9):
            ids = tokens.values[tokens.offsets[row] : tokens.offsets[row + 1]].astype(np.int64)
            for which, answer in enumerate((ids[: split[row]], ids[split[row] :])):
                real = torch.from_numpy(np.where(answer < 0, ~answer, answer))[None]
                logs = model(input_ids=real).logits[0, :-1].log_softmax(-1).gather(1, real[0, 1:, None])[:, 0]
                learned = torch.from_numpy(answer[1:] >= 0)
                plain[row][which] = logs[learned].sum()
                if which == 0:
                    plain[row][2] = logs[~learned].sum()
        if each:
            _chunked_loss.attach(model, _chunked_loss.AfterHead(), each=True)
        whole = sums_of(np.arange(9))
        assert torch.allclose(whole, torch.stack(plain), atol=1e-4)
        assert torch.allclose(sums_of(np.array([4, 8]))[0], whole[4], atol=1e-5)
        changed = sums_of(np.array([4, 0]))[0]
        assert torch.allclose(changed, whole[4], atol=1e-5)


def test_the_head_computes_in_chunks_what_it_computes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.build_language_model(tmp_path)
    found = []
    for size in (2**30, 4 * 400 * 8):
        monkeypatch.setattr(_chunked_loss, "CHUNK_BYTES", size)
        model = load.load_model(folder, None, auto_class="AutoModelForCausalLM")
        _chunked_loss.attach(model, _chunked_loss.AfterHead(factor=0.5, cap=3.0), each=True)
        ids = torch.arange(60).reshape(2, 30)
        places = torch.arange(5, 50)
        logs = model(input_ids=ids, use_cache=False, targets=places + 1, places=places)
        assert logs.shape == (45,)
        (logs * torch.linspace(0.1, 2, 45)).sum().backward()
        found.append((logs.detach(), model.get_output_embeddings().weight.grad))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-5)
    assert torch.allclose(found[0][1], found[1][1], atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 20), seed=st.integers(0, 99), isolates=st.booleans(), length=st.integers(16, 80))
def test_every_answer_is_in_a_line_once(count: int, seed: int, isolates: bool, length: int) -> None:
    tokens, split = some_pairs(count, seed)
    lines = pairs.lines_of(pairs.answers_of(tokens, split), length, isolates=isolates)
    assert sorted(lines.order.tolist()) == list(range(2 * count))
    assert lines.length <= max(length, int(tokens.lengths.max()))
    made = pairs.pair_batch(lines, 0, with_prompts=False)
    assert made.mask.sum() == tokens.lengths.sum()
    assert len(made.targets) == (tokens.values >= 0).sum()
    learned = np.add.reduceat(tokens.values >= 0, tokens.offsets[:-1], dtype=np.int64)
    assert np.bincount(made.slots // pairs.SUMS, minlength=count).tolist() == learned.tolist()


BOTH = {"chosen": "a", "rejected": "b"}


@pytest.mark.parametrize(
    ("data", "train", "words"),
    [
        ({"chosen": "a"}, {}, "data.chosen is set without data.rejected"),
        ({"rejected": "a"}, {}, "data.rejected is set without data.chosen"),
        ({**BOTH, "learn": "assistant"}, {}, "data.learn is assistant, but data.chosen and"),
        ({"chosen": "a", "rejected": "a"}, {}, "must be different columns"),
        ({"text": None}, {}, "data.text: is null; only pairs"),
        ({}, {"preference": {"loss": "ipo"}}, r"train.preference: .* \(data.chosen and data.rejected\)"),
        (BOTH, {"preference": {"loss": "orpo", "sft_weight": 1.0}}, "loss orpo has no sft_weight"),
        (BOTH, {"preference": {"loss": "ipo", "label_smoothing": 0.1}}, "loss ipo has no label_smoothing"),
    ],
)
def test_settings_that_contradict_are_refused_first(data: dict[str, Any], train: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        draft_spec(
            load_job(None, data={"train": "t", **data}, model={"base": "m", "task": "text_generation"}, train=train)
        )


def test_answers_that_are_not_texts_are_refused() -> None:
    for kind in (pa.int64(), pa.binary(), pa.dictionary(pa.int32(), pa.float32())):
        schema = pa.schema({"text": pa.string(), "chosen": pa.string(), "rejected": kind})
        with pytest.raises(TableError, match="the column 'rejected' holds .*, not strings or conversations"):
            TASK.find_columns(schema, spec(), None)


def test_pairs_of_a_prompt_stay_on_one_side() -> None:
    job = load_job(
        None, data={"train": "t", "text": "p", **BOTH}, model={"base": "m", "task": "text_generation"}, train={}
    )
    prompts = np.arange(40, dtype=np.uint64) % 10
    hashes = np.column_stack([prompts, *np.random.default_rng(0).integers(0, 2**60, (3, 40), dtype=np.uint64)])
    training, held_out = divide(job, None, hashes)
    assert held_out is not None
    assert len(held_out) == 4
    assert not set(prompts[training]) & set(prompts[held_out])


@pytest.mark.parametrize("data", [{"system": "Be brief."}, {"messages": {"role": "by", "content": "said"}}], ids=str)
def test_settings_of_conversations_are_refused_beside_strings(tmp_path: Path, base: Path, data: dict[str, Any]) -> None:
    """They would change nothing."""
    job = sections(tmp_path / "job", base)
    job["data"] |= data
    with pytest.raises(UsageError, match=rf"data\.{next(iter(data))}: opening, better, worse hold text, not"):
        tl.train(None, run=tmp_path / "run", **job)
    assert not (tmp_path / "run").exists()


def sections(folder: Path, base: Path, **train: Any) -> dict[str, Any]:
    """A job over 32 pairs; `train` may have the loss."""
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(task_cases.preferences(32), folder / "reviews.parquet")
    made = runs.job(folder, base, **{"epochs": 1, "batch_size": 4, "learning_rate": 3e-3, **train})
    made["data"] |= {"text": "opening", "chosen": "better", "rejected": "worse"}
    made["model"] |= {"task": "text_generation", "max_length": 32}
    return made


@pytest.mark.parametrize("loss", sweep(["orpo", "dpo"], quick=["dpo"]))
def test_bad_pairs_are_left_out(tmp_path: Path, base: Path, loss: str) -> None:
    job = sections(tmp_path / "a", base, preference={"loss": loss})
    rows = task_cases.preferences(32).to_pylist()
    rows[3]["worse"], rows[8]["better"] = rows[3]["better"], " "
    for number, some in enumerate((rows, [row for row in rows if row not in (rows[3], rows[8])])):
        pq.write_table(pa.Table.from_pylist(some), tmp_path / "a" / "reviews.parquet")
        job["data"] |= {"bad_rows": "drop", "validation": None}
        job["train"]["max_steps"] = 1
        runs.succeed(tmp_path / f"{number}", job)
    assert runs.losses(tmp_path / "0")[0] == pytest.approx(runs.losses(tmp_path / "1")[0], abs=0.5)
    errors = pq.read_table(tmp_path / "0" / "prepared" / "train")["error"].to_pylist()
    assert [row for row, error in enumerate(errors) if error] == [3, 8]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build_language_model(tmp_path_factory.mktemp("base"), kind="llama")


IN_AN_EPOCH = ("rank0.step:5:kill9",)
EVERYWHERE = ("reference.batch:1:kill9", "commit.write:1:kill9", "rank0.step:1:kill9", "rank0.step:5:kill9")


@pytest.mark.parametrize("sites", sweep([((),), (IN_AN_EPOCH,), (EVERYWHERE,)], quick={((),)}))
def test_a_killed_run_goes_on_with_the_same_bytes(tmp_path: Path, base: Path, sites: tuple[str, ...]) -> None:
    """Killed or not: what the run learns, and how it is measured."""
    job = sections(tmp_path / "a", base)
    for site in sites:
        assert runs.attempt(tmp_path / "run", job, failpoint=site).exit_code == -9
    runs.succeed(tmp_path / "run", job)
    losses = runs.losses(tmp_path / "run")
    if sites:
        runs.succeed(tmp_path / "whole", job)
        assert losses == runs.losses(tmp_path / "whole")
        assert runs.weights_sha256(tmp_path / "run") == runs.weights_sha256(tmp_path / "whole")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5)  # the model is still its reference
    assert losses[-1] < losses[0]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if "validation_reward_accuracy" in line][-1]
    assert last["validation_reward_accuracy_low"] <= last["validation_reward_accuracy"]
    assert last["validation_reward_margin_low"] <= last["validation_reward_margin"]
    held_out = tmp_path / "a" / "reviews.parquet"
    measured = tl.evaluate(tmp_path / "run" / "model", held_out, engine=runs.Inline())
    assert measured.rows == 32
    assert measured.metrics["reward_accuracy"].value > 0.5
    assert measured.metrics["reward_margin"].low <= measured.metrics["reward_margin"].value
    again = {"inputs": {"chosen": "worse", "rejected": "better"}, "text": "opening", "engine": runs.Inline()}
    turned = tl.evaluate(tmp_path / "run" / "model", held_out, **again)
    assert turned.metrics["reward_margin"].value == pytest.approx(-measured.metrics["reward_margin"].value, abs=1e-5)
    with pytest.raises(UsageError, match="the model did not learn from pairs"):
        tl.evaluate(base, held_out, **again)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "strategy"), [(2, "fsdp"), (3, "ddp"), (4, "ddp")])
def test_killed_ranks_go_on_with_the_same_bytes(tmp_path: Path, base: Path, ranks: int, strategy: str) -> None:
    job = sections(tmp_path / "a", base, strategy=strategy)
    runs.succeed(tmp_path / "whole", job, ranks=ranks)
    for site in ("reference.batch:1:kill9", "rank0.step:5:kill9"):
        stopped = runs.attempt(tmp_path / "run", job, ranks=ranks, failpoint=site)
        assert stopped.exit_code in (0, -9)  # ranks that are killed are started again
    runs.succeed(tmp_path / "run", job, ranks=ranks)
    assert runs.losses(tmp_path / "run") == runs.losses(tmp_path / "whole")
    assert runs.weights_sha256(tmp_path / "run") == runs.weights_sha256(tmp_path / "whole")


def test_a_reference_of_another_tokenizer_is_refused(tmp_path: Path, base: Path) -> None:
    other = tiny.build_language_model(tmp_path / "other", kind="llama")
    tokenizer = load.load_tokenizer(other)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(other)
    job = sections(tmp_path / "a", base, preference={"reference": str(other)})
    failed = runs.attempt(tmp_path / "run", job)
    size = len(tokenizer)
    assert f"a vocabulary of {size:,} tokens" in failed.error
    assert f"which has {size - 1:,}" in failed.error
    assert failed.error.startswith(DataError.__name__)


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"loss": "dpo", "sft_weight": 0.5}, {"loss": "ipo"}, {"loss": "orpo"}], ids=str)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_micro_batches_and_ranks_change_no_loss(tmp_path: Path, how: dict[str, Any], kind: Any) -> None:
    base = tiny.build_language_model(tmp_path / "base", kind=kind, dropout=0.0)
    runs.succeed(tmp_path / "one", sections(tmp_path / "a", base, preference=how))
    expected = runs.losses(tmp_path / "one")
    small = sections(tmp_path / "a", base, preference=how, micro_batch_tokens=60)
    runs.succeed(tmp_path / "small", small)
    assert runs.losses(tmp_path / "small") == pytest.approx(expected, rel=1e-4)
    for ranks, strategy in ((2, "fsdp"), (3, "ddp"), (4, "ddp")):
        job = sections(tmp_path / "a", base, preference=how, strategy=strategy)
        runs.succeed(tmp_path / f"{ranks}", job, ranks=ranks)
        assert runs.losses(tmp_path / f"{ranks}") == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_conversations_with_tools_are_learned_in_any_type(tmp_path: Path, base: Path) -> None:
    base = shutil.copytree(base, tmp_path / "base")
    calls = "{% for call in message.tool_calls %}{{ call.function | tojson }}{% endfor %}"
    (base / "chat_template.jinja").write_text(tiny.CHAT_TEMPLATE.replace("{% endfor %}", calls + "{% endfor %}", 1))
    call = {"type": "function", "function": {"name": "look", "arguments": {"city": "Rome"}}}
    other = {"type": "function", "function": {"name": "look", "arguments": {"zone": 1}}}
    rows = [
        {"ask": MESSAGES, "yes": GOOD, "no": [{"role": "assistant", "content": None, "tool_calls": [one]}]}
        for one in (call, other)
    ]
    for row in rows:
        row["tools"] = [{"type": "function", "function": {"name": "look"}}]
    typed = pa.Table.from_pylist(rows * 6)
    written = pa.table({name: [json.dumps(row[name]) for row in rows] * 6 for name in typed.column_names})
    names = typed.column_names[:-1]
    wide = pa.table(
        {
            **{name: typed[name].cast(pa.large_list(typed[name].type.value_type)) for name in names},
            "tools": written["tools"].cast(pa.string_view()),
        }
    )
    coded = pa.table({name: written[name].combine_chunks().dictionary_encode() for name in written.column_names})
    losses = []
    for number, table in enumerate((typed, written, wide, coded)):
        job = sections(tmp_path / f"{number}", base, batch_size=12)
        pq.write_table(table, tmp_path / f"{number}" / "reviews.parquet")
        job["data"] |= {"text": "ask", "chosen": "yes", "rejected": "no", "validation": None}
        runs.succeed(tmp_path / f"run{number}", job)
        losses.append(runs.losses(tmp_path / f"run{number}"))
    assert losses[1:] == losses[:1] * 3


@pytest.mark.slow
@pytest.mark.parametrize("train", [{"ema": 0.9}, {"activation_checkpointing": True}], ids=str)
def test_pairs_go_with_other_settings(tmp_path: Path, base: Path, train: dict[str, Any]) -> None:
    runs.succeed(tmp_path / "run", sections(tmp_path / "a", base, **train))
    assert runs.losses(tmp_path / "run")[0] == pytest.approx(math.log(2), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [None, "nf4", "int8"])
def test_low_rank_adapters_learn_relative_to_their_base(tmp_path: Path, base: Path, quantize: str | None) -> None:
    pytest.importorskip("peft")
    if quantize is not None:
        pytest.importorskip("bitsandbytes")
    job = sections(tmp_path / "a", base, learning_rate=3e-2)
    job["model"] |= {"lora": {"rank": 4, "merge": False}, "quantize": quantize}
    runs.succeed(tmp_path / "run", job)
    losses = runs.losses(tmp_path / "run")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-3 if quantize == "int8" else 1e-4)
    assert losses[-1] < losses[0]
    measured = tl.evaluate(tmp_path / "run" / "model", tmp_path / "a" / "reviews.parquet", engine=runs.Inline())
    assert measured.metrics["reward_accuracy"].value > 0.5


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "strategy"), [(1, "single"), (2, "fsdp")])
def test_chunks_of_the_head_change_no_loss(tmp_path: Path, base: Path, ranks: int, strategy: str) -> None:
    runs.succeed(tmp_path / "one", sections(tmp_path / "a", base))
    job = sections(tmp_path / "a", base, strategy=strategy)
    runs.succeed(tmp_path / "chunks", job, ranks=ranks, stub=runs.small_chunks)
    assert runs.losses(tmp_path / "chunks") == pytest.approx(runs.losses(tmp_path / "one"), rel=1e-4)
