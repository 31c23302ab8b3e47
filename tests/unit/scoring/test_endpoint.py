"""Rows that an endpoint answers: every row out once, named errors, limits that hold, and no key anywhere."""

import gc
import itertools
import json
import os
import threading
import time
from collections.abc import Callable
from glob import glob
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import s3_server
from fake_endpoint import FakeEndpoint, serving
from torchlake.cli.main import main
from torchlake.engines.local import Local
from torchlake.errors import ConfigError, LimitReached, TableError, TorchlakeError, UsageError
from torchlake.processes.serialization import pack, unpack
from torchlake.runtimes._http import batches, client
from torchlake.runtimes._http.requests import json_format
from torchlake.scoring.predict import predict

KEY = "sk-very/secret-12345"
PRICE = {"small": {"input": 1.0, "output": 2.0, "cached": 0.5}}


class Here(Local):
    """The local engine without child processes: those cost a second each."""

    def run_chunks(self, make_worker: Any, chunks: Any, **_: Any) -> Any:
        make = unpack(pack(make_worker))  # as every engine sends it
        return make[0]()(iter(list(chunks))) if isinstance(make, tuple) else make()(iter(list(chunks)))


@pytest.fixture
def rows(tmp_path: Path) -> Callable[..., Path]:
    def write(count: int = 20, **columns: Any) -> Path:
        columns = columns or {"text": [f"row {row} of it" for row in range(count)]}
        path = tmp_path / f"in-{len(list(tmp_path.iterdir()))}.parquet"
        pq.write_table(pa.table({"id": list(range(len(next(iter(columns.values()))))), **columns}), path)
        return path

    return write


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_KEY", KEY)
    monkeypatch.setattr(client, "PAUSE_S", 0.001)


def ask(table: Path, endpoint: FakeEndpoint, output: Path, **options: Any) -> list[dict[str, Any]]:
    given: dict[str, Any] = {"model_name": "small", "key": "id", "engine": Here(), "max_error_rate": 1.0, **options}
    predict(None, str(table), output, endpoint=endpoint.url, **given)
    found: list[dict[str, Any]] = pq.read_table(output).sort_by("id").to_pylist()
    return found


def test_a_worker_ends_its_thread_and_its_connections(rows: Callable[..., Path], tmp_path: Path) -> None:
    def opened() -> list[str]:
        names = (os.readlink(each) for each in glob("/proc/self/fd/*") if os.path.islink(each))
        return sorted(name.partition("[")[0] for name in names if "/part-" not in name)

    table, place = rows(9), tmp_path / "out"
    gc.collect()
    files, threads = opened(), set(threading.enumerate())
    with serving() as endpoint:
        with pytest.raises(LimitReached):
            ask(table, endpoint, place, max_tokens_total=100, concurrency=1)
        ask(table, endpoint, place)
        endpoint.faults = {"row": "403"}
        with pytest.raises(UsageError):
            ask(table, endpoint, tmp_path / "refused")
        for thread in (one for one in threading.enumerate() if one.name == "asking" and one not in threads):
            thread.join(10)
            assert not thread.is_alive()
    gc.collect()  # the refusal, whose traceback refers to the worker
    assert opened() == files


def test_each_row_is_answered_once_and_faults_are_named(rows: Callable[..., Path], tmp_path: Path) -> None:
    faults = {
        "row 1 ": ["503", "408", "425", "409", "reset", "cut"],
        "row 2 ": "400:too odd \ud800",
        "row 3 ": "html",
        "row 4 ": "half",
        "row 5 ": "error200",
        "row 6 ": "nochoices",
        "row 7 ": "filter",
        "row 8 ": "filtered",
        "row 9 ": "refusal",
        "row 10 ": "empty",
        "row 11 ": "422",
        "row 12 ": "500",
        "row 13 ": "413",
        "row 14 ": "length",
        "row 15 ": "think",
    }
    with serving(faults=faults) as endpoint:
        found = ask(rows(18), endpoint, tmp_path / "out", max_retries=6, max_error_rate=1.0)
    assert [row["id"] for row in found] == list(range(18))
    reasons = [row["error"] and row["error"].partition(":")[0] for row in found]
    named = ["http_400", *["bad_answer"] * 4, "content_filter", "content_filter", "refused", "length", "http_422"]
    assert reasons == [None, None, *named, "http_500", "http_413", *[None] * 4]
    assert found[2]["error"] == "http_400: too odd ?"
    assert found[3]["error"].endswith("Sign in</body></html>")
    assert "upstream failed" in found[5]["error"]
    assert found[14]["finish_reason"] == "length"
    assert found[14]["generated_text"] == "echo row 14 of it"
    assert found[15]["reasoning"] == "Let me see."
    asked = {row: sum(f"row {row} " in text for text in endpoint.texts) for row in range(18)}
    assert asked == dict.fromkeys(range(18), 1) | {1: 7, 12: 7}
    assert found[0]["prompt_tokens"] == 4
    assert found[0]["generated_tokens"] == 2
    assert found[0]["cached_tokens"] == 1


def test_the_same_requests_reach_the_endpoint(rows: Callable[..., Path], tmp_path: Path) -> None:
    """Messages go as messages, with what the options put around them; nulls of Arrow's structs are not sent."""
    chats = [
        [{"role": "user", "content": "hi", "name": None}],
        [{"role": "system", "content": "own", "name": None}, {"role": "user", "content": "yo", "name": "Ann"}],
        None,
    ]
    with serving() as endpoint:
        found = ask(
            rows(messages=chats),
            endpoint,
            tmp_path / "chats",
            system="be brief",
            temperature=0.5,
            seed=7,
            stop=["."],
            max_new_tokens=9,
            logprobs="tokens",
            request_options={"reasoning_effort": "low", "stop": None},
        )
        assert [row["error"] for row in found] == [None, None, "null_input"]
        assert (found[0]["logprob"], found[0]["token_logprobs"]) == (-0.5, [-0.25, -0.75])
        bodies = sorted((one.body for one in endpoint.requests), key=lambda one: str(one["messages"]))
        assert bodies[0]["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
        assert bodies[1]["messages"][1] == {"role": "user", "content": "yo", "name": "Ann"}
        assert bodies[1]["messages"][0]["content"] == "own"
        options = {"max_tokens": 9, "temperature": 0.5, "seed": 7, "reasoning_effort": "low", "logprobs": True}
        assert {name: value for name, value in bodies[0].items() if name != "messages"} == {"model": "small", **options}

        del endpoint.requests[:]
        found = ask(rows(2), endpoint, tmp_path / "texts", api="completions", n=2, temperature=1.0)
        assert found[1]["generated_text"] == ["echo row 1 of it", "echo row 1 of it #1"]
        assert endpoint.requests[0].path == "/v1/completions"
        found = ask(rows(2), endpoint, tmp_path / "vectors", task="feature_extraction", model_name="embedder")
        assert found[0]["embedding"] == [len("row 0 of it"), 1.0, -0.5]
        own = [{"max_new_tokens": 3, "stop": ["x"]}, None, {"max_new_tokens": -1, "stop": None}]
        for form in (own, [json.dumps(one) for one in own]):
            del endpoint.requests[:]
            table = rows(text=["a", "b", "c"], options=form)
            found = ask(table, endpoint, tmp_path / type(form[0]).__name__, max_new_tokens=7)
            assert [one.body["max_tokens"] for one in sorted(endpoint.requests, key=lambda one: one.text)] == [3, 7]
            assert found[2]["error"].startswith("bad_options: max_new_tokens")
        endpoint.faults = {"row 1 ": "length"}
        form = {"response_format": json_format({"type": "object", "properties": {}}, ())}
        found = ask(rows(2), endpoint, tmp_path / "form", request_options=form)
        assert json.loads(found[0]["generated_text"]) == {"answer": "echo row 0 of it"}
        assert found[1]["error"] == "length"
        assert found[1]["generated_text"] == '{"answer": "echo row 1 of it"}', "it is kept"
        tools = [{"name": "weather", "parameters": {"type": "object"}}]
        endpoint.faults = {"row 1 ": "call"}
        found = ask(rows(2), endpoint, tmp_path / "tools", tools=tools, prompt="Do {text}")
        assert json.loads(found[1]["tool_calls"])[0]["function"]["name"] == "weather"
        assert endpoint.requests[-1].body["tools"] == [{"type": "function", "function": tools[0]}]
        del endpoint.requests[:]
        asked = [json.dumps([{"role": "user", "content": "row 7"}])]
        ask(rows(text=asked, tools=[json.dumps(tools)]), endpoint, tmp_path / "column", chat=True)
        assert endpoint.requests[-1].body["tools"] == [{"type": "function", "function": tools[0]}]


def test_answers_have_a_form(rows: Callable[..., Path], tmp_path: Path) -> None:
    """Choices are picked out of JSON, and the properties of a schema are columns; what does not fit is an error row."""
    with serving(faults={"row 1 ": "plain", "row 2 ": "length"}) as endpoint:
        found = ask(rows(3), endpoint, tmp_path / "choices", choices=["good", "bad"])
        assert [row["generated_text"] for row in found] == ["good", None, '{"answer": "good"}']
        reasons = [row["error"] and row["error"].partition(":")[0] for row in found]
        assert reasons == [None, "bad_answer", "length"]
        schema = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
        found = ask(rows(3), endpoint, tmp_path / "columns", json_schema=schema, json_columns=True, prefix="its_")
        assert [row["its_answer"] for row in found] == ["echo row 0 of it", None, "echo row 2 of it"]
        assert endpoint.requests[-1].body["response_format"]["json_schema"]["schema"] == schema
    with pytest.raises(UsageError, match="regex: the runtime 'http' has json_schema and choices"):
        ask(rows(3), endpoint, tmp_path / "regex", regex="a+")


def test_the_key_is_nowhere(rows: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    faults = {"row 1 ": "echokey", "row 2 ": "echo400", "row 3 ": ["429", "503"], "row 4 ": "echo503"}
    with serving(faults=faults, key=KEY) as endpoint:
        found = ask(rows(6), endpoint, tmp_path / "out", key_env="TEST_KEY", max_cost=1.0, price=PRICE, max_retries=2)
        assert found[4]["error"] == "http_503: got Bearer [redacted] (3 attempts)"
        assert all(one.headers["authorization"] == f"Bearer {KEY}" for one in endpoint.requests)
        with pytest.raises(LimitReached):
            ask(rows(9), endpoint, tmp_path / "cut", key_env="TEST_KEY", max_tokens_total=100, concurrency=1)
        endpoint.key = "another"
        with pytest.raises(UsageError, match=r"the key in TEST_KEY. It says 401: bad key Bearer \[redacted\]"):
            ask(rows(6), endpoint, tmp_path / "refused", key_env="TEST_KEY")
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(kept) > 6
    content = b"".join(path.read_bytes() for path in kept) + "".join(capfd.readouterr()).encode()
    content += b"".join(repr(pq.read_table(path).to_pylist()).encode() for path in kept if path.suffix == ".parquet")
    assert KEY.encode() not in content
    assert KEY.replace("/", "\\/").encode() not in content


def test_a_placeholder_of_a_key_changes_no_answer(
    rows: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("1", "row", "EMPTY"):
        monkeypatch.setenv("TEST_KEY", key)
        with serving(key=key) as endpoint:
            found = ask(rows(2), endpoint, tmp_path / key, key_env="TEST_KEY")
        assert [row["generated_text"] for row in found] == ["echo row 0 of it", "echo row 1 of it"]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("403", "refuses the request"),
        ("model", "has no model 'small' for chat"),
        ("404", "there is nothing at /v1/chat/completions"),
        ("307", "redirects to another host, http://127.0.0.1"),
        ("302:same", "drops the request"),
        ("308", "redirects to an address that cannot be read"),
    ],
)
def test_what_no_row_would_survive_ends_the_job(
    fault: str, message: str, rows: Callable[..., Path], tmp_path: Path
) -> None:
    with serving(faults={"row": fault}) as endpoint:
        endpoint.elsewhere = "http://[" if fault == "308" else endpoint.elsewhere
        with pytest.raises(UsageError, match=message):
            ask(rows(40), endpoint, tmp_path / "out")
        assert len(endpoint.requests) <= 16


def test_a_redirect_on_the_same_host_is_followed(rows: Callable[..., Path], tmp_path: Path) -> None:
    with serving(faults={"row": "307:same"}) as endpoint:
        assert [row["error"] for row in ask(rows(2), endpoint, tmp_path / "out")] == [None, None]


@pytest.mark.parametrize("fault", ["quota", "quota403", "402"])
def test_an_exhausted_quota_keeps_what_is_there(fault: str, rows: Callable[..., Path], tmp_path: Path) -> None:
    table = rows(12)
    with serving(faults={6: fault}) as endpoint:
        with pytest.raises(LimitReached, match="the endpoint's own limit is reached: no money"):
            ask(table, endpoint, tmp_path / "out", concurrency=1)
        endpoint.faults = {}
        ask(table, endpoint, tmp_path / "out", concurrency=1)
        assert sorted(endpoint.texts[:5] + endpoint.texts[6:]) == sorted(f"row {row} of it" for row in range(12))


def test_a_limit_of_cost_stops_below_it_and_more_goes_on(rows: Callable[..., Path], tmp_path: Path) -> None:
    table, place = rows(40), tmp_path / "out"
    each = (3 + 0.5 + 2 * 2) / 1e6  # 4 tokens of which 1 is cached, and 2 new ones
    with serving() as endpoint:
        options: dict[str, Any] = {"price": PRICE, "max_new_tokens": 4, "concurrency": 4}
        with pytest.raises(LimitReached, match=r"max_cost=0.0001 is reached: \d+ rows took 0.0001, and \d+ rows are"):
            ask(table, endpoint, place, **options, max_cost=100e-6)
        first = len(endpoint.requests)
        assert 0.8 * 100e-6 < first * each <= 100e-6
        found = ask(table, endpoint, place, **options, max_cost=500e-6)
        assert len(endpoint.requests) == 40, "no row is paid twice"
        assert sum(row["cost"] for row in found) == pytest.approx(40 * each)
    record = predict(
        None,
        str(table),
        place,
        endpoint=endpoint.url,
        model_name="small",
        key="id",
        price=PRICE,
        max_new_tokens=4,
        engine=Here(),
    ).record
    assert record["provenance"]["usage"]["cost"] == pytest.approx(40 * each)
    assert record["provenance"]["usage"]["prompt_tokens"] == 160


def test_batches_are_found_again_and_their_errors_become_rows(
    rows: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "POLL_S", 0.001)
    table, place = rows(20), tmp_path / "out"
    given: dict[str, Any] = {"batch_api": True, "price": PRICE, "max_tokens_total": 2500}  # not for two batches
    with serving(faults={"row 3 ": "400", "row 4 ": "html", "row 5 ": "lost", "row 6 ": "refusal"}) as endpoint:
        with monkeypatch.context() as broken:
            broken.setattr(endpoint, "end", lambda batch: batch.update(status="failed", errors={"data": []}))
            with pytest.raises(UsageError, match="batch batch-0 failed"):
                ask(table, endpoint, place, **given)
        assert endpoint.batches["batch-0"]["status"] == "failed"
        with monkeypatch.context() as broken:
            broken.setattr(client.Client, "fetch", _without_answers(client.Client.fetch))
            with pytest.raises(UsageError, match="killed"):
                ask(table, endpoint, place, **given)
        found = ask(table, endpoint, place, **given)
        assert list(endpoint.batches) == ["batch-0", "batch-1", "batch-2"], (
            "the failed one is begun again and then found, and the last has the row that this one lost"
        )
    reasons = [row["error"] and row["error"].partition(":")[0] for row in found]
    assert reasons == [None, None, None, "http_400", None, "batch", "refused", *[None] * 13]
    assert found[1]["cost"] == pytest.approx(0.5 * 7.5e-6)


def _without_answers(fetch: Any) -> Any:
    async def broken(self: client.Client, path: str, *given: Any, **more: Any) -> bytes:
        if path.startswith("files/"):
            raise UsageError("killed before the answers")
        answer: bytes = await fetch(self, path, *given, **more)
        return answer

    return broken


def test_a_batch_is_begun_once_also_if_its_answer_is_lost(
    rows: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "POLL_S", 0.001)
    table = rows(3)
    with serving(lost_batches=1) as endpoint:
        ask(table, endpoint, tmp_path / "first", batch_api=True)
        assert list(endpoint.batches) == ["batch-0"], "it is found before the request is sent again"
        endpoint.lost_batches = 1
        with pytest.raises(UsageError, match="no connection|connection: "):
            ask(table, endpoint, tmp_path / "out", batch_api=True, max_retries=0, max_tokens_total=300)
        assert list(endpoint.batches) == ["batch-0", "batch-1"]
        ask(rows(2), endpoint, tmp_path / "other", batch_api=True)
        found = ask(table, endpoint, tmp_path / "out", batch_api=True, max_retries=0, max_tokens_total=300)
        assert len(endpoint.batches) == 3, "by its file, in the next call"
        assert [row["error"] for row in found] == [None] * 3
        with pytest.raises(UsageError, match="batch_api and concurrency, requests_per_minute: "):
            ask(table, endpoint, tmp_path / "paced", batch_api=True, concurrency=3, requests_per_minute=90)


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        ("POST /v1/files", b"{}"),
        ("POST /v1/files", b"[" * 100_000),
        ("POST /v1/batches", b'{"id": null}'),
        ("GET /v1/batches/batch-0", b'{"id": "batch-0"}'),
    ],
)
def test_an_endpoint_without_batches_is_named(
    asked: str, answer: bytes, rows: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as endpoint:
        real = endpoint.of_batches
        monkeypatch.setattr(endpoint, "of_batches", lambda one, body: answer if one == asked else real(one, body))
        with pytest.raises(UsageError, match=f"no answer of the form of {asked.replace('/v1/', '')}"):
            ask(rows(2), endpoint, tmp_path / "out", batch_api=True, max_retries=0)


@pytest.mark.parametrize("errors", [["too large"], {"data": ["too large"]}, {"data": [{"message": "too large"}]}])
def test_a_failed_batch_says_why(
    errors: Any, rows: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "POLL_S", 0.001)
    with serving() as endpoint:
        monkeypatch.setattr(endpoint, "end", lambda batch: batch.update(status="failed", errors=errors))
        with pytest.raises(UsageError, match="batch batch-0 failed: too large"):
            ask(rows(2), endpoint, tmp_path / "out", batch_api=True)


def test_lines_of_a_batch_without_a_form_are_errors_of_their_rows(
    rows: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "POLL_S", 0.001)
    odd = b'{"custom_id":"0","response":{"status_code":"503"}}\n{"custom_id":"1","response":7}\n' + b"[" * 100_000
    with serving() as endpoint:
        real = endpoint.of_batches
        monkeypatch.setattr(endpoint, "of_batches", lambda one, body: odd if "/v1/files/" in one else real(one, body))
        found = ask(rows(2), endpoint, tmp_path / "out", batch_api=True)
    assert [row["error"].partition(":")[0] for row in found] == ["http_503", "batch"]


@pytest.mark.parametrize(
    ("status", "headers", "code", "words"),
    [(429, {}, "insufficient_quota", "limit is reached: no money"), (429, {"retry-after": "86400"}, "", "24.0 hours")],
)
def test_an_exhausted_quota_ends_a_job_of_batches(
    status: int,
    headers: dict[str, str],
    code: str,
    words: str,
    rows: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    async def refused(*_: Any, **__: Any) -> httpx.Response:
        return httpx.Response(status, headers=headers, json={"error": {"message": "no money", "code": code}})

    monkeypatch.setattr(httpx.AsyncClient, "request", refused)
    with serving() as endpoint, pytest.raises(LimitReached, match=words):
        ask(rows(2), endpoint, tmp_path / "out", batch_api=True)


def test_the_account_goes_on_in_the_next_call(
    rows: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An endpoint without counts is counted by an estimate, and a lost answer with its most."""
    table, place = rows(40), tmp_path / "out"
    monkeypatch.setattr(FakeEndpoint, "usage", lambda *_: {})
    each = 11 / 4 + 4 + 16 / 4
    options: dict[str, Any] = {"max_new_tokens": 4, "concurrency": 1, "max_tokens_total": 120}
    with serving(faults={2: "cut"}) as endpoint:
        for _ in range(2):
            with pytest.raises(LimitReached, match=r"5 rows took 89 tokens, and 35 rows are left"):
                ask(table, endpoint, place, **options)
            assert 6 <= len(endpoint.requests) <= 1 + (120 - 15 - 4) / each, "the second call has no more"
        assert ask(table, endpoint, place, **options | {"max_tokens_total": 600})[0]["prompt_tokens"] is None


@pytest.mark.slow
def test_a_limit_holds_for_an_output_in_a_bucket(
    rows: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = rows(40)
    with s3_server.serving() as server, serving() as endpoint:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        place = (
            f"s3://{s3_server.BUCKET}/{tmp_path.parent.name}-{tmp_path.name}"  # its logs are in a folder of this name
        )
        given: dict[str, Any] = {"model_name": "small", "key": "id", "engine": Here(), "max_new_tokens": 2}
        for _ in range(2):
            with pytest.raises(LimitReached, match="max_tokens_total=150 is reached"):
                predict(None, str(table), place, endpoint=endpoint.url, max_tokens_total=150, **given)
            assert 100 < 6 * len(endpoint.requests) <= 150
        done = predict(None, str(table), place, endpoint=endpoint.url, max_tokens_total=9000, **given)
        assert (done.rows_out, done.rows_failed, len(endpoint.requests)) == (40, 0, 40)


def test_the_most_of_a_row_is_its_own(rows: Callable[..., Path], tmp_path: Path) -> None:
    own = [{"max_new_tokens": 1}, {"max_new_tokens": None}, {"max_new_tokens": 900}]
    table = rows(text=["a", "b", "c"], options=own)
    with serving() as endpoint:
        with pytest.raises(LimitReached, match="2 rows took 6 tokens, and 1 row is left"):
            ask(table, endpoint, tmp_path / "out", max_tokens_total=500, max_new_tokens=5, concurrency=1)
        asked: dict[str, Any] = {"request_options": {"max_completion_tokens": 7}}
        ask(table, endpoint, tmp_path / "fields", **asked)
        fields = [sorted(one.body.keys() & {"max_tokens", "max_completion_tokens"}) for one in endpoint.requests[-3:]]
        assert fields == [["max_completion_tokens"]] * 3


def test_options_that_decide_the_columns_belong_to_the_job(rows: Callable[..., Path], tmp_path: Path) -> None:
    table = rows(9)
    schema = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
    given: dict[str, Any] = {"json_schema": schema, "request_options": {"logprobs": True}}
    with serving(faults={3: "quota"}) as endpoint:
        with pytest.raises(LimitReached):
            ask(table, endpoint, tmp_path / "out", max_new_tokens=2, **given)
        for other in ({"logprobs": True}, {"json_columns": True}, {"prefix": "a"}, {"columns": ["text"]}):
            with pytest.raises(TorchlakeError, match="an interrupted write"):
                ask(table, endpoint, tmp_path / "out", max_new_tokens=2, **given, **other)
        ask(table, endpoint, tmp_path / "out", max_new_tokens=2, **given)


def test_a_limit_of_tokens(rows: Callable[..., Path], tmp_path: Path) -> None:
    with serving() as endpoint:
        with pytest.raises(LimitReached, match="max_tokens_total=100 is reached"):
            ask(rows(40), endpoint, tmp_path / "out", max_tokens_total=100, max_new_tokens=2)
        assert 80 < len(endpoint.requests) * 6 <= 100


def test_open_requests_follow_concurrency_and_retry_after_is_obeyed(rows: Callable[..., Path], tmp_path: Path) -> None:
    with serving(gates=(3,)) as endpoint:
        ask(rows(30), endpoint, tmp_path / "three", concurrency=3)
        assert endpoint.most_open == 3
    with serving(gates=(8, 9)) as endpoint:  # one answer while eight are open, all others once nine have been
        ask(rows(30), endpoint, tmp_path / "grown")
        assert endpoint.most_open >= 9
    with serving() as endpoint:
        endpoint.faults = {2: "429:0.3"}
        ask(rows(12), endpoint, tmp_path / "waited", concurrency=2)
        times = [one.at for one in endpoint.requests]
        assert max(after - before for before, after in itertools.pairwise(times)) >= 0.25


def test_rates_hold(rows: Callable[..., Path], tmp_path: Path) -> None:
    """6,000 requests a minute are 100 a second: the last of 60 is never earlier than its moment."""
    with serving() as endpoint:
        began = time.monotonic()
        ask(rows(60), endpoint, tmp_path / "out", requests_per_minute=6000)
        assert endpoint.requests[-1].at - began >= 0.6
        began = time.monotonic()
        ask(rows(60), endpoint, tmp_path / "tokens", tokens_per_minute=36_000, max_new_tokens=2)
        assert endpoint.requests[-1].at - began >= 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endpoint": "https://me:pass@host/v1"}, "the URL for host has a user or password in it"),
        ({"endpoint": "https://host/v1?api_key=abc"}, "has the secret 'api_key' in it"),
        ({"endpoint": "http://example.org/v1"}, "http://example.org is not encrypted"),
        ({"endpoint": "ftp://host/v1"}, "expected a URL such as https://host/v1"),
        ({"endpoint": "https://host/v1/chat/completions"}, "leave out /chat/completions"),
        ({"key_env": "NOT_SET"}, "the environment variable NOT_SET is not set on "),
        ({"key_env": "sk-abc"}, "expected the name of an environment variable"),
        (
            {"price": {"other": {"input": 1}, "third": {"input": 1}}},
            "no price of the model 'small'; it has other, third",
        ),
        ({"price": {"small": {"output": 1}}}, "small: no input"),
        ({"price": {"small": {"input": -1}}}, "input: expected a price of 0 or more, got -1"),
        ({"price": "none.yaml"}, "price: none.yaml: there is no such file"),
        ({"max_cost": 1.0}, "the prices of the model are needed"),
        ({"max_length": 10}, "max_length: for a model folder"),
        ({"num_beams": 2}, "num_beams: the runtime 'http' does not have it"),
        ({"request_options": {"messages": []}}, "'messages' is not an option"),
        ({"request_options": {"model": "large"}}, "'model' is not an option"),
        ({"request_options": {"stream": True}}, "'stream' is not an option"),
        ({"request_options": {"n": 2}}, "'n' is not an option"),
        ({"request_options": {"max_tokens": 9}}, "'max_tokens' is the option max_new_tokens"),
        ({"request_options": {"seed": 9}}, "'seed' is the option seed"),
        ({"request_options": {"response_format": {}}, "choices": ["a", "b"]}, "'response_format' is there already"),
        ({"request_options": {"tools": []}, "tools": [{"name": "f"}]}, "'tools' is there already"),
        ({"task": "token_classification"}, "the runtime 'http' has text_generation and feature_extraction"),
        ({"api": "embeddings", "max_new_tokens": 3}, "max_new_tokens: for text generation only"),
        ({"model_name": ""}, "needs endpoint and model_name"),
    ],
)
def test_mistakes_are_found_before_any_work(
    options: dict[str, Any], message: str, rows: Callable[..., Path], tmp_path: Path
) -> None:
    given = {"endpoint": "http://127.0.0.1:9/v1", "model_name": "small", **options}
    with pytest.raises(UsageError) as caught:
        predict(None, str(rows(2)), tmp_path / "out", engine=Here(), **given)
    assert message in str(caught.value)
    assert not any(secret in str(caught.value) for secret in ("pass@", "abc"))
    assert not (tmp_path / "out").exists()


def test_other_mistakes(rows: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no connection"):
        predict(None, str(rows(2)), tmp_path / "out", endpoint="http://127.0.0.1:9/v1", model_name="m", engine=Here())
    with pytest.raises(TableError, match="there is no text column 'body'"):
        predict(None, str(rows(2)), tmp_path / "o", text="body", endpoint="http://localhost/v1", model_name="m")
    with pytest.raises(TableError, match="number"):
        predict(None, str(rows(2)), tmp_path / "o", key="number", endpoint="http://localhost/v1", model_name="m")
    with pytest.raises(UsageError, match="reads no model folder"):
        predict("model", str(rows(2)), tmp_path / "o", runtime="http", endpoint="http://localhost/v1", model_name="m")
    with pytest.raises(UsageError, match="endpoint: for the runtime 'http'"):
        predict("model", str(rows(2)), tmp_path / "o", runtime="eager", endpoint="http://localhost/v1")
    (tmp_path / "prices.yaml").write_text("small: {input: 1,")
    with pytest.raises(ConfigError, match="not valid YAML"):
        predict(
            None,
            str(rows(2)),
            tmp_path / "o",
            endpoint="http://localhost/v1",
            model_name="small",
            price=tmp_path / "prices.yaml",
        )


def test_the_command_line(rows: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, output, prices = str(rows(2)), str(tmp_path / "out"), tmp_path / "prices.yaml"
    prices.write_text("small: {input: 1, output: 2}")
    (tmp_path / "effort.yaml").write_text("low")
    asked = ["--runtime", "http", "--endpoint", "http://127.0.0.1:9/v1", "--model-name", "small"]
    assert main(["plan", table, *asked, "--price", str(prices), "--request-option", f"x=@{tmp_path}/effort.yaml"]) == 0
    assert "cost      about 0.0001" in capsys.readouterr().out
    for words, message in (
        (["predict", "model", table, output, *asked], "reads no model folder"),
        (["predict", "-", output, *asked], "not standard input"),
        (["predict", table, output, *asked, "--key-env", "NOT_SET"], "NOT_SET is not set"),
        (["predict", table, output, *asked, "--max-cost", "1"], "prices of the model"),
        (["plan", table, *asked, "--processes", "2"], "--processes: for the plan of a training"),
    ):
        assert main(words) == 64
        assert message in capsys.readouterr().err
    assert not Path(output).exists()
