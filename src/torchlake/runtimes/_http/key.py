"""The key of an endpoint, and its removal from whatever comes back."""

import json
from dataclasses import replace
from typing import Any

from torchlake.redaction import REDACTED
from torchlake.runtimes._http.answers import Answer

PLACEHOLDERS = {"dummy", "empty", "lm-studio", "no-key", "none", "not-needed", "null", "ollama", "token"}
"Keys of servers that want none: words that answers may have, as is what is shorter than LEAST_KEY characters."
LEAST_KEY = 4


class EndpointKey:
    """The key that requests have, if any."""

    def __init__(self, value: str | None) -> None:
        self.value = value
        known = value is None or len(value) < LEAST_KEY or value.lower() in PLACEHOLDERS
        self._secret = None if known else value

    def clean(self, text: str) -> str:
        """Return a message without the key."""
        return text if self.value is None else text.replace(self.value, REDACTED)

    def clean_bytes(self, content: bytes) -> bytes:
        """Return a body without the key, also as JSON writes it."""
        if self._secret is not None:
            quoted = json.dumps(self._secret)[1:-1]
            for form in {self._secret, quoted, quoted.replace("/", "\\/")}:
                content = content.replace(form.encode(), REDACTED.encode())
        return content

    def clean_answer(self, answer: Answer, request_id: str) -> Answer:
        """Return an answer without the key, however it was written, and as valid text, with the id of its request."""
        answer = replace(answer, request_id=str(request_id)[:200], reasons=tuple(map(self._text, answer.reasons)))
        found = {name: getattr(answer, name) for name in ("reasoning", "tool_calls", "error", "request_id")}
        whole: dict[str, Any] = {name: self._text(each) for name, each in found.items() if each is not None}
        return replace(answer, texts=tuple(map(self._text, answer.texts)), **whole)

    def _text(self, text: str) -> str:
        text = text if self._secret is None else self.clean(text)
        return text.encode("utf-8", "replace").decode()
