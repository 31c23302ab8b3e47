"""One request while it is answered, what the log says about it, and how each protocol's clients expect a refusal.

A message says which row and field, and never repeats what was sent; of that the log has the request's id alone.
"""

import base64
import json
import logging
import os
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from torchlake.errors import DataError, TorchlakeError, UsageError
from torchlake.scoring.in_process import Model
from torchlake.scoring.options.call import AS_LOADED, CallOptions
from torchlake.serving.batching import RowTimeout

if TYPE_CHECKING:
    import pyarrow as pa

    from torchlake.serving.service import Service

log, faults = logging.getLogger("torchlake.requests"), logging.getLogger(__name__)

KINDS = {424: "Backend", 429: "Overloaded", 500: "Backend", 503: "Unhealthy"}
"TEI's names of errors; Validation for other statuses."
MLFLOW = {
    401: "UNAUTHENTICATED",
    404: "ENDPOINT_NOT_FOUND",
    429: "REQUEST_LIMIT_EXCEEDED",
    503: "TEMPORARILY_UNAVAILABLE",
}
OPENAI = {401: "invalid_api_key", 404: "not_found", 429: "rate_limit_exceeded"}

Route = tuple[str, str, Callable[[Request], Awaitable[Response]], Any]
"Path, method, handler, and the content of the body in OpenAPI's form; None: no body."


class Refused(Exception):
    """A request is not answered; `status`, `kind` (TEI's), `field` and `code` (OpenAI's) say why to programs."""

    def __init__(
        self, status: int, message: str, *, kind: str | None = None, field: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.field, self.code = status, field, code
        self.kind = kind or KINDS.get(status, "Validation")


@dataclass
class ServedRequest:
    """One request: what arrived, which model answers it, and what that cost."""

    service: "Service"
    model: Model
    id: bytes = field(default_factory=lambda: uuid.uuid4().hex.encode())
    status: int = 0
    "That of the answer, once it has begun; `complete`: once it has ended; `kind`: TEI's name of its error."
    kind: str = "Validation"
    complete: bool = False
    body: bytes = b""
    content_type: str = ""
    began: float = field(default_factory=time.perf_counter)
    rows: int = 0
    tokens: int = 0
    reading_s: float = 0.0
    queued_s: float = 0.0
    computed_s: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)
    "How many rows have an error, by its first word."
    truncated: int = 0

    def json(self) -> Any:
        """Return the body as JSON. Raises Refused."""
        if self.content_type not in ("application/json", ""):
            raise Refused(415, "content-type: expected application/json")
        return parse_json(self.body)

    async def score(self, table: "pa.Table", unreadable: dict[int, str], view: CallOptions = AS_LOADED) -> "pa.Table":
        """Return the prediction columns of rows. Raises Refused if they are too many, and TimeoutError."""
        options = self.service.options
        self.rows += len(table)
        if len(table) > options.max_rows:
            raise Refused(422, f"{len(table):,} rows; the limit is {options.max_rows:,} (--max-rows)")
        try:
            done = await self.model.ascore(table, unreadable, view, patience=options.queue_timeout)
        except RowTimeout as error:
            return self._noted(self.model.failed(len(table), str(error), view))
        self.tokens += done.tokens
        self.reading_s += done.reading_s
        self.queued_s += done.queued_s
        self.computed_s += done.computed_s
        return self._noted(done.table)

    def _noted(self, table: "pa.Table") -> "pa.Table":
        self.errors.update(reason.partition(":")[0] for reason in table["error"].drop_null().to_pylist())
        self.truncated += table["truncated"].to_pylist().count(True)
        return table

    def answer_by(self, send: Callable[[Any], Awaitable[None]]) -> Callable[[Any], Awaitable[None]]:
        """Return `send` with the headers that all answers have; it notes the status and the end."""

        async def answer(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
                message = {**message, "headers": [*message["headers"], *self.headers()]}
            else:
                self.complete = not message.get("more_body", False)
            await send(message)

        return answer

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers that all answers have."""
        found = [(b"x-request-id", self.id), (b"x-model-sha", self.model.sha.encode())]
        if self.rows:
            names = {"tokenization": self.reading_s, "queue": self.queued_s, "inference": self.computed_s}
            times = {**names, "total": time.perf_counter() - self.began}
            found += [(f"x-{name}-time".encode(), b"%d" % round(seconds * 1000)) for name, seconds in times.items()]
            found.append((b"x-compute-tokens", b"%d" % self.tokens))
        if self.service.draining or self.status == 408:
            found.append((b"connection", b"close"))
        return found

    def record(self, route: str, method: str) -> None:
        """Count the request and write its line: no texts, and no values of headers but the id."""
        seconds = time.perf_counter() - self.began
        if method not in ("GET", "HEAD", "OPTIONS"):  # the model's requests are POSTs; a probe would be most of them
            self.service.metrics.count(self, seconds)
        self.service.note_queue()
        if log.isEnabledFor(logging.INFO):
            line = {"time": round(time.time(), 3), "id": self.id.decode(), "method": method, "route": route}
            line |= {"status": self.status, "rows": self.rows, "tokens": self.tokens}
            names = {"total": seconds, "queue": self.queued_s, "tokenizing": self.reading_s, "model": self.computed_s}
            line |= {f"{name}_ms": round(value * 1e3, 2) for name, value in names.items()}
            log.info(orjson.dumps(line).decode())

    def log_fault(self, error: Exception) -> None:
        """Write an unexpected error's type and place, without its message, which may repeat what a row says."""
        frames = "".join(traceback.format_tb(error.__traceback__))
        faults.error("request %s: %s\n%s", self.id.decode(), type(error).__name__, frames)


def parse_json(body: bytes) -> Any:
    """Return what a JSON text holds. Raises Refused for anything that is not JSON."""
    try:
        # Half a pair of surrogates is valid JSON, and the error of one row; orjson refuses the whole.
        if b"\\ud" not in body and b"\\uD" not in body:
            return orjson.loads(body)
        return json.loads(body, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise Refused(400, "the body is not valid JSON in UTF-8") from None


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def reply(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON response; NumPy arrays are written as they are."""
    content = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS, default=_plain)
    return Response(content, status, headers, media_type="application/json")


def _plain(value: Any) -> Any:
    """Return bytes as base64, and what orjson cannot write as a string."""
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def refusal(path: str, error: Refused) -> Response:
    """Return the response to a refused request, in the form of the protocol at `path`."""
    status, message = error.status, str(error)
    headers = {"retry-after": "1"} if status in (429, 503) else {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    rows = path.startswith("/invocations") or path == os.environ.get("AIP_PREDICT_ROUTE")
    if not rows and (path.startswith("/v1/") or path == "/embeddings"):
        kind = "server_error" if status >= 500 else "invalid_request_error"
        code = error.code or OPENAI.get(status)
        return reply({"error": {"message": message, "type": kind, "param": error.field, "code": code}}, status, headers)
    if rows:
        code = MLFLOW.get(status, "INTERNAL_ERROR" if status >= 500 else "BAD_REQUEST")
        return reply({"error_code": code, "message": message}, status, headers)
    return reply({"error": message, "error_type": error.kind}, status, headers)


def as_refused(error: Exception, closed: str | None) -> Refused:
    """Return the refusal for an exception. `closed` is why the model computes nothing more, if so."""
    if isinstance(error, Refused):
        return error
    if closed is not None:
        return Refused(503, closed)
    if isinstance(error, TimeoutError):
        return Refused(503, f"{error}; try again later")
    if isinstance(error, UsageError | DataError):
        return Refused(422, str(error))
    return Refused(500, "a fault in the server" if isinstance(error, TorchlakeError) else type(error).__name__)
