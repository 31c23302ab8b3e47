"""How a server stops, and faults of rows and of the log: what was accepted is answered, and others are not harmed."""

import logging
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from serving_runs import Running, Stuck, running, until

SECRET = "unrepeatable"


def health(server: Running) -> httpx.Response | None:
    """The answer on a new connection; None if it is refused, or came in the microseconds in which the socket closes."""
    try:
        return httpx.get(f"{server.url}/health", trust_env=False, timeout=60)
    except (httpx.ConnectError, httpx.ReadError):
        return None


def test_new_connections_are_served_until_the_delay_is_over_or_no_connection_is_left(tiny_model: Path) -> None:
    with running(tiny_model, drain_delay=600.0, drain_timeout=600.0) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60):
            until(lambda: len(server.server.server_state.connections) == 1)
            server.server.handle_exit(signal.SIGTERM, None)
            for path in ("/health", "/ping"):
                assert httpx.get(f"{server.url}{path}", trust_env=False, timeout=60).status_code == 503
            for _ in range(2):
                answer = server.post("/predict", {"inputs": "good film"})
                assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        until(lambda: health(server) is None)
        assert server.stopped() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_takes_too_long_gets_503_and_the_status_says_so(tiny_model: Path, number: int) -> None:
    with running(tiny_model, drain_timeout=0.5) as server, ThreadPoolExecutor(2) as pool:
        stuck = Stuck(server.service.model.batcher)
        first = pool.submit(server.post, "/invocations", {"instances": ["good"]})
        assert stuck.entered.wait(30)
        waiting = pool.submit(server.post, "/predict", {"inputs": "good"})
        until(lambda: server.service.model.batcher.queued == 1)
        server.server.handle_exit(number, None)
        for late in (first.result(), waiting.result()):
            assert (late.status_code, "the server stops" in late.text) == (503, True)
            assert (late.headers["connection"], late.headers["retry-after"]) == ("close", "1")
        assert server.stopped() == 128 + number
        stuck.permit.set()


def test_what_was_accepted_is_answered_after_the_signal(tiny_model: Path) -> None:
    with running(tiny_model, drain_timeout=600.0) as server, ThreadPoolExecutor(1) as pool:
        stuck = Stuck(server.service.model.batcher)
        first = pool.submit(server.post, "/predict", {"inputs": "good"})
        assert stuck.entered.wait(30)
        server.server.handle_exit(signal.SIGTERM, None)
        until(lambda: health(server) is None)
        stuck.permit.set()
        assert (first.result().status_code, first.result().headers["connection"]) == (200, "close")
        assert server.stopped() == 0


def test_a_second_signal_ends_at_once(tiny_model: Path) -> None:
    with running(tiny_model, drain_delay=600.0, drain_timeout=600.0) as server, ThreadPoolExecutor(1) as pool:
        stuck = Stuck(server.service.model.batcher)
        lost = pool.submit(server.post, "/predict", {"inputs": "good"})
        assert stuck.entered.wait(30)
        for number in (signal.SIGTERM, signal.SIGINT):
            server.server.handle_exit(number, None)
        with suppress(httpx.TransportError):
            assert lost.result().status_code == 503
        assert (server.stopped(), server.server.force_exit) == (128 + signal.SIGINT, True)
        stuck.permit.set()


def raises(rows: np.ndarray) -> None:
    raise ValueError(SECRET)


def out_of_memory(rows: np.ndarray) -> None:
    raise MemoryError


@pytest.mark.parametrize(
    ("fault", "reason"), [(raises, "ValueError"), (out_of_memory, "out_of_memory"), (None, "non_finite")]
)
def test_a_row_that_fails_is_an_error_and_harms_no_other_row(
    tiny_model: Path, fault: Callable[[np.ndarray], None] | None, reason: str
) -> None:
    with running(tiny_model, load={"runtime": "eager"}) as server, ThreadPoolExecutor(8) as pool:
        expected = server.post("/predict", {"inputs": ["good", "bad"]}).json()
        scorer: Any = server.service.model._scorer
        forward, film = scorer.forward, scorer.processor.backend_tokenizer.token_to_id("film")

        def faulty(**inputs: np.ndarray) -> Any:
            rows = (inputs["input_ids"] == film).any(axis=1)
            if fault is not None and rows.any():
                fault(rows)
            out = forward(**inputs)
            out[rows] = np.nan
            return out

        scorer.forward = faulty
        stuck = Stuck(server.service.model.batcher)  # so that all of them are one batch
        pool.submit(server.post, "/predict", {"inputs": "good"})
        assert stuck.entered.wait(30)
        mixed = pool.submit(server.post, "/invocations", {"instances": ["good", "a film", "bad"]})
        whole = pool.submit(server.post, "/predict", {"inputs": ["good", "a film"]})
        others = [pool.submit(server.post, "/predict", {"inputs": ["good", "bad"]}) for _ in range(4)]
        until(lambda: server.service.model.batcher.queued == 6)
        stuck.permit.set()
        errors = [row["error"] for row in mixed.result().json()["predictions"]]
        assert (errors[0], errors[2]) == (None, None)
        assert errors[1].startswith(reason)
        assert (whole.result().status_code, whole.result().json()["error_type"]) == (424, "Backend")
        assert SECRET not in whole.result().text
        for other in others:
            for found, row in zip(other.result().json(), expected, strict=True):
                assert [one["score"] for one in found] == pytest.approx([one["score"] for one in row], abs=1e-5)
        assert server.client.get("/health").status_code == 200


def test_an_exception_is_logged_without_what_it_says(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken(parts: Any) -> Any:
        raise KeyError(SECRET)

    with running(tiny_model) as server:
        server.service.model.batcher._compute = broken
        answer = server.post("/predict", {"inputs": "good"}, headers={"x-request-id": "the-fault"})
        assert (answer.status_code, answer.json()) == (500, {"error": "KeyError", "error_type": "Backend"})
    assert "request the-fault: KeyError" in caplog.text
    assert "in broken" in caplog.text
    assert SECRET not in caplog.text


def test_a_log_that_cannot_be_written_stops_nothing(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requests = logging.getLogger("torchlake.requests")
    with open("/dev/full", "w") as full, running(tiny_model) as server:
        handler, level = logging.StreamHandler(full), requests.level
        requests.addHandler(handler)
        requests.setLevel(logging.INFO)
        try:
            answers = [server.post("/predict", {"inputs": SECRET}) for _ in range(3)]
        finally:
            requests.removeHandler(handler)
            requests.setLevel(level)
            with suppress(OSError):
                full.close()
    assert [answer.status_code for answer in answers] == [200] * 3
    assert SECRET not in capsys.readouterr().err
