"""Batches of requests: a file of them is uploaded, the endpoint works on it within a day, and its answers are fetched.

    POST files -> POST batches -> GET batches/ID until it has ended -> GET files/ID/content, of answers and of errors

Hosted models take half the price for it. A batch that was begun is found again by its id, or by that of its file.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from torchlake.errors import UsageError
from torchlake.runtimes._http.answers import Answer, message_of, read_answer, refused_row
from torchlake.runtimes._http.client import Client
from torchlake.runtimes._http.requests import PATHS, Begun, Note

POLL_S = 30.0
ENDED = ("completed", "failed", "expired", "cancelled")
WINDOW = "24h"
PAGE = 100


async def run_batch(client: Client, bodies: Mapping[int, bytes], known: Begun | None, note: Note) -> dict[int, Answer]:
    """Return the answers to requests by row, of the batch `known` or of a new one, which `note` gets.

    Rows that the batch did not come to have no answer. Raises UsageError for a batch that the endpoint does not take.
    """
    begun = known
    if begun is None:
        note(begun := Begun(await _upload(client, list(bodies.items()))))
    if not begun.batch:
        found = None if known is None else await _find(client, begun.file)
        state = await _begin(client, begun.file) if found is None else json.loads(found)
        note(begun := Begun(begun.file, str(state["id"])))
    name = begun.batch
    while (state := await client.call("GET", f"batches/{name}", "status"))["status"] not in ENDED:
        await asyncio.sleep(POLL_S)
    if state["status"] == "failed" and not state.get("output_file_id"):
        if known is not None:  # of an attempt before, which has said why; its rows are asked again
            return {}
        why = message_of(json.dumps(_first(state.get("errors"))).encode())[1]
        raise UsageError(f"{client.endpoint.url}: batch {name} failed: {client.key.clean(why)}")
    answers: dict[int, Answer] = {}
    for file in (state.get("error_file_id"), state.get("output_file_id")):
        if file:
            for line in (await client.fetch(f"files/{file}/content")).splitlines():
                row, answer = _answer(client, line)
                if row in bodies:
                    answers[row] = client.key.clean_answer(answer, answer.request_id or name)
    return answers


def _first(errors: Any) -> Any:
    """Return the first of the errors of a batch, or what stands in their place."""
    data = errors.get("data") if isinstance(errors, dict) else errors
    return data[0] if isinstance(data, list) and data else data


def _path(client: Client) -> str:
    """Return the path of requests in files."""
    path = f"{urlsplit(client.endpoint.url).path}/{PATHS[client.endpoint.api]}"
    return path[path.rfind("/v1/") :] if "/v1/" in path else path


async def _upload(client: Client, bodies: Sequence[tuple[int, bytes]]) -> str:
    """Upload requests, and return the id of their file."""
    head = f'"method":"POST","url":{json.dumps(_path(client))},"body":'.encode()
    lines = b"".join(b'{"custom_id":"%d",%s%s}\n' % (row, head, body) for row, body in bodies)
    files = {"file": ("requests.jsonl", lines, "application/jsonl")}
    return str((await client.call("POST", "files", "id", files=files, data={"purpose": "batch"}))["id"])


async def _begin(client: Client, file: str) -> dict[str, Any]:
    """Begin a batch, once: if an answer was lost, it is looked for before the request is sent again."""
    value = {"input_file_id": file, "endpoint": _path(client), "completion_window": WINDOW}
    return await client.call("POST", "batches", "id", json=value, done=partial(_find, client, file))


async def _find(client: Client, file: str) -> bytes | None:
    """Return the batch of a file; None if there is none, or if the endpoint has no list of batches."""
    after = ""
    while True:
        page = await client.call("GET", f"batches?limit={PAGE}{after}", absent=b"{}")
        batches = page.get("data") or []
        found = next((one for one in batches if one.get("input_file_id") == file), None)
        if found is not None or not batches or not page.get("has_more"):
            return None if found is None else json.dumps(found).encode()
        after = f"&after={batches[-1]['id']}"


def _answer(client: Client, line: bytes) -> tuple[int, Answer]:
    """Return the row and the answer in a line of a file of results."""
    try:
        value: Any = json.loads(line)
        row = int(value["custom_id"])
        got = value.get("response") or {}
        status, content = got.get("status_code"), json.dumps(got.get("body") or {}).encode()
        problem = value.get("error")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return -1, Answer()
    status = int(str(status)) if str(status).isdecimal() else 0
    if problem:
        return row, Answer(error=f"batch: {message_of(json.dumps({'error': problem}).encode())[1]}", final=False)
    answer = read_answer(client.endpoint, content) if status == 200 else refused_row(status, content)
    return row, replace(answer, request_id=got.get("request_id"), final=0 < status < 500)
