"""A server process: sockets, limits of connections and headers, signals, and several processes on one port.

Stopping: (1) /health turns 503 and every answer closes its connection, (2) the socket closes, (3) accepted requests are
answered. An idle connection is closed last: a client that uses it again meanwhile is still served.
"""

import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from torchlake import plugins
from torchlake.engines import make_engine
from torchlake.engines.local import Local
from torchlake.errors import PortTaken, TorchlakeError, UsageError
from torchlake.logs import log_to_stderr
from torchlake.models import folders
from torchlake.models.load import load_spec
from torchlake.processes.environment import thread_variables
from torchlake.processes.hardware import cores
from torchlake.processes.interrupts import noted_signals
from torchlake.processes.serialization import pack, unpack
from torchlake.redaction import redacted
from torchlake.serving.asgi import Service, app, writes_text
from torchlake.serving.options import ServeOptions
from torchlake.serving.reload import renew

log = logging.getLogger(__name__)

MAX_HEADERS = 64 << 10
"Bytes of the request line and headers."
IDLE_S = 1.0
"Seconds after SIGTERM in which a client that had an idle connection may use it again."
BACKLOG = 2048
HANGS = 70
"The exit code of a process whose model hangs: its supervisor starts it again."
TICK_S = 0.05


class Connection(HttpToolsProtocol):
    """An HTTP connection with limits on headers, on time, and on the number of connections."""

    def __init__(self, config: uvicorn.Config, *rest: Any, **named: Any) -> None:
        super().__init__(config, *rest, **named)
        application: Any = config.app
        self._options: ServeOptions = application.state.service.options
        self._received, self._complete, self._ended = 0, False, False
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        most = 2 * self._options.max_requests
        if len(self.connections) > most:
            self._refuse(503, f"the server has {most:,} connections")
        self._late = self.loop.call_later(self._options.read_timeout, self._slow)

    def on_message_begin(self) -> None:
        self._received, self._complete = 0, False
        self._stop_waiting()
        self._late = self.loop.call_later(self._options.read_timeout, self._slow)
        super().on_message_begin()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._late is None and self._complete and self.cycle.response_complete and self.cycle.more_body:
            # The rest of a body that was refused is read, so that its sender sees the answer, but not for long.
            self._late = self.loop.call_later(self._options.read_timeout, self.transport.close)
        self._ended = False
        super().data_received(data)
        if self._complete or self.transport.is_closing():
            return
        # Of a chunk that ends another request an unknown part belongs to these headers: the next chunks count.
        self._received += 0 if self._ended else len(data)
        if self._received > MAX_HEADERS:
            self._too_large()

    def on_headers_complete(self) -> None:
        self._complete = True
        self._stop_waiting()
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEADERS:
            self._too_large()
        elif not self.transport.is_closing():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._ended = True
        if not self.transport.is_closing():
            super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _slow(self) -> None:
        if not self.transport.is_closing():
            self._refuse(408, f"the headers did not arrive within {self._options.read_timeout:g} seconds")

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_large(self) -> None:
        self._refuse(431, f"the headers are larger than {MAX_HEADERS:,} bytes")

    def _refuse(self, status: int, message: str) -> None:
        body = b'{"error":"%s","error_type":"%s"}' % (
            message.encode(),
            b"Overloaded" if status == 503 else b"Validation",
        )
        names = {408: b"Request Timeout", 431: b"Request Header Fields Too Large", 503: b"Service Unavailable"}
        head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % (
            status,
            names[status],
            len(body),
        )
        self.transport.write(head + b"retry-after: 1\r\nconnection: close\r\n\r\n" + body)
        self.transport.close()

    @property
    def idle(self) -> bool:
        """Whether no request is read or answered, and none has arrived in the socket."""
        if (self.cycle is not None and not self.cycle.response_complete) or (self._received and not self._complete):
            return False
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket"), select.POLLIN)
        return not poll.poll(0)


class ServerProcess(uvicorn.Server):
    """uvicorn's server with another way to stop. `status` is the exit code."""

    def __init__(self, application: FastAPI) -> None:
        self.service: Service = application.state.service
        options = self.service.options
        super().__init__(
            uvicorn.Config(
                application,
                http=Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=75,
                backlog=BACKLOG,
                host=options.host,
                port=options.port,
            )
        )
        self.status, self.signum = 0, 0
        self._renewing: asyncio.Task[bool] | None = None
        self._renew = False

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Begin to stop; a second signal ends at once."""
        if self.should_exit:
            self.status = 128 + sig
            self.force_exit = True
        self.signum, self.should_exit = sig, True
        self.service.draining = True

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        """Handle signals in the block, and restore the handlers before; nothing is raised again after it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers: dict[int, Any] = dict.fromkeys((signal.SIGTERM, signal.SIGINT), self.handle_exit)
        handlers[signal.SIGHUP] = self._look_for_model
        before = {each: signal.signal(each, handler) for each, handler in handlers.items()}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def _look_for_model(self, sig: int, frame: Any) -> None:
        self._renew = True

    async def on_tick(self, counter: int) -> bool:
        """Return whether to stop: at a signal, or because the model hangs."""
        self.service.ensure_watching()
        if self._renew and (self._renewing is None or self._renewing.done()):
            self._renew, self._renewing = False, asyncio.create_task(renew(self.service))
        if self.service.hung is not None and not self.should_exit:
            self.status, self.should_exit, self.service.draining = HANGS, True, True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer what was accepted, and close."""
        options, began = self.service.options, time.monotonic()
        connections: set[Any] = self.server_state.connections

        def passed() -> float:
            return time.monotonic() - began

        while passed() < options.drain_delay and connections and not self.force_exit:
            await asyncio.sleep(TICK_S)
        await self._close_listeners(sockets or [])
        while connections and passed() < options.drain_timeout and not self.force_exit:
            if passed() > options.drain_delay + IDLE_S or self.service.hung is not None:
                for connection in list(connections):
                    if connection.idle:
                        connection.transport.close()
            await asyncio.sleep(TICK_S)
        self.service.over = True
        left = list(self.service.tasks)
        if left:
            self.status = self.status or 128 + (self.signum or signal.SIGTERM)
            log.warning("%d requests were not answered within %g seconds", len(left), options.drain_timeout)
        for task in left:
            task.cancel()
        if left and not self.force_exit:
            await asyncio.wait(left, timeout=1)
        for connection in list(connections):
            connection.transport.close()

    async def _close_listeners(self, sockets: list[socket.socket]) -> None:
        """Close the sockets, but first accept who waits there: the system would reset these connections."""
        waiting: list[socket.socket] = []
        for one in sockets:
            with contextlib.suppress(OSError):  # BlockingIOError: there is none
                while True:
                    waiting.append(one.accept()[0])
        for server in self.servers:
            server.close()
        for one in sockets:
            one.close()
        loop, state = asyncio.get_running_loop(), self.lifespan.state
        for each in waiting:
            each.setblocking(False)
            await loop.connect_accepted_socket(lambda: Connection(self.config, self.server_state, state), each)


def serve(model: str | Path, *, engine: Any = None, options: ServeOptions | None = None, **load_options: Any) -> int:
    """Answer requests with a model until SIGTERM or SIGINT; return the exit code.

        tl.serve("runs/reviews/model", options=tl.serving.ServeOptions(port=8080))

    `load_options` are those of `load`. `engine=tl.Ray(...)` deploys the same app with Ray Serve, and returns when it is
    stopped. 0: everything was answered; 70: a batch took longer than `row_timeout`, and a supervisor should start the
    server again; 128 + signal: a second signal, or requests without an answer after `drain_timeout`. Raises PortTaken,
    UsageError for a model that writes text, and the errors of `load`.
    """
    options = options or ServeOptions()
    if engine is not None and engine != "local" and not isinstance(engine, Local):
        return _on_engine(engine, model, options, load_options)
    if options.host not in ("127.0.0.1", "::1", "localhost") and options.api_key is None:
        log.warning("%s: anyone who reaches this address can use the model; set TORCHLAKE_API_KEY", options.host)
    if options.processes > 1:
        return _serve_several(model, options, load_options)
    return _serve_here(model, options, load_options)


def _serve_here(model: str | Path, options: ServeOptions, load_options: dict[str, Any], *, shared: bool = False) -> int:
    listener = listen(options.host, options.port, shared=shared)
    try:
        return run(app(model, options=options, **load_options), listener)
    finally:
        listener.close()


def run_shared() -> None:
    """Serve in this process, as one of several on a port; what to serve arrives on standard input."""
    model, options, load_options, level = unpack(sys.stdin.buffer.read())
    log_to_stderr(level)
    try:
        code = _serve_here(model, options, load_options, shared=True)
    except TorchlakeError as error:
        print(redacted(f"error: {error}"), file=sys.stderr)
        code = error.exit_code
    sys.exit(code)


def run(application: FastAPI, listener: socket.socket) -> int:
    """Run an app on an open socket until a signal; return the exit code."""
    service: Service = application.state.service
    _allow_many_files()
    host, port = listener.getsockname()[:2]
    server = ServerProcess(application)
    shown = f"[{host}]" if ":" in host else host
    log.info("%s (%s, %s): http://%s:%d", service.name, service.model.spec.task, service.model.runtime, shown, port)
    asyncio.run(server.serve(sockets=[listener]))
    if server.status == HANGS or server.force_exit:
        logging.shutdown()
        os._exit(server.status)  # a thread that computes would be waited for
    return server.status


def try_out(model: str | Path, *, options: ServeOptions, read: Callable[[str], str] | None, **load_options: Any) -> int:
    """Serve a page to try a model; `read` asks for each column of a row in the terminal, until it raises EOFError."""
    if read is None:
        return serve(model, options=options, **load_options)
    listener = listen(options.host, options.port)
    application = app(model, options=options, **load_options)
    server = ServerProcess(application)
    loaded = server.service.model
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    print(f"http://{options.host}:{listener.getsockname()[1]} has a page. Here, Ctrl-D ends.")
    try:
        with contextlib.suppress(EOFError, KeyboardInterrupt):
            while True:
                (row,) = loaded([{name: read(f"{name}> ") for name in loaded.spec.input_columns}])
                print("\n".join(f"  {name}: {value}" for name, value in row.items()))
    finally:
        server.handle_exit(signal.SIGTERM, None)
        thread.join()
    return 0


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Return a socket that listens. Raises PortTaken, and UsageError for an address that is not this machine's."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise UsageError(f"host: {host!r} is not an address of this machine ({error.strerror})") from None
    made = socket.socket(found[0], socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        made.bind(found[4])
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        if isinstance(error, PermissionError):
            raise UsageError(f"port: {port} needs more rights than this user has; choose one from 1024 on") from None
        raise PortTaken(f"port {port} of {host} is taken ({error.strerror}); choose another one with --port") from None
    made.setblocking(False)
    return made


def _serve_several(model: str | Path, options: ServeOptions, load_options: dict[str, Any]) -> int:
    """Serve in several processes on one port; start one again that ends by itself."""
    if not hasattr(socket, "SO_REUSEPORT"):
        raise UsageError("processes: this system cannot share a port among processes; use 1")
    probe = listen(options.host, options.port)  # another server on this port would share it, too
    port = probe.getsockname()[1]
    probe.close()
    threads = max(1, cores() // options.processes)
    stopping: list[int] = []
    children: dict[int, subprocess.Popen[bytes]] = {}

    def tell(sig: int, frame: Any) -> None:
        if sig != signal.SIGHUP:
            stopping.append(sig)
        for child in children.values():
            child.send_signal(sig)

    before = {each: signal.signal(each, tell) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    with tempfile.TemporaryDirectory(prefix="torchlake-metrics-") as metrics:
        environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": metrics, **thread_variables(threads)}
        command = [sys.executable, "-c", "from torchlake.serving.process import run_shared; run_shared()"]
        level = logging.getLogger("torchlake").getEffectiveLevel()
        message = pack(os.fspath(model), replace(options, port=port, processes=1), load_options, level)

        def start(number: int) -> None:
            child = subprocess.Popen(command, env=environment, start_new_session=True, stdin=subprocess.PIPE)
            assert child.stdin is not None, "a pipe"
            with contextlib.suppress(BrokenPipeError), child.stdin:
                child.stdin.write(message)
            children[number] = child

        try:
            for number in range(options.processes):
                start(number)
            return _supervise(children, start, stopping)
        finally:
            for child in children.values():
                child.kill()
                child.wait()
            for each, handler in before.items():
                signal.signal(each, handler)


def _supervise(
    children: dict[int, "subprocess.Popen[bytes]"], start: Callable[[int], None], stopping: list[int]
) -> int:
    """Wait for the processes, and start those again that end by themselves; return the worst exit code."""
    started = dict.fromkeys(children, time.monotonic())
    while True:
        codes = {number: child.poll() for number, child in children.items()}
        if stopping and all(code is not None for code in codes.values()):
            return max(abs(code or 0) for code in codes.values())
        for number, code in codes.items():
            if code is None or stopping:
                continue
            if time.monotonic() - started[number] < 1 or code in (2, 64, 65, 77):
                return code  # a process that cannot start would end again
            log.warning("process %d ended with %d; it is started again", number + 1, code)
            started[number] = time.monotonic()
            start(number)
        time.sleep(TICK_S)


def _allow_many_files() -> None:
    """Raise the limit of open files, of which each connection is one, as far as this user may."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else 65536, hard))
    del soft


def _on_engine(engine: Any, model: str | Path, options: ServeOptions, load_options: dict[str, Any]) -> int:
    """Deploy the app by an engine, and wait for a signal."""
    made: Any = make_engine(engine, options.processes) if isinstance(engine, str) else engine
    if not hasattr(made, "serve"):
        raise UsageError(f"The engine {type(made).__name__} serves nothing: use Ray (--engine ray), or no engine.")
    usual = ServeOptions()
    if own := [name for name in ("read_timeout", "drain_delay") if getattr(options, name) != getattr(usual, name)]:
        raise UsageError(f"{', '.join(own)}: of torchlake's own server; with Ray, its proxies accept connections.")
    folder = folders.model_folder(model).absolute()  # replicas may run in another folder
    if plugins.load("tasks", load_spec(folder).task).generates:
        raise writes_text(folder, load_spec(folder).task)
    # The proxies of Ray Serve accept connections; a replica answers what they send it.
    build = partial(app, folder, options=replace(options, processes=1), **load_options)
    address = (options.host, options.port)
    made.join()  # Ray sets its own signal handlers, which are replaced below
    with noted_signals() as stop:
        most, drain_s = options.max_requests, options.drain_timeout
        end = made.serve(build, name="torchlake", address=address, most=most, drain_s=drain_s)
        log.info("%s is served by Ray on http://%s:%d", model, *address)
        try:
            while not stop.wait(0.5):
                pass
        finally:
            end()
    return 0
