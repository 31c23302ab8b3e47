"""Prompts from columns, system texts, examples, tools, options of the template: the texts of the same by hand."""

import json
import logging
import shutil
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

import tiny
import torchlake as tl
from torchlake import failpoints, plugins
from torchlake.errors import FingerprintError, TableError, TorchlakeError, UsageError
from torchlake.models.generation import GenerationOptions, without_reasoning
from torchlake.runtimes._writing.row import Row
from torchlake.tasks import ColumnOptions, _rendering
from torchlake.tasks._prompts import with_prompts

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | length }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} </s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if not (quick | default(false)) %}<think>{% endif %}{% endif %}"
    "{# </think> #}"
)
TOOLS = [{"type": "function", "function": {"name": "f"}}]
ROWS = pa.table(
    {
        "title": ["good film", None, "bad", None],
        "body": ["we like it", "boring", None, None],
        "stars": pa.array([5, 1, None, None], pa.int64()),
        "tools": [json.dumps(TOOLS), None, None, None],
    }
)
USERS = ["good film", None, "bad", None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.build_language_model(tmp_path_factory.mktemp("prompts") / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def written(model: Path, table: pa.Table = ROWS, **options: Any) -> list[tuple[Any, Any, Any]]:
    done = tl.predict(model, table, max_new_tokens=5, max_error_rate=1.0, engine=tiny.Here(), **options)
    rows = done.to_pylist()  # a template without marks has no reasoning
    return [(row.get("reasoning"), row["generated_text"], row["error"]) for row in rows]


def texts(model: Path, prompts: list[str | None]) -> list[Any]:
    """Reasoning and answer to each text as it is, whether or not its marks are in the prompt."""
    return _texts(model, tuple(prompts))


@cache
def _texts(model: Path, prompts: tuple[str | None, ...]) -> list[Any]:
    found = written(model, pa.table({"text": pa.array(prompts, pa.string())}))
    return [None if error else f"{reasoning or ''}{text}" for reasoning, text, error in found]


def joined(found: list[tuple[Any, Any, Any]]) -> list[Any]:
    return [None if error else f"{reasoning or ''}{text}" for reasoning, text, error in found]


def test_prompts_are_made_from_columns(model: Path, tmp_path: Path) -> None:
    found = written(model, prompt="{title} {stars}: {{x}} {body}\n")
    assert joined(found) == texts(model, ["good film 5: {x} we like it\n", " 1: {x} boring\n", "bad : {x} \n", None])
    assert [error for *_, error in found] == [None, None, None, "null_input"]
    seq2seq = tiny.build_encoder_decoder(tmp_path / "t5")
    options: dict[str, Any] = {"max_new_tokens": 5, "max_error_rate": 1.0, "engine": tiny.Here()}
    made = tl.predict(seq2seq, ROWS, prompt="{title}!", **options)["generated_text"].to_pylist()
    alone = tl.predict(seq2seq, pa.table({"text": ["good film!", "bad!"]}), **options)["generated_text"].to_pylist()
    assert [made[0], made[2]] == alone


def test_what_is_around_a_prompt_is_that_of_the_template(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)

    def rendered(*before: tuple[str, str], **options: Any) -> list[str | None]:
        chats = [[*before, ("user", user)] if user else None for user in USERS]
        return [
            chat
            and tokenizer.apply_chat_template(
                [{"role": role, "content": content} for role, content in chat],
                tokenize=False,
                **{"add_generation_prompt": True, **options},
            )
            for chat in chats
        ]

    system, shown = ("system", "be brief"), (("user", "a"), ("assistant", "b"))
    few = [{"title": "a", "answer": "b"}]
    assert joined(written(model, prompt="{title}", chat=True)) == texts(model, rendered())
    assert joined(written(model, text="title", system="be brief")) == texts(model, rendered(system))
    assert joined(
        written(model, prompt="{title}", system="be brief", examples=few, template_options={"quick": True})
    ) == texts(model, rendered(system, *shown, quick=True))
    assert joined(written(model, prompt="{title}", tools=TOOLS)) == texts(model, rendered(tools=TOOLS))
    by_row = [*rendered(tools=TOOLS)[:1], *rendered()[1:]]
    assert joined(written(model, text="title", tools="tools")) == texts(model, by_row)
    asked = [None if user is None else json.dumps([{"role": "user", "content": user}]) for user in USERS]
    table = ROWS.append_column("messages", pa.array(asked))
    for form in ({}, {"chat": True}):  # found by the first rows, or said
        assert joined(written(model, table, text="messages", **form)) == texts(model, by_row), form
    for own in ("{{ messages[-1].content }}!", "{{ messages[-1].content }}{{ quick }}"):
        made = written(model, text="title", chat_template=own, template_options={"quick": "!"})
        assert joined(made) == texts(model, [user and f"{user}!" for user in USERS])
    as_text = [user and f"a b\n\n{user}" for user in USERS]
    assert joined(written(model, prompt="{title}", examples=few)) == texts(model, as_text)


@pytest.mark.parametrize("name", ["chatml", "templates/chatml.tmpl"])
def test_a_file_of_a_template_that_is_missing_is_no_template(name: str, model: Path) -> None:
    with pytest.raises(UsageError, match=f"chat_template: {name}: cannot be read"):
        written(model, text="title", chat_template=name)


def test_unfinished_answers_are_continued_if_that_is_asked_for(model: Path) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I am"}]
    table = pa.table({"messages": [turns, turns[:1]]})
    another, begun = written(model, table), "<user> hi </s><assistant><think>"
    assert joined(another) == texts(model, ["<user> hi </s><assistant> I am </s><assistant><think>", begun])
    found = written(model, table, continue_final_message=True)
    assert joined(found) == texts(model, ["<user> hi </s><assistant> I am", "<user> hi </s><assistant><think>"])
    assert found[0][0] is None
    assert found[1][0] is not None, "its prompt ends with the mark of reasoning"


class Fake(datetime):
    """A clock that stands still."""

    at = ""

    @classmethod
    def now(cls, tz: Any = None) -> "Fake":
        return cls.fromisoformat(cls.at)


def test_a_job_that_is_resumed_tells_templates_the_time_of_its_beginning(
    tmp_path: Path, tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker is killed on one day, and the same command runs on the next one; another job has another time."""
    monkeypatch.setattr(_rendering, "datetime", Fake)
    folder = tmp_path / "model"
    shutil.copytree(tiny_gpt2, folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ 'film ' * (strftime_now('%d') | int) }}"
    )
    chats = pa.table({"messages": [[{"role": "user", "content": word}] for word in ("good", "bad", "we", "like")]})
    pq.write_table(chats, tmp_path / "in.parquet", row_group_size=1)

    def counts(name: str, day: str, recorded: str | None = None) -> list[int]:
        Fake.at = f"2024-02-{day}T23:59:00"
        given: dict[str, Any] = {"text": "messages", "max_new_tokens": 1, "chunk_rows": 1}
        made = tl.predict(folder, tmp_path / "in.parquet", tmp_path / name, engine=tiny.Here(), **given)
        assert made.record["fingerprint"]["time"] == f"2024-02-{recorded or day}T23:59:00"
        return [row["prompt_tokens"] for row in pq.read_table(tmp_path / name).to_pylist()]

    whole = counts("whole", "07")
    with monkeypatch.context() as broken:
        broken.setattr(failpoints, "_hits", {})
        broken.setenv("TORCHLAKE_FAILPOINT", "part.rename:3:enospc")
        with pytest.raises(TorchlakeError):
            counts("out", "07")
    parts = list(tmp_path.rglob("part-*.parquet"))
    assert len(whole) < len(parts) < 2 * len(whole)
    assert counts("out", "21", recorded="07") == counts("out", "22", recorded="07") == whole
    other = counts("other", "21")
    assert [more - count for more, count in zip(other, whole, strict=True)] == [14] * 4


def test_prompts_are_part_of_the_job(model: Path, tmp_path: Path) -> None:
    pq.write_table(ROWS, tmp_path / "rows.parquet")
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    options: dict[str, Any] = {"prompt": "{title}", "system": "a", "tools": str(tmp_path / "tools.json")}
    options |= {"max_new_tokens": 2, "max_error_rate": 1.0, "engine": tiny.Here()}
    tl.predict(model, tmp_path / "rows.parquet", tmp_path / "out", **options)
    assert tl.verify(tmp_path / "out").problems == []
    for changed in ({"system": "b"}, {"prompt": "{title}."}, {"tools": None}, {"template_options": {"quick": True}}):
        with pytest.raises(FingerprintError, match="prompts"):
            tl.predict(model, tmp_path / "rows.parquet", tmp_path / "out", **{**options, **changed})


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"prompt": "{titel}"}, UsageError, "no column 'titel'. Did you mean 'title'"),
        ({"prompt": "{title!r}"}, UsageError, "nothing else in them"),
        ({"prompt": "{"}, UsageError, "write a brace itself as"),
        ({"prompt": "none"}, UsageError, "needs the names of columns"),
        ({"prompt": "{title}", "text": "body"}, UsageError, "leave one of them out"),
        ({"prompt": "{title}", "continue_final_message": True}, UsageError, "for a column of conversations"),
        ({"text": "title", "tools": "nothing.json"}, UsageError, "No such file"),
        ({"text": "title", "tools": "toolz"}, TableError, "no tools column 'toolz'"),
        ({"text": "title", "template_options": {"messages": 1}}, UsageError, "torchlake sets it"),
        ({"prompt": "{title}", "examples": [{"body": "a"}]}, UsageError, "no column 'title'"),
        ({"prompt": "{title}", "examples": [{"title": "a", "x": "b", "y": "c"}]}, UsageError, "has x, y"),
        ({"prompt": "{title}", "examples": [{"title": "a", "x": None}]}, UsageError, "row 0 lacks"),
    ],
)
def test_bad_prompts_are_refused_in_words(model: Path, options: dict[str, Any], error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        written(model, **options)


def test_columns_are_found_by_name_unless_the_prompt_names_them(model: Path) -> None:
    found = written(model, pa.table({"prompt": ["good film"]}))
    assert joined(found) == texts(model, ["good film"])
    with pytest.raises(UsageError, match="no column 'text'"):
        written(model, pa.table({"prompt": ["good film"]}), prompt="{text}")


def test_options_without_effect_are_named(model: Path, tiny_bert: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        written(model, text="title", template_options={"quik": True})
    assert "does not use 'quik'" in caplog.text
    seq2seq = plugins.load("tasks", "text2text_generation")
    for task, words in ((seq2seq, "reads text"), (plugins.load("tasks", "text_classification"), "generation only")):
        with pytest.raises(UsageError, match=words):
            with_prompts({"system": "x"}, task, tiny.SPEC, tiny_bert, chat=False)


@pytest.mark.parametrize(
    ("text", "begun", "reasoning", "answer"),
    [
        ("<think>\na\n</think>\n\nb", None, "a", "b"),
        ("a</think>b", True, "a", "b"),
        ("a</think>b", None, "a", "b"),
        ("a</think>b", False, None, "a</think>b"),
        ("<think>a", None, "a", ""),
        ("<think>a</think>b</think>c", False, "a", "b</think>c"),
        ("a", True, "a", ""),
        ("a <think>b</think>", None, None, "a <think>b</think>"),
        ("a", None, None, "a"),
    ],
)
def test_reasoning_is_between_marks(text: str, begun: bool | None, reasoning: str | None, answer: str) -> None:
    assert without_reasoning(text, ("<think>", "</think>"), begun=begun) == (reasoning, answer)


@pytest.mark.parametrize(
    ("prompt", "continues", "reasoning", "answer"),
    [
        ("<user> hi </s><assistant><think>\n", False, "a", ""),
        ("<user> hi </s><assistant><think>\n\n</think>\n\n", False, None, "a</think>"),
        ("<user> hi </s><assistant>", False, "a", ""),
        ("<user> <think> </s><assistant> <think>well", True, "a", ""),
        ("<user> <think> </s><assistant> <think>well</think> it", True, None, "a</think>"),
        ("<user> <think> </s><assistant> it", True, "a", ""),
    ],
)
def test_reasoning_may_be_open_or_closed_in_the_prompt(
    model: Path, prompt: str, continues: bool, reasoning: str | None, answer: str
) -> None:
    """An answer that closes reasoning: its text before is not reasoning if the prompt has closed it already."""
    task, tokenizer = plugins.load("tasks", "text_generation"), AutoTokenizer.from_pretrained(model)
    features = task.features({"text": pa.array([prompt])}, tokenizer, tiny.SPEC, chat=True)
    options = ColumnOptions(marks=("<think>", "</think>"), features=features, continues=continues)
    [row] = task.output_columns(
        np.array([tokenizer("a</think>")["input_ids"]]), tokenizer, tiny.SPEC, options
    ).to_pylist()
    assert (row["reasoning"], row["generated_text"]) == (reasoning, answer)
    if options.continues and "<think>well" in prompt and reasoning:
        [row] = task.output_columns(np.array([tokenizer("a")["input_ids"]]), tokenizer, tiny.SPEC, options).to_pylist()
        assert (row["reasoning"], row["generated_text"]) == ("a", ""), "it was cut before the mark"


@pytest.mark.parametrize("looked_for", [True, False])
def test_a_stop_string_is_not_found_across_a_mark(model: Path, looked_for: bool) -> None:
    """A mark that is a special token is no text, but what it separates is not one text either."""
    task, tokenizer = plugins.load("tasks", "text_generation"), AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]"]})
    tokens = tokenizer("[THINK]a\n[/THINK]\nb.c")["input_ids"]
    options = GenerationOptions(max_new_tokens=99, stop=("\n\n", "."))
    row = Row(number=0, prompt=np.array([5]), options=options, ends=[2], tokenizer=tokenizer, tokens=[], limit=99)
    for token in tokens:
        if row.reason is None:
            row.take(token)
    assert row.reason == "stop"
    assert tokenizer.decode(row.tokens).endswith("b.")
    marks = ("[THINK]", "[/THINK]") if looked_for else None
    found = task.output_columns(
        np.array([row.tokens]), tokenizer, tiny.SPEC, ColumnOptions(marks=marks, stop=options.stop)
    ).to_pylist()[0]
    wanted = ("a", "b") if looked_for else (None, "a\n\nb")
    assert (found.get("reasoning"), found["generated_text"], found["finish_reason"]) == (*wanted, "stop")


def test_a_call_of_tools_is_not_continued(model: Path) -> None:
    """Its text is empty, and transformers refuses one without text; what is continued would lose the call."""
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}]
    turns[1]["tool_calls"] = [{"type": "function", "function": {"name": "f", "arguments": {}}}]  # type: ignore[assignment]
    table = pa.table({"messages": [json.dumps(turns), json.dumps(turns[:1])]})
    found = written(model, table, continue_final_message=True, chat=True)
    assert [error for *_, error in found] == [
        "bad_chat: its last message calls tools and has no text to continue",
        None,
    ]
