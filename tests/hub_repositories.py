"""A server with the part of the Hugging Face Hub's API by which datasets are read and written, on this machine.

Run as a script it prints its address. Repositories are `NAME/anything`; each one begins with one commit. A GET of
`/faults?<status>-<made>,...` sets the wrong answers to the next commits.
"""

import base64
import hashlib
import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


class Repository:
    """The commits of a repository, each with all of its files."""

    def __init__(self) -> None:
        self.commits: list[tuple[str, dict[str, bytes]]] = []
        self.add({".gitattributes": b"*.parquet filter=lfs\n"})

    def add(self, files: dict[str, bytes]) -> str:
        oid = hashlib.sha1(f"{len(self.commits)} {sorted(files)}".encode()).hexdigest()
        self.commits.append((oid, files))
        return oid

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        if revision == "main":
            return self.commits[-1]
        return next((one for one in self.commits if one[0] == revision), None)


class Hub:
    """All repositories, and the uploaded objects by their sha256."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.faults: list[tuple[int, bool]] = []
        self.lock = threading.Lock()

    def repository(self, name: str) -> Repository | None:
        if name.startswith("missing/"):
            return None
        return self.repositories.setdefault(name, Repository())


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the base class writes to stderr."""

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        if address.path == "/faults":
            pairs = (one.split("-") for one in address.query.split(",") if one)
            self.hub.faults = [(int(status), made == "made") for status, made in pairs]
            return self._json({})
        parts = [unquote(part) for part in address.path.strip("/").split("/")]
        if parts[:2] == ["api", "datasets"]:
            return self._api_get(parts[2:], parse_qs(address.query))
        return self._resolve(parts)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        if parts[-3:] == ["lfs", "objects", "batch"]:
            return self._json(self._batch(json.loads(body)))
        name, what = "/".join(parts[2:4]), parts[4]
        repository = self.hub.repository(name)
        if repository is None:
            return self._missing("RepoNotFound")
        if what == "preupload":
            modes = {True: "lfs", False: "regular"}
            files = json.loads(body)["files"]
            return self._json(
                {
                    "files": [
                        {
                            "path": one["path"],
                            "uploadMode": modes[one["path"].endswith(".parquet")],
                            "shouldIgnore": False,
                        }
                        for one in files
                    ]
                }
            )
        if what == "paths-info":
            found = repository.at(parts[5])
            assert found is not None
            wanted = parse_qs(body.decode())["paths"] if b"paths=" in body else json.loads(body)["paths"]
            return self._json(_listed(found[1], lambda path: path in wanted, wanted))
        assert what == "commit", self.path
        return self._commit(repository, [json.loads(line) for line in body.splitlines()])

    def do_PUT(self) -> None:
        content = self._chunks() if self.headers.get("Transfer-Encoding") == "chunked" else None
        if content is None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
        oid = self.path.rpartition("/")[2]
        assert hashlib.sha256(content).hexdigest() == oid
        self.hub.objects[oid] = content
        self._json({})

    def _chunks(self) -> bytes:
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def _api_get(self, parts: list[str], query: dict[str, list[str]]) -> None:
        repository = self.hub.repository("/".join(parts[:2]))
        if repository is None:
            return self._missing("RepoNotFound")
        found = repository.at(parts[3] if len(parts) > 3 else "main")
        if found is None:
            return self._missing("RevisionNotFound")
        oid, files = found
        if len(parts) < 3 or parts[2] == "revision":
            return self._json(
                {"id": "/".join(parts[:2]), "sha": oid, "siblings": [{"rfilename": one} for one in files]}
            )
        assert parts[2] == "tree", self.path
        below = "/".join(parts[4:])
        top = f"{below}/" if below else ""
        if below and not any(one.startswith(top) for one in files):
            return self._missing("EntryNotFound")
        deep = query.get("recursive") == ["True"] or query.get("recursive") == ["true"]
        return self._json(
            _listed(files, lambda path: path.startswith(top) and (deep or "/" not in path[len(top) :]), [])
        )

    def _resolve(self, parts: list[str]) -> None:
        repository = self.hub.repository("/".join(parts[1:3]))
        found = None if repository is None else repository.at(parts[4])
        content = None if found is None else found[1].get("/".join(parts[5:]))
        if content is None or found is None:
            return self._missing("EntryNotFound")
        first, last = 0, len(content)
        status = 200
        if wanted := self.headers.get("Range"):
            start, _, end = wanted.removeprefix("bytes=").partition("-")
            first, last, status = int(start), min(int(end or last - 1) + 1, last), 206
        headers = {"X-Repo-Commit": found[0], "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        headers |= {"Content-Range": f"bytes {first}-{last - 1}/{len(content)}"} if status == 206 else {}
        return self._send(status, content[first:last], {**headers, "Accept-Ranges": "bytes"})

    def _batch(self, body: dict[str, Any]) -> dict[str, Any]:
        host = self.headers["Host"]
        objects = []
        for one in body["objects"]:
            upload = {"upload": {"href": f"http://{host}/lfs/{one['oid']}"}}
            objects.append({**one, **({} if one["oid"] in self.hub.objects else {"actions": upload})})
        return {"transfer": "basic", "objects": objects}

    def _commit(self, repository: Repository, lines: list[dict[str, Any]]) -> None:
        with self.hub.lock:
            fault = self.hub.faults.pop(0) if self.hub.faults else None
            oid, files = repository.commits[-1]
            if fault is None or fault[1]:
                if lines[0]["value"].get("parentCommit", oid) != oid:
                    return self._send(
                        412, b'{"error": "A commit has happened since. Please refresh and try again."}', {}
                    )
                files = dict(files)
                for line in lines[1:]:
                    value = line["value"]
                    if line["key"] == "deletedFile":
                        del files[value["path"]]
                    elif line["key"] == "lfsFile":
                        files[value["path"]] = self.hub.objects[value["oid"]]
                    else:
                        files[value["path"]] = base64.b64decode(value["content"])
                oid = repository.add(files)
        if fault is not None:
            return self._send(fault[0], b'{"error": "asked for by the test"}', {})
        return self._json({"commitUrl": f"http://{self.headers['Host']}/commit/{oid}", "commitOid": oid})

    def _missing(self, kind: str) -> None:
        self._send(404, json.dumps({"error": kind}).encode(), {"X-Error-Code": kind, "X-Error-Message": kind})

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _listed(files: dict[str, bytes], wanted: Any, folders: list[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
        for path, content in files.items()
        if wanted(path)
    ]
    for folder in folders:
        if folder not in files and any(path.startswith(f"{folder}/") for path in files):
            found.append({"type": "directory", "path": folder, "oid": "0" * 40})
    return found


@contextmanager
def serving() -> Iterator[str]:
    """The address of a server in a process of its own."""
    process = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def client_settings(address: str, home: str) -> dict[str, Any]:
    """The values of `huggingface_hub.constants`, which it reads from the environment when it is imported."""
    return {
        "ENDPOINT": address,
        "HUGGINGFACE_CO_URL_TEMPLATE": f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
        "HF_HOME": home,
        "HF_HUB_CACHE": f"{home}/hub",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
    }


def set_faults(address: str, *faults: tuple[int, str]) -> None:
    """Answer the next commits with these statuses; `made` or not."""
    query = ",".join(f"{status}-{made}" for status, made in faults)
    urllib.request.urlopen(f"{address}/faults?{query}", timeout=30).read()


if __name__ == "__main__":
    Handler.hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
