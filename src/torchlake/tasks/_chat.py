"""Conversations as texts, by the chat template in the tokenizer's folder.

    [{role: "user", content: "..."}, ...]  ->  "<|user|>...<|assistant|>"

A template is a Jinja program written by the model's authors. transformers runs it in Jinja's immutable sandbox, with
access to the messages and the special tokens only; `_rendering.py` limits its time and memory. A conversation that
exceeds a limit becomes an error row, `chat_limit: ...`.
"""

import json
import re
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from torchlake.errors import TorchlakeError
from torchlake.tables.arrays import is_text
from torchlake.tasks._rendering import RenderLimitExceeded, render

MAX_CONSECUTIVE_LIMITS = 5
"After this many consecutive conversations over a limit, the rest of the column is skipped."


def is_chat(kind: pa.DataType) -> bool:
    """Return whether a column of this type holds conversations: lists of structs with the strings `role` and
    `content`."""
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_struct(kind.value_type):
        return False
    fields = {field.name: field.type for field in kind.value_type}
    return all(name in fields and is_text(fields[name]) for name in ("role", "content"))


def render_chats(tokenizer: Any, column: pa.Array, *, add_generation_prompt: bool) -> tuple[pa.Array, dict[int, str]]:
    """Render a column of conversations, structs or JSON strings, as texts; return them and {row: reason} for errors.

    With `add_generation_prompt`, each text ends where the assistant's answer begins. Nulls and blank strings become
    null.
    """
    texts, errors = _each(
        column, lambda messages: render(tokenizer, messages, add_generation_prompt=add_generation_prompt)[0]
    )
    return pa.array(texts, pa.string()), errors


def marks_answers(tokenizer: Any) -> bool:
    """Return whether the chat template marks the assistant's turns: {% generation %} ... {% endgeneration %}."""
    return re.search(r"{%-?\s*generation\s*-?%}", tokenizer.get_chat_template()) is not None


def tokenize_chats(tokenizer: Any, column: pa.Array) -> tuple[list[list[int] | None], dict[int, str]]:
    """Tokenize a column of conversations, with ~id (below zero) for tokens outside the assistant's turns.

    Each ends with one end token, which belongs to the turn before it. Errors are as in `render_chats`; a conversation
    without an assistant's turn is an error, too.
    """

    def ids_of(messages: list[dict[str, str]]) -> list[int]:
        text, spans = render(tokenizer, messages, add_generation_prompt=False, spans=True)
        tokens = tokenizer(text, add_special_tokens=False, verbose=False)
        ids = tokens["input_ids"]
        learned = [False] * len(ids)
        for start, end in spans:
            first, last = tokens.char_to_token(start), tokens.char_to_token(end - 1)
            if first is not None:  # None: the text ends before the span
                after = len(ids) if last is None else last + 1
                learned[first:after] = [True] * (after - first)
        if not any(learned):
            raise ValueError("it has no assistant's turn to learn from")
        if ids[-1] != tokenizer.eos_token_id:
            ids, learned = [*ids, tokenizer.eos_token_id], [*learned, learned[-1]]
        return [token if wanted else ~token for token, wanted in zip(ids, learned, strict=True)]

    return _each(column, ids_of)


def _each(column: pa.Array, make: Callable[[list[dict[str, str]]], Any]) -> tuple[list[Any], dict[int, str]]:
    """Apply `make` to every conversation; return the values, None for missing ones, and {row: reason} for errors."""
    made: list[Any] = []
    errors: dict[int, str] = {}
    exceeded = 0
    for row, value in enumerate(column.to_pylist()):
        made.append(None)
        if value is None or (isinstance(value, str) and not value.strip()):
            continue
        if exceeded == MAX_CONSECUTIVE_LIMITS:
            errors[row] = f"chat_limit: not tried after {exceeded} rows in a row for which the template took too much"
            continue
        try:
            made[row] = make(_messages(json.loads(value) if isinstance(value, str) else value))
            exceeded = 0
        except RenderLimitExceeded as error:
            errors[row] = f"chat_limit: {error}"[:500]
            exceeded += 1
        except TorchlakeError:
            raise
        except Exception as error:  # not a conversation, or raised by the template
            errors[row] = f"bad_chat: {error}"[:500]
    return made, errors


def _messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise ValueError("it is not a list of messages, or it is empty")
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict):
            raise ValueError(f"message {number} is not an object with role and content")
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                raise ValueError(f"message {number} has no text in {name!r}")
    return value
