"""Does a server that gets twice the requests that it can answer still answer as many, and refuse the others at once?

MiniLM, reviews, one text a request to /embed, fp32, one thread, room for 64 requests (--max-requests). Twice as many
requests as 63 clients get answered are sent at fixed times: on connections that are used again, as HTTP clients with a
session do, or each on a new one, in both the clients' load and the overload. `goodput` are the answers in a second, and
for a second of the server's CPU, `most` those of 63 clients: on a busy machine only the latter say something.
`p99 idle`: /health at the same times before it, which shows the waits that the machine itself makes. `bound`: the time
in which `most` answers the requests for which there is room.
"""

import asyncio
import os
import time
from collections import defaultdict
from itertools import count
from typing import Any

import pyarrow.parquet as pq
from _common import finish, parser, reviews
from _contender import ONE_THREAD
from _serving_load import answer, load, request, seconds
from serving import OWN, Started, end, start

os.environ.update(ONE_THREAD, TOKENIZERS_PARALLELISM="false")
ROOM = 64


def main() -> None:
    options = parser(__doc__ or "", seconds=20, rounds=3, requests=256)
    given = options.parse_args()
    texts = pq.read_table(reviews() / "test.parquet")["text"].to_pylist()[: given.requests]
    servers = start({"torchlake": OWN}, "--max-requests", str(ROOM))
    try:
        server = servers["torchlake"]
        asyncio.run(load(OWN, server.port, ROOM, texts))
        rows = [
            {"name": f"round {number + 1}, {name}", **asyncio.run(overload(server, texts, given.seconds, again=again))}
            for number in range(given.rounds)
            for name, again in (("connections used again", True), ("new connections", False))
        ]
    finally:
        end(servers)
    finish("serving_overload", rows, as_json=given.json, note=__doc__ or "")


async def overload(server: Started, texts: list[str], for_s: int, *, again: bool) -> dict[str, Any]:
    """Find the most answers in a second, and send twice as many requests for some seconds."""
    process, port = server.process, server.port
    health, posts = [request("/health", "", "GET")], [request(OWN.path, body) for body in OWN.bodies(texts)]
    used, began = seconds(process), time.perf_counter()
    answers = await in_turn(Connections(port, again=again), posts, for_s / 2)
    most, most_of_cpu = answers / (time.perf_counter() - began), answers / (seconds(process) - used)
    idle = await at_fixed_times(Connections(port, again=again), health, 2 * most, min(5, for_s))
    used, began = seconds(process), time.perf_counter()
    waits = await at_fixed_times(Connections(port, again=again), posts, 2 * most, for_s)
    taken, used = time.perf_counter() - began, seconds(process) - used
    found = {"most/s": most, "goodput/s": len(waits[200]) / taken}
    found |= {"most/CPU s": most_of_cpu, "goodput/CPU s": len(waits[200]) / used, "bound, ms": ROOM / most * 1e3}
    for name, each in (("idle", idle[200]), *sorted(waits.items())):
        found |= {f"{name}": len(each), f"p50 of {name}, ms": percentile(each, 50)}
        found[f"p99 of {name}, ms"] = percentile(each, 99)
    return found


def percentile(waits: list[float], share: int) -> float:
    return sorted(waits)[len(waits) * share // 100] * 1e3


class Connections:
    """Connections to a server: a request takes one that is free, or a new one."""

    def __init__(self, port: int, *, again: bool) -> None:
        self.port, self.again = port, again
        self.free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def send(self, sent: bytes) -> int:
        """Return the status of the answer."""
        one = self.free.pop() if self.free else await asyncio.open_connection("127.0.0.1", self.port)
        one[1].write(sent)
        status, _ = await answer(one[0])
        if self.again and status in (200, 429):  # the server closes others
            self.free.append(one)
        else:
            one[1].close()
        return status

    def close(self) -> None:
        for _, writer in self.free:
            writer.close()


async def in_turn(connections: Connections, requests: list[bytes], for_s: float) -> int:
    """Let one client less than there is room for send a request after the other; return the number of answers."""
    ends, at, statuses = time.perf_counter() + for_s, count(), []

    async def client() -> None:
        while time.perf_counter() < ends:
            statuses.append(await connections.send(requests[next(at) % len(requests)]))

    await asyncio.gather(*(client() for _ in range(ROOM - 1)))
    connections.close()
    assert set(statuses) == {200}, set(statuses)
    return len(statuses)


async def at_fixed_times(
    connections: Connections, requests: list[bytes], rate: float, for_s: int
) -> dict[int, list[float]]:
    """Send requests in turn, `rate` in a second, whether they are answered or not; return the waits of each status."""
    waits: dict[int, list[float]] = defaultdict(list)

    async def one(sent: bytes) -> None:
        asked = time.perf_counter()
        status = await connections.send(sent)
        waits[status].append(time.perf_counter() - asked)

    began, tasks = time.perf_counter(), []
    for number in range(int(rate * for_s)):
        await asyncio.sleep(began + number / rate - time.perf_counter())
        tasks.append(asyncio.create_task(one(requests[number % len(requests)])))
    await asyncio.gather(*tasks)
    connections.close()
    return waits


if __name__ == "__main__":
    main()
