"""The endpoint of a job, and the bodies of its requests.

    https://host/v1  +  chat/completions | completions | embeddings

A URL never has a secret: the key is read, in each process, from the environment variable that the job names.
"""

import ipaddress
import json
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import parse_qsl, urlsplit

from torchlake.errors import UsageError
from torchlake.redaction import is_secret

Api = Literal["chat", "completions", "embeddings"]
Prompt = str | Sequence[Mapping[str, Any]]
"Text, or messages."
PATHS: dict[Api, str] = {"chat": "chat/completions", "completions": "completions", "embeddings": "embeddings"}
INPUTS: dict[Api, str] = {"chat": "messages", "completions": "prompt", "embeddings": "input"}
OWN = ("model", "stream", "stream_options", "messages", "prompt", "input", "n")
"Fields of a body that are not options, and the number of answers, which decides the columns."
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
OPTIONS = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_token_ids": "stop_token_ids",
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "n", "seed", "stop")},
    **{name: name for name in ("presence_penalty", "frequency_penalty", "repetition_penalty")},
}
"The options of text generation that a request can have, and their names in its body."


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where requests go, and what is the same in all of them; plain values without a secret."""

    url: str
    "As `checked_url` returns it."
    model: str
    api: Api
    key_env: str | None = None
    "The environment variable that has the key; None: requests have none."
    options: Mapping[str, Any] = field(default_factory=dict)
    "The fields of a body besides the model and the input."
    choices: tuple[str, ...] = ()
    "The texts that an answer may be; empty: any."
    timeout_s: float = 600.0
    "The time of one attempt at a request, with its answer."
    max_retries: int = 8

    @property
    def address(self) -> str:
        """The URL of requests."""
        base, mark, query = self.url.partition("?")
        return f"{base}/{PATHS[self.api]}{mark}{query}"

    @property
    def structured(self) -> bool:
        """Whether answers are JSON, so that one that was cut is worth nothing."""
        form = self.options.get("response_format")
        return isinstance(form, Mapping) and str(form.get("type", "")).startswith("json")

    @property
    def texts(self) -> int:
        """The number of texts of each answer."""
        return int(self.options.get("n", 1))

    @property
    def most_tokens(self) -> int:
        """The most tokens that an answer can have, as far as the request says."""
        most = self.options.get("max_tokens", self.options.get("max_completion_tokens", 0))
        return int(most) * self.texts if isinstance(most, int) else 0

    def body(self, prompt: Prompt) -> bytes:
        """Return the body of the request for a prompt."""
        value = {"model": self.model, INPUTS[self.api]: prompt, **self.options}
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()

    def key(self) -> str | None:
        """Return the key from the environment. Raises UsageError if it is not there, or cannot be sent."""
        if self.key_env is None:
            return None
        key = os.environ.get(self.key_env, "").strip()
        if not key:
            raise UsageError(
                f"key_env: the environment variable {self.key_env} is not set on {socket.gethostname()}; it has the "
                "key of the endpoint. Set it on each machine that runs the job."
            )
        if not key.isascii() or not key.isprintable():
            raise UsageError(f"key_env: the value of {self.key_env} cannot be sent: a key is one line of ASCII.")
        return key


@dataclass(frozen=True)
class Begun:
    """A batch of requests that was begun."""

    file: str
    "The id of its requests."
    batch: str = ""
    "Its own id; empty: it is not known whether the endpoint has begun it."
    settled: frozenset[int] = frozenset()
    "Rows whose answers from it an earlier attempt has paid, and not kept: they are asked again."


Note = Callable[[Begun], None]
"Keeps it for the next attempt."


def checked_url(url: str, *, insecure: bool = False) -> str:
    """Return the URL of an endpoint without a slash at the end. Raises UsageError, which never repeats a password."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        parts, host = urlsplit(""), None
    if parts.scheme not in ("https", "http") or not host or parts.fragment:
        raise UsageError("endpoint: expected a URL such as https://host/v1.")
    if "@" in parts.netloc:
        raise UsageError(
            f"endpoint: the URL for {host} has a user or password in it, which would be stored with the output. Leave "
            "it out, and name the environment variable that has the key with key_env (--key-env)."
        )
    secret = next((name for name, _ in parse_qsl(parts.query, True) if is_secret(name) or _is_key(name)), None)
    if secret is not None:
        raise UsageError(
            f"endpoint: the URL for {host} has the secret {secret!r} in it. Name the environment variable that has the "
            "key with key_env (--key-env)."
        )
    if parts.scheme == "http" and not is_local(host) and not insecure:
        raise UsageError(
            f"endpoint: http://{host} is not encrypted: others could read the key and the rows. Use https, or "
            "insecure_endpoint (--insecure-endpoint) in a network that you trust."
        )
    path = parts.path.rstrip("/")
    whole = next((each for each in PATHS.values() if path.endswith(f"/{each}")), None)
    if whole is not None:
        raise UsageError(f"endpoint: leave out /{whole}, which is added: it ends like https://host/v1.")
    return f"{parts.scheme}://{parts.netloc}{path}" + (f"?{parts.query}" if parts.query else "")


def is_local(host: str) -> bool:
    """Return whether a host is this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def checked_key_env(name: str | None) -> str | None:
    """Return the name of a variable. Raises UsageError for what may be a key itself, without repeating it."""
    if name is not None and not VARIABLE.fullmatch(name):
        raise UsageError(
            "key_env: expected the name of an environment variable, such as OPENAI_API_KEY; what was given is not a "
            "name, and is not shown because it may be the key."
        )
    return name


def body_options(api: Api, generation: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of bodies: options of text generation by their names there, then `more` as they are.

    A null in `more` removes a field. Raises UsageError for an option that the API does not have, and in `more` for a
    field that torchlake sets.
    """
    own = next((name for name in more if name in OWN), None)
    if own is not None:
        raise UsageError(f"request_options: {own!r} is not an option: torchlake sets it for each request.")
    for name, field_name in OPTIONS.items():
        if more.get(field_name) is not None:
            raise UsageError(f"request_options: {field_name!r} is the option {name}: use that. null leaves it out.")
    if generation and api == "embeddings":
        raise UsageError(f"{', '.join(generation)}: for texts that are written, and embeddings are vectors.")
    lacking = sorted(generation.keys() - OPTIONS.keys() - {"logprobs"})
    if lacking:
        raise UsageError(
            f"{', '.join(lacking)}: the runtime 'http' does not have it. What an endpoint takes besides can be sent "
            "with request_options (--request-option NAME=VALUE)."
        )
    found = {
        OPTIONS[name]: list(value) if isinstance(value, tuple) else value
        for name, value in generation.items()
        if name in OPTIONS
    }
    if "logprobs" in generation:
        found["logprobs"] = True if api == "chat" else 1
    if "max_completion_tokens" in more:
        found.pop("max_tokens", None)
    return {name: value for name, value in {**found, **more}.items() if value is not None}


def json_format(schema: Any, choices: Sequence[str]) -> dict[str, Any]:
    """Return the response_format of a JSON schema or, as JSON with the only key `answer`, of choices."""
    if choices:
        answer = {"answer": {"type": "string", "enum": list(choices)}}
        schema = {"type": "object", "properties": answer, "required": ["answer"], "additionalProperties": False}
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


def _is_key(name: str) -> bool:
    return name.lower() in ("key", "sig", "code", "token", "subscription-key")
