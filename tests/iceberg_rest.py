"""Support for tests: an Iceberg REST catalog over a SQLite catalog, on this machine, in a thread of its own.

It answers the requests of the REST specification that clients need to create, read and change tables; requirements and
updates of a commit are checked and applied by pyiceberg. pyiceberg has a client and no server.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import CommitTableRequest, Table
from pyiceberg.table.sorting import SortOrder

import http_servers

STATUS = {
    NoSuchNamespaceError: 404,
    NoSuchTableError: 404,
    TableAlreadyExistsError: 409,
    NamespaceAlreadyExistsError: 409,
    CommitFailedException: 409,
}
ENDPOINTS = [
    "GET /v1/{prefix}/namespaces",
    "POST /v1/{prefix}/namespaces",
    "GET /v1/{prefix}/namespaces/{namespace}",
    "GET /v1/{prefix}/namespaces/{namespace}/tables",
    "POST /v1/{prefix}/namespaces/{namespace}/tables",
    "GET /v1/{prefix}/namespaces/{namespace}/tables/{table}",
    "POST /v1/{prefix}/namespaces/{namespace}/tables/{table}",
    "DELETE /v1/{prefix}/namespaces/{namespace}/tables/{table}",
]


class Fault(NamedTuple):
    """A wrong answer to a commit."""

    status: int
    made: bool
    "Whether the commit is made nevertheless."


@contextmanager
def serving(catalog: SqlCatalog, *, token: str | None = None, faults: list[Fault] | None = None) -> Iterator[str]:
    """The address of a server; with a `token` it asks for that as a bearer.

    Each of `faults` is for one commit, in their order, and is removed then.
    """
    lock = threading.Lock()  # SQLite

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: the base class writes to stderr."""

        def _answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else {}
            if token is not None and self.headers.get("Authorization") != f"Bearer {token}":
                return self._send(401, _error("NotAuthorizedException", "no valid token", 401))
            parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
            commits = self.command == "POST" and parts[1:2] == ["namespaces"] and len(parts) == 5
            fault = faults.pop(0) if faults and commits else None
            try:
                with lock:
                    value = (
                        None if fault is not None and not fault.made else answer(catalog, self.command, parts[1:], body)
                    )
                status = 204 if value is None else 200
                if fault is not None:
                    status, value = fault.status, _error("Fault", "asked for by the test", fault.status)
            except tuple(STATUS) as error:
                status = STATUS[type(error)]
                value = _error(type(error).__name__, str(error), status)
            return self._send(status, value)

        def _send(self, status: int, value: Any) -> None:
            content = b"" if value is None else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_POST = do_DELETE = do_HEAD = _answer

    with http_servers.serving(Handler) as address:
        yield address


def answer(catalog: SqlCatalog, method: str, parts: list[str], body: dict[str, Any]) -> Any:
    """The body of the answer to a request; None: no content."""
    match (method, parts):
        case ("GET", ["config"]):
            return {"defaults": {}, "overrides": {}, "endpoints": ENDPOINTS}
        case ("GET", ["namespaces"]):
            return {"namespaces": [list(one) for one in catalog.list_namespaces()]}
        case ("POST", ["namespaces"]):
            catalog.create_namespace(tuple(body["namespace"]), body.get("properties", {}))
            return {"namespace": body["namespace"], "properties": body.get("properties", {})}
        case ("GET" | "HEAD", ["namespaces", namespace]):
            return {"namespace": [namespace], "properties": dict(catalog.load_namespace_properties(namespace))}
        case ("GET", ["namespaces", namespace, "tables"]):
            listed = catalog.list_tables(namespace)
            return {"identifiers": [{"namespace": list(one[:-1]), "name": one[-1]} for one in listed]}
        case ("POST", ["namespaces", namespace, "tables"]):
            return _loaded(_create(catalog, namespace, body))
        case ("GET" | "HEAD", ["namespaces", namespace, "tables", table]):
            return _loaded(catalog.load_table((namespace, table)))
        case ("POST", ["namespaces", namespace, "tables", table]):
            return _commit(catalog, namespace, table, body)
        case ("DELETE", ["namespaces", namespace, "tables", table]):
            catalog.drop_table((namespace, table))
            return None
    raise AssertionError(f"this server does not know the request {method} {parts}")


def _create(catalog: SqlCatalog, namespace: str, body: dict[str, Any]) -> Table:
    spec, order = body.get("partition-spec"), body.get("write-order")
    return catalog.create_table(
        (namespace, body["name"]),
        Schema.model_validate(body["schema"]),
        location=body.get("location"),
        partition_spec=PartitionSpec.model_validate(spec) if spec else PartitionSpec(),
        sort_order=SortOrder.model_validate(order) if order else SortOrder(),
        properties=body.get("properties") or {},
    )


def _commit(catalog: SqlCatalog, namespace: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
    body["identifier"] = {"namespace": [namespace], "name": name}
    request = CommitTableRequest.model_validate(body)
    done = catalog.commit_table(catalog.load_table((namespace, name)), request.requirements, request.updates)
    return {"metadata-location": done.metadata_location, "metadata": json.loads(done.metadata.model_dump_json())}


def _loaded(table: Table) -> dict[str, Any]:
    metadata = json.loads(table.metadata.model_dump_json())
    return {"metadata-location": table.metadata_location, "metadata": metadata, "config": {}}


def _error(kind: str, message: str, code: int) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "code": code}}
