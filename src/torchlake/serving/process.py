"""Serve in this process, in several on one port, or by an engine.

Of several processes one that ends is started again, each time after a longer wait if it does not last; the others serve
meanwhile. When none can be started, the server ends.
"""

import asyncio
import contextlib
import errno
import gc
import logging
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty
from typing import Any

from fastapi import FastAPI
from prometheus_client.multiprocess import mark_process_dead

from torchlake import plugins
from torchlake.engines import make_engine
from torchlake.engines.local import Local
from torchlake.errors import PortTaken, TorchlakeError, UsageError
from torchlake.logs import LEVEL
from torchlake.models import folders
from torchlake.models.spec import load_spec
from torchlake.processes.children import Children
from torchlake.processes.environment import keep_freed_memory, local_environment
from torchlake.processes.hardware import gpus
from torchlake.processes.interrupts import noted_signals
from torchlake.processes.serialization import pack, unpack
from torchlake.redaction import redacted
from torchlake.serving.asgi import build_app, writes_text
from torchlake.serving.connections import BACKLOG, HANGS, TICK_S, ServerProcess
from torchlake.serving.options import ServeOptions
from torchlake.tables.sources.files import local_path

log = logging.getLogger(__name__)

LASTS_S = 10.0
"Seconds of a process that has served, before which its end counts as a failed start."
LONGEST_WAIT_S = 60.0
PERMANENT = (2, 64, 65, 77)
"Exit codes of a process that would end again."


def serve(model: str | Path, *, engine: Any = None, options: ServeOptions | None = None, **load_options: Any) -> int:
    """Answer requests with a model until SIGTERM or SIGINT; return the exit code.

        tl.serve("runs/reviews/model", options=tl.serving.ServeOptions(port=8080))

    `load_options` are those of `load`. `engine=tl.Ray(...)` deploys the same app with Ray Serve, and returns when it is
    stopped. 0: everything was answered; 70: rows took longer than `row_timeout`, or the device is lost, and a
    supervisor should start the server again; 128 + signal: a second signal, or requests without an answer after
    `drain_timeout`. Raises PortTaken, UsageError for a model that writes text, and the errors of `load`.
    """
    options = options or ServeOptions()
    if engine is not None and engine != "local" and not isinstance(engine, Local):
        return _on_engine(engine, model, options, load_options)
    if options.host not in ("127.0.0.1", "::1", "localhost") and options.api_key is None:
        log.warning("%s: anyone who reaches this address can use the model; set TORCHLAKE_API_KEY", options.host)
    if options.processes > 1:
        return _serve_several(model, options, load_options)
    with noted_signals(signal.SIGHUP) as hangups, listen(options.host, options.port) as listener:
        return run(build_app(model, options, load_options), listener, hangups)


def run(application: FastAPI, listener: socket.socket, hangups: list[int]) -> int:
    """Run an app on an open socket until a signal; return the exit code. `hangups` gets each SIGHUP."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # each connection is an open file
        resource.setrlimit(resource.RLIMIT_NOFILE, (most if most != resource.RLIM_INFINITY else 65536, most))
    server = ServerProcess(application)
    service, model = server.service, server.service.model
    log.info("%s (%s, %s): %s", service.name, model.spec.task, model.runtime, address_of(listener))
    server.watched, server.hangups = True, hangups
    keep_freed_memory()
    gc.freeze()  # libraries stay: a collection that looks at all of torch would stop requests for a third of a second
    asyncio.run(server.serve(sockets=[listener]))
    if server.status == HANGS or server.force_exit:
        logging.shutdown()
        os._exit(server.status)  # a thread that computes would be waited for
    return server.status


def try_out(model: str | Path, *, options: ServeOptions, read: Callable[[str], str] | None, **load_options: Any) -> int:
    """Serve a page to try a model; `read` asks for each column of a row in the terminal, until it raises EOFError."""
    if read is None:
        return serve(model, options=options, **load_options)
    with listen(options.host, options.port) as listener:
        server = ServerProcess(build_app(model, options, load_options))
        loaded = server.service.model
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        print(f"{address_of(listener)} has a page. Here, Ctrl-D ends.")
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
    # With the protocol, which connections take over: asyncio sends at once (TCP_NODELAY) only where it is named, else
    # the second part of an answer waits 40 ms for the client's acknowledgment of the first.
    made = socket.socket(*found[:3])
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
        if error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(f"host: {host!r} is not an address of this machine ({error.strerror})") from None
        raise PortTaken(f"port {port} of {host} is taken ({error.strerror}); choose another one with --port") from None
    made.setblocking(False)
    return made


def address_of(listener: socket.socket) -> str:
    """Return the URL of a socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _serve_several(model: str | Path, options: ServeOptions, load_options: dict[str, Any]) -> int:
    """Serve in several processes on one port; start one again that ends by itself."""
    if not hasattr(socket, "SO_REUSEPORT"):
        raise UsageError("processes: this system cannot share a port among processes; use 1")
    with listen(options.host, options.port) as probe:  # another server on this port would share it, too
        port = probe.getsockname()[1]
    payload = pack(_serve_shared, local_path(model), replace(options, port=port), load_options)
    level, devices = logging.getLevelName(logging.getLogger("torchlake").getEffectiveLevel()), gpus()
    with (
        noted_signals(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals,
        tempfile.TemporaryDirectory(prefix="torchlake-metrics-") as metrics,
        Children(grace_s=options.drain_timeout + 1, held=(signal.SIGHUP,)) as children,
    ):

        def start(number: int) -> None:
            own = [devices[number % len(devices)]] if devices else None
            more = {LEVEL: level, "PROMETHEUS_MULTIPROC_DIR": metrics}
            children.start(number, "rank", payload, local_environment(options.processes, own, more))

        return _supervise(children, start, options.processes, signals, metrics)


def _serve_shared(model: str, options: ServeOptions, load_options: dict[str, Any]) -> None:
    """Serve in this process, as one of several on a port, and end it."""
    try:
        application = build_app(model, options, load_options)
        # Only now: the system would give it connections while it loads the model.
        with (
            noted_signals(signal.SIGHUP) as hangups,
            listen(options.host, options.port, shared=True) as listener,
        ):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])  # held since the start of the process
            code = run(application, listener, hangups)
    except TorchlakeError as error:
        print(redacted(f"error: {error}"), file=sys.stderr)
        code = error.exit_code
    logging.shutdown()
    os._exit(code)


def _supervise(
    children: Children, start: Callable[[int], None], processes: int, signals: list[int], metrics: str
) -> int:
    """Start the processes, and again those that end by themselves; return the worst exit code after a signal.

    Ends, too, if none of them can be started, or the first start of one fails for good.
    """
    due: dict[int, float] = dict.fromkeys(range(processes), 0.0)
    began: dict[int, float] = {}
    again: set[int] = set()
    failed = dict.fromkeys(due, 0)  # how often a process has ended soon after its start, without lasting in between
    worst = stopping = 0
    while True:
        while signals:
            given = signals.pop(0)
            stopping = stopping or (given if given != signal.SIGHUP else 0)
            # SIGINT would be an exception in a process that loads its model.
            children.signal(signal.SIGTERM if given == signal.SIGINT else given)
        if stopping and len(due) == processes:
            return 128 + stopping if worst == 128 + signal.SIGTERM else worst
        now = time.monotonic()
        for number in [number for number, when in due.items() if when <= now and not stopping]:
            del due[number]
            began[number] = now
            start(number)
        try:
            child, kind, value = children.events.get(timeout=TICK_S)
        except Empty:
            continue
        if kind == "error":
            log.error("process %d: %s", child.number + 1, unpack(value).traceback)
        if kind != "exit":
            continue
        served = (Path(metrics) / f"gauge_livesum_{child.pid}.db").exists()
        mark_process_dead(child.pid, metrics)  # type: ignore[no-untyped-call]
        code: int = 128 - value if value < 0 else value
        number = child.number
        lasted = served and time.monotonic() - began[number] > LASTS_S
        failed[number] = 0 if lasted else failed[number] + 1
        wait = pause(failed[number])
        due[number] = time.monotonic() + wait
        if stopping:
            # One that SIGTERM itself has ended was still loading its model: it had accepted nothing.
            worst = max(worst, 0 if value == -signal.SIGTERM else code)
            continue
        if (number not in again and code in PERMANENT) or (len(due) == processes and all(failed.values())):
            return code
        again.add(number)
        log.warning("process %d ended with %d; it is started again in %.0f seconds", number + 1, code, wait)


def pause(failures: int) -> float:
    """Return how many seconds to wait before a start, after `failures` failed starts."""
    return min(2.0 ** min(failures, 10) - 1, LONGEST_WAIT_S)


def _on_engine(engine: Any, model: str | Path, options: ServeOptions, load_options: dict[str, Any]) -> int:
    """Deploy the app by an engine, and wait for a signal."""
    made: Any = make_engine(engine, options.processes) if isinstance(engine, str) else engine
    if not hasattr(made, "serve"):
        raise UsageError(f"The engine {type(made).__name__} serves nothing: use Ray (--engine ray), or no engine.")
    options.refuse(
        ("read_timeout", "drain_delay"), "of torchlake's own server; with Ray, its proxies accept connections."
    )
    folder = folders.model_folder(model).absolute()  # replicas may run in another folder
    if plugins.load("tasks", load_spec(folder).task).generates:
        raise writes_text(folder, load_spec(folder).task)
    # The proxies of Ray Serve accept connections; a replica answers what they send it.
    build = partial(build_app, folder, replace(options, processes=1), load_options)
    name, address = options.name or "torchlake", (options.host, options.port)
    made.join()  # Ray sets its own signal handlers, which are replaced below
    with noted_signals(signal.SIGTERM, signal.SIGINT) as stop:
        most, drain_s = options.max_requests, options.drain_timeout
        end = made.serve(build, name=name, address=address, most=most, drain_s=drain_s)
        try:
            while not stop:
                time.sleep(0.5)
        finally:
            end()
    return 0
