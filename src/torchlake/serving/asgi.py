"""The ASGI app: routes, and in front of them what every request has to pass.

    request id -> admission.py: token, room (429), body -> route -> answer or refusal -> exchange.py: headers, log

A request whose client has gone is canceled, and dropped from the queue. `host` and `x-forwarded-*` change nothing.
"""

import asyncio
import os
import re
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, Response

from torchlake import plugins
from torchlake.errors import UsageError
from torchlake.scoring.in_process import Model, load
from torchlake.serving.admission import admit, read_body
from torchlake.serving.exchange import Refused, Route, ServedRequest, as_refused, refusal, reply
from torchlake.serving.options import ServeOptions
from torchlake.serving.protocols import hub, openai, rows, tei
from torchlake.serving.service import Service
from torchlake.tables.sources.files import local_path

REQUEST_ID = re.compile(rb"[\w.:/+=-]{1,128}")
OPEN = ("/health", "/ping")
VERTEX = ("AIP_PREDICT_ROUTE", "AIP_HEALTH_ROUTE")
"Variables with the routes of Vertex AI."


def app(model: str | Path, *, options: ServeOptions | None = None, **load_options: Any) -> FastAPI:
    """Return an ASGI app that answers with a model, to be mounted in another app or run by any ASGI server.

        application = tl.serving.app("runs/reviews/model", options=tl.serving.ServeOptions(max_rows=64))

    `load_options` are those of `load`. `serve` runs it in a server that also limits connections and headers, and stops
    without losing a request. Raises UsageError for an option of that server, such as `port`, and for a model that
    writes text, and the errors of `load`.
    """
    options = options or ServeOptions()
    own = ("host", "port", "processes", "drain_delay", "drain_timeout")
    options.refuse(own, "give it to the server that runs the app, or use tl.serve")
    return build_app(model, options, load_options)


def build_app(model: str | Path, options: ServeOptions, load_options: dict[str, Any]) -> FastAPI:
    """Return the app, for a server that has all of the options."""

    def loaded() -> Model:
        made = load(model, **load_options)
        if plugins.load("tasks", made.spec.task).generates:
            made.close()
            raise writes_text(model, made.spec.task)
        return made

    with plugins.without_collections():
        service = Service(local_path(model), loaded, options)
    made = FastAPI(
        title=f"torchlake: {service.name}",
        version=version("torchlake"),
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,  # the address would be that of the header `host`
    )
    made.state.service = service
    answers = routes(page=service.options.page)
    for path, method, handler, schema in answers:
        extra = {} if schema is None else {"requestBody": {"required": True, "content": schema}}
        made.add_api_route(path, handler, methods=[method], openapi_extra=extra, response_class=Response)
    made.add_exception_handler(HTTPException, _unknown)
    made.add_middleware(Gate, service=service, handlers={each[:2]: each[2] for each in answers})
    return made


def writes_text(model: str | Path, task: str) -> UsageError:
    """Return the error for a model that writes texts."""
    return UsageError(
        f"{model}: {task} writes texts, which serve does not. Use `transformers serve` or vLLM with the model folder; "
        "predict writes the answers to a table."
    )


def routes(*, page: bool) -> list[Route]:
    """Return all routes."""
    predict, health = (os.environ.get(name) for name in VERTEX)
    for name in VERTEX:
        if not (os.environ.get(name) or "/").startswith("/"):
            raise UsageError(f"{name}: expected a path that begins with /, got {os.environ[name]!r}")
    found: list[Route] = [
        ("/invocations", "POST", rows.invocations, rows.SCHEMA),
        *tei.routes(),
        ("/", "POST", hub.root, {"application/json": {"schema": hub.RootBody.model_json_schema()}}),
        *openai.routes(),
        ("/health", "GET", _health, None),
        ("/ping", "GET", _health, None),
        ("/version", "GET", _version, None),
        ("/metrics", "GET", _metrics, None),
        ("/openapi.json", "GET", _openapi, None),
    ]
    if page:
        found.append(("/", "GET", _page, None))
    if predict:  # in place of another protocol's route
        found = [one for one in found if one[:2] != (predict, "POST")]
        found.append((predict, "POST", rows.invocations, rows.SCHEMA))
    if health and health not in [path for path, method, *_ in found if method == "GET"]:
        found.append((health, "GET", _health, None))
    return found


async def _health(request: Request) -> Response:
    """Return 200 while the model answers, 503 while it stops or hangs; of several processes, how many serve."""
    service: Service = request.app.state.service
    if service.unhealthy is not None:
        raise Refused(503, service.unhealthy)
    serving, all_ = service.metrics.serving(service.options.processes), service.options.processes
    return Response(f"{serving} of {all_} processes serve\n" if serving < all_ else "\n", media_type="text/plain")


async def _version(request: Request) -> Response:
    """Return the version of torchlake."""
    return Response(version("torchlake"), media_type="text/plain")


async def _metrics(request: Request) -> Response:
    """Return the metrics in Prometheus' format."""
    service: Service = request.app.state.service
    service.note_queue()
    return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _openapi(request: Request) -> Response:
    """Return the description of these routes."""
    return reply(request.app.openapi())


async def _page(request: Request) -> Response:
    """Return a page to try the model."""
    return FileResponse(Path(__file__).with_name("page.html"), media_type="text/html; charset=utf-8")


async def _unknown(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = {404: "no such route", 405: "this route has another method"}
    response = refusal(_path_of(request.scope), Refused(error.status_code, words.get(error.status_code, "refused")))
    response.headers.update(error.headers or {})
    return response


def _path_of(scope: Any) -> str:
    """Return the path of a request in this app, which may be mounted in another one."""
    return scope["path"].removeprefix(scope.get("root_path", "")) or "/"


class Gate:
    """What every request passes before its route, and every answer after it.

    It calls the routes' `handlers` itself, by path and method: FastAPI's own way to them costs a third of all that is
    not the model. `app` refuses everything else.
    """

    def __init__(self, app: Any, *, service: Service, handlers: dict[tuple[str, str], Any]) -> None:
        self.app, self.service, self.handlers = app, service, handlers
        health = os.environ.get("AIP_HEALTH_ROUTE")
        self.open = {*OPEN, *([health] if health else []), *(["/metrics"] if service.options.open_metrics else [])}
        self.cors = CORSMiddleware(
            app,
            allow_origins=service.options.allow_origin,
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-request-id"],
            expose_headers=["retry-after", "x-request-id", "x-model-sha"],
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        service = self.service
        service.ensure_watching()
        if scope["method"] == "HEAD":  # the server leaves out the body
            scope = {**scope, "method": "GET"}
        path, headers = _path_of(scope), dict(scope["headers"])
        handler = self.handlers.get((path, scope["method"]))
        route = "other" if handler is None else path
        is_open = scope["method"] == "GET" and path in self.open
        if service.options.allow_origin:
            if scope["method"] == "OPTIONS" and {b"origin", b"access-control-request-method"} <= headers.keys():
                handler, is_open = self._preflight, True
            elif b"origin" in headers:
                send = partial(self.cors.send, send=send, request_headers=Headers(scope=scope))
        used = scope["torchlake"] = ServedRequest(service, service.model)
        if REQUEST_ID.fullmatch(given := headers.get(b"x-request-id", b"")):
            used.id = given
        answer = used.answer_by(send)
        task = asyncio.current_task()
        assert task is not None
        service.tasks.add(task)
        watch: asyncio.Task[Any] | None = None
        try:
            admit(service, headers, open_route=is_open)
            used.content_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")
            if scope["method"] == "POST":
                used.body = await read_body(receive, headers, service.options)
                watch, receive = asyncio.create_task(_gone(receive, task, used)), _never
            application = self.app if handler is None else await handler(Request(scope))
            await application(scope, receive, answer)
        except ClientDisconnect:
            used.status = 499
        except asyncio.CancelledError:
            if watch is not None and watch.done() and not service.over:
                used.status = 499  # the client has gone, and reads no answer
            elif service.over and not used.status:
                task.uncancel()
                await refusal(path, Refused(503, "the server stops"))(scope, receive, answer)
            else:
                raise
        except Exception as error:
            refused = as_refused(error, service.hung)
            used.kind = refused.kind
            if refused.status == 500:
                used.log_fault(error)
            refused.__traceback__ = None  # it would keep the model until garbage is collected
            if not used.status:
                await refusal(path, refused)(scope, receive, answer)
        finally:
            service.tasks.discard(task)
            del scope["torchlake"]  # a connection keeps the scope, and a replaced model with it
            if watch is not None:
                watch.cancel()
            used.record(route, scope["method"])

    async def _preflight(self, request: Request) -> Response:
        """Return whether a page's scripts may send a request; the browser asks without the token."""
        return self.cors.preflight_response(request.headers)


async def _gone(receive: Any, task: "asyncio.Task[Any]", used: ServedRequest) -> None:
    """Cancel a request when its client closes the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
    if not used.complete:  # else this is how the server says that the answer was sent
        task.cancel()


async def _never() -> None:
    """Wait until it is canceled: routes have the body from the exchange, and `_gone` waits for the end."""
    await asyncio.get_running_loop().create_future()
