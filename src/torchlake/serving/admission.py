"""Who is answered: the token, the limits that refuse a request, and the body within them.

Limits on headers and connections are in `connections.py`, that on rows in `exchange.py`.
"""

import asyncio
import hmac
from typing import Any

from starlette.requests import ClientDisconnect

from torchlake.serving.exchange import Refused
from torchlake.serving.options import ServeOptions
from torchlake.serving.service import Service


def admit(service: Service, headers: dict[bytes, bytes], *, open_route: bool) -> None:
    """Raise Refused, before the body is read, for a request without the token (401), while the model hangs (503) or
    there is no room (429), and for a body that is coded (501, 415).

    An open route needs no token, and always has room.
    """
    if not open_route:
        _check_token(service.options, headers)
        if service.hung is not None:
            raise Refused(503, service.hung)
        _check_room(service)
    if headers.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
        raise Refused(501, "transfer-encoding: send the body as it is, or chunked")
    if headers.get(b"content-encoding", b"").lower() not in (b"", b"identity"):
        raise Refused(415, "content-encoding: send the body as it is, without compression")


def _check_token(options: ServeOptions, headers: dict[bytes, bytes]) -> None:
    if options.api_key is None:
        return
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"bearer" or not hmac.compare_digest(token.strip(), options.api_key.encode()):
        raise Refused(401, "send the header authorization: Bearer KEY")


def _check_room(service: Service) -> None:
    options, waiting = service.options, service.model.batcher.queued_tokens
    if len(service.tasks) > options.max_requests:
        raise Refused(429, f"{options.max_requests:,} requests are in flight (--max-requests)")
    if waiting >= options.max_queued_tokens:
        raise Refused(429, f"{waiting:,} tokens are waiting (--max-queued-tokens)")


async def read_body(receive: Any, headers: dict[bytes, bytes], options: ServeOptions) -> bytes:
    """Return the body. Raises Refused for one that is too large (413) or takes too long (408), and ClientDisconnect."""
    limit = options.body_bytes
    too_large = Refused(413, f"the body is larger than {limit:,} bytes (--max-body)")
    if int(headers.get(b"content-length", b"0") or 0) > limit:
        raise too_large
    pieces, size = [], 0
    try:
        async with asyncio.timeout(options.read_timeout):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                pieces.append(message.get("body", b""))
                size += len(pieces[-1])
                if size > limit:
                    raise too_large
                if not message.get("more_body", False):
                    return b"".join(pieces)
    except TimeoutError:
        raise Refused(408, f"the body did not arrive within {options.read_timeout:g} seconds") from None
