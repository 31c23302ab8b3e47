"""Answers of an endpoint: what a row gets from the body of a response, or why it gets nothing.

http_400: ...    the endpoint refuses the request          content_filter    it does not show the text
bad_answer: ...  what came is not an answer                refused: ...      the model declines
length           JSON or a tool call that was cut, or no text because the tokens were used before it
timeout: ...     no whole answer in the time of a row      connection: ...   the connection broke each time
"""

import base64
import binascii
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from torchlake.runtimes._http.requests import Endpoint

SHOWN = 200
"Characters of a response in an error."
FILTERED = ("content_filter", "content_policy_violation", "responsible_ai_policy_violation")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a row got; without an `error` at least one text, or a vector."""

    texts: tuple[str, ...] = ()
    reasoning: str | None = None
    tool_calls: str | None = None
    "As JSON."
    reasons: tuple[str, ...] = ()
    "Why each text ended."
    prompt_tokens: int | None = None
    generated_tokens: int | None = None
    cached_tokens: int | None = None
    "Those of the prompt that the endpoint had computed before."
    logprobs: tuple[float, ...] | None = None
    "The log-probabilities of the tokens of the first text."
    vector: str | None = None
    "Float32 numbers in base64."
    request_id: str | None = None
    error: str | None = None
    final: bool = True
    "Whether asking again would change nothing: a row without it is not kept for the next attempt."

    def to_bytes(self) -> bytes:
        """Return the answer for the journal."""
        return json.dumps({name: each for name, each in asdict(self).items() if each is not None}).encode()

    @property
    def numbers(self) -> np.ndarray | None:
        """The vector, (D,) float32."""
        return None if self.vector is None else np.frombuffer(base64.b64decode(self.vector), "<f4")


def answer_of(kept: bytes) -> Answer:
    """Return an answer from the journal."""
    value = json.loads(kept)
    for name in ("texts", "reasons", "logprobs"):
        if name in value:
            value[name] = tuple(value[name])
    return Answer(**value)


def read_answer(endpoint: Endpoint, content: bytes) -> Answer:
    """Return the answer in the body of a response with the status 200."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return _bad("it is not JSON", content)
    if not isinstance(value, dict):
        return _bad("it is not an object", content)
    if value.get("error"):
        return _bad("it is an error", content)
    try:
        answer = _vector(value) if endpoint.api == "embeddings" else _texts(endpoint, value)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        return replace(_bad(str(error)[:SHOWN], content), **_usage(value))
    return replace(answer, **_usage(value))


def message_of(content: bytes) -> tuple[str, str]:
    """Return the code of an error and its message, from the body of a response."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return "", shown(content)
    found = (value.get("error") or value) if isinstance(value, dict) else value
    if isinstance(found, dict):
        code = found.get("code") or found.get("type") or ""
        inner = found.get("innererror")
        if isinstance(inner, dict) and isinstance(inner.get("code"), str):
            code = inner["code"] if code not in FILTERED else code
        message = found.get("message") or found.get("detail")
        return str(code), message[: 2 * SHOWN] if isinstance(message, str) else shown(content)
    return "", str(found)[: 2 * SHOWN]


def refused_row(status: int, content: bytes) -> Answer:
    """Return the error row of a request that the endpoint refuses."""
    code, message = message_of(content)
    if code.lower() in FILTERED or (code.lower() == "responsibleaipolicyviolation"):
        return Answer(error=f"content_filter: {message}", reasons=("content_filter",))
    return Answer(error=f"http_{status}: {message}")


def shown(content: bytes) -> str:
    """Return the beginning of a body on one line."""
    return " ".join(content[: 8 * SHOWN].decode("utf-8", "replace").split())[:SHOWN]


def _bad(why: str, content: bytes) -> Answer:
    return Answer(error=f"bad_answer: {why}: {shown(content)}")


def _usage(value: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of tokens that the endpoint has counted."""
    usage = value.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    found: dict[str, Any] = {
        "prompt_tokens": usage.get("prompt_tokens"),
        "generated_tokens": usage.get("completion_tokens"),
        "cached_tokens": cached,
    }
    # Arrow's columns are int32; a count beyond that, or a negative one, is not a count.
    known = {name: each for name, each in found.items() if type(each) in (int, float) and 0 <= each < 2**31}
    return {name: int(known[name]) if name in known and known[name] % 1 == 0 else None for name in found}


def _texts(endpoint: Endpoint, value: dict[str, Any]) -> Answer:
    """Return the texts of chat completions and completions. Raises ValueError and others for another form."""
    choices = value.get("choices")
    if not isinstance(choices, list) or not choices:
        raise ValueError("it has no choices")
    if len(choices) < endpoint.texts:
        raise ValueError(f"it has {len(choices)} of {endpoint.texts} choices")
    choices = sorted(choices, key=lambda one: one.get("index") or 0)[: endpoint.texts]
    messages = [one["message"] if endpoint.api == "chat" else {"content": one["text"]} for one in choices]
    if not all(isinstance(one, dict) for one in messages):
        raise ValueError("a choice has no message")
    calls = [one["tool_calls"] for one in messages if one.get("tool_calls")]
    reasons = tuple(str(one.get("finish_reason") or "stop") for one in choices)
    texts = tuple(_text(one, reason) for one, reason in zip(messages, reasons, strict=True))
    answer = Answer(
        texts=texts,
        reasoning=next((each for one in messages for each in _reasonings(one)), None),
        tool_calls=json.dumps(calls[0] if endpoint.texts == 1 else calls, ensure_ascii=False) if calls else None,
        reasons=reasons,
        logprobs=_logprobs(choices[0].get("logprobs")) if endpoint.options.get("logprobs") else None,
    )
    refusal = next((one["refusal"] for one in messages if one.get("refusal")), None)
    if refusal is not None:
        return replace(answer, error=f"refused: {str(refusal)[:SHOWN]}")
    if "content_filter" in reasons:
        return replace(answer, error="content_filter")
    if "length" in reasons and (endpoint.structured or calls or not any(texts)):
        return replace(answer, error="length")
    if endpoint.structured and not calls:
        for text in texts:
            json.loads(text)
    return _chosen(answer, endpoint.choices) if endpoint.choices else answer


def _reasonings(message: dict[str, Any]) -> list[str]:
    found = (message.get("reasoning_content"), message.get("reasoning"))
    return [each for each in found if isinstance(each, str) and each]


def _text(message: dict[str, Any], reason: str) -> str:
    """Return the text of a message; it may be missing beside what stands for it, and where it ended before any."""
    content = message.get("content")
    if isinstance(content, list):  # parts
        content = "".join(one["text"] for one in content if one.get("type") in ("text", "output_text"))
    instead = message.get("tool_calls") or message.get("refusal") or _reasonings(message)
    if content is None and (instead or reason in ("length", "content_filter")):
        return ""
    if not isinstance(content, str):
        raise ValueError("a choice has no text" if "content" in message else "a message has no content")
    content.encode()  # an unpaired surrogate is not text
    return content


def _chosen(answer: Answer, choices: tuple[str, ...]) -> Answer:
    """Return the answer with the choice in place of its JSON."""
    picked = []
    for text in answer.texts:
        found = json.loads(text)
        found = found.get("answer") if isinstance(found, dict) else found
        if found not in choices:
            raise ValueError("it is none of the choices")
        picked.append(str(found))
    return replace(answer, texts=tuple(picked))


def _logprobs(value: Any) -> tuple[float, ...] | None:
    """Return the log-probabilities of the tokens of a choice, if it has any."""
    if not isinstance(value, dict):
        return None
    tokens = value.get("content")
    found = [one["logprob"] for one in tokens] if isinstance(tokens, list) else value.get("token_logprobs") or []
    return tuple(float(each) for each in found if each is not None)


def _vector(value: dict[str, Any]) -> Answer:
    """Return the vector of embeddings. Raises ValueError and others for another form."""
    data = value.get("data")
    if not isinstance(data, list) or len(data) != 1:
        raise ValueError("it does not have one vector")
    numbers = data[0]["embedding"]
    if isinstance(numbers, str):
        try:
            found = np.frombuffer(base64.b64decode(numbers, validate=True), "<f4")
        except binascii.Error:
            raise ValueError("its vector is not base64") from None
    else:
        with np.errstate(over="ignore"):  # what float32 cannot hold is found below
            found = np.asarray(numbers, dtype=np.float32)
    if found.ndim != 1 or not len(found) or not np.isfinite(found).all():
        raise ValueError("its vector is not a list of numbers")
    return Answer(vector=base64.b64encode(found.astype("<f4").tobytes()).decode())
