"""Tool calls in the form that a chat template writes, which is found out with a sample, once for each template.

arguments    an object, or its JSON text: OpenAI's messages have text, of which many templates write a string in a
             string, or letters; DeepSeek's first ones want text
content      beside calls "", or null, without which some templates leave the calls out
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

Message = Mapping[str, Any]
Form = tuple[bool, bool]
"Whether arguments are text, and whether content beside calls is null."
NAME, KEY, VALUE = "sample_function", "sample_key", "SampleValue"
CALL = {"id": "sample001", "type": "function", "function": {"name": NAME, "arguments": {KEY: VALUE}}}
SAMPLE = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TOOL = {"type": "object", "properties": {KEY: {"type": "string", "description": KEY}}, "required": [KEY]}
TOOLS = [{"type": "function", "function": {"name": NAME, "description": NAME, "parameters": TOOL}}]
MISWRITTEN = (f'\\"{KEY}', f"{{'{KEY}")
"JSON in a string, and Python's form of an object."


def find_form(make: Callable[[Sequence[Message], Any], str]) -> Form:
    """Return the first form in which a template writes a sample; `make` renders messages with tools."""
    for form in ((False, False), (False, True), (True, False), (True, True)):
        with suppress(Exception):  # a template may raise anything
            text = make([{"role": "user", "content": "Hi"}, with_form(SAMPLE, form)], TOOLS).rpartition("Hi")[2]
            if KEY in text and VALUE in text and not any(each in text for each in MISWRITTEN):
                return form
    return False, False


def with_form(message: Message, form: Form) -> Message:
    """Return a message with its calls in a form; one without calls as it is."""
    calls, (as_text, null_content) = message.get("tool_calls"), form
    if not isinstance(calls, list) or not calls:
        return message
    content = None if null_content and message.get("content") == "" else message.get("content")
    return {**message, "content": content, "tool_calls": [_call(each, as_text) for each in calls]}


def _call(call: Any, as_text: bool) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _call(call["function"], as_text)}
    given = call.get("arguments")
    if as_text and isinstance(given, Mapping):
        return {**call, "arguments": json.dumps(given, ensure_ascii=False)}
    if not as_text and isinstance(given, str):
        with suppress(ValueError, RecursionError):
            return {**call, "arguments": read} if isinstance(read := json.loads(given), dict) else call
    return call


def called(message: Message) -> list[list[str]]:
    """Return the name and id of each call of a message."""
    found = []
    for call in (each for each in message.get("tool_calls") or () if isinstance(each, Mapping)):
        function = call["function"] if isinstance(call.get("function"), Mapping) else call
        found.append([each for each in (function.get("name"), call.get("id")) if each and isinstance(each, str)])
    return [names for names in found if names]


def check_written(number: int, message: Message, answer: str) -> None:
    """Raise ValueError if an answer lacks a call of its message, whose number is `number`."""
    for names in called(message):
        if not any(name in answer for name in names):
            raise ValueError(f"message {number} calls {names[0]!r}, and the template does not write tool calls")
