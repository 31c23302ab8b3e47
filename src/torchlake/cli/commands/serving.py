"""Commands that answer requests with a model: serve, try."""

import os
import signal
import sys
from functools import partial
from importlib import import_module
from typing import Annotated, Any

from torchlake import plugins
from torchlake.cli.command import ModelFolder, command
from torchlake.cli.display import Outcome
from torchlake.cli.engine import make_engine
from torchlake.cli.options import Given
from torchlake.config.arguments import read_named
from torchlake.config.options import Option
from torchlake.errors import UsageError, need_library
from torchlake.processes.interrupts import noted_signals
from torchlake.serving.options import ServeOptions

_input = partial(Option, "Input")
_serving = partial(Option, "Serving")


class LoadFlags:
    """Options of `serve` and `try` about the model."""

    text_pair: Annotated[str, _input("COLUMN", "Column of the second text, of a cross-encoder of others.")]


class ServeFlags:
    """Options of `serve` that `ServeOptions` has in another form."""

    no_truncate: Annotated[bool, _serving(None, "Refuse texts that are too long, instead of truncating them.")]
    api_key_file: Annotated[
        str, _serving("FILE", "File with the token that requests have to bring (default: TORCHLAKE_API_KEY).")
    ]


LOADING = (LoadFlags, "task task_options runtime all_probabilities null max_length batch_tokens")


class TryFlags:
    """Options of `try` about its server."""

    host: Annotated[str, _serving("ADDRESS", "Address to listen on: 127.0.0.1, ::1 or localhost (default: 127.0.0.1).")]
    port: Annotated[int, _serving("N", "Port (default: any free one).", min=0, max=65535)]


@command("serve runs/reviews/model --port 8080", ServeOptions, ServeFlags, *LOADING, "engine set")
def serve(model: ModelFolder, given: Given) -> Outcome:
    """Answer HTTP requests with a model. Rows as MLflow, texts as Text Embeddings Inference and OpenAI take them."""
    engine, settings = given["engine"], given["set"] or ()
    if engine is None and settings:
        raise UsageError("--set: it sets options of --engine ray; name the engine, or leave it out.")
    with noted_signals(signal.SIGHUP):  # which asks for a new model: none has been read while libraries are
        process = load_serving()
        made = None if engine is None else make_engine(engine, given["processes"], settings, as_json=False)
        status = process.serve(model, engine=made, options=_serve_options(given), **given.some(*LOADING))
    return Outcome(values={"exit_code": status}, lines=[], exit_code=status)


@command("try runs/reviews/model", TryFlags, *LOADING)
def try_(model: ModelFolder, given: Given) -> Outcome:
    """Try a model: a page in the browser, or a prompt in a terminal."""
    if given["host"] not in (None, "127.0.0.1", "::1", "localhost"):
        raise UsageError("--host: try is for this machine, without a token; use serve for others.")
    process = load_serving()
    options = ServeOptions(**{"port": 0, **given.some(TryFlags)}, page=True)
    read = input if sys.stdin.isatty() else None
    status = process.try_out(model, options=options, read=read, **given.some(*LOADING))
    return Outcome(values={"exit_code": status}, lines=[], exit_code=status)


def load_serving() -> Any:
    """Return the module `torchlake.serving.process`. Raises MissingExtra without a server's libraries."""
    for library in ("fastapi", "uvicorn", "httptools", "orjson", "prometheus_client"):
        need_library(library, "serve", "serve")
    with plugins.without_collections():
        return import_module("torchlake.serving.process")


def _serve_options(given: Given) -> ServeOptions:
    """Return the options of a server: those given, and the environment's."""
    options, port = given.some(ServeOptions), os.environ.get("AIP_HTTP_PORT", "")
    if port and not port.isdecimal():
        raise UsageError(f"AIP_HTTP_PORT: expected a port, got {port!r}")
    if port:
        options = {"port": int(port), **options}
    if given["api_key_file"] is not None:
        options["api_key"] = read_named("--api-key-file", given["api_key_file"]).strip()
    options["allow_origin"] = tuple(options.get("allow_origin", ()))
    return ServeOptions(**options, truncate=not given["no_truncate"])
