"""Batches of requests: a file of them is uploaded, the endpoint works on it within a day, and its answers are fetched.

    POST files -> POST batches -> GET batches/ID until it has ended -> GET files/ID/content, of answers and of errors

Hosted models take half the price for it. A batch that was begun is found again by its id.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from torchlake.errors import UsageError
from torchlake.runtimes._http.answers import Answer, message_of, read_answer, refused_row
from torchlake.runtimes._http.client import Client
from torchlake.runtimes._http.requests import PATHS

POLL_S = 30.0
ENDED = ("completed", "failed", "expired", "cancelled")
WINDOW = "24h"


async def run_batch(
    client: Client, bodies: Mapping[int, bytes], known: str | None, begin: Callable[[str], None]
) -> dict[int, Answer]:
    """Return the answers to requests by row, of the batch `known` or of a new one, whose id `begin` gets.

    Rows that the batch did not come to have no answer. Raises UsageError for a batch that the endpoint does not take.
    """
    name = known or await _start(client, list(bodies.items()))
    if known is None:
        begin(name)
    while (state := await client.call("GET", f"batches/{name}"))["status"] not in ENDED:
        await asyncio.sleep(POLL_S)
    if state["status"] == "failed" and not state.get("output_file_id"):
        if known is not None:  # of an attempt before, which has said why; its rows are asked again
            return {}
        problems = (state.get("errors") or {}).get("data") or [{}]
        raise UsageError(f"{client.endpoint.url}: batch {name} failed: {client.clean(str(problems[0].get('message')))}")
    answers: dict[int, Answer] = {}
    for file in (state.get("error_file_id"), state.get("output_file_id")):
        if file:
            for line in (await client.fetch(f"files/{file}/content")).splitlines():
                row, answer = _answer(client, line)
                if row in bodies:
                    answers[row] = client.cleaned(answer, answer.request_id or name)
    return answers


async def _start(client: Client, bodies: Sequence[tuple[int, bytes]]) -> str:
    """Upload requests, and return the id of their batch."""
    path = f"{urlsplit(client.endpoint.url).path}/{PATHS[client.endpoint.api]}"
    path = path[path.rfind("/v1/") :] if "/v1/" in path else path
    head = f'"method":"POST","url":{json.dumps(path)},"body":'.encode()
    lines = b"".join(b'{"custom_id":"%d",%s%s}\n' % (row, head, body) for row, body in bodies)
    files = {"file": ("requests.jsonl", lines, "application/jsonl")}
    uploaded = await client.call("POST", "files", files=files, data={"purpose": "batch"})
    value = {"input_file_id": uploaded["id"], "endpoint": path, "completion_window": WINDOW}
    return str((await client.call("POST", "batches", json=value))["id"])


def _answer(client: Client, line: bytes) -> tuple[int, Answer]:
    """Return the row and the answer in a line of a file of results."""
    try:
        value: Any = json.loads(line)
        row = int(value["custom_id"])
        got = value.get("response") or {}
        status, content = got.get("status_code"), json.dumps(got.get("body") or {}).encode()
        problem = value.get("error")
    except (ValueError, KeyError, TypeError, AttributeError):
        return -1, Answer()
    if problem:
        return row, Answer(error=f"batch: {message_of(json.dumps({'error': problem}).encode())[1]}", final=False)
    answer = read_answer(client.endpoint, content) if status == 200 else refused_row(int(status or 0), content)
    return row, replace(answer, request_id=got.get("request_id"), final=status is not None and status < 500)
