"""A server that speaks the part of the Hub's interface with which files are listed and read, on this machine."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote, urlsplit

import http_servers

TOKEN = "hf_of_a_test"
GATED, PRIVATE = "lake/gated", "lake/private"
"Datasets that are read with the token only; a private one is not there without it."


@contextmanager
def serving(files: dict[str, bytes]) -> Iterator[str]:
    """The address of a server with these files, which may change; names begin with the dataset's, `lake/reviews`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: the base class writes to stderr."""

        def do_GET(self) -> None:
            parts = unquote(urlsplit(self.path).path).strip("/").split("/")
            resolved = parts[0] == "datasets"
            dataset, rest = "/".join(parts[1:3] if resolved else parts[2:4]), parts[3:] if resolved else parts[4:]
            own = {
                name.removeprefix(f"{dataset}/"): content for name, content in files.items() if name.startswith(dataset)
            }
            known = self.headers.get("authorization") == f"Bearer {TOKEN}"
            if not own or (dataset == PRIVATE and not known):
                self.answer(401, b"{}", {"X-Error-Code": "RepoNotFound"})
            elif dataset == GATED and resolved and not known:
                self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
            elif resolved:
                self.send_file(own, "/".join(rest[2:]))
            elif rest[:1] == ["tree"]:
                self.send_tree(own, "/".join(rest[2:]))
            else:
                self.answer(200, json.dumps({"id": dataset, "sha": "0" * 40, "siblings": []}).encode())

        do_HEAD = do_GET

        def send_tree(self, own: dict[str, bytes], folder: str) -> None:
            found: dict[str, dict[str, Any]] = {}
            for path, content in own.items():
                if folder and not path.startswith(f"{folder}/"):
                    continue
                below = path.removeprefix(folder).strip("/").split("/")
                above = [folder] if folder else []
                entry = {"type": "file", "path": path, "size": len(content), "oid": sha1(content).hexdigest()}
                if len(below) > 1:
                    folders = ["/".join([*above, *below[:depth]]) for depth in range(1, len(below))]
                    found |= {name: {"type": "directory", "path": name, "oid": "0" * 40} for name in folders}
                    if "recursive=true" not in self.path.lower():
                        continue
                found[path] = entry
            self.answer(
                200 if found else 404,
                json.dumps([*found.values()]).encode(),
                {} if found else {"X-Error-Code": "EntryNotFound"},
            )

        def send_file(self, own: dict[str, bytes], path: str) -> None:
            content, wanted = own.get(path), self.headers.get("range")
            if content is None:
                self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
            elif wanted is None:
                self.answer(200, content)
            else:
                start, stop = (int(number) for number in wanted.removeprefix("bytes=").split("-"))
                self.answer(206, content[start : stop + 1], {"Content-Range": f"bytes {start}-{stop}/{len(content)}"})

        def answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

    with http_servers.serving(Handler) as address:
        yield address
