"""What does a request of one text cost a server, at 1, 8 and 64 connections, beside other servers of the same encoder?

MiniLM, reviews of mixed length, one text a request, fp32, one thread. All servers run; in each round each contender
answers in turn, and the first round does not count. `ms`: CPU milliseconds of the server's process tree for a request,
the lowest of the rounds, so the load of the machine does not count. `predict` is the same work without a server: rows
of the same texts in one call. `memory` is the tree's, in MB, at the end. `ready` and `ready cpu`: seconds, and seconds
of CPU, until the first answer, the lower of two starts. `difference`: the largest one between a number of a vector and
that of `tl.load`, both vectors of length 1. With `--wrk SECONDS` wrk sends the requests, for so long each time, in
place of Python.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
from _common import SCRATCH, finish, minilm, parser, reviews
from _contender import ONE_THREAD
from _environments import python_of
from _serving_load import Peer, load, seconds, tree, vector, with_wrk

os.environ.update(ONE_THREAD, TOKENIZERS_PARALLELISM="false")
OWN = Peer()
PEERS = {
    "torchlake": OWN,
    "sentence-transformers in FastAPI": Peer(function="sentence_fastapi"),
    "transformers' pipeline in FastAPI": Peer(function="pipeline_fastapi"),
    "LitServe": Peer("litserve", "litserve"),
    "infinity": Peer("infinity", "infinity", "/embeddings", '{"input": %s, "model": "minilm"}'),
    "MLflow's server": Peer(function="mlflow", path="/invocations", body='{"inputs": [%s]}'),
}
WAIT_S = 180
COMPARED = 32


class Started(NamedTuple):
    """A server that has answered once; the seconds, and those of CPU, that it took."""

    process: subprocess.Popen[bytes]
    port: int
    ready: float
    cpu: float


def main() -> None:
    options = parser(__doc__ or "", rounds=3, requests=256, wrk=0)
    given = options.parse_args()
    texts = pq.read_table(reviews() / "test.parquet")["text"].to_pylist()[: given.requests]
    alone, expected = in_one_call(texts, given.rounds)
    first = start(PEERS)
    end(first)
    servers = start(PEERS)
    try:
        rows: list[dict[str, Any]] = []
        for name, server in servers.items():
            replies, _ = asyncio.run(load(PEERS[name], server.port, 8, texts[:COMPARED]))
            found = np.array([vector(reply) for reply in replies])
            found /= np.linalg.norm(found, axis=1, keepdims=True)
            rows.append(
                {
                    "name": name,
                    "ready": min(first[name].ready, server.ready),
                    "ready cpu": min(first[name].cpu, server.cpu),
                    "difference": float(np.abs(found - expected).max()),
                    "bytes": len(replies[0]),
                    "lowest": {},
                }
            )
        for number in range(given.rounds + 1):
            for row in rows:
                name = row["name"]
                for connections in (1, 8, 64):
                    found = measured(PEERS[name], servers[name], connections, texts, given.wrk)
                    if number:
                        note(row["lowest"], connections, *found)
        for row in rows:
            row["memory"] = sum(one.memory_info().rss for one in tree(servers[row["name"]].process)) / 1e6
            row |= row.pop("lowest")
    finally:
        end(servers)
    finish("serving_wrk" if given.wrk else "serving", [*rows, alone], as_json=given.json, note=__doc__ or "")


def measured(peer: Peer, server: Started, connections: int, texts: list[str], for_s: int) -> tuple[float, float]:
    """Return CPU milliseconds of a request, and the seconds of half of all answers."""
    before = seconds(server.process)
    if for_s:
        answers, half = with_wrk(peer, server.port, connections, texts, for_s, SCRATCH)
    else:
        sent = texts[: max(32, len(texts) // 4)] if connections == 1 else texts
        _, waits = asyncio.run(load(peer, server.port, connections, sent))
        answers, half = len(waits), sorted(waits)[len(waits) // 2]
    return (seconds(server.process) - before) / answers * 1e3, half


def note(lowest: dict[str, float], connections: int, used: float, half: float) -> None:
    """Keep the lowest CPU time, and the milliseconds of half of all answers in that round."""
    name = f"ms at {connections}"
    if used < lowest.get(name, float("inf")):
        lowest[name], lowest[f"p50 at {connections}"] = used, half * 1e3


def start(peers: dict[str, Peer], *more: str) -> dict[str, Started]:
    """Start every server that can be started, and wait until each answers; `more` options are torchlake's."""
    folder = minilm()
    commands: dict[str, list[str]] = {}
    for name, peer in peers.items():
        python, port = python_of(peer.environment), str(free_port())
        if isinstance(python, str):
            print(f"{name}: {python}", file=sys.stderr)
            continue
        own = [
            "-m",
            "torchlake",
            "serve",
            str(folder),
            "--task",
            "feature_extraction",
            "--quiet",
            *more,
            "--port",
            port,
        ]
        other = [str(Path(__file__).with_name("_serving_peers.py")), peer.function, str(folder), port]
        commands[name] = [str(python), *(other if peer.function else own)]
    SCRATCH.mkdir(exist_ok=True)
    found: dict[str, Started] = {}
    for name, command in commands.items():
        log = (SCRATCH / "serving.log").open("ab")
        process, port, began = subprocess.Popen(command, stdout=log, stderr=log), int(command[-1]), time.monotonic()
        while not answers(peers[name], port):
            if process.poll() is not None or time.monotonic() > began + WAIT_S:
                end({**found, name: Started(process, port, 0, 0)})
                raise SystemExit(f"{name} does not start: {SCRATCH / 'serving.log'}")
            time.sleep(0.05)
        found[name] = Started(process, port, time.monotonic() - began, seconds(process))
    return found


def end(servers: dict[str, Started]) -> None:
    """End all servers; LitServe leaves processes behind."""
    left = [one for server in servers.values() for one in tree(server.process)]
    for server in servers.values():
        server.process.send_signal(signal.SIGTERM)
    for server in servers.values():
        server.process.wait(60)
    for one in left:
        if one.is_running():
            one.kill()


def answers(peer: Peer, port: int) -> bool:
    try:
        asyncio.run(load(peer, port, 1, ["a film"]))
    except (OSError, AssertionError, asyncio.IncompleteReadError):
        return False
    return True


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def in_one_call(texts: list[str], rounds: int) -> tuple[dict[str, Any], np.ndarray]:
    """The same rows without a server, and from 64 threads that share a loaded model; the vectors of some."""
    from concurrent.futures import ThreadPoolExecutor

    import torchlake as tl

    model, lowest = tl.load(minilm(), task="feature_extraction"), [float("inf")] * 2
    with ThreadPoolExecutor(64) as threads:
        for _ in range(rounds + 1):
            for at, work in enumerate((lambda: model(texts), lambda: list(threads.map(model, texts)))):
                began = time.process_time()
                work()
                lowest[at] = min(lowest[at], (time.process_time() - began) / len(texts) * 1e3)
    vectors = model.embed(texts[:COMPARED])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return {"name": "tl.load, no server", "one call": lowest[0], "64 threads": lowest[1]}, vectors


if __name__ == "__main__":
    main()
