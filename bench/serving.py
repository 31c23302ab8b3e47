"""What does a request of one text cost a server, at 1, 8 and 64 connections, beside other servers of the same encoder?

MiniLM, reviews of mixed length, one text a request to /embed, fp32, one thread. All servers run; in each round each
contender answers in turn, and the first round does not count. CPU milliseconds of the server's process tree for a
request, the lowest of the rounds: the load of the machine does not count. `predict` is the same work without a server:
rows of the same texts in one call. `memory` is the tree's, in MB, at the end. `ready`: seconds of CPU until the first
answer. With `--overload SECONDS` torchlake alone gets twice the requests that it can answer, at fixed times, each on a
new connection: how many it answers in a second beside its maximum, and the waits of those that it answers and refuses.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow.parquet as pq
from _common import SCRATCH, finish, minilm, parser, reviews
from _contender import ONE_THREAD
from _environments import python_of

os.environ.update(ONE_THREAD, TOKENIZERS_PARALLELISM="false")
PEERS = {"sentence-transformers in FastAPI": ("main", "sentence_fastapi"), "LitServe": ("litserve", "litserve")}
WAIT_S = 180
REQUEST = b"POST /embed HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


def main() -> None:
    options = parser(__doc__ or "", rounds=3, requests=256, overload=0)
    given = options.parse_args()
    texts = pq.read_table(reviews() / "test.parquet")["text"].to_pylist()[: given.requests]
    servers = dict(start({} if given.overload else PEERS))
    try:
        if given.overload:
            _, port = servers["torchlake"]
            row = asyncio.run(overload(port, texts, given.overload))
            finish("serving_overload", [row], as_json=given.json, note=__doc__ or "")
            return
        rows = [{"name": name, "ready": seconds(process), "lowest": {}} for name, (process, _) in servers.items()]
        for number in range(given.rounds + 1):
            for row in rows:
                process, port = servers[row["name"]]
                for connections in (1, 8, 64):
                    sent = texts[: max(32, len(texts) // 4)] if connections == 1 else texts
                    before = seconds(process)
                    size, waits = asyncio.run(load(port, connections, sent))
                    used = (seconds(process) - before) / len(sent) * 1e3
                    if number:
                        note(row["lowest"], connections, used, waits)
                    row["bytes"] = size
        for row in rows:
            process, _ = servers[row["name"]]
            row["memory"] = sum(one.memory_info().rss for one in tree(process)) / 1e6
            row |= row.pop("lowest")
    finally:
        for process, _ in servers.values():
            process.send_signal(signal.SIGTERM)
        for process, _ in servers.values():
            process.wait(60)
    finish("serving", [*rows, in_one_call(texts, given.rounds)], as_json=given.json, note=__doc__ or "")


def note(lowest: dict[str, float], connections: int, used: float, waits: list[float]) -> None:
    """Keep the lowest CPU time, and the milliseconds of half of all answers in that round."""
    name = f"ms at {connections}"
    if used < lowest.get(name, float("inf")):
        lowest[name], lowest[f"p50 at {connections}"] = used, sorted(waits)[len(waits) // 2] * 1e3


def start(peers: dict[str, tuple[str, str]]) -> list[tuple[str, tuple[subprocess.Popen[bytes], int]]]:
    """Start torchlake and every peer that can be started, and wait until each answers."""
    folder, found = minilm(), []
    commands: dict[str, list[str]] = {}
    for name, (environment, function) in {"torchlake": ("main", ""), **peers}.items():
        python, port = python_of(environment), str(free_port())
        if isinstance(python, str):
            print(f"{name}: {python}", file=sys.stderr)
            continue
        own = ["-m", "torchlake", "serve", str(folder), "--task", "feature_extraction", "--quiet", "--port", port]
        peer = [str(Path(__file__).with_name("_serving_peers.py")), function, str(folder), port]
        commands[name] = [str(python), *(peer if function else own)]
    SCRATCH.mkdir(exist_ok=True)
    for name, command in commands.items():
        log = (SCRATCH / "serving.log").open("ab")
        process, port = subprocess.Popen(command, stdout=log, stderr=log), int(command[-1])
        ends = time.monotonic() + WAIT_S
        while not answers(port):
            if process.poll() is not None or time.monotonic() > ends:
                raise SystemExit(f"{name} does not start: {SCRATCH / 'serving.log'}")
            time.sleep(0.1)
        found.append((name, (process, port)))
    return found


def answers(port: int) -> bool:
    try:
        asyncio.run(load(port, 1, ["a film"]))
    except (OSError, AssertionError, asyncio.IncompleteReadError):
        return False
    return True


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def tree(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    root = psutil.Process(process.pid)
    return [root, *root.children(recursive=True)]


def seconds(process: subprocess.Popen[bytes]) -> float:
    """CPU seconds of a server with its children."""
    return sum(one.cpu_times().user + one.cpu_times().system for one in tree(process))


async def load(port: int, connections: int, texts: list[str]) -> tuple[int, list[float]]:
    """Send each text once over a number of connections; return the bytes of a reply, and the seconds of each answer."""
    left, size, waits = list(reversed(texts)), 0, []

    async def client() -> None:
        nonlocal size
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while left:
            body = json.dumps({"inputs": left.pop()}).encode()
            began = time.perf_counter()
            writer.write(REQUEST % len(body) + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200"), answer
            (length,) = (line for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            size = len(await reader.readexactly(int(length.split(b":")[1])))
            waits.append(time.perf_counter() - began)
        writer.close()

    await asyncio.gather(*(client() for _ in range(connections)))
    return size, waits


async def overload(port: int, texts: list[str], seconds: int) -> dict[str, object]:
    """Find the most answers in a second, and send twice as many requests for some seconds."""
    await load(port, 64, texts)
    began = time.perf_counter()
    await load(port, 64, texts * 2)
    most, waits = 2 * len(texts) / (time.perf_counter() - began), {200: [0.0], 429: [0.0]}

    async def request(text: str) -> None:
        asked = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST % (len(body := json.dumps({"inputs": text}).encode())) + body)
        status = int((await reader.readuntil(b"\r\n\r\n")).split()[1])
        waits[status].append(time.perf_counter() - asked)
        writer.close()

    began, tasks = time.perf_counter(), []
    for number in range(int(2 * most * seconds)):
        await asyncio.sleep(began + number / (2 * most) - time.perf_counter())
        tasks.append(asyncio.create_task(request(texts[number % len(texts)])))
    await asyncio.gather(*tasks)
    taken = time.perf_counter() - began
    found: dict[str, object] = {"name": "torchlake", "most/s": most, "goodput/s": (len(waits[200]) - 1) / taken}
    for status, each in waits.items():
        found |= {f"{status}": len(each) - 1, f"p99 of {status}, ms": sorted(each)[len(each) * 99 // 100] * 1e3}
    return found


def in_one_call(texts: list[str], rounds: int) -> dict[str, object]:
    """The same rows without a server, and from 64 threads that share a loaded model."""
    from concurrent.futures import ThreadPoolExecutor

    import torchlake as tl

    model, lowest = tl.load(minilm(), task="feature_extraction"), [float("inf")] * 2
    with ThreadPoolExecutor(64) as threads:
        for _ in range(rounds + 1):
            for at, work in enumerate((lambda: model(texts), lambda: list(threads.map(model, texts)))):
                began = time.process_time()
                work()
                lowest[at] = min(lowest[at], (time.process_time() - began) / len(texts) * 1e3)
    return {"name": "tl.load, no server", "one call": lowest[0], "64 threads": lowest[1]}


if __name__ == "__main__":
    main()
