"""Tool calls in the form that a chat template writes, which is found out with a sample, once for each template.

arguments    an object, or its JSON text: OpenAI's messages have text, of which many templates write a string in a
             string, or letters; DeepSeek's first ones want text
content      beside calls "", or null, without which some templates leave the calls out
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]
NAME, KEY, VALUE = "sample_function", "sample_key", "SampleValue"
TOOL = {"type": "object", "properties": {KEY: {"type": "string", "description": KEY}}, "required": [KEY]}
TOOLS = [{"type": "function", "function": {"name": NAME, "description": NAME, "parameters": TOOL}}]
MISWRITTEN = (f'\\"{KEY}', f"{{'{KEY}")
"JSON in a string, and Python's form of an object."


@dataclass(frozen=True)
class CallForm:
    """How a template wants calls."""

    as_text: bool = False
    null_content: bool = False

    def written(self, message: Message) -> Message:
        """Return a message with its calls in this form; one without calls as it is."""
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or not calls:
            return message
        content = None if self.null_content and message.get("content") == "" else message.get("content")
        return {**message, "content": content, "tool_calls": [self._call(each) for each in calls]}

    def _call(self, call: Any) -> Any:
        if not isinstance(call, Mapping):
            return call
        if isinstance(call.get("function"), Mapping):
            return {**call, "function": self._call(call["function"])}
        given = call.get("arguments")
        if self.as_text and isinstance(given, Mapping):
            return {**call, "arguments": json.dumps(given, ensure_ascii=False)}
        if not self.as_text and isinstance(given, str):
            with suppress(ValueError, RecursionError):
                read = json.loads(given)
                return {**call, "arguments": read} if isinstance(read, dict) else call
        return call


def find_form(make: Callable[[Sequence[Message], Any], str]) -> CallForm:
    """Return the first form in which a template writes a sample; `make` renders messages with tools."""
    function = {"name": NAME, "arguments": {KEY: VALUE}}
    call = {"id": "sample001", "type": "function", "function": function}
    sample = {"role": "assistant", "content": "", "tool_calls": [call]}
    for form in (CallForm(), CallForm(null_content=True), CallForm(as_text=True), CallForm(True, null_content=True)):
        with suppress(Exception):  # a template may raise anything
            text = make([{"role": "user", "content": "Hi"}, form.written(sample)], TOOLS)
            text = text.rpartition("Hi")[2]
            if KEY in text and VALUE in text and not any(each in text for each in MISWRITTEN):
                return form
    return CallForm()


def check_written(number: int, message: Message, answer: str) -> None:
    """Raise ValueError if an answer lacks a call of its message, whose number is `number`."""
    for call in message.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        known = [each for each in (name, call.get("id")) if isinstance(each, str)] if name else []
        if known and not any(each in answer for each in known):
            raise ValueError(f"message {number} calls {name!r}, and the template does not write tool calls")
