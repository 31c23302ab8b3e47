"""Requests to a server, from Python over one or many connections, or by wrk; and the CPU time of the server."""

import asyncio
import json
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil


class Peer(NamedTuple):
    """A server: environment and function of `_serving_peers.py` ("": torchlake), route, and the body of a request."""

    environment: str = "main"
    function: str = ""
    path: str = "/embed"
    body: str = '{"inputs": %s}'

    def bodies(self, texts: list[str]) -> list[str]:
        """Return the body of the request of each text."""
        return [self.body % json.dumps(text) for text in texts]


def request(path: str, body: str, method: str = "POST") -> bytes:
    """Return a request as bytes."""
    sent = body.encode()
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(sent)}\r\n\r\n"
    )
    return head.encode() + sent


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Return the status and body of a response."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    (length,) = (line for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
    return int(head.split()[1]), await reader.readexactly(int(length.split(b":")[1]))


async def load(peer: Peer, port: int, connections: int, texts: list[str]) -> tuple[list[bytes], list[float]]:
    """Send each text once over a number of connections; return the replies in the texts' order, and their seconds."""
    left, replies, waits = list(enumerate(peer.bodies(texts)))[::-1], [b""] * len(texts), []

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while left:
            at, body = left.pop()
            began = time.perf_counter()
            writer.write(request(peer.path, body))
            status, replies[at] = await answer(reader)
            assert status == 200, replies[at]
            waits.append(time.perf_counter() - began)
        writer.close()

    await asyncio.gather(*(client() for _ in range(connections)))
    return replies, waits


def vector(reply: bytes) -> list[float]:
    """Return the first list of numbers in a JSON text: each protocol puts it elsewhere."""

    def found(value: Any) -> Any:
        if isinstance(value, list) and value and isinstance(value[0], float):
            return value
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return next((one for one in map(found, inner) if one), None)

    numbers: list[float] = found(json.loads(reply))
    return numbers


WRK = """
local bodies, at = {}, 0
for line in io.lines("%s") do bodies[#bodies + 1] = line end
wrk.method, wrk.headers["content-type"] = "POST", "application/json"
request = function()
  at = at %% #bodies + 1
  return wrk.format(nil, "%s", nil, bodies[at])
end
done = function(summary, latency)
  print(string.format("[%%d, %%d, %%d]", summary.requests, summary.errors.status, latency:percentile(50)))
end
"""


def with_wrk(peer: Peer, port: int, connections: int, texts: list[str], for_s: int, folder: Path) -> tuple[int, float]:
    """Send the texts in turn for some seconds; return the number of answers, and half of all answers' seconds."""
    (folder / "bodies").write_text("\n".join(peer.bodies(texts)) + "\n")
    (folder / "wrk.lua").write_text(WRK % (folder / "bodies", peer.path))
    options = ["-t", "1", "-c", str(connections), "-d", str(for_s), "--timeout", "60"]
    command = ["wrk", *options, "-s", str(folder / "wrk.lua"), f"http://127.0.0.1:{port}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    number, wrong, half = json.loads(done.stdout.splitlines()[-1])
    assert wrong == 0, done.stdout
    return number, half / 1e6


def tree(process: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    """The process of a server with its children."""
    root = psutil.Process(process.pid)
    return [root, *root.children(recursive=True)]


def seconds(process: "subprocess.Popen[bytes]") -> float:
    """CPU seconds of a server with its children."""
    return sum(one.cpu_times().user + one.cpu_times().system for one in tree(process))
