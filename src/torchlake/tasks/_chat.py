"""Conversations as columns have them, and as texts by the chat template in the tokenizer's folder.

    [{role: "user", content: "..."}, ...]  ->  "<|user|>...<|assistant|>"

A column holds lists of structs or JSON text. Arrow gives every struct the fields of all rows, so nulls in it only fill
it and are removed at every depth; a null in JSON text was written, and stays in what the template reads.

A template is a Jinja program written by the model's authors. transformers runs it in Jinja's immutable sandbox, with
access to the messages and the special tokens only; `_rendering.py` limits its time and memory. A conversation that
exceeds a limit becomes an error row, `chat_limit: ...`.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pyarrow as pa

from torchlake.config.task_spec import RowOptions
from torchlake.models.generation import PromptOptions
from torchlake.tables.arrays import is_text
from torchlake.tasks._rendering import RenderLimitExceeded, Request, render

log = logging.getLogger(__name__)

NAMES = ("messages", "conversations")
"Columns that hold conversations."
MOST_LOOKED_AT = 8
"Rows that are looked at to find out what a column holds."
INSTEAD = ("tool_calls", "reasoning_content", "thinking", "reasoning", "function_call")
"What a message may have in place of content."
SYSTEM = ("system", "developer")
"Roles of a system text, the first message."


@dataclass(frozen=True, kw_only=True)
class Names:
    """How a table names the parts of a message (`data.messages`)."""

    role: str = "role"
    content: str = "content"
    roles: Mapping[str, str] = field(default_factory=dict)
    "{the table's name of a role: the template's}"


OPENAI = Names()
SHAREGPT = Names(
    role="from",
    content="value",
    roles={"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"},
)


def names_of(rows: RowOptions) -> Names | None:
    """Return how a task's tables name the parts of a message; None: as usual."""
    return None if rows.messages is None else Names(**rows.messages)


def is_chat(kind: pa.DataType, names: Names | None = None) -> bool:
    """Return whether a column of this type holds conversations: lists of structs with the field `role`, or `from` and
    `value` (ShareGPT), as strings; with `names`, those of the table. A struct of lists, as datasets has sequences, too.
    """
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if _is_list(kind) and pa.types.is_struct(kind.value_type):
        fields = {one.name for one in kind.value_type if _is_word(one.type)}
    elif pa.types.is_struct(kind):
        fields = {one.name for one in kind if _is_list(one.type) and _is_word(one.type.value_type)}
    else:
        return False
    known = ({OPENAI.role}, {SHAREGPT.role, SHAREGPT.content}) if names is None else ({names.role},)
    return any(each <= fields for each in known)


def looks_like_chats(values: Iterable[Any], names: Names | None = None) -> bool:
    """Return whether half of the first texts, nulls and blanks left out, or more are conversations as JSON."""
    texts = [value for value in values if isinstance(value, str) and value.strip()][:MOST_LOOKED_AT]
    good = 0
    for text in texts:
        with suppress(ValueError, RecursionError):
            good += bool(read_messages(text, names))
    return 2 * good >= max(1, len(texts))


def read_messages(value: Any, names: Names | None = None) -> list[dict[str, Any]]:
    """Return a conversation's messages as a template reads them, from a list of messages or its JSON text.

    Nulls that only fill a struct are removed, parts of text are joined, and `names` (None: those of OpenAI or ShareGPT)
    become `role` and `content`. Raises ValueError for what is not a conversation of texts.
    """
    written = isinstance(value, str)
    messages = _from_json(value, "it is") if written else value
    if isinstance(messages, dict) and all(isinstance(each, list) for each in messages.values()):
        messages = [dict(zip(messages, each, strict=True)) for each in zip(*messages.values(), strict=True)]
    if not isinstance(messages, list) or not messages:
        raise ValueError("it is not a list of messages, or it is empty")
    read = [_message(number, each, names, written) for number, each in enumerate(messages, start=1)]
    if written and "\\ud" in value.lower():
        json.dumps(read, ensure_ascii=False).encode()  # half a surrogate pair is not text: UnicodeEncodeError
    return read


def read_tools(value: Any) -> list[dict[str, Any]] | None:
    """Return the tools of a row, a list of JSON schemas or its JSON text; None for null, blank or an empty list."""
    written = "its tools are"
    tools = _from_json(value, written) if isinstance(value, str) and value.strip() else without_fillers(value)
    if not tools or isinstance(tools, str):
        return None
    if isinstance(tools, list):
        tools = [_from_json(each, written) if isinstance(each, str) else each for each in tools]
    if not isinstance(tools, list) or not all(isinstance(each, dict) for each in tools):
        raise ValueError("its tools are not a list of JSON schemas")
    return tools


def _from_json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{what} not JSON: {error}") from None


def without_fillers(value: Any) -> Any:
    """Return a value of an Arrow column without the nulls of its structs, at every depth; maps become dicts."""
    if isinstance(value, dict):
        return {name: without_fillers(each) for name, each in value.items() if each is not None}
    if isinstance(value, list):
        if value and all(isinstance(each, tuple) for each in value):
            return {name: without_fillers(each) for name, each in value}
        return [without_fillers(each) for each in value]
    return value


def _message(number: int, message: Any, names: Names | None, written: bool) -> dict[str, Any]:
    """Return message `number` with its role and content as strings; `written`: its nulls are those of JSON text."""
    if not isinstance(message, dict):
        raise ValueError(f"message {number} is not an object with role and content")
    if names is None:
        names = SHAREGPT if SHAREGPT.role in message and OPENAI.role not in message else OPENAI
    role, content = message.get(names.role), message.get(names.content)
    if not isinstance(role, str):
        raise ValueError(f"message {number} has no text in {names.role!r}")
    role = names.roles.get(role, role)
    if isinstance(content, str) and len(message) == 2:
        return {"role": role, "content": content}
    others = {name: each for name, each in message.items() if each is not None}
    others = {name: others[name] for name in others if name not in (names.role, names.content)}
    others = others if written else without_fillers(others)
    if not others.get("tool_calls", True):
        del others["tool_calls"]  # an empty list: none
    if content is None and any(name in others for name in INSTEAD):
        content = ""
    if isinstance(content, list):
        content = "".join(_part(number, each) for each in content)
    if not isinstance(content, str):
        raise ValueError(f"message {number} has no text in {names.content!r}")
    return {"role": role, "content": content, **others}


def _part(number: int, part: Any) -> str:
    """Return the text of a part of message `number`."""
    if isinstance(part, str):
        return part
    kind = (part.get("type") or "text") if isinstance(part, dict) else type(part).__name__
    text = part.get("text") if isinstance(part, dict) and str(kind).endswith("text") else None
    if not isinstance(text, str):
        raise ValueError(f"message {number} has a part of type {kind}; this model reads texts")
    return text


def row_error(error: Exception) -> str:
    """Return the reason of a row that is not a conversation, or whose template failed."""
    return f"{'chat_limit' if isinstance(error, RenderLimitExceeded) else 'bad_chat'}: {error}"[:500]


def system_of(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the system text with which a conversation begins, as a list of one message, or an empty list."""
    return [one for one in messages[:1] if one["role"] in SYSTEM]


def with_system(messages: list[dict[str, Any]], system: str | None) -> list[dict[str, Any]]:
    """Return the messages after a system text, unless it is None or they begin with one."""
    if system is None or system_of(messages):
        return messages
    return [{"role": "system", "content": system}, *messages]


def read_chats(
    column: Sequence[Any],
    tools: Sequence[Any] | None = None,
    *,
    names: Names | None = None,
    system: str | None = None,
    turns: bool = False,
) -> tuple[dict[int, Request], dict[int, str]]:
    """Return the conversations of a column by row, and {row: reason} for bad ones; nulls and blanks are in neither.

    `turns`: the column has texts, which are turns of the user.
    """
    requests, errors = dict[int, Request](), dict[int, str]()
    for row, value in enumerate(column):
        if value is None or (isinstance(value, str) and not value.strip()):
            continue
        try:
            messages = [{"role": "user", "content": value}] if turns else read_messages(value, names)
            messages = with_system(messages, system)
            requests[row] = Request(messages=messages, tools=None if tools is None else read_tools(tools[row]))
        except (ValueError, RecursionError) as error:
            errors[row] = row_error(error)
    return requests, errors


@cache
def _warn_of_second_answers() -> None:
    """Say once per process what is done with conversations that have an answer."""
    log.warning(
        "conversations end with the assistant's message: the model begins another answer. --continue "
        "(continue_final_message) continues that message."
    )


@cache
def _warn_of_reasoning() -> None:
    log.warning("the chat template does not write reasoning_content, so answers are learned without it.")


def check_reasoning(messages: Sequence[Mapping[str, Any]], text: str) -> None:
    """Warn once per process if the template left out the reasoning of the last message: earlier ones may lose it."""
    reasoning = messages[-1].get("reasoning_content")
    if isinstance(reasoning, str) and reasoning.strip() not in text:
        _warn_of_reasoning()


def chat_requests(
    column: pa.Array,
    tools: pa.Array | None = None,
    *,
    names: Names | None = None,
    system: str | None = None,
    options: PromptOptions = PromptOptions(),
    turns: bool = False,
) -> tuple[dict[int, Request], dict[int, str]]:
    """Return the conversations of a column, which an answer follows, as `read_chats` does, with what the options put
    around them.

    `tools` is a column of the tools of each row; see `read_tools`.
    """
    called = None if tools is None else tools.to_pylist()
    requests, errors = read_chats(column.to_pylist(), called, names=names, system=system, turns=turns)
    for row, request in [*requests.items()]:
        want: Any = "prompt"
        if request.messages[-1]["role"] == "assistant":
            if options.continue_final_message:
                want = "continue"
                if request.messages[-1].get("tool_calls") and not request.messages[-1]["content"]:
                    del requests[row]
                    errors[row] = "bad_chat: its last message calls tools and has no text to continue"
                    continue
            else:
                _warn_of_second_answers()
        head = len(system_of(request.messages))
        requests[row] = replace(
            request,
            messages=[*request.messages[:head], *map(dict, options.examples), *request.messages[head:]],
            tools=request.tools or options.tools or None,
            options=options.template_options,
            want=want,
        )
    return requests, errors


def render_chats(tokenizer: Any, requests: Mapping[int, Request], rows: int) -> tuple[pa.Array, dict[int, str]]:
    """Return the texts of conversations by row, null for those of `rows` that are not among them, and {row: reason}
    for errors."""
    errors, texts = dict[int, str](), list[str | None]([None] * rows)
    for row, each in zip(requests, render(tokenizer, [*requests.values()]), strict=True):
        if isinstance(each, ValueError):
            errors[row] = row_error(each)
        else:
            texts[row] = each[0].text
    return pa.array(texts, pa.string()), errors


def _is_list(kind: pa.DataType) -> bool:
    lists = ("is_list", "is_large_list", "is_fixed_size_list", "is_list_view", "is_large_list_view")
    return any(getattr(pa.types, one)(kind) for one in lists)


def _is_word(kind: pa.DataType) -> bool:
    return is_text(kind.value_type if pa.types.is_dictionary(kind) else kind)
