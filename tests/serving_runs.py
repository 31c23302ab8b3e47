"""A server in this process, for tests where the process is not the subject."""

import asyncio
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from torchlake.serving.asgi import Service, build_app
from torchlake.serving.batching import Batcher
from torchlake.serving.options import ServeOptions
from torchlake.serving.process import ServerProcess, listen


@dataclass
class Running:
    """A server that answers."""

    url: str
    port: int
    service: Service
    server: ServerProcess
    client: httpx.Client
    thread: threading.Thread

    def stopped(self) -> int:
        """The exit code of a server that ends by itself."""
        self.thread.join(60)
        assert not self.thread.is_alive()
        return self.server.status

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def raw(self, data: bytes, *, timeout: float = 30) -> bytes:
        """Send bytes; return all that comes back until the server closes, or one answer or `100 Continue`."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=timeout) as connection:
            connection.sendall(data)
            found = b""
            while piece := connection.recv(65536):
                found += piece
                head, end, body = found.partition(b"\r\n\r\n")
                size = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                if end and (head.startswith(b"HTTP/1.1 1") or (size and len(body) >= int(size[0].split(b":")[1]))):
                    break
            return found


@dataclass
class Stuck:
    """One of a model's threads, whose next work waits for a permit."""

    batcher: Batcher
    entered: threading.Event = field(default_factory=threading.Event)
    permit: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        compute = self.batcher._compute

        def stuck(parts: Any) -> Any:
            self.entered.set()
            assert self.permit.wait(60)
            return compute(parts)

        self.batcher._compute = stuck


@contextmanager
def running(model: Path, *, load: dict[str, Any] | None = None, **options: Any) -> Iterator[Running]:
    """Serve a model on a free port of this machine, in a thread."""
    server = ServerProcess(build_app(model, ServeOptions(**options), load or {}))
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
            yield Running(f"http://127.0.0.1:{port}", port, server.service, server, client, thread)
    finally:
        server.handle_exit(signal.SIGTERM, None)
        thread.join(timeout=60)
        assert not thread.is_alive()


def until(condition: Any, *, within: float = 60) -> None:
    """Wait for something that another thread does, for some seconds at most."""
    ends = time.monotonic() + within
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.002)


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        port: int = made.getsockname()[1]
        return port


def started(
    model: Path, *options: str, port: int, at_start: Callable[["subprocess.Popen[str]"], None] = lambda process: None
) -> "subprocess.Popen[str]":
    """A server in a process of its own, once it answers."""
    process = subprocess.Popen(
        [sys.executable, "-m", "torchlake", "serve", str(model), "--port", str(port), *options],
        stderr=subprocess.PIPE,
        text=True,
    )
    at_start(process)
    deadline = time.monotonic() + 120
    while True:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200:
                return process
        except httpx.TransportError:
            assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
