"""The options of a server, declared once: the command line has those with an `Option`, with the same defaults."""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

from torchlake.amounts import size_in_bytes
from torchlake.config.arguments import check_arguments
from torchlake.config.options import Option
from torchlake.errors import UsageError

_serving = partial(Option, "Serving")
ORIGIN = re.compile(r"\*|null|[\w.+-]+://[^/\s]+")


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options of `serve` and `app` besides those of the model."""

    host: Annotated[str, _serving("ADDRESS", "Address to listen on.")] = "127.0.0.1"
    port: Annotated[
        int, _serving("N", "Port; 0: any free one (default: AIP_HTTP_PORT, or 8080).", min=0, max=65535)
    ] = 8080
    processes: Annotated[
        int, _serving("N", "Processes on this port, each with the model and its share of the cores.", min=1)
    ] = 1
    name: Annotated[
        str | None,
        _serving("NAME", "Name of the model, also for OpenAI's clients (default: that of its folder or run)."),
    ] = None
    max_body: Annotated[int | str, _serving("SIZE", "Largest body of a request.")] = "2MiB"
    max_rows: Annotated[int, _serving("N", "Rows or texts of a request.", min=1)] = 1024
    max_requests: Annotated[int, _serving("N", "Requests in flight; more get 429.", min=1)] = 512
    max_queued_tokens: Annotated[int, _serving("N", "Tokens in the queue from which on requests get 429.", min=1)] = (
        131_072
    )
    queue_timeout: Annotated[
        float, _serving("SECONDS", "Seconds in queues after which a request gets 503.", min=0.001)
    ] = 30.0
    row_timeout: Annotated[
        float,
        _serving(
            "SECONDS",
            "Seconds of reading rows or of a batch after which they fail, and the process ends with 70.",
            min=0.001,
        ),
    ] = 600.0
    read_timeout: Annotated[float, _serving("SECONDS", "Seconds for headers and body to arrive.", min=0.001)] = 10.0
    drain_delay: Annotated[
        float, _serving("SECONDS", "Seconds after SIGTERM in which connections are accepted.", min=0)
    ] = 0.0
    drain_timeout: Annotated[
        float, _serving("SECONDS", "Seconds after SIGTERM in which accepted requests are answered.", min=0)
    ] = 25.0
    truncate: bool = True
    "Whether longer texts are truncated; if not, they are refused."
    reload: Annotated[bool, _serving(None, "Take a new model in the folder or behind the link; kill -HUP: once.")] = (
        False
    )
    api_key: str | None = field(default=None, repr=False)
    "The token that requests have to bring; None: that of the variable TORCHLAKE_API_KEY, if it is set."
    open_metrics: Annotated[bool, _serving(None, "Answer /metrics without the token.")] = False
    allow_origin: Annotated[
        tuple[str, ...], _serving("ORIGIN", "Origin of web pages whose scripts may call the server; repeatable.")
    ] = ()
    page: bool = False
    "Whether GET / is a page to try the model."

    def __post_init__(self) -> None:
        check_arguments(
            {name: getattr(self, name) for name in ServeOptions.__annotations__}, ServeOptions.__annotations__
        )
        _ = self.body_bytes  # or every request would be refused
        if self.api_key is None and not self.page:  # the page is for this machine
            object.__setattr__(self, "api_key", os.environ.get("TORCHLAKE_API_KEY"))
        key = self.api_key
        if key is not None and not (key and key.isascii() and key.isprintable() and key == key.strip()):
            raise UsageError("The API key must be printable ASCII characters, at least one, with no spaces around.")
        wrong = next((one for one in self.allow_origin if not ORIGIN.fullmatch(one)), None)
        if wrong is not None:  # browsers never send it
            raise UsageError(f"allow_origin: {wrong!r} is not an origin. Write it without a path: https://example.org.")

    def refuse(self, names: Iterable[str], instead: str) -> None:
        """Raise UsageError, with what to do `instead`, if an option of these does not have its default."""
        if given := [name for name in names if getattr(self, name) != getattr(ServeOptions, name)]:
            raise UsageError(f"{', '.join(given)}: {instead}")

    @property
    def body_bytes(self) -> int:
        """The largest body in bytes."""
        return int(size_in_bytes(self.max_body, "max_body"))
