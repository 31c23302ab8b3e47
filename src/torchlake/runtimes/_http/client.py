"""The connections to an endpoint, with retries.

    408, 409, 425, 429, 5xx, broken connections, cut answers   sent again, after a random part of a growing time
    401, 403, a missing model, another host, no certificate    end the job: each row would fail
    other statuses                                             an error row

Only the endpoint's host is connected. The key goes into a header, and is removed from whatever comes back.
"""

import asyncio
import json
import logging
import random
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpx

from torchlake.errors import LimitReached, UsageError
from torchlake.runtimes._http.answers import Answer, message_of, read_answer, refused_row, shown
from torchlake.runtimes._http.key import EndpointKey
from torchlake.runtimes._http.limits import Limits, retry_after
from torchlake.runtimes._http.requests import Endpoint, is_local

RETRIED = {408, 409, 425, 429}
"Statuses after which a request is sent again, besides those from 500."
PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
"Before a retry at most: the first one, and any."
LONGEST_WAIT_S = 3600.0
"An endpoint that asks to wait longer has reached a limit of its own."
CONNECT_S = 30.0
MOST_BYTES = 1 << 26
"Bytes of a response that are read."
MOST_REDIRECTS = 3
MOST_TIMEOUTS = 2
UNREACHED = 3
"Attempts to connect to an endpoint that has never answered."
UNSENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
QUOTA = ("insufficient_quota", "billing_hard_limit_reached", "billing_not_active")
NO_MODEL = ("not exist", "not found", "unknown model", "no such model")


@dataclass(frozen=True)
class Response:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    content: bytes


class Cut(Exception):
    """A response that is too long, or cannot be decoded."""


class Client:
    """The requests of one process to one endpoint; used by one event loop. Raises UsageError as `Endpoint.key`."""

    def __init__(self, endpoint: Endpoint, limits: Limits) -> None:
        self.endpoint, self.limits = endpoint, limits
        self.key = EndpointKey(endpoint.key())
        self._host = urlsplit(endpoint.url).hostname or ""
        for name in ("httpx", "httpcore"):  # they log each request, with its headers
            logging.getLogger(name).setLevel(logging.WARNING)
        self._address = endpoint.address
        self._headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "torchlake"}
        if self.key.value is not None:
            self._headers["Authorization"] = f"Bearer {self.key.value}"
        self._trust = httpx.create_ssl_context()  # once: it takes 20 ms
        self._clients: list[httpx.AsyncClient] = []
        self._free: list[httpx.AsyncClient] = []
        "Those without a request."
        self._answered = False
        "Whether the endpoint has ever answered a request."

    async def close(self) -> None:
        """Close the connections."""
        for client in self._clients:
            await client.aclose()

    @contextmanager
    def _connection(self) -> Iterator[httpx.AsyncClient]:
        """Yield a client that no other request uses, and which has one connection.

        For each request httpx looks at all connections of its client: with 16 of them a row takes 1.5 times the CPU.
        """
        if not self._free:
            self._clients.append(
                httpx.AsyncClient(
                    timeout=httpx.Timeout(None, connect=CONNECT_S),
                    limits=httpx.Limits(max_connections=None, max_keepalive_connections=1),
                    follow_redirects=False,
                    verify=self._trust,
                    trust_env=not is_local(self._host),  # proxies
                )
            )
            self._free.append(self._clients[-1])
        client = self._free.pop()
        try:
            yield client
        finally:
            self._free.append(client)

    async def ask(self, body: bytes, name: str, prompt_tokens: float, again: Callable[[], bool]) -> Answer | None:
        """Return the answer to a request, or the error of its row; `name` is that of the request in the endpoint's log.

        An attempt whose answer was lost may be paid: then None is returned if there may not be another one, by `again`.
        Raises UsageError for what no row would survive, and LimitReached for an exhausted quota.
        """
        problem, timeouts = "", 0
        for attempt in range(self.endpoint.max_retries + 1):
            expected = await self.limits.start(prompt_tokens)
            began, wait, lost = time.monotonic(), 0.0, False
            try:
                async with asyncio.timeout(self.endpoint.timeout_s):
                    got = await self._send(body, f"{name}-{attempt}")
            except TimeoutError:
                timeouts, lost = timeouts + 1, True
                problem = f"timeout: no whole answer in {self.endpoint.timeout_s:g} s"
                if timeouts == MOST_TIMEOUTS:
                    return Answer(error=f"{problem}, twice", final=False)
            except httpx.TransportError as error:
                problem, lost = self._broken(error, attempt), not isinstance(error, UNSENT)
            except (Cut, httpx.DecodingError) as error:
                return Answer(error=f"bad_answer: {self.key.clean(str(error))}")
            else:
                seconds = time.monotonic() - began
                answer = self._answer(got)
                if answer is not None:
                    usage = (answer.prompt_tokens, answer.generated_tokens or 0)
                    self.limits.answered(seconds, expected, None if usage[0] is None else (usage[0], usage[1]))
                    return self.key.clean_answer(answer, got.headers.get("x-request-id") or f"{name}-{attempt}")
                problem = f"http_{got.status}: {message_of(got.content)[1]}"
                wait = retry_after(got.headers)
                if got.status == 429 or wait:
                    self.limits.refused(seconds, wait)
            if attempt < self.endpoint.max_retries:
                if lost and not again():
                    return None
                await asyncio.sleep(wait + random.uniform(0, min(LONGEST_PAUSE_S, PAUSE_S * 2**attempt)))
        failed = Answer(error=f"{problem} ({self.endpoint.max_retries + 1} attempts)", final=False)
        return self.key.clean_answer(failed, f"{name}-{attempt}")

    async def call(self, method: str, path: str, *names: str, **options: Any) -> dict[str, Any]:
        """Return the JSON object, with strings of these names, that the endpoint gives for a path; see `fetch`."""
        body = await self.fetch(path, method, **options)
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict) or not all(isinstance(value.get(name), str) for name in names):
            raise UsageError(f"{self.endpoint.url}: no answer of the form of {method} {path}: {shown(body)}")
        return value

    async def fetch(
        self,
        path: str,
        method: str = "GET",
        *,
        done: Callable[[], Awaitable[bytes | None]] | None = None,
        absent: bytes | None = None,
        **content: Any,
    ) -> bytes:
        """Return what the endpoint gives for another path; retried as requests are. Raises UsageError if it refuses.

        `done` returns before a retry what an attempt has done whose answer was lost. `absent` is returned if the
        endpoint does not have the path.
        """
        problem, (base, _, query) = "", self.endpoint.url.partition("?")
        address = f"{base}/{path}" + (f"{'&' if '?' in path else '?'}{query}" if query else "")
        headers = {name: each for name, each in self._headers.items() if name != "Content-Type"}
        for attempt in range(self.endpoint.max_retries + 1):
            wait = 0.0
            if attempt and done is not None and (found := await done()) is not None:
                return found
            try:
                async with asyncio.timeout(self.endpoint.timeout_s):
                    with self._connection() as client:
                        got = await client.request(method, address, headers=headers, **content)
            except (TimeoutError, httpx.TransportError, httpx.DecodingError) as error:
                if isinstance(error, httpx.TransportError):
                    problem = self._broken(error, attempt)
                else:
                    problem = str(error) or "timeout"
            else:
                body = self.key.clean_bytes(got.content)
                if got.status_code == 200:
                    self._answered = True
                    return body
                if got.status_code in (404, 405) and absent is not None:
                    return absent
                self._check_quota(Response(got.status_code, got.headers, body))
                problem, wait = f"http_{got.status_code}: {message_of(body)[1]}", retry_after(got.headers)
                if got.status_code not in RETRIED and got.status_code < 500:
                    break
            if attempt < self.endpoint.max_retries:
                await asyncio.sleep(wait + random.uniform(0, min(LONGEST_PAUSE_S, PAUSE_S * 2**attempt)))
        raise UsageError(f"{self.endpoint.url}: {method} {path}: {self.key.clean(problem)}")

    def _answer(self, got: Response) -> Answer | None:
        """Return what a row gets from a response; None if the request is worth another attempt."""
        if got.status == 200:
            self._answered = True
            return read_answer(self.endpoint, got.content)
        self._check_quota(got)
        if got.status in RETRIED or got.status >= 500:
            return None
        self._check_fatal(got)
        self._answered = True
        return refused_row(got.status, got.content)

    async def _send(self, body: bytes, name: str) -> Response:
        """Send a request and read the response, of redirects to the same host the last one."""
        address = self._address
        for _ in range(MOST_REDIRECTS + 1):
            headers, content = {**self._headers, "X-Request-Id": name}, bytearray()
            with self._connection() as client:
                request = client.build_request("POST", address, content=body, headers=headers)
                response = await client.send(request, stream=True)
                try:
                    async for piece in response.aiter_bytes():
                        content += piece
                        if len(content) > MOST_BYTES:
                            raise Cut(f"it is longer than {MOST_BYTES:,} bytes: {shown(bytes(content))}")
                finally:
                    await response.aclose()
            headers = {each.lower(): value for each, value in response.headers.items()}
            if response.status_code not in (301, 302, 303, 307, 308):
                return Response(response.status_code, headers, self.key.clean_bytes(bytes(content)))
            address = self._redirected(address, response.status_code, headers.get("location", ""))
        raise UsageError(
            f"{self.endpoint.url}: more than {MOST_REDIRECTS} redirects. Give the address of the endpoint."
        )

    def _redirected(self, address: str, status: int, location: str) -> str:
        """Return where a redirect leads. Raises UsageError unless that is the same host and the request may be sent."""
        try:
            there, here = urlsplit(urljoin(address, location)), urlsplit(address)
        except ValueError:
            raise UsageError(f"{self.endpoint.url}: it redirects to an address that cannot be read.") from None
        if (there.scheme, there.netloc) != (here.scheme, here.netloc):
            raise UsageError(
                f"{self.endpoint.url}: it redirects to another host, {there.scheme}://{there.hostname}, which is "
                "refused: the key and the rows are for the host that was named. Give the address of the endpoint."
            )
        if status not in (307, 308):
            raise UsageError(
                f"{self.endpoint.url}: it redirects to {self.key.clean(there.path)} with the status {status}, which "
                "drops the request. Give the address of the endpoint."
            )
        return there.geturl()

    def _check_fatal(self, got: Response) -> None:
        """Raise UsageError for a response that each row would get."""
        code, message = message_of(got.content)
        said = self.key.clean(f"{got.status}: {message}")
        if got.status in (401, 403):
            key = self.endpoint.key_env
            which = "has no key: name its variable with key_env" if key is None else f"has the key in {key}"
            raise UsageError(f"{self.endpoint.url}: the endpoint refuses the request, which {which}. It says {said}")
        words = message.lower()
        named = self.endpoint.model.lower() in words and "model" in words
        if "model_not_found" in code.lower() or (
            got.status in (400, 404) and named and any(each in words for each in NO_MODEL)
        ):
            raise UsageError(
                f"{self.endpoint.url}: the endpoint has no model {self.endpoint.model!r} for {self.endpoint.api}. It "
                f"says {said}"
            )
        if got.status in (404, 405) and not self._answered:
            raise UsageError(
                f"{self.endpoint.url}: there is nothing at {urlsplit(self._address).path}. It says {said} Give the "
                "address before it, such as https://host/v1."
            )

    def _check_quota(self, got: Response) -> None:
        """Raise LimitReached if waiting is not worth it."""
        (code, message), wait = message_of(got.content), retry_after(got.headers)
        if got.status == 402 or code.lower() in QUOTA or wait > LONGEST_WAIT_S:
            after = f", and asks to wait {wait / 3600:.1f} hours" if wait > LONGEST_WAIT_S else ""
            raise LimitReached(
                f"{self.endpoint.url}: the endpoint's own limit is reached{after}: {self.key.clean(message)} "
                "Finished rows are kept; run the same command again later."
            )

    def _broken(self, error: httpx.TransportError, attempt: int) -> str:
        """Return the problem of a connection. Raises UsageError if it is none of this request."""
        said = self.key.clean(str(error) or type(error).__name__)
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ssl.SSLCertVerificationError):
                raise UsageError(
                    f"{self.endpoint.url}: the certificate is not trusted: {cause.verify_message}. For a private "
                    "authority set SSL_CERT_FILE."
                ) from None
            cause = cause.__cause__ or cause.__context__
        unreached = isinstance(error, UNSENT) and not self._answered
        if unreached and attempt + 1 >= min(UNREACHED, self.endpoint.max_retries + 1):
            raise UsageError(f"{self.endpoint.url}: no connection: {said}. Is this the address, and does it run?")
        return f"connection: {said}"
