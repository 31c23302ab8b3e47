"""Conversations as texts, by the chat template in the tokenizer's folder.

    [{role: "user", content: "..."}, ...]  ->  "<|user|>...<|assistant|>"

A template is a Jinja program of the model's authors. transformers runs it in Jinja's immutable sandbox: it sees the
messages and the special tokens, and no attribute of a Python object that could lead out. Price: Python per row.
"""

import json
from typing import Any

import pyarrow as pa


def is_chat(kind: pa.DataType) -> bool:
    """Whether a column of this type holds conversations: lists of structs with the strings `role` and `content`."""
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_struct(kind.value_type):
        return False
    fields = {field.name: field.type for field in kind.value_type}
    texts = (pa.string(), pa.large_string(), pa.string_view())
    return all(fields.get(name) in texts for name in ("role", "content"))


def rendered(tokenizer: Any, column: pa.Array, *, asking: bool) -> tuple[pa.Array, dict[int, str]]:
    """The conversations of a column, structs or JSON in strings, as texts, and {row: reason} for those that are none.

    `asking` lets each text end where the assistant's answer begins. A null, or a blank string, becomes null.
    """
    texts: list[str | None] = []
    errors: dict[int, str] = {}
    for row, value in enumerate(column.to_pylist()):
        text = None
        if value is not None and not (isinstance(value, str) and not value.strip()):
            try:
                messages = _messages(json.loads(value) if isinstance(value, str) else value)
                text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asking)
            except Exception as error:  # a template may raise anything
                errors[row] = f"bad_chat: {error}"[:500]
        texts.append(text)
    return pa.array(texts, pa.string()), errors


def _messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise ValueError("it is no list of messages, or an empty one")
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict):
            raise ValueError(f"message {number} is no object with a role and a content")
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                raise ValueError(f"message {number} has no text in {name!r}")
    return value
