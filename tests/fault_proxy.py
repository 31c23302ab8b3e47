"""A proxy before the S3 server that fails on demand: it answers for the server, or loses what the server answered."""

import http.client
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote, urlsplit

import http_servers
from s3_server import S3Server

CODES = {
    400: "ExpiredToken",
    403: "AccessDenied",
    409: "ConditionalRequestConflict",
    412: "PreconditionFailed",
    500: "InternalError",
    503: "SlowDown",
}


@dataclass(kw_only=True)
class Fault:
    """What happens to the requests that match, from the n-th one on and so many times."""

    method: str
    path: str
    "A regular expression, found in the object's key and the query."
    answer: int | None = None
    "This status instead of the server's answer; None: the connection is closed."
    passed: bool = False
    "The server gets the request first, and does it: the success is lost."
    then: Callable[[], None] = lambda: None
    "Happens before the answer."
    nth: int = 1
    times: int = 1
    seen: int = 0
    hit: int = 0


@dataclass
class FaultProxy:
    """The server behind the proxy, as clients find it."""

    server: S3Server
    address: str
    faults: list[Fault] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)
    "Method and key of every request."

    @property
    def behind(self) -> S3Server:
        """The same objects through the proxy."""
        return S3Server(self.address)

    def fail(self, method: str, path: str, **how: Any) -> Fault:
        fault = Fault(method=method, path=path, **how)
        self.faults.append(fault)
        return fault

    def clear(self) -> None:
        self.faults.clear()
        self.requests.clear()

    def _chosen(self, method: str, path: str) -> Fault | None:
        self.requests.append((method, path))
        for fault in self.faults:
            if fault.method == method and re.search(fault.path, path):
                fault.seen += 1
                if fault.nth <= fault.seen < fault.nth + fault.times:
                    fault.hit += 1
                    return fault
        return None


@contextmanager
def between(server: S3Server) -> Iterator[FaultProxy]:
    """A proxy before `server`, by threads of this process."""
    target = urlsplit(server.address).netloc
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: Any) -> None:
            """Nothing."""

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except (ConnectionError, TimeoutError):
                self.close_connection = True

        def do_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with lock:
                fault = proxy._chosen(self.command, unquote(self.path))
            if fault is None or fault.passed:
                status, headers, content = self.pass_on(body)
            if fault is not None:
                fault.then()
            if fault is None:
                self.reply(status, headers, content)
            elif fault.answer is not None:
                self.reply(fault.answer, {"Content-Type": "application/xml"}, error_of(fault.answer))
            else:
                self.close_connection = True

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_any

        def pass_on(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
            connection = http.client.HTTPConnection(target, timeout=60)
            try:
                headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
                connection.request(self.command, self.path, body, headers)
                answer = connection.getresponse()
                return answer.status, dict(answer.getheaders()), answer.read()
            finally:
                connection.close()

        def reply(self, status: int, headers: dict[str, str], content: bytes) -> None:
            self.send_response(status)
            length = headers.get("Content-Length") if self.command == "HEAD" else None
            for name, value in headers.items():
                if name.lower() not in ("content-length", "transfer-encoding", "connection", "server", "date"):
                    self.send_header(name, value)
            self.send_header("Content-Length", length or str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

    with http_servers.serving(Handler) as address:
        proxy = FaultProxy(server, address)
        yield proxy


def error_of(status: int) -> bytes:
    code = CODES[status]
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected {code}</Message></Error>".encode()
