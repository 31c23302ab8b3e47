"""The options of a server, with their defaults."""

import os
from dataclasses import dataclass, field

from torchlake.amounts import size_in_bytes
from torchlake.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options of `serve` and `app` besides those of the model."""

    host: str = "127.0.0.1"
    "The address to listen on."
    port: int = 8080
    "The port; 0: any free one."
    processes: int = 1
    "Processes on the same port, each with the model and its share of the cores."
    name: str | None = None
    "The name of the model in `/info` and for OpenAI's clients; None: that of its folder or run."
    max_body: int | str = "2MiB"
    "The largest body of a request."
    max_rows: int = 1024
    "Rows or texts of a request."
    max_requests: int = 512
    "Requests in flight; more get 429."
    max_queued_tokens: int = 131_072
    "Tokens in the queue from which on further requests get 429."
    queue_timeout: float = 30.0
    "Seconds that a request waits in queues before it gets 503."
    row_timeout: float = 600.0
    "Seconds of reading rows, or of a batch, after which they are errors, and the process ends with exit code 70."
    read_timeout: float = 10.0
    "Seconds in which the headers and the body of a request have to arrive."
    drain_delay: float = 0.0
    "Seconds after SIGTERM in which new connections are still accepted."
    drain_timeout: float = 25.0
    "Seconds after SIGTERM in which accepted requests are answered."
    truncate: bool = True
    "Whether longer texts are truncated; if not, they are refused."
    reload: bool = False
    "Whether a new model in the folder, or behind the symbolic link, replaces the loaded one."
    api_key: str | None = field(default=None, repr=False)
    "The token that requests have to bring; None: that of the variable TORCHLAKE_API_KEY, if it is set."
    open_metrics: bool = False
    "Whether /metrics needs no token."
    allow_origin: tuple[str, ...] = ()
    "Origins of web pages whose scripts may call the server."
    page: bool = False
    "Whether GET / is a page to try the model."

    def __post_init__(self) -> None:
        for name in ("processes", "max_rows", "max_requests", "max_queued_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}: expected 1 or more, got {getattr(self, name)}")
        for name in ("queue_timeout", "row_timeout", "read_timeout"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name}: expected more than 0 seconds, got {getattr(self, name)}")
        for name in ("drain_delay", "drain_timeout"):
            if not getattr(self, name) >= 0:
                raise UsageError(f"{name}: expected 0 seconds or more, got {getattr(self, name)}")
        if self.api_key is None and not self.page:  # the page is for this machine
            object.__setattr__(self, "api_key", os.environ.get("TORCHLAKE_API_KEY"))
        if self.api_key is not None and not (self.api_key and self.api_key.isascii() and self.api_key.isprintable()):
            raise UsageError("The API key must be printable ASCII characters, at least one.")
        if not 0 <= self.port <= 65535:
            raise UsageError(f"port: expected 0 to 65535, got {self.port}")

    @property
    def body_bytes(self) -> int:
        """The largest body in bytes."""
        return int(size_in_bytes(self.max_body, "max_body"))
