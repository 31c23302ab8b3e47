"""Faults under load: a process that is killed, and new models, lose no request of others and mix no answers."""

import resource
import select
import shutil
import signal
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

import tiny
import torchlake as tl
from serving_runs import free_port, started, until
from sweeps import examples

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def no_server_stays() -> Iterator[None]:
    """End the server of a test that has failed."""
    before = set(psutil.Process().children())
    yield
    for process in set(psutil.Process().children()) - before:
        process.kill()


TEXTS = [" ".join(["good", "film", "a", "bore", "bad"][at % 5 :] * (1 + at % 9)) for at in range(60)]


def scores(model: Path) -> list[float]:
    return [row["prob_good"] for row in tl.load(model, all_probabilities=True)(TEXTS)]


def right(response: httpx.Response, rows: list[int], expected: list[float]) -> bool:
    """Whether each row has its own score; no two rows of TEXTS have the same."""
    found = [{one["label"]: one["score"] for one in row}["good"] for row in response.json()]
    return found == pytest.approx([expected[row] for row in rows], abs=1e-5)


@contextmanager
def load(port: int, judge: Callable[[httpx.Response, list[int]], Any]) -> Iterator["Counter[Any]"]:
    """Send requests of 1 to 4 rows from 12 clients, and count what `judge` says of the answers, or the error."""
    stop, counts = threading.Event(), Counter[Any]()

    def call(first: int) -> None:
        at = first
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=120)
        while not stop.is_set():
            at += 7
            rows = [(at + more) % len(TEXTS) for more in range(1 + at % 4)]
            try:
                response = client.post("/predict", json={"inputs": [TEXTS[row] for row in rows]})
            except httpx.TransportError:
                counts["lost"] += 1
                client.close()
                client = httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=120)
            else:
                counts[judge(response, rows) if response.status_code == 200 else response.status_code] += 1
        client.close()

    threads = [threading.Thread(target=call, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    try:
        yield counts
    finally:
        stop.set()
        for thread in threads:
            thread.join(120)


def test_a_process_that_is_killed_loses_its_own_requests_only(tiny_model: Path) -> None:
    expected, port = scores(tiny_model), free_port()
    process = started(tiny_model, "--quiet", "--processes", "2", port=port)

    def get(path: str) -> str:
        try:
            return httpx.get(f"http://127.0.0.1:{port}{path}", trust_env=False, timeout=120).text
        except httpx.TransportError:  # the process that is killed has it
            return ""

    until(lambda: "torchlake_processes 2.0" in get("/metrics"), within=200)
    with load(port, lambda response, rows: right(response, rows, expected)) as counts:
        for _ in range(2):
            until(lambda: counts[True] > 100, within=200)
            counts.clear()
            (victim, *_) = sorted(psutil.Process(process.pid).children(), key=lambda one: -one.memory_info().rss)
            victim.kill()
            until(lambda: get("/health") == "1 of 2 processes serve\n", within=200)
            until(lambda: "torchlake_processes 2.0" in get("/metrics"), within=200)
            assert get("/health") == "\n"
            # Only what the killed process had: at most one request of each client.
            assert counts["lost"] <= 12
            assert set(counts) <= {True, "lost"}
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors[-2000:]


def test_twenty_new_models_under_load_mix_no_answers(tiny_bert: Path, tmp_path: Path) -> None:
    folders = [tiny.build_model(tmp_path / f"model{seed}", encoder=tiny_bert, seed=seed) for seed in (0, 1)]
    expected, port, link = [scores(folder) for folder in folders], free_port(), tmp_path / "current"
    damaged = shutil.copytree(folders[1], tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"no weights")
    link.symlink_to(folders[0])
    process = started(link, "--quiet", port=port)
    models: dict[str, int] = {}
    metrics = f"http://127.0.0.1:{port}/metrics"

    def sha() -> str:
        found: str = httpx.get(f"http://127.0.0.1:{port}/info", trust_env=False, timeout=120).json()["model_sha"]
        return found

    def point(folder: Path) -> None:
        (tmp_path / "next").symlink_to(folder)
        (tmp_path / "next").rename(link)
        process.send_signal(signal.SIGHUP)

    def judge(response: httpx.Response, rows: list[int]) -> bool:
        return right(response, rows, expected[models[response.headers["x-model-sha"]]])

    models[sha()] = 0
    point(folders[1])
    until(lambda: sha() not in models, within=200)
    models[sha()] = 1
    with load(port, judge) as counts:
        for number in range(20):
            if number == 10:
                point(damaged)
                until(
                    lambda: "torchlake_reload_failures 1.0" in httpx.get(metrics, trust_env=False, timeout=120).text,
                    within=200,
                )
            point(folders[number % 2])
            now = number % 2
            until(lambda now=now: models[sha()] == now, within=200)
    assert set(counts) == {True}
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors[-2000:]


CONNECTIONS = 10_000


def test_ten_thousand_connections_are_refused_politely(tiny_model: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < CONNECTIONS + 1000:
        pytest.skip(f"this system allows {hard:,} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (CONNECTIONS + 1000, hard))
    port = free_port()
    process = started(tiny_model, "--quiet", "--read-timeout", "600", port=port)
    server, others = psutil.Process(process.pid), []
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=120) as client:

            def served() -> bool:
                return client.post("/predict", json={"inputs": TEXTS[:4]}).status_code == 200

            def connect(number: int) -> None:
                for at in range(number):
                    others.append(socket.create_connection(("127.0.0.1", port), timeout=120))
                    assert at % 500 or served()

            assert served()
            files = server.num_fds()
            connect(CONNECTIONS // 5)
            until(lambda: server.num_fds() <= 1024 + files)
            memory = server.memory_info().rss
            connect(CONNECTIONS - len(others))
            # The server keeps twice --max-requests, this client's among them.
            refused = others[1023:]
            for other in refused:
                assert other.recv(13) == b"HTTP/1.1 503 "
            assert served()
            assert server.memory_info().rss - memory < 16 << 20
            assert select.select(others[:500], [], [], 0)[0] == []
            while others:
                others.pop().close()
            until(lambda: server.num_fds() == files)
            assert served()
    finally:
        for other in others:
            other.close()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=200)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert process.returncode == 0, errors[-2000:]


MIXED_S = float(examples(1800, quick=20))
WARM, WARM_SHARE = 1_000, 6
"Requests, and the share of the time, after which most sizes of batches were computed: libraries keep kernels for each."


def test_memory_files_and_threads_stay_the_same_under_mixed_load(
    tiny_model: Path, tiny_bert: Path, tmp_path: Path
) -> None:
    folders, port = [tiny_model, tiny.build_model(tmp_path / "other", encoder=tiny_bert, seed=1)], free_port()
    (link := tmp_path / "current").symlink_to(folders[0])
    process = started(link, "--quiet", port=port)
    server, found = psutil.Process(process.pid), []
    json = b"POST /predict HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: "
    bad = [
        json + b"1\r\n\r\n{",
        json + b"99999999\r\n\r\n",
        b"GET /none HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET /met",
        b"\0",
    ]
    gone = json + b'18\r\n\r\n{"inputs": "good"}'

    def trouble(at: int) -> None:
        """Send what is refused, and close connections in the middle of a request and before its answer."""
        for sent in (bad[at % len(bad)], gone):
            with socket.create_connection(("127.0.0.1", port), timeout=120) as rude:
                rude.sendall(sent)
        assert httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False, timeout=120).status_code == 200
        if at % 10 == 0:
            (tmp_path / "next").symlink_to(folders[at // 10 % 2])
            (tmp_path / "next").rename(link)
            process.send_signal(signal.SIGHUP)

    with load(port, lambda response, rows: True) as counts:
        for seconds, requests in ((MIXED_S / WARM_SHARE, WARM), (MIXED_S, 0)):
            at, ends = 0, time.monotonic() + seconds
            # A model that is being loaded beside another one takes memory, too: the lowest of two rounds of reloads.
            memory = deque[int](maxlen=20)
            while time.monotonic() < ends or at < 40 or counts.total() < requests:
                trouble(at)
                memory.append(server.memory_info().rss)
                at += 1
            found.append((min(memory), server.num_fds(), server.num_threads()))
    (memory_before, files, threads), (memory_then, _, _) = found
    assert set(counts) == {True}
    # A model that is being replaced has threads of its own for a moment.
    until(lambda: server.num_threads() <= threads + 4 and server.num_fds() <= files, within=120)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors[-2000:]
    assert memory_then < 1.1 * memory_before, found
