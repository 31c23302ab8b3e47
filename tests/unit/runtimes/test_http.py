"""The limits of requests to an endpoint, and what becomes of its answers."""

import itertools
import json
import math
import time
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchlake.errors import UsageError
from torchlake.runtimes._http.answers import Answer, answer_of, message_of, read_answer
from torchlake.runtimes._http.limits import FIRST, LimitOptions, Limits, _Rates, retry_after
from torchlake.runtimes._http.requests import Endpoint, checked_url

CHAT = Endpoint(url="https://host/v1", model="small", api="chat", options={"n": 1})
JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def message(**parts: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "message": {"role": "assistant", **parts}, "finish_reason": "stop"}]}


@given(
    st.binary(max_size=40)
    | JSON.map(json.dumps).map(str.encode)
    | st.tuples(
        st.sampled_from(["choices", "message", "content", "usage", "logprobs", "data", "embedding", "tool_calls"]), JSON
    ).map(lambda one: json.dumps({**message(content="x"), one[0]: one[1]}).encode()),
    st.sampled_from(["chat", "completions", "embeddings"]),
)
def test_any_body_becomes_an_answer_or_a_named_error(content: bytes, api: Any) -> None:
    answer = read_answer(Endpoint(url="https://host/v1", model="small", api=api), content)
    assert answer.error is not None or answer.texts or answer.vector
    assert answer.error is None or answer.error.partition(":")[0] in ("bad_answer", "refused", "length")
    assert answer_of(answer.to_bytes()) == answer


@given(JSON)
def test_any_message_becomes_an_answer_or_a_named_error(part: Any) -> None:
    for name in ("content", "refusal", "tool_calls", "reasoning", "reasoning_content"):
        value = message(content="x") if name != "content" else message()
        value["choices"][0]["message"][name] = part
        answer = read_answer(CHAT, json.dumps(value).encode())
        assert isinstance(answer.reasoning, str | None)
        assert answer_of(answer.to_bytes()) == answer


def test_choices_are_picked_out_of_json() -> None:
    endpoint = Endpoint(url="https://host/v1", model="small", api="chat", choices=("good", "bad"))
    assert read_answer(endpoint, json.dumps(message(content='{"answer": "bad"}')).encode()).texts == ("bad",)
    for content in ('{"answer": "odd"}', "bad", "{}"):
        error = read_answer(endpoint, json.dumps(message(content=content)).encode()).error
        assert error is not None
        assert error.startswith("bad_answer: ")


@pytest.mark.parametrize(
    ("parts", "reason", "error"),
    [
        ({}, "content_filter", "content_filter"),  # Azure's
        ({"content": None}, "length", "length"),
        ({"content": None, "reasoning": "hm"}, "length", "length"),
        ({"content": None, "reasoning": "hm"}, "stop", None),
        ({"content": None, "tool_calls": [{"id": "1"}]}, "tool_calls", None),
        ({"content": None}, "stop", "bad_answer"),
    ],
    ids=str,
)
def test_a_message_without_a_text_says_why(parts: dict[str, Any], reason: str, error: str | None) -> None:
    value = message(**parts)
    value["choices"][0]["finish_reason"] = reason
    answer = read_answer(CHAT, json.dumps(value).encode())
    assert (answer.error and answer.error.partition(":")[0]) == error
    assert error == "bad_answer" or answer.texts == ("",)


def test_counts_are_whole_numbers() -> None:
    counts = {"prompt_tokens": 4.0, "completion_tokens": 2.5, "prompt_tokens_details": {"cached_tokens": -1}}
    answer = read_answer(CHAT, json.dumps(message(content="x") | {"usage": counts}).encode())
    assert (repr(answer.prompt_tokens), answer.generated_tokens, answer.cached_tokens) == ("4", None, None)


def test_a_text_does_not_depend_on_what_was_not_asked() -> None:
    value = message(content="x") | {"usage": None}
    value["choices"][0]["logprobs"] = {"content": [{"token": "x"}]}
    assert read_answer(CHAT, json.dumps(value).encode()) == Answer(texts=("x",), reasons=("stop",))
    assert message_of(b'{"error": null, "message": "why"}') == ("", "why")


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": formatdate(0)}, 0),
        ({"retry-after-ms": "x", "retry-after": "3"}, 3),
        ({"retry-after-ms": "1500", "retry-after": "3"}, 1.5),
        ({"retry-after-ms": "inf", "retry-after": "nan"}, 0),
        ({"retry-after": "soon"}, 0),
    ],
    ids=str,
)
def test_times_to_wait(headers: dict[str, str], seconds: float) -> None:
    assert retry_after(headers) == seconds


def test_a_date_to_wait_for() -> None:
    in_50_minutes = formatdate(time.time() + 3000, usegmt=True)
    assert retry_after({"retry-after": in_50_minutes}) == pytest.approx(3000, abs=600)


def test_open_requests_grow_while_latency_holds_and_halve_once() -> None:
    limits = Limits(LimitOptions(), 64)
    for _ in range(40):
        limits.open = int(limits.most)
        limits.answered(1.0, 0.0, None)
    assert limits.most == FIRST + 40
    limits.refused(10.0, 0.0)
    half = limits.most
    limits.refused(10.0, 0.0)  # it was sent before the first one came back
    assert half == limits.most == (FIRST + 40) / 2
    for _ in range(int(half)):
        limits.open = int(limits.most)
        limits.answered(1.0, 0.0, None)
    assert half + 0.9 < limits.most < half + 1.1, "one more in a round"
    for _ in range(50):
        limits.open = int(limits.most)
        limits.answered(5.0, 0.0, None)
    assert limits.most < half + 3, "answers take longer: no more requests"


def test_processes_share_the_moments_of_a_file(tmp_path: Path) -> None:
    options = LimitOptions(requests_per_minute=600, tokens_per_minute=6000, shared=str(tmp_path / "rates"))
    one, other = _Rates(options), _Rates(options)
    moments = [(one, other)[place % 2].reserve(0.0, 5.0) for place in range(9)]
    spaces = [after - before for before, after in itertools.pairwise(moments)]
    assert all(0.1 <= space < 0.11 for space in spaces)
    one.correct(100.0)
    assert other.reserve(0.0, 5.0) - moments[-1] == pytest.approx(1.06, abs=0.02), "100 tokens more take a second"


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("https://host/v1/", "https://host/v1"),
        ("https://host:8443/openai?api-version=2", "https://host:8443/openai?api-version=2"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1"),
        ("http://[::1]:8000/v1", "http://[::1]:8000/v1"),
        ("http://localhost/v1", "http://localhost/v1"),
        ("http://localhost.example.org/v1", None),
        ("http://10.0.0.1/v1", None),
        ("https://host/v1?key=abc", None),
        ("https://user@host/v1", None),
        ("https://host:99999/v1", None),
        ("host/v1", None),
        ("", None),
    ],
)
def test_urls(url: str, kept: str | None) -> None:
    if kept is None:
        with pytest.raises(UsageError):
            checked_url(url)
    else:
        assert checked_url(url) == kept


def test_answers_survive_the_journal() -> None:
    answer = Answer(texts=("a\n", ""), reasons=("stop", "length"), logprobs=(-0.5,), prompt_tokens=3, final=False)
    assert answer_of(answer.to_bytes()) == answer
    vector = read_answer(
        Endpoint(url="https://host/v1", model="small", api="embeddings"), b'{"data": [{"embedding": [1, 2.5]}]}'
    )
    assert vector.numbers is not None
    assert vector.numbers.tolist() == [1, 2.5]
    assert not math.isnan(float(vector.numbers.sum()))
