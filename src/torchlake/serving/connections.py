"""Connections with limits, and a server that stops without losing a request.

Stopping: (1) /health turns 503 and every answer closes its connection, (2) the socket closes, (3) accepted requests are
answered. An idle connection is closed last: a client that uses it again meanwhile is still served.
"""

import asyncio
import contextlib
import faulthandler
import logging
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import httptools
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from torchlake.serving.exchange import Refused, ServedRequest, refusal
from torchlake.serving.service import Service, renew

log = logging.getLogger(__name__)

MAX_HEADERS = 64 << 10
"Bytes of the request line and headers."
IDLE_S = 1.0
"Seconds after SIGTERM in which a client that had an idle connection may use it again."
BACKLOG = 2048
HANGS = 70
"The exit code of a process whose model hangs, or has lost its device: its supervisor starts it again."
TICK_S = 0.05
LOOP_S = 60.0
"Seconds that the event loop may stand still at least."


class Connection(HttpToolsProtocol):
    """An HTTP connection with limits on headers, on time, and on the number of connections."""

    def __init__(self, config: uvicorn.Config, *rest: Any, **named: Any) -> None:
        super().__init__(config, *rest, **named)
        application: Any = config.app
        self._service: Service = application.state.service
        self._options = self._service.options
        self._received, self._complete, self._ended = 0, False, False
        self._data, self._again, self._upgrade = b"", b"", False
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        most = 2 * self._options.max_requests
        if len(self.connections) > most:
            self._refuse(503, f"the server has {most:,} connections")
        self._wait(self._slow)

    def on_message_begin(self) -> None:
        self._received, self._complete = 0, False
        self._wait(self._slow)
        super().on_message_begin()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._late is None and self._complete and self.cycle.response_complete and self.cycle.more_body:
            # The rest of a body that was refused is read, so that its sender sees the answer, but not for long.
            self._wait(self.transport.close)
        self._again = data
        while self._again and not self.transport.is_closing():
            self._ended, self._data, self._again = False, self._again, b""
            super().data_received(self._data)
        if self._complete or self.transport.is_closing():
            return
        # Of a chunk that ends another request an unknown part belongs to these headers: the next chunks count.
        self._received += 0 if self._ended else len(data)
        if self._received > MAX_HEADERS:
            self._too_large()

    def on_headers_complete(self) -> None:
        self._complete = True
        self._wait(None)
        self._upgrade = self.parser.should_upgrade()
        if self._upgrade:
            if self.parser.get_method() == b"CONNECT":  # what follows would not be HTTP
                self._refuse(405, "this server is not a proxy")
            return
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEADERS:
            self._too_large()
        elif not self.transport.is_closing():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._ended = True
        if not self.transport.is_closing() and not self._upgrade:
            super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """Answer in HTTP/1.1 a request that offers another protocol, as clients of HTTP/2 do with their first one.

        The parser has stopped before the body. A new one reads the request again, without the offer.
        """
        if self.transport.is_closing():
            return
        stopped, kept = sys.exception(), [(name, value) for name, value in self.headers if name != b"upgrade"]
        assert stopped is not None
        head = b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        self.parser = httptools.HttpRequestParser(self)
        self._again = head + _lines(kept) + self._data[stopped.args[0] :]

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP."""
        self._refuse(400, "this is not a request of HTTP/1.1")

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait(None)
        super().connection_lost(exc)

    def _slow(self) -> None:
        if not self.transport.is_closing():
            self._refuse(408, f"the headers did not arrive within {self._options.read_timeout:g} seconds")

    def _wait(self, late: Callable[[], None] | None) -> None:
        """Call `late` after the time to read, in place of what was to be called before."""
        if self._late is not None:
            self._late.cancel()
        self._late = None if late is None else self.loop.call_later(self._options.read_timeout, late)

    def _too_large(self) -> None:
        self._refuse(431, f"the headers are larger than {MAX_HEADERS:,} bytes")

    def _refuse(self, status: int, message: str) -> None:
        """Answer before there is a request, and close the connection."""
        refused = Refused(status, message)
        used, answer = ServedRequest(self._service, self._service.model), refusal("", refused)
        used.status, used.kind = status, refused.kind
        used.record("other", "")
        own = (*used.headers()[:2], (b"connection", b"close"))
        headers = [*self.server_state.default_headers, *answer.raw_headers, *own]
        self.transport.write(STATUS_LINE[status] + _lines(headers) + answer.body)
        self.transport.close()

    @property
    def idle(self) -> bool:
        """Whether no request is read or answered, and none has arrived in the socket."""
        if (self.cycle is not None and not self.cycle.response_complete) or (self._received and not self._complete):
            return False
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket"), select.POLLIN)
        return not poll.poll(0)


def _lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return headers as HTTP/1.1 writes them, and the empty line after them."""
    return b"".join(b"%s: %s\r\n" % each for each in headers) + b"\r\n"


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
                log_level="error",  # requests that are refused have their own lines
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
        self.watched = False
        "Whether the process ends, with 1, if this event loop stands still: what a thread hangs in may hold all others."
        self._renewing: asyncio.Task[bool] | None = None
        self.hangups: list[int] = []
        "A SIGHUP in it asks to look for a new model."

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
        before = {each: signal.signal(each, self.handle_exit) for each in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    async def on_tick(self, counter: int) -> bool:
        """Return whether to stop: at a signal, or because the model hangs."""
        self.service.ensure_watching()
        if self.watched and counter % 10 == 0 and sys.__stderr__ is not None:
            seconds = max(LOOP_S, self.service.options.row_timeout)
            faulthandler.dump_traceback_later(seconds, file=sys.__stderr__, exit=True)
        if self.hangups and (self._renewing is None or self._renewing.done()):
            self.hangups.clear()
            self._renewing = asyncio.create_task(renew(self.service))
        if self.service.hung is not None and not self.should_exit:
            self.status, self.should_exit, self.service.draining = HANGS, True, True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer what was accepted, and close."""
        faulthandler.cancel_dump_traceback_later()
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
