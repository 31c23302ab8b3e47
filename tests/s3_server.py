"""A server that speaks S3, on this machine, in a process of its own; it keeps its objects in memory."""

import os
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.error import URLError
from xml.etree import ElementTree

import fsspec

import forked
import http_servers

BUCKET = "lake"
DEADLINE_S = 60.0
UNCHECKED = "AWS4-HMAC-SHA256 Credential=testing/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
"This server asks for a signature and looks at none."


@dataclass(frozen=True)
class S3Server:
    """Its objects, by key."""

    address: str

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which any client finds the server; the keys are nobody's."""
        return {
            "AWS_ENDPOINT_URL": self.address,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def keys(self, prefix: str) -> list[str]:
        """The keys of the objects below a prefix, sorted, without it."""
        listing = ElementTree.fromstring(self._ask("GET", f"?list-type=2&prefix={prefix}/"))
        return sorted(
            str(key.text).removeprefix(f"{prefix}/") for key in listing.iter() if key.tag.rpartition("}")[2] == "Key"
        )

    def get(self, key: str) -> bytes:
        return self._ask("GET", f"/{key}")

    def put(self, key: str, content: bytes) -> None:
        self._ask("PUT", f"/{key}", content)

    def delete(self, key: str) -> None:
        self._ask("DELETE", f"/{key}")

    def _ask(self, method: str, path: str, content: bytes | None = None) -> bytes:
        url = f"{self.address}/{BUCKET}{path}"
        signed = {"Authorization": UNCHECKED, "Content-Type": "application/octet-stream"}
        request = urllib.request.Request(url, data=content, method=method, headers=signed)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return bytes(answer.read())


@contextmanager
def serving() -> Iterator[S3Server]:
    """A server with an empty bucket."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with open(os.devnull, "wb") as out:
        files = {1: out.fileno(), 2: out.fileno()}
        process = forked.start("moto.server:main", ["-H", "127.0.0.1", "-p", str(port)], files=files)
    server = S3Server(f"http://127.0.0.1:{port}")
    try:
        until = time.monotonic() + DEADLINE_S
        while True:
            try:
                server._ask("PUT", "")
                break
            except URLError:
                assert process.poll() is None, "the server ended at once"
                assert time.monotonic() < until, "the server did not come up in time"
                time.sleep(0.05)
        _drop_clients()
        yield server
    finally:
        _drop_clients()
        process.kill()
        process.wait()


def _drop_clients() -> None:
    """Close fsspec's clients, which it keeps: one of another test would ask a server that is gone."""
    with suppress(ImportError):
        fsspec.get_filesystem_class("s3").clear_instance_cache()


@contextmanager
def of_another_region() -> Iterator[str]:
    """A server that answers as S3 does for a bucket of another region, whatever region a client tries."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: the base class writes to stderr."""

        def do_GET(self) -> None:
            body = b"<Error><Code>PermanentRedirect</Code><Message>Use the specified endpoint</Message></Error>"
            self.send_response(301)
            self.send_header("x-amz-bucket-region", "eu-west-3")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_GET

    with http_servers.serving(Handler) as address:
        yield address
