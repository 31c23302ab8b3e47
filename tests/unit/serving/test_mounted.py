"""Each option of an app that another server runs: it has its effect, or is refused with the word what to do."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import pytest

import tiny
import torchlake as tl
from serving_runs import Stuck
from torchlake.serving import service as service_module
from torchlake.serving.options import ServeOptions
from torchlake.serving.service import Service

OF_A_PROCESS = {"host": "127.0.0.2", "port": 8081, "processes": 2, "drain_delay": 1.0, "drain_timeout": 1.0}
Client = httpx.AsyncClient


async def post(client: Client, *texts: str, path: str = "/predict") -> int:
    return (await client.post(path, json={"inputs": list(texts)})).status_code


async def name(client: Client, service: Service) -> None:
    assert (await client.get("/info")).json()["model_id"] == "reviews"


async def max_body(client: Client, service: Service) -> None:
    assert await post(client, "good film") == 413


async def max_rows(client: Client, service: Service) -> None:
    assert (await post(client, "good"), await post(client, "good", "film")) == (200, 422)


async def max_requests(client: Client, service: Service) -> None:
    assert sorted(await asyncio.gather(post(client, "good"), post(client, "good"))) == [200, 429]


async def max_queued_tokens(client: Client, service: Service) -> None:
    service.model.batcher.queued_tokens = 1
    assert await post(client, "good") == 429


async def late(client: Client, service: Service) -> None:
    """A request while the model computes another one."""
    stuck = Stuck(service.model.batcher)
    if service.options.row_timeout < 1:
        given_up = await client.post("/invocations", json={"instances": ["good"]})
        assert given_up.json()["predictions"][0]["error"].startswith("timeout: ")
        assert (await client.get("/health")).status_code == 503
        stuck.permit.set()
    else:
        first = asyncio.create_task(service.model.acall(["good"]))  # which waits in the queues without a limit
        assert await asyncio.to_thread(stuck.entered.wait, 30)
        assert await post(client, "good") == 503
        stuck.permit.set()
        assert (await first)[0]["error"] is None


async def read_timeout(client: Client, service: Service) -> None:
    never = asyncio.Event()

    async def slow() -> Any:
        yield b"{"
        await never.wait()

    assert (await client.post("/predict", content=slow())).status_code == 408


async def truncate(client: Client, service: Service) -> None:
    assert (await post(client, "good"), await post(client, "good " * 200)) == (200, 422)


async def reload(client: Client, service: Service) -> None:
    before = (await client.get("/info")).json()["model_sha"]
    link = Path(service.source)
    (link.parent / "next").symlink_to(link.parent / "new")
    (link.parent / "next").rename(link)
    async with asyncio.timeout(120):
        while (await client.get("/info")).json()["model_sha"] == before:
            await asyncio.sleep(0.01)


async def api_key(client: Client, service: Service) -> None:
    assert (await post(client, "good"), (await client.get("/metrics")).status_code) == (401, 401)


async def open_metrics(client: Client, service: Service) -> None:
    assert (await post(client, "good"), (await client.get("/metrics")).status_code) == (401, 200)


async def allow_origin(client: Client, service: Service) -> None:
    answer = await client.get("/health", headers={"origin": "https://a.example"})
    assert answer.headers["access-control-allow-origin"] == "https://a.example"


async def page(client: Client, service: Service) -> None:
    assert "<form" in (await client.get("/")).text


HONORED: dict[str, tuple[dict[str, Any], Callable[[Client, Service], Awaitable[None]]]] = {
    "name": ({"name": "reviews"}, name),
    "max_body": ({"max_body": "10B"}, max_body),
    "max_rows": ({"max_rows": 1}, max_rows),
    "max_requests": ({"max_requests": 1}, max_requests),
    "max_queued_tokens": ({"max_queued_tokens": 1}, max_queued_tokens),
    "queue_timeout": ({"queue_timeout": 0.05}, late),
    "row_timeout": ({"row_timeout": 0.2}, late),
    "read_timeout": ({"read_timeout": 0.05}, read_timeout),
    "truncate": ({"truncate": False}, truncate),
    "reload": ({"reload": True}, reload),
    "api_key": ({"api_key": "secret"}, api_key),
    "open_metrics": ({"api_key": "secret", "open_metrics": True}, open_metrics),
    "allow_origin": ({"allow_origin": ("https://a.example",)}, allow_origin),
    "page": ({"page": True}, page),
}


@pytest.mark.parametrize("option", [field.name for field in fields(ServeOptions)])
def test_each_option_is_honored_or_refused(
    tiny_model: Path, tiny_bert: Path, tmp_path: Path, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if option in OF_A_PROCESS:
        with pytest.raises(tl.errors.UsageError, match=f"^{option}: give it to the server that runs the app"):
            tl.serving.app(tiny_model, options=ServeOptions(**{option: OF_A_PROCESS[option]}))
        return
    monkeypatch.setattr(service_module, "LOOK_S", 0.01)
    (link := tmp_path / "model").symlink_to(tiny_model)
    if option == "reload":
        tiny.build_model(tmp_path / "new", encoder=tiny_bert, seed=1)
    options, check = HONORED[option]
    app = tl.serving.app(link, options=ServeOptions(**options))

    async def run() -> None:
        async with Client(transport=httpx.ASGITransport(app), base_url="http://model") as client:
            await check(client, app.state.service)

    asyncio.run(run())
    app.state.service.model.close()
