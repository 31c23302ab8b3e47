"""Connections, time and signals: what arrives badly or slowly harms no other request, and nothing accepted is lost."""

import asyncio
import gc
import json
import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

import tiny
import torchlake as tl
from serving_runs import Running, Stuck, free_port, running, started, until
from sweeps import sweep
from torchlake.cli.main import main
from torchlake.processes.children import Children
from torchlake.processes.serialization import pack
from torchlake.serving import asgi
from torchlake.serving.process import _supervise, listen
from torchlake.serving.service import identity, renew

GET = b"GET /health HTTP/1.1\r\nhost: a\r\n"
POST = b"POST /predict HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Running]:
    with running(tiny_model, max_body="4KB", max_requests=4) as made:
        yield made


@pytest.fixture(scope="module")
def impatient(tiny_model: Path) -> Iterator[Running]:
    with running(tiny_model, read_timeout=0.5) as made:
        yield made


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b"", 400),
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b'{"inputs": NaN}', 400),
        (b'{"inputs": "\\ud800", "a": Infinity}', 400),
        (b"[" * 2000, 400),
        (b'{"inputs": "\\ud800' + b'", "b": ' + b"[" * 1990, 400),
        (b'{"inputs": 7}', 422),
        (b'{"inputs": "a", "inputs": "b"}', 200),
        (b"[[],[],[]]", 422),
        (b'"text"', 422),
        (b'{"inputs": "' + b"a" * 5000 + b'"}', 413),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_bodies(server: Running, body: bytes, found: int) -> None:
    response = server.client.post("/predict", content=body, headers={"content-type": "application/json"})
    assert response.status_code == found, response.text


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"nonsense\r\n\r\n", 400),
        (GET + b"x: " + b"a" * 70_000 + b"\r\n\r\n", 431),
        (GET + b"x: " + b"a" * 200_000, 431),
        (POST + b"content-length: 9\r\ncontent-length: 3\r\n\r\n{}", 400),
        (POST + b"content-length: 99999999\r\n\r\n", 413),
        (
            POST
            + b"transfer-encoding: chunked\r\n\r\n"
            + b"1000\r\n"
            + b"a" * 4096
            + b"\r\n"
            + b"10\r\n"
            + b"a" * 16
            + b"\r\n",
            413,
        ),
        (POST + b"content-encoding: gzip\r\ncontent-length: 2\r\n\r\n{}", 415),
        (POST + b"content-encoding: \r\ncontent-length: 18\r\n\r\n" + b'{"inputs": "good"}', 200),
        (POST + b"transfer-encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 501),
        (POST + b"expect: 100-continue\r\ncontent-length: 14\r\n\r\n", 100),
        (b"POST /predict HTTP/1.1\r\nhost: a\r\ncontent-type: text/html\r\ncontent-length: 2\r\n\r\n{}", 415),
        (b"BREW /health HTTP/1.1\r\nhost: a\r\n\r\n", 400),
        (b"DELETE /predict HTTP/1.1\r\nhost: a\r\n\r\n", 405),
        (b"CONNECT a:80 HTTP/1.1\r\nhost: a\r\n\r\n" + GET + b"\r\n", 405),
        (b"CONNECT /predict HTTP/1.1\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n", 405),
    ],
    ids=lambda value: repr(value)[:60] if isinstance(value, bytes) else str(value),
)
def test_requests_as_bytes(server: Running, data: bytes, found: int) -> None:
    assert status(server.raw(data)) == found
    assert server.client.get("/health").status_code == 200


@pytest.mark.parametrize("data", [b"", GET, POST + b"content-length: 30\r\n\r\n{"], ids=["nothing", "headers", "body"])
def test_a_request_has_to_arrive_in_time(impatient: Running, data: bytes) -> None:
    assert status(impatient.raw(data)) == 408
    assert impatient.client.get("/health").status_code == 200


H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
BODY = b'{"inputs": "good"}'


@pytest.mark.parametrize("cut", [0, 20, -40, -1])
@pytest.mark.parametrize("offer", [H2C, b"upgrade: websocket\r\nconnection: upgrade\r\n"], ids=["h2c", "websocket"])
def test_a_request_that_offers_another_protocol_is_answered_with_its_body(
    server: Running, offer: bytes, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    length = POST + b"content-length: 18\r\n"
    data = length + offer + b"\r\n" + BODY + length + b"connection: close\r\n\r\n" + BODY
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(data[:cut])
        assert server.client.get("/health").status_code == 200  # it has read the first part
        connection.sendall(data[cut:])
        found = b""
        while piece := connection.recv(65536):
            found += piece
    assert found.count(b"HTTP/1.1 200 OK") == 2
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_many_offers_in_one_packet_are_answered(server: Running) -> None:
    one = b"GET /health HTTP/1.1\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(one * 1500 + GET + b"connection: close\r\n\r\n")
        found = b""
        while piece := connection.recv(65536):
            found += piece
    assert found.count(b"HTTP/1.1 200 OK") == 1501


def test_pipelined_requests_are_answered_in_order(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(GET + b"x-request-id: one\r\n\r\n" + GET + b"x-request-id: two\r\nconnection: close\r\n\r\n")
        found = b""
        while piece := connection.recv(65536):
            found += piece
    assert found.count(b"HTTP/1.1 200") == 2
    assert found.index(b"x-request-id: one") < found.index(b"x-request-id: two")


def test_more_connections_than_allowed_are_refused_and_others_served(server: Running) -> None:
    assert server.client.get("/health").status_code == 200  # this connection stays
    others = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(12)]
    try:
        assert server.client.get("/health").status_code == 200
        until(lambda: len(select.select(others, [], [], 0)[0]) >= 4)
        refused, _, _ = select.select(others, [], [], 0)
        assert all(other.recv(200).startswith(b"HTTP/1.1 503") for other in refused)
    finally:
        for other in others:
            other.close()


def test_a_client_that_has_gone_is_dropped_from_the_queue(server: Running) -> None:
    batcher, entered, permit = server.service.model.batcher, threading.Event(), threading.Event()
    compute, rows = batcher._compute, []
    gone_before = server.service.metrics.failure.labels("dropped")._value.get()

    def gated(parts: Any) -> Any:
        rows.append(sum(len(part) for _, part in parts))
        entered.set()
        assert permit.wait(60)
        return compute(parts)

    batcher._compute = gated
    try:
        threads = [threading.Thread(target=server.post, args=("/predict", {"inputs": "good"}))]
        threads[0].start()
        assert entered.wait(30)
        body = b'{"inputs": ["a", "b", "c"]}'
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as gone:
            gone.sendall(POST + b"content-length: %d\r\n\r\n" % len(body) + body)
            until(lambda: batcher.queued == 1)
        until(lambda: batcher._waiting[0].future.cancelled())
        until(lambda: server.service.metrics.failure.labels("dropped")._value.get() == gone_before + 1)
        permit.set()
        threads[0].join(30)
        assert server.post("/predict", {"inputs": "good"}).status_code == 200
        assert rows == [1, 1]
    finally:
        batcher._compute = compute


def test_a_client_that_goes_while_its_rows_are_computed_harms_no_other(tiny_model: Path) -> None:
    with running(tiny_model) as server, ThreadPoolExecutor(1) as pool:
        stuck = Stuck(server.service.model.batcher)
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as gone:
            gone.sendall(POST + b"content-length: 18\r\n\r\n" + BODY)
            assert stuck.entered.wait(30)
            other = pool.submit(server.post, "/predict", {"inputs": "good"})
            until(lambda: server.service.model.batcher.queued == 1)
        until(lambda: server.service.metrics.failure.labels("dropped")._value.get() == 1)
        stuck.permit.set()
        assert other.result().status_code == 200
        until(lambda: not server.service.tasks)
        assert server.service.model.batcher.queued_tokens == 0


THREADS = pytest.mark.parametrize(("thread", "done"), [("reader", "read"), ("batcher", "computed")])


@THREADS
def test_a_row_that_takes_too_long_is_an_error_and_the_server_ends(tiny_model: Path, thread: str, done: str) -> None:
    with running(tiny_model, row_timeout=0.2, queue_timeout=30) as server, ThreadPoolExecutor(2) as pool:
        stuck = Stuck(getattr(server.service.model, thread))
        answer = pool.submit(server.post, "/invocations", {"instances": ["a", "b"]})
        assert stuck.entered.wait(30)
        waiting = pool.submit(server.post, "/tokenize" if thread == "reader" else "/predict", {"inputs": "a"})
        reason = f"timeout: {done} for more than 0.2 seconds"
        assert [row["error"] for row in answer.result().json()["predictions"]] == [reason] * 2
        assert waiting.result().status_code == 503
        assert server.service.hung is not None
        try:
            refused = server.client.get("/health").status_code
        except httpx.HTTPError:  # it has closed its socket
            refused = 503
        assert refused == 503
        until(lambda: server.server.status == 70)
        stuck.permit.set()


@THREADS
def test_a_request_that_waits_too_long_is_refused(tiny_model: Path, thread: str, done: str) -> None:
    with running(tiny_model, queue_timeout=1.0) as server, ThreadPoolExecutor(1) as pool:
        stuck = Stuck(getattr(server.service.model, thread))
        first = pool.submit(server.post, "/predict", {"inputs": "good"})
        assert stuck.entered.wait(30)
        for path in ["/predict", "/tokenize"][: 2 if thread == "reader" else 1]:
            late = server.post(path, {"inputs": "good"})
            assert (late.status_code, late.headers["retry-after"]) == (503, "1")
            assert "--queue-timeout" in late.json()["error"]
        stuck.permit.set()
        assert first.result().status_code == 200


def test_a_batch_of_the_model_before_is_watched(tiny_model: Path) -> None:
    with running(tiny_model, row_timeout=0.2) as server, ThreadPoolExecutor(1) as pool:
        stuck = Stuck(server.service.model.batcher)
        before = pool.submit(server.post, "/invocations", {"instances": ["a"]})
        assert stuck.entered.wait(30)
        server.service.take(server.service.load())
        with suppress(httpx.TransportError):  # it may have ended by now
            assert server.post("/predict", {"inputs": "good"}).status_code in (200, 503)
        assert before.result().json()["predictions"][0]["error"] == "timeout: computed for more than 0.2 seconds"
        until(lambda: server.server.status == 70)
        stuck.permit.set()


def test_a_lost_device_ends_the_server(tiny_model: Path) -> None:
    with running(tiny_model) as server:

        def lost(parts: Any) -> Any:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")

        server.service.model.batcher._compute = lost
        refused = server.post("/predict", {"inputs": "good"})
        assert (refused.status_code, refused.json()["error_type"]) == (503, "Unhealthy")
        assert "The device is lost" in refused.json()["error"]
        until(lambda: server.server.status == 70)


@pytest.mark.real_starts
def test_a_process_that_ends_is_started_again_and_the_others_serve(tmp_path: Path) -> None:
    calls: list[Any] = [(time.sleep, 600), (os._exit, 9), (time.sleep, 600)]
    started, signals = [], []

    def start(number: int) -> None:
        started.append(number)
        children.start(number, "rank", pack(*calls[len(started) - 1]), os.environ)

    with Children() as children, ThreadPoolExecutor(1) as pool:
        code = pool.submit(_supervise, children, start, 2, signals, str(tmp_path))
        until(lambda: len(started) == 3, within=200)
        assert (started, code.done()) == ([0, 1, 1], False)
        signals.append(signal.SIGINT)
        assert code.result(200) == 0  # they were loading their models, so to say: no request is lost


@pytest.mark.real_starts
@pytest.mark.parametrize("calls", [[(time.sleep, 600), (os._exit, 65)], [(os._exit, 9)]])
def test_processes_that_cannot_be_started_end_the_server(tmp_path: Path, calls: list[Any]) -> None:
    with Children() as children:

        def start(number: int) -> None:
            children.start(number, "rank", pack(*calls[number]), os.environ)

        assert _supervise(children, start, len(calls), [], str(tmp_path)) == calls[-1][1]


@pytest.mark.real_starts
def test_a_signal_waits_in_a_process_that_loads_its_model() -> None:
    with Children(held=(signal.SIGHUP,)) as children:
        payload = pack(signal.sigtimedwait, (signal.SIGHUP,), 200)
        child = children.start(0, "rank", payload, {**os.environ, "RANK": "1"})
        children.signal(signal.SIGHUP)
        until(lambda: child.pid)
        children.signal(signal.SIGHUP)
        events = iter(children.events.get, None)
        assert next(code for _, kind, code in events if kind == "exit") == 0


def logged(caplog: pytest.LogCaptureFixture, requests: int) -> list[dict[str, Any]]:
    """Return the lines of some requests. The server writes each after its answer, so a client may be faster."""

    def messages() -> list[str]:
        return [record.message for record in list(caplog.records) if record.name == "torchlake.requests"]

    until(lambda: len(messages()) >= requests)
    return [json.loads(message) for message in messages()]


def test_what_is_refused_before_it_is_a_request_is_counted_and_logged(
    impatient: Running, caplog: pytest.LogCaptureFixture
) -> None:
    before = impatient.service.metrics.failure.labels("validation")._value.get()
    with caplog.at_level(logging.INFO):
        sent = [b"unrepeatable\r\n\r\n", GET + b"x: " + b"a" * 70_000 + b"\r\n\r\n", GET]
        answers = [impatient.raw(data) for data in sent]
        lines = logged(caplog, 3)
    assert len(caplog.records) == len(lines)
    assert [(line["route"], line["status"]) for line in lines] == [("other", 400), ("other", 431), ("other", 408)]
    assert impatient.service.metrics.failure.labels("validation")._value.get() == before + 3
    for line, answer in zip(lines, answers, strict=True):
        head, _, body = answer.partition(b"\r\n\r\n")
        assert f"x-request-id: {line['id']}".encode() in head
        assert json.loads(body).keys() == {"error", "error_type"}
    assert "unrepeatable" not in caplog.text


def test_no_text_is_logged(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="torchlake.requests"):
        server.post("/predict", {"inputs": "unrepeatable"}, headers={"authorization": "unrepeatable"})
        server.post("/predict", {"inputs": ["unrepeatable", ""]})
        lines = logged(caplog, 2)
    assert [(line["route"], line["status"], line["rows"]) for line in lines] == [
        ("/predict", 200, 1),
        ("/predict", 400, 2),
    ]
    assert "unrepeatable" not in caplog.text


def test_a_new_model_replaces_the_old_one_or_is_refused(tiny_bert: Path, tmp_path: Path) -> None:
    folders = [tiny.build_model(tmp_path / f"model{seed}", encoder=tiny_bert, seed=seed) for seed in (0, 1)]
    other = tiny.build_model(tmp_path / "other", encoder=tiny_bert, spec=tiny.spec_for("single_label", ("x", "y")))
    link = tmp_path / "current"
    link.symlink_to(folders[0])
    with running(link) as server:
        service = server.service
        before = server.client.get("/info").json()["model_sha"]
        answers = [server.post("/predict", {"inputs": "good"}).json()]

        def point(folder: Path) -> bool:
            link.unlink()
            link.symlink_to(folder)
            return asyncio.run(renew(service))

        assert not point(other)
        damaged = tmp_path / "damaged"
        shutil.copytree(folders[1], damaged)
        (damaged / "model.safetensors").write_bytes(b"no weights")
        assert not point(damaged)
        assert server.client.get("/info").json()["model_sha"] == before
        assert "torchlake_reload_failures 2.0" in server.client.get("/metrics").text
        assert point(folders[1])
        after = server.post("/predict", {"inputs": "good"})
        assert after.headers["x-model-sha"] != before
        assert after.json() != answers[0]

        loaded, entered, permit, shas = service.load, threading.Event(), threading.Event(), []

        def slow() -> Any:
            made = loaded()
            shas.append(made.sha)
            if len(shas) == 1:
                entered.set()
                assert permit.wait(60)
            return made

        async def twice() -> None:
            first = asyncio.create_task(renew(service))
            await asyncio.to_thread(entered.wait, 60)
            link.unlink()
            link.symlink_to(folders[0])
            second = asyncio.create_task(renew(service))
            await asyncio.wait([second], timeout=0.5)  # it waits for the first
            permit.set()
            assert (await first, await second) == (True, True)

        service.load = slow
        asyncio.run(twice())
        assert service.sha == shas[1] == before  # the model that is in the folder now

        def broken() -> Any:
            raise KeyError("a fault in a library")

        service.load = broken
        assert not asyncio.run(renew(service))


def test_a_change_in_a_folder_of_the_model_is_seen(tmp_path: Path) -> None:
    """The modules of an embedding model have folders of their own."""
    folder = tiny.build_embedder(tmp_path / "embedder")
    before = identity(str(folder))
    assert identity(str(folder)) == before
    pooling = folder / "1_Pooling" / "config.json"
    pooling.write_text(pooling.read_text() + " ")
    assert (now := identity(str(folder))) != before
    for other in ("runtimes/onnx/model.onnx", ".cache/file", "checkpoint-5/model.safetensors"):  # of other jobs
        (folder / other).parent.mkdir(parents=True)
        (folder / other).touch()
    assert identity(str(folder)) == now


@pytest.mark.parametrize(
    "sent", sweep([b'{"inputs": "good"}', b'{"inputs": 7}', b'{"inputs": " "}', b"{"], quick=[b"{"])
)
def test_a_replaced_model_is_freed_without_a_collection_of_garbage(tiny_model: Path, sent: bytes) -> None:
    with running(tiny_model) as server:
        server.post("/predict", {"inputs": "good"})
        gc.collect()
        gc.disable()
        try:
            server.client.post("/predict", content=sent, headers={"content-type": "application/json"})
            with socket.create_connection(("127.0.0.1", server.port), timeout=30) as gone:
                gone.sendall(POST + b"content-length: 18\r\n\r\n" + sent)
            until(lambda: not server.service.tasks)
            old = weakref.ref(server.service.model)
            assert server.service.watching is not None
            loop = server.service.watching.get_loop()
            assert asyncio.run_coroutine_threadsafe(renew(server.service), loop).result(60)
            until(lambda: old() is None)
        finally:
            gc.enable()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_no_accepted_request_is_lost_at_a_signal(tiny_model: Path, processes: int) -> None:
    port = free_port()
    process = started(tiny_model, "--processes", str(processes), port=port)
    stop, wrong, served = threading.Event(), [], []

    def call() -> None:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as client:
            while not stop.is_set():
                try:
                    response = client.post("/predict", json={"inputs": "good film"})
                except httpx.ConnectError:
                    return  # refused before it was sent: the socket is closed
                except httpx.TransportError as error:
                    wrong.append(repr(error))
                    return
                served.append(response.status_code)

    threads = [threading.Thread(target=call) for _ in range(16)]
    for thread in threads:
        thread.start()
    until(lambda: len(served) > 100)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert wrong == [], errors[-2000:]
    assert set(served) == {200}
    assert process.returncode == 0, errors[-2000:]


def test_a_hangup_while_the_model_is_loaded_is_answered_after_it(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Any] = []

    def load(*model: Any, **options: Any) -> Any:
        loaded.append(tl.load(*model, **options))
        os.kill(os.getpid(), signal.SIGTERM if len(loaded) == 2 else signal.SIGHUP)
        return loaded[-1]

    monkeypatch.setattr(asgi, "load", load)
    assert main(["serve", str(tiny_model), "--port", "0"]) == 0
    assert len(loaded) == 2


@pytest.mark.slow
def test_a_second_server_on_a_port_ends_with_2(tiny_model: Path) -> None:
    port = free_port()
    process = started(tiny_model, port=port)
    try:
        command = [sys.executable, "-m", "torchlake", "serve", str(tiny_model), "--port", str(port)]
        other = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert (other.returncode, str(port) in other.stderr) == (2, True)
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.mark.slow
def test_a_signal_while_the_models_are_loaded_is_answered_after_it(
    tiny_model: Path, tiny_bert: Path, tmp_path: Path
) -> None:
    new = tiny.build_model(tmp_path / "new", encoder=tiny_bert, seed=1)
    (link := tmp_path / "current").symlink_to(tiny_model)
    port = free_port()

    def hang_up(process: "subprocess.Popen[str]") -> None:
        until(lambda: len(psutil.Process(process.pid).children()) == 3, within=200)  # with the watchdog
        pids.update(child.pid for child in psutil.Process(process.pid).children())
        (tmp_path / "next").symlink_to(new)
        (tmp_path / "next").rename(link)
        process.send_signal(signal.SIGHUP)

    def answers() -> tuple[str, str]:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as client:
            return client.get("/health").text, client.get("/info").json()["model_sha"]

    pids: set[int] = set()
    process = started(link, "--processes", "2", port=port, at_start=hang_up)
    try:
        sha = tl.load(new).sha
        # Ten connections in a row reach both processes.
        until(lambda: {answers() for _ in range(10)} == {("\n", sha)}, within=200)
        assert {child.pid for child in psutil.Process(process.pid).children()} == pids
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, "started again" in errors) == (0, False), errors[-2000:]


def test_a_connection_sends_at_once() -> None:
    """Else the body of an answer waits for the client's acknowledgment of its head."""

    async def option() -> int:
        loop, made = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        class Connection(asyncio.Protocol):
            def connection_made(self, transport: Any) -> None:
                own = transport.get_extra_info("socket")
                made.set_result(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
                transport.close()

        listener = listen("127.0.0.1", 0)
        async with await loop.create_server(Connection, sock=listener):
            with socket.create_connection(listener.getsockname()):
                return int(await made)

    assert asyncio.run(option())
