"""The answers of conversations, found without marks: they are what transformers marks, after what `predict` feeds."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from sweeps import sweep
from torchlake.config.task_spec import RowOptions
from torchlake.data.features import Features
from torchlake.tasks import _chat
from torchlake.tasks._completions import turn_end
from torchlake.tasks._whole_rows import whole_rows

TEMPLATES = {path.stem: path.read_text() for path in sorted((Path(__file__).parents[2] / "templates").glob("*.jinja"))}
MARKS = re.compile(r"{%-?\s*(end)?generation\s*-?%}")
SPECIAL = {
    "llama3": ("<s>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    "mistral": ("<s>", "</s>", "[INST]", "[/INST]"),
    "phi3": (None, "<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"),
    "olmo2": ("<|endoftext|>", "<|endoftext|>"),
    "zephyr": (None, "</s>"),
    "gemma": ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    **dict.fromkeys(("chatml", "smollm2", "qwen2_5", "qwen3"), (None, "<|im_end|>", "<|im_start|>", "<|endoftext|>")),
}
"Of each template the begin token, the end token and other special ones."
SAID = (
    "good ?",
    "x",
    "  \n",
    "yes , all\n\n",
    "\u6f22\u5b57 \U0001f44d\U0001f3fd",
    "<|im_start|>assistant\nfake<|im_end|> on",
    "",
)
CALLS = [{"type": "function", "function": {"name": "f", "arguments": {"city": "Rome"}}}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


def tokenizer(name: str, *, marked: bool) -> Any:
    made = tiny.language_tokenizer()
    begin, end, *others = SPECIAL[name]
    made.add_special_tokens({"eos_token": end, "additional_special_tokens": others})
    if begin is not None:
        made.add_special_tokens({"bos_token": begin})
    made.chat_template = TEMPLATES[name] if marked else MARKS.sub("", TEMPLATES[name])
    return made


def conversation(*said: str, system: bool = False) -> list[dict[str, str]]:
    turns = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(said)]
    return [{"role": "system", "content": "be good"}, *turns] if system else turns


def rows_of(tokens: Any, *chats: Any, length: int = 4096, learn: str = "answers", **options: Any) -> Features:
    column = pa.array([json.dumps(chat) for chat in chats])
    return whole_rows(tokens, {"text": column}, RowOptions(chat=True, **options), length, learn)


def sequences(rows: Features, row: int = 0) -> list[list[int]]:
    ids, sizes = rows.arrays["input_ids"], rows.arrays["sequences"]
    own = ids.values[ids.offsets[row] : ids.offsets[row + 1]].tolist()  # type: ignore[union-attr]
    ends = np.cumsum(sizes.values[sizes.offsets[row] : sizes.offsets[row + 1]]).tolist()  # type: ignore[union-attr]
    return [own[first:end] for first, end in zip([0, *ends], ends, strict=False)]


def answers(made: list[list[int]]) -> list[tuple[list[int], list[int]]]:
    """Each answer with the tokens before it."""
    found = []
    for row in made:
        starts = [at for at, token in enumerate(row) if token >= 0 and (at == 0 or row[at - 1] < 0)]
        for start in starts:
            end = next((at for at in range(start, len(row)) if row[at] < 0), len(row))
            found.append(([token if token >= 0 else ~token for token in row[:start]], row[start:end]))
    return found


def marked(tokens: Any, chat: list[dict[str, Any]], **options: Any) -> list[int]:
    """A conversation as transformers marks it."""
    theirs = tokens.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True, **options)
    return [
        token if mark else ~token for token, mark in zip(theirs["input_ids"], theirs["assistant_masks"], strict=True)
    ]


def check(name: str, chat: list[dict[str, Any]]) -> None:
    theirs, plain = (tokenizer(name, marked=each) for each in (True, False))
    made = rows_of(plain, chat)
    assert made.errors == {}
    assert made.arrays["merged"].tolist() == [0]  # type: ignore[union-attr]
    ours = sequences(made)
    if len(ours) == 1:
        whole = marked(theirs, chat)
        assert ours[0][: len(whole)] == whole
    turns = [at for at, message in enumerate(chat) if message["role"] == "assistant"]
    assert answers(ours) == [answers([marked(theirs, chat[: at + 1])])[-1] for at in turns]
    for at, (before, _) in zip(turns, answers(ours), strict=True):
        fed = plain.apply_chat_template(chat[:at], add_generation_prompt=True, return_dict=True)["input_ids"]
        assert before == fed, "what predict feeds"
    assert sequences(rows_of(theirs, chat)) == ours, "marks give equal answers"
    assert answers(sequences(rows_of(plain, chat, learn="last"))) == answers(ours)[-1:]


@pytest.mark.parametrize("name", sweep(TEMPLATES, quick={"llama3", "phi3"}))
def test_answers_are_what_transformers_marks_in_ten_templates(name: str) -> None:
    for chat in (
        conversation("good ?", "yes , all"),
        conversation("x", "y\n\n", "\u6f22", "<|im_start|>assistant\nfake"),
    ):
        check(name, chat)
    if name != "gemma":
        check(name, conversation("good ?", "yes", "a film", "no", system=True))


def test_a_template_that_changes_earlier_turns_gives_each_answer_its_own_sequence() -> None:
    chat = conversation("1", "<think>\na\n</think>\n\nb", "2", "<think>\nc\n</think>\n\nd")
    check("qwen3", chat)
    made = tokenizer("qwen3", marked=False)
    rows = rows_of(made, chat, chat[:2])
    assert [len(sequences(rows, row)) for row in range(2)] == [2, 1]
    first, second = (made.decode(ids) for _, ids in answers(sequences(rows)))
    assert first == "<think>\na\n</think>\n\nb<|im_end|>"
    assert second == "<think>\nc\n</think>\n\nd<|im_end|>"


@pytest.mark.slow
@pytest.mark.parametrize("name", sweep(TEMPLATES, quick={"llama3", "phi3"}))
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_answers_of_any_texts(name: str, data: st.DataObject) -> None:
    texts = st.one_of(st.sampled_from(SAID), st.text("ab \n.<|>", max_size=12)).filter(str.strip)
    said = data.draw(st.lists(texts, min_size=2, max_size=8).map(lambda some: some[: len(some) // 2 * 2]))
    made = rows_of(tokenizer(name, marked=False), conversation(*said))
    if made.arrays["merged"].tolist() == [0]:  # type: ignore[union-attr]
        check(name, conversation(*said))


def test_tool_calls_without_content_are_learned_with_their_own_arguments() -> None:
    """As structs, which Arrow fills with the fields of other rows, and as JSON; a row's tools are in its prompt."""
    asked, made = {"role": "user", "content": "weather ?"}, tokenizer("qwen2_5", marked=False)
    chats: list[Any] = [
        [asked, {"role": "assistant", "content": None, "tool_calls": CALLS}, {"role": "tool", "content": "sunny"}],
        [
            asked,
            {"role": "assistant", "tool_calls": [{"function": {"name": "g", "arguments": {"zone": ["UTC", None]}}}]},
        ],
        [asked, {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
    ]
    wanted = ['{"name": "f", "arguments": {"city": "Rome"}}', '{"name": "g", "arguments": {"zone": ["UTC", null]}}']
    for column in (pa.array(chats[:2]), pa.array([json.dumps(chat) for chat in chats])):
        tools = pa.array([TOOLS, None, None][: len(column)])
        options = RowOptions(chat=pa.types.is_string(column.type))
        rows = whole_rows(made, {"text": column, "tools": tools}, options, 4096, "answers")
        assert rows.errors == {}
        for row, text in enumerate(wanted):
            [(before, answer)] = answers(sequences(rows, row))
            assert made.decode(answer) == f"<tool_call>\n{text}\n</tool_call><|im_end|>"
            assert ("<tools>" in made.decode(before)) == (row == 0)
    assert made.decode(answers(sequences(rows, 2))[0][1]) == "ab<|im_end|>"


BAD: list[tuple[Any, str]] = [
    (conversation("good ?"), "bad_chat: it has no turn of the assistant to learn"),
    ([], "bad_chat: it is not a list of messages, or it is empty"),
    (
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "image_url", "image_url": "b"}]}],
        "bad_chat: message 2 has a part of type image_url; this model reads texts",
    ),
    ([{"role": "user"}], "bad_chat: message 1 has no text in 'content'"),
    ([{"content": "a"}], "bad_chat: message 1 has no text in 'role'"),
    (conversation("a", "b")[::-1], "bad_chat: Conversation roles must alternate user/assistant/user/assistant/..."),
    (conversation("a", "b", system=True), "bad_chat: System role not supported"),
]


def test_bad_conversations_are_errors_of_their_rows() -> None:
    made = rows_of(tokenizer("gemma", marked=False), *(chat for chat, _ in BAD), conversation("a", "b"))
    assert made.errors == {row: reason for row, (_, reason) in enumerate(BAD)}
    chats = {"text": pa.array(["good ?", *[json.dumps(conversation("a", "b"))] * 2])}
    chats["tools"] = pa.array([None, "f(x)", json.dumps(["f(x)"])])
    found = whole_rows(tokenizer("chatml", marked=False), chats, RowOptions(chat=True), 64, "answers").errors
    assert [each.partition(": Expecting")[0] for each in found.values()] == [
        "bad_chat: it is not JSON",
        *["bad_chat: its tools are not JSON"] * 2,
    ]
    needs = tokenizer("chatml", marked=False)
    needs.chat_template = "{% if not tools %}{{ raise_exception('no tools') }}{% endif %}" + needs.chat_template
    assert rows_of(needs, conversation("a", "b")).errors == {0: "bad_chat: no tools"}


def test_answers_and_reasoning_that_a_template_leaves_out_are_named(caplog: pytest.LogCaptureFixture) -> None:
    said = {"role": "assistant", "content": "yes", "reasoning_content": "it is a good film"}
    thinking = [{"role": "user", "content": "good ?"}, said]
    warning = "the chat template does not write reasoning_content, so answers are learned without it."
    for name, warnings in (("qwen3", []), ("chatml", [warning])):
        _chat._warn_of_reasoning.cache_clear()
        assert not rows_of(tokenizer(name, marked=False), thinking, thinking).errors
        assert caplog.messages == warnings
    silent = tokenizer("chatml", marked=False)
    silent.chat_template = "{% for one in messages if one.role == 'user' %}{{ one.content }}{% endfor %}"
    found = rows_of(silent, conversation("good ?", "yes")).errors[0]
    assert found.startswith("no_answer_left: no token is left of what is learned: the chat template")


def test_a_long_conversation_is_cut_at_a_message_with_its_system_text() -> None:
    made = tokenizer("chatml", marked=False)
    chat = conversation(*["good ? a film"] * 9, "yes", system=True)
    whole = sequences(rows_of(made, chat))[0]
    kept = sequences(rows_of(made, [chat[0], *chat[5:]]))[0]
    for length in (len(kept), len(kept) + 3):
        rows = rows_of(made, chat, length=length)
        assert sequences(rows) == [kept]
        assert rows.cut.tolist() == [len(whole) - len(kept)]
    assert sequences(rows_of(made, chat, length=len(kept), too_long="cut_end"))[0] == whole[: len(kept)]
    for too_long in ("drop", "error"):
        found = rows_of(made, chat, length=len(kept), too_long=too_long).errors
        assert found == {0: f"too_long: {len(whole)} tokens, and model.max_length is {len(kept)}"}
    assert rows_of(made, chat, length=9).errors[0].startswith("no_answer_left: ")
    assert len(sequences(rows_of(made, chat, length=9, learn="all"))[0]) == 9


def test_a_system_text_and_the_names_of_sharegpt() -> None:
    made = tokenizer("chatml", marked=False)
    share = [{"from": "human", "value": "good ?"}, {"from": "gpt", "value": "yes"}]
    other = [{"who": "q", "text": "good ?"}, {"who": "a", "text": "yes"}]
    expected = sequences(rows_of(made, conversation("good ?", "yes", system=True)))
    assert sequences(rows_of(made, share, system="be good")) == expected
    names = {"role": "who", "content": "text", "roles": {"q": "user", "a": "assistant"}}
    assert sequences(rows_of(made, other, system="be good", messages=names)) == expected
    assert rows_of(made, other).errors == {0: "bad_chat: message 1 has no text in 'role'"}


@pytest.mark.parametrize(("name", "end"), [("phi3", "<|end|>"), ("gemma", "<end_of_turn>"), ("qwen3", "<|im_end|>")])
def test_the_end_token_of_a_turn_is_found(name: str, end: str) -> None:
    made = tokenizer(name, marked=False)
    assert turn_end(made) == made.convert_tokens_to_ids(end)
    made.chat_template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    assert turn_end(made) is None


def test_a_completion_is_learned_up_to_its_end_token() -> None:
    made = tokenizer("chatml", marked=False)
    ids = tiny.completion_ids(made, "good ?", " yes")
    assert [token if token >= 0 else ~token for token in ids] == made("good ? yes")["input_ids"] + [made.eos_token_id]
    assert [token for token in ids if token >= 0] == made(" yes")["input_ids"] + [made.eos_token_id]
    chat = conversation("good ?", "yes")
    assert answers([tiny.completion_ids(made, chat[:1], chat[1:])]) == answers(sequences(rows_of(made, chat)))
    assert tiny.completion_ids(made, chat[:1], "yes") == tiny.completion_ids(made, chat[:1], chat[1:])
    with pytest.raises(ValueError, match="no turn of the assistant"):
        tiny.completion_ids(made, chat[:1], chat[:1])


def test_an_answer_after_other_tokens_than_predicts_is_counted() -> None:
    """The tokens of a prompt that ends within a word."""
    made = tokenizer("chatml", marked=False)
    word = next(text for text in sorted(made.get_vocab()) if text.isalpha() and text.isascii() and len(text) > 2)
    texts = {"text": pa.array([word[:2], f"{word} "]), "completion": pa.array([word[2:], "\u6f22"])}
    rows = whole_rows(made, texts, RowOptions(), 64, "answers")
    assert rows.arrays["merged"].tolist() == [1, 0]  # type: ignore[union-attr]


@pytest.mark.parametrize("messages", sweep([2, 100_000], quick=[2]))
def test_conversations_of_any_number_of_messages_of_one_character(messages: int) -> None:
    made = tokenizer("chatml", marked=False)
    rows = rows_of(made, conversation(*"x" * messages), length=128)
    assert rows.errors == {}
    [row] = sequences(rows)
    assert 0 < len(row) <= 128
    assert messages == 2 or len(row) > 110
    assert all(made.decode(ids) == "x<|im_end|>" for _, ids in answers([row]))


JSON = st.recursive(
    st.one_of(st.booleans(), st.integers(-9, 9), st.text("ab", max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(st.sampled_from("xyz"), inner, min_size=1, max_size=3)
    ),
    max_leaves=5,
)
ARGUMENTS = st.lists(st.dictionaries(st.sampled_from("abc"), JSON, min_size=1), min_size=1, max_size=4)
KINDS = [
    lambda kind: kind,
    lambda kind: pa.large_list(kind.value_type),
    lambda kind: pa.list_view(kind.value_type),
]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.dictionaries(st.sampled_from("abc"), JSON, min_size=1), min_size=1, max_size=4), st.sampled_from(KINDS)
)
def test_nulls_that_fill_structs_are_removed_at_every_depth(arguments: list[Any], kind: Any) -> None:
    chats = [
        [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"function": {"arguments": each}}]}]
        for each in arguments
    ]
    try:
        column = pa.array(chats)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return  # values that are no column of one type
    column = pa.array(chats, kind(column.type))
    assert _chat.is_chat(column.type)
    read = [_chat.read_messages(value) for value in column.to_pylist()]
    assert [each[1]["tool_calls"][0]["function"]["arguments"] for each in read] == arguments
    assert [each[1]["content"] for each in read] == [""] * len(read)


def test_a_struct_of_lists_is_a_list_of_messages() -> None:
    """As datasets stores a sequence of several fields."""
    chat = [{"role": "user", "content": "good ?"}, {"role": "assistant", "content": "yes"}]
    column = pa.array([{name: [each[name] for each in chat] for name in ("role", "content")}])
    assert _chat.is_chat(column.type)
    assert _chat.read_messages(column[0].as_py()) == chat
    assert not _chat.is_chat(pa.struct([("role", pa.string()), ("content", pa.list_(pa.string()))]))
    for bad in ({}, {"role": "user"}, {"role": ["user"], "content": []}):
        with pytest.raises(ValueError, match="it is not a list of messages|shorter"):
            _chat.read_messages(bad)


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
def test_conversations_as_text_of_any_type(kind: pa.DataType) -> None:
    chats = [json.dumps(conversation("good ?", "yes")), None, " "]
    column = pa.array(chats).dictionary_encode() if pa.types.is_dictionary(kind) else pa.array(chats, kind)
    assert _chat.looks_like_chats(column.to_pylist())
    assert not _chat.looks_like_chats(["[1, 2]"])
    rows = whole_rows(tokenizer("chatml", marked=False), {"text": column}, RowOptions(chat=True), 64, "answers")
    assert rows.errors == {1: "null_input", 2: "null_input"}


def test_strings_need_no_template_and_messages_do() -> None:
    made = tokenizer("llama3", marked=False)
    made.chat_template = None
    texts = {"text": pa.array(["good ?", "a film"]), "completion": pa.array([" yes", "[1, 2]"])}
    assert not whole_rows(made, texts, RowOptions(pack="whole"), 64, "answers").errors
    chats = {"text": pa.array([conversation("good ?", "yes")])}
    [error] = whole_rows(made, chats, RowOptions(pack="whole"), 64, "answers").errors.values()
    assert error == "bad_chat: the tokenizer has no chat template"


@pytest.mark.parametrize("too_long", ["cut_start", "cut_end"])
def test_nothing_but_answers_is_learned_of_a_long_conversation(too_long: str) -> None:
    made = tokenizer("llama3", marked=False)
    chat = conversation(*("ask", "yes") * 70)
    found = whole_rows(made, {"text": pa.array([chat])}, RowOptions(pack="whole", too_long=too_long), 128, "answers")
    ids = found.arrays["input_ids"].values
    learned = made.decode([token for token in ids if token >= 0])
    assert len(ids) <= 128
    assert "yes" in learned
    assert "ask" not in learned


def test_half_a_surrogate_pair_and_text_in_brackets() -> None:
    made = tokenizer("llama3", marked=False)
    prompts = [json.dumps(conversation(text)) for text in ("\ud83d", "good ?", "good ?")]
    answers = ["yes", "[1, 2]", json.dumps([{"role": "assistant", "content": "yes"}])]
    inputs = {"text": pa.array(prompts), "completion": pa.array(answers)}
    found = whole_rows(made, inputs, RowOptions(pack="whole", chat=True), 128, "answers")
    assert [*found.errors] == [0]
    assert found.errors[0].startswith("bad_chat:")
    rows = found.arrays["input_ids"]
    said = [made.decode([token for token in row if token >= 0]) for row in np.split(rows.values, rows.offsets[1:-1])]
    assert "[1, 2]" in said[1]
    assert "role" not in said[2]


TURN = "{{ '<|im_start|>' + m.role + '\n' }}"
PLAIN = "{{ m.content }}<|im_end|>\n"
CALLING = {
    "an object as JSON": "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}",
    "the items of an object": "{% for c in m.tool_calls %}{{ c.function.name }}"
    '{{ "{" }}{% for k, v in c.function.arguments.items() %}"{{ k }}": "{{ v }}"{% endfor %}{{ "}" }}{% endfor %}',
    "text, without content": "{% if m.content is none %}{% for c in m.tool_calls %}"
    "{{ c.function.name + c.function.arguments }}{% endfor %}{% endif %}",
}


@pytest.mark.parametrize("calling", CALLING)
@pytest.mark.parametrize("arguments", [{"city": "Rome"}, '{"city": "Rome"}'])
def test_calls_get_the_form_that_a_template_writes(calling: str, arguments: Any) -> None:
    """OpenAI's arguments are JSON text, those of transformers' templates objects, and those of DeepSeek's text."""
    made = tokenizer("chatml", marked=False)
    made.chat_template = (
        f"{{% for m in messages %}}{TURN}{{% if m.tool_calls %}}{CALLING[calling]}<|im_end|>\n"
        f"{{% else %}}{PLAIN}{{% endif %}}{{% endfor %}}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    chat += [{"role": "tool", "content": "b"}, {"role": "assistant", "content": "c"}]
    written = [made.decode(answer) for _, answer in answers(sequences(rows_of(made, chat)))]
    assert written == ['f{"city": "Rome"}<|im_end|>', "c<|im_end|>"]


def test_calls_that_a_template_leaves_out_are_not_learned_as_silence() -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "I look", "tool_calls": CALLS}]
    found = rows_of(tokenizer("llama3", marked=False), chat).errors
    assert found == {0: "bad_chat: message 2 calls 'f', and the template does not write tool calls"}


def test_an_answer_follows_what_predict_feeds_if_the_template_moves_the_system_text() -> None:
    """Mistral 0.3 writes it into the last message, which is an answer's question only while it has no answer."""
    made = tokenizer("mistral", marked=False)
    made.chat_template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {% if loop.last and messages[0].role == "
        "'system' %}{{ messages[0].content }}\n\n{% endif %}{{ m.content }}[/INST]{% elif m.role == 'assistant' %}"
        " {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    )
    rows = rows_of(made, conversation("good ?", "yes", "a film", "no", system=True))
    assert rows.arrays["merged"].tolist() == [0]  # type: ignore[union-attr]
    shown = [(made.decode(before), made.decode(answer)) for before, answer in answers(sequences(rows))]
    assert shown == [
        ("<s>[INST] be good\n\ngood ?[/INST]", " yes</s>"),
        ("<s>[INST] good ?[/INST] yes</s>[INST] be good\n\na film[/INST]", " no</s>"),
    ]


def test_the_end_of_a_turn_has_several_tokens_or_none() -> None:
    """Command A ends with two; GLM with none, so that the end token follows, also after the mark of a call."""
    made = tokenizer("chatml", marked=False)
    turn = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}END{% endfor %}"
    turn += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    made.add_tokens(["</tool_call>"])
    for end, content, learned in (
        ("<|endoftext|><|im_end|>", "b", "b<|endoftext|><|im_end|>"),
        ("", "b </tool_call>", "b </tool_call><|im_end|>"),
    ):
        made.chat_template = turn.replace("END", end)
        chat = conversation("a", content)
        assert made.decode(answers(sequences(rows_of(made, chat)))[0][1]) == learned
        assert made.decode([one for one in tiny.completion_ids(made, chat[:1], chat[1:]) if one >= 0]) == learned


def test_a_row_with_tools_has_the_template_for_them() -> None:
    made = tokenizer("chatml", marked=False)
    made.chat_template = {"default": made.chat_template, "tool_use": "tools " + made.chat_template}
    rows = whole_rows(
        made,
        {"text": pa.array([json.dumps(conversation("a", "b"))] * 2), "tools": pa.array([TOOLS, None])},
        RowOptions(chat=True),
        64,
        "answers",
    )
    first, second = (made.decode([max(one, ~one) for one in sequences(rows, row)[0]]) for row in range(2))
    assert first == f"tools {second}"
