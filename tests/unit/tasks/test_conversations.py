"""Jobs on columns of conversations and completions as users have them: trained, evaluated and answered."""

import json
import math
import shutil
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiny
import torchlake as tl
import training_runs as runs
from sweeps import sweep
from torchlake import failpoints, plugins
from torchlake.config.job import load_job
from torchlake.errors import ConfigError, DataError, TorchlakeError, UsageError
from torchlake.models.spec import load_spec
from torchlake.preparation.conversations import packed_facts, packed_lines, with_table
from torchlake.preparation.prepare import prepare
from torchlake.preparation.problem import complete_spec, draft_spec
from torchlake.tables.record import read_commit
from torchlake.tables.sources._options import ReadOptions
from torchlake.tasks import _rendering

SAID = ("good ?", "yes , all of it", "a film that we like", "it was boring", "is it fun ?", "no")
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def chats(rows: int = 12) -> list[list[dict[str, Any]]]:
    return [
        [
            {"role": ("user", "assistant")[turn % 2], "content": SAID[(row + turn) % len(SAID)]}
            for turn in range(2 + 2 * (row % 2))
        ]
        for row in range(rows)
    ]


def sections(folder: Path, model: Path, table: pa.Table, **data: Any) -> dict[str, Any]:
    pq.write_table(table, folder / "table.parquet")
    return {
        "data": {"train": str(folder / "table.parquet"), "validation": None, **data},
        "model": {"base": str(model), "task": "text_generation", "max_length": 64},
        "train": {"batch_size": 1000, "max_steps": 1, "learning_rate": 1e-9, "precision": "fp32", "warmup": 0.0},
    }


def loss_alone(model: Path, rows: list[list[int]]) -> float:
    """The mean loss of the learned tokens of each row by itself."""
    stock, total, targets = AutoModelForCausalLM.from_pretrained(model).eval(), 0.0, 0
    for row in rows:
        ids = torch.tensor([[token if token >= 0 else ~token for token in row]])
        labels = torch.tensor([[token if token >= 0 else -100 for token in row]])
        number = int((labels[:, 1:] != -100).sum())
        with torch.inference_mode():
            total += stock(input_ids=ids, labels=labels).loss.item() * number
        targets += number
    return total / targets


def first_loss(folder: Path) -> float:
    return float(runs.losses(folder)[0])


def test_messages_and_tools_are_found_and_learned_without_marks(tmp_path: Path, tiny_gpt2: Path) -> None:
    """By name and by the first rows; another table may hold them in another form."""
    table = pa.table({"messages": [json.dumps(chat) for chat in chats()], "tools": [json.dumps(TOOLS), None] * 6})
    job = sections(tmp_path, tiny_gpt2, table, learn="assistant")
    runs.succeed(tmp_path / "run", job)
    tokenizer = AutoTokenizer.from_pretrained(tiny_gpt2)
    alone = []
    for chat in chats():
        row: list[int] = []
        for at in range(0, len(chat), 2):
            made = tiny.completion_ids(tokenizer, chat[: at + 1], chat[at + 1 : at + 2])
            row += made[len(row) :]
            row = row[:-1] if at + 2 < len(chat) else row
        alone.append(row)
    model = tmp_path / "run" / "model"
    loss = loss_alone(tiny_gpt2, alone)
    assert first_loss(tmp_path / "run") == pytest.approx(loss, rel=1e-5)
    facts = json.loads((tmp_path / "run" / "data.json").read_text())["packed"]
    assert facts["learned"] == sum(token >= 0 for row in alone for token in row)
    assert (facts["cut"], facts["dropped"]) == (0, 0)
    assert 0.5 < facts["filled"] <= 1
    spec = load_spec(model)
    assert (spec.text, spec.inputs, spec.rows.pack) == ("messages", {"tools": "tools"}, "whole")
    structs = pa.table({"conversations": chats()})
    pq.write_table(structs, tmp_path / "structs.parquet")
    found = tl.evaluate(model, tmp_path / "structs.parquet", text="conversations", engine=tiny.Here(), inputs=None)
    assert found.metrics["loss"].value == pytest.approx(loss, rel=1e-5)
    prompts = [chat[:1] for chat in chats(3)]
    options: dict[str, Any] = {"max_new_tokens": 3, "engine": tiny.Here()}
    wanted = tl.predict(model, pa.table({"messages": prompts}), **options)["generated_text"]
    texts = pa.table({"messages": [json.dumps(prompt) for prompt in prompts]})
    assert tl.predict(model, texts, **options)["generated_text"] == wanted


FORMS = {
    "strings": ({"prompt": ["is it good ?", "fun ?"], "answer": [" yes , all", " no"]}, {"text": "prompt"}),
    "messages": (
        {"prompt": [chat[:1] for chat in chats(2)], "answer": [chat[1:2] for chat in chats(2)]},
        {"text": "prompt"},
    ),
    "a template": (
        {"ask": ["good ?", "fun ?"], "more": ["a film", None], "answer": [" yes", " no"]},
        {"text": ["ask", "more"], "template": "{ask}\n{more}\n:"},
    ),
}


@pytest.mark.parametrize("form", sweep(FORMS, quick=()))
def test_the_loss_is_over_the_completion(form: str, tmp_path: Path, tiny_gpt2: Path) -> None:
    columns, data = FORMS[form]
    runs.succeed(tmp_path / "run", sections(tmp_path, tiny_gpt2, pa.table(columns), completion="answer", **data))
    tokenizer, rows = AutoTokenizer.from_pretrained(tiny_gpt2), pa.table(columns).to_pylist()
    if form == "a template":
        prompts = [f"{row['ask']}\n{row['more'] or ''}\n:" for row in rows]
    else:
        prompts = [row["prompt"] for row in rows]
    alone = [tiny.completion_ids(tokenizer, prompt, row["answer"]) for prompt, row in zip(prompts, rows, strict=True)]
    assert first_loss(tmp_path / "run") == pytest.approx(loss_alone(tiny_gpt2, alone), rel=1e-5)
    model = tmp_path / "run" / "model"
    found = tl.evaluate(model, tmp_path / "table.parquet", report=tmp_path / "eval", engine=tiny.Here())
    assert found.tokens == sum(token >= 0 for row in alone for token in row)
    seen = pq.read_table(tmp_path / "eval" / "rows.parquet")
    assert seen["tokens"].to_pylist() == [sum(token >= 0 for token in row) for row in alone]
    assert seen["loss"].to_pylist() == pytest.approx([loss_alone(tiny_gpt2, [row]) for row in alone], rel=1e-4)
    asked = pa.table(columns).drop_columns(["answer"])
    assert tl.predict(model, asked, max_new_tokens=2, engine=tiny.Here())["error"].null_count == 2


@pytest.mark.slow
@pytest.mark.parametrize("learn", ["all", None])
def test_conversations_and_texts_packed_whole_do_not_see_each_other(
    learn: str | None, tmp_path: Path, tiny_gpt2: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_gpt2)
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats()]
    alone = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    values, data = (texts, {"pack": "whole"}) if learn is None else (chats(), {"learn": learn})
    job = sections(tmp_path, tiny_gpt2, pa.table({"text": values}), **data)
    runs.succeed(tmp_path / "run", job)
    assert first_loss(tmp_path / "run") == pytest.approx(loss_alone(tiny_gpt2, alone), rel=1e-5)
    job["data"]["pack"] = "stream"
    if learn == "all":
        with pytest.raises(UsageError, match="holds conversations, which are packed whole"):
            tl.train(run=tmp_path / "stream", engine=tiny.Here(), **job)
        return
    runs.succeed(tmp_path / "stream", job)
    assert abs(first_loss(tmp_path / "stream") - first_loss(tmp_path / "run")) > 1e-4


def test_settings_that_exclude_each_other_are_refused_before_any_work(tmp_path: Path, tiny_gpt2: Path) -> None:
    table = pa.table({"text": ["good ?"], "answer": ["yes"]})
    for data, names in (
        ({"completion": "answer", "learn": "all"}, r"data\.completion and data\.learn: all"),
        ({"completion": "answer", "pack": "stream"}, r"data\.completion and data\.pack: stream"),
        ({"learn": "last", "pack": "stream"}, r"data\.learn and data\.pack: stream"),
        ({"too_long": "drop", "pack": "stream"}, r"data\.too_long and data\.pack: stream"),
    ):
        with pytest.raises(UsageError, match=names):
            tl.train(run=tmp_path / "run", engine=tiny.Here(), **sections(tmp_path, tiny_gpt2, table, **data))
    job = sections(tmp_path, tiny_gpt2, table, system="be good")
    job["model"]["task"] = "text_classification"
    with pytest.raises(ConfigError, match=r"data\.system: text_classification reads no conversations"):
        tl.train(run=tmp_path / "run", engine=tiny.Here(), **job)
    assert not (tmp_path / "run").exists()


def prepared(
    folder: Path, model: Path, table: pa.Table, engine: Any = None, *, bad_rows: str = "error", **data: Any
) -> dict[str, Any]:
    path = folder / "table.parquet"
    spec = draft_spec(load_job(None, **sections(folder, model, table, **data)))
    spec = complete_spec(with_table(spec, path, ReadOptions()), None, max_length=64)
    made: Any = {"tokenizer": model, "spec": spec, "engine": engine or tiny.Here(), "bad_rows": bad_rows}
    return prepare(path, folder / "tokens", **made)


def test_rows_that_are_too_long_are_cut_dropped_or_errors(tmp_path: Path, tiny_gpt2: Path) -> None:
    long = [[*chats(1)[0], *chats(1)[0]] * 3, *chats(2), [{"role": "user", "content": "film " * 40}, chats(1)[0][1]]]
    table = pa.table({"messages": long})
    found = {}
    for too_long in ("drop", "error", "cut_start"):
        folder = tmp_path / too_long
        folder.mkdir()
        data = {"learn": "assistant", "too_long": too_long}
        if too_long == "drop":
            prepared(folder, tiny_gpt2, table, **data)
        else:
            (folder / "refused").mkdir()
            with pytest.raises(DataError, match="too_long" if too_long == "error" else "row 3: no_answer_left"):
                prepared(folder / "refused", tiny_gpt2, table, **data)
            prepared(folder, tiny_gpt2, table, bad_rows="drop", **data)
        errors = pq.read_table(folder / "tokens")["error"].to_pylist()
        found[too_long] = [error and error.partition(":")[0] for error in errors]
    assert found["drop"] == found["error"] == ["too_long", None, None, "too_long"]
    assert found["cut_start"] == [None, None, None, "no_answer_left"]
    assert read_commit(tmp_path / "cut_start" / "tokens")["provenance"]["truncated"]["rows"] == 1


def test_settings_of_conversations_beside_strings_are_refused(tmp_path: Path, tiny_gpt2: Path) -> None:
    """They would change nothing; beside completions that are messages they do."""
    strings = pa.table({"prompt": ["good ?", "fun ?"], "answer": [" yes", " no"]})
    for own in ({"system": "be good"}, {"messages": {"role": "by", "content": "said"}}):
        for columns in ({"text": "prompt"}, {"text": ["prompt", "answer"]}, {"text": "prompt", "completion": "answer"}):
            job = sections(tmp_path, tiny_gpt2, strings, **own, **columns)
            with pytest.raises(UsageError, match=rf"data\.{next(iter(own))}: .*hold(s)? text, not conversations"):
                tl.train(run=tmp_path / "run", engine=tiny.Here(), **job)
            assert not (tmp_path / "run").exists()
    answers = [[{"role": "assistant", "content": "yes"}], [{"role": "assistant", "content": "no"}]]
    table = pa.table({"prompt": ["good ?", "fun ?"], "answer": answers})
    rows = []
    for system in (None, "be good"):
        folder = tmp_path / str(system)
        folder.mkdir()
        prepared(folder, tiny_gpt2, table, text="prompt", completion="answer", system=system)
        rows.append(pq.read_table(folder / "tokens")["length"].to_pylist())
    assert all(longer > shorter for shorter, longer in zip(*rows, strict=True))


def test_answers_that_do_not_fit_are_counted_as_cut(tmp_path: Path, tiny_gpt2: Path) -> None:
    """The template leaves out earlier answers, so each answer is a sequence; the first one does not fit."""
    shutil.copytree(tiny_gpt2, tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}> {% if m.role != 'assistant' or loop.last %}{{ m.content }} "
        "{% endif %}</s>{% endfor %}{{ '<assistant>' if add_generation_prompt }}"
    )
    chat = [
        {"role": "user", "content": "good ?"},
        {"role": "assistant", "content": "film " * 80},
        {"role": "user", "content": "fun ?"},
        {"role": "assistant", "content": "no"},
    ]
    prepared(tmp_path, tmp_path / "base", pa.table({"messages": [chat, chat[2:]]}), learn="assistant")
    found = pq.read_table(tmp_path / "tokens")
    assert [len(one) for one in found["sequences"].to_pylist()] == [1, 1]
    assert found["cut"].to_pylist()[1] == 0
    assert found["cut"].to_pylist()[0] > 60


def test_answers_after_other_tokens_than_predicts_are_shown(tmp_path: Path, tiny_gpt2: Path) -> None:
    """A token of the second row reaches across the end of its prompt."""
    words = AutoTokenizer.from_pretrained(tiny_gpt2).get_vocab()
    word = next(text for text in sorted(words) if text.isalpha() and text.isascii() and len(text) > 2)
    table = pa.table({"prompt": [f"{word} ", word[:2]], "answer": ["yes", word[2:]]})
    prepared(tmp_path, tiny_gpt2, table, text="prompt", completion="answer")
    job = sections(tmp_path, tiny_gpt2, table, text="prompt", completion="answer")
    spec = with_table(draft_spec(load_job(None, **job)), tmp_path / "table.parquet", ReadOptions())
    facts = packed_facts(tmp_path / "tokens", np.arange(2), complete_spec(spec, None, max_length=64))
    assert facts["other_prompt"] == 1
    assert packed_lines(facts)[1:] == ["1 rows have an answer that does not follow the tokens that predict feeds"]
    assert len(packed_lines({**facts, "other_prompt": 0})) == 1


class Fake(datetime):
    """A clock that stands still."""

    day = 0

    @classmethod
    def now(cls, tz: Any = None) -> "Fake":
        return cls(2024, 2, cls.day, 23, 59)


def test_rows_prepared_on_two_days_tell_templates_one_time(
    tmp_path: Path, tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_rendering, "datetime", Fake)
    base, table = tmp_path / "base", pa.table({"messages": chats(3)})
    shutil.copytree(tiny_gpt2, base)
    (base / "chat_template.jinja").write_text(
        "{{ 'film ' * (strftime_now('%d') | int) }}{% for m in messages %}<{{ m.role }}> {{ m.content }}</s>"
        "{% endfor %}{{ '<assistant>' if add_generation_prompt }}"
    )
    lengths = []
    for folder, day, point in (("a", 7, ""), ("b", 7, "part.rename:1:enospc"), ("b", 9, ""), ("c", 9, "")):
        (tmp_path / folder).mkdir(exist_ok=True)
        Fake.day = day
        with monkeypatch.context() as broken, pytest.raises(TorchlakeError) if point else nullcontext():
            broken.setattr(failpoints, "_hits", {})
            broken.setenv("TORCHLAKE_FAILPOINT", point or "none:1:raise")
            prepared(tmp_path / folder, base, table, tiny.Here(), learn="assistant")
            lengths.append(pq.read_table(tmp_path / folder / "tokens")["length"].to_pylist())
    assert lengths[0] == lengths[1]
    assert [more - length for more, length in zip(lengths[2], lengths[1], strict=True)] == [2, 2, 2]


def test_a_row_without_any_of_its_texts_is_an_error(tmp_path: Path, tiny_gpt2: Path) -> None:
    table = pa.table({"ask": ["good ?", None, "fun ?"], "more": ["a film", " ", None]})
    prepared(tmp_path, tiny_gpt2, table, bad_rows="drop", text=["ask", "more"])
    assert pq.read_table(tmp_path / "tokens")["error"].to_pylist() == [None, "null_input", None]


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path: Path, tiny_gpt2: Path) -> None:
    shutil.copytree(tiny_gpt2, tmp_path / "base")
    settings = json.loads((tmp_path / "base" / "tokenizer_config.json").read_text())
    settings["pad_token"] = settings.pop("eos_token")
    (tmp_path / "base" / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(DataError, match="base: its tokenizer has no end token"):
        prepared(tmp_path, tmp_path / "base", pa.table({"text": ["good ?"]}))


@pytest.mark.slow
@pytest.mark.usefixtures("spark", "ray")
def test_three_engines_prepare_the_same_bytes(tmp_path: Path, tiny_gpt2: Path) -> None:
    table = pa.table({"messages": [json.dumps(chat) for chat in chats(40)], "tools": [json.dumps(TOOLS), None] * 20})
    files = {}
    for name in plugins.names("engines"):
        folder = tmp_path / name
        folder.mkdir()
        prepared(folder, tiny_gpt2, table, getattr(tl, name.title())(processes=2), learn="last")
        files[name] = [path.read_bytes() for path in sorted((folder / "tokens").glob("*.parquet"))]
    assert files["local"] == files["ray"] == files["spark"] != []


@pytest.mark.slow
def test_perplexity_follows_the_loss(tmp_path: Path, tiny_gpt2: Path) -> None:
    """Of a validation table beside the training table, by the last answer of each conversation."""
    job = sections(tmp_path, tiny_gpt2, pa.table({"messages": chats()}), learn="last")
    job["data"]["validation"] = job["data"]["train"]
    one = runs.succeed(tmp_path / "run", job)
    assert one.metrics is not None
    assert one.metrics["perplexity"] == pytest.approx(math.exp(one.metrics["loss"]))
    found = tl.evaluate(tmp_path / "run" / "model", tmp_path / "table.parquet", engine=tiny.Here())
    assert found.metrics["loss"].value == pytest.approx(one.metrics["loss"], rel=1e-5)
    said = [f" {chat[-1]['content']} " for chat in chats()]
    answers = AutoTokenizer.from_pretrained(tiny_gpt2)(said)["input_ids"]
    assert found.tokens == sum(map(len, answers)) + len(answers)
