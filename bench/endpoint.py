"""An endpoint with 50 ms latency: how well a rate limit is used, and how many rows one process asks on one core.

One process keeps 256 requests open; four share a limit of 1,000 requests a minute. The server is the fake one of the
tests, a process of its own.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from _common import arguments, finish

import torchlake as tl

LATENCY_S = 0.05
SERVER = Path(__file__).parents[1] / "tests" / "fake_endpoint.py"


@contextmanager
def serving() -> Iterator[tuple[str, dict[str, Any]]]:
    """Run the server; yield its address, and what it saw when the block has ended."""
    seen: dict[str, Any] = {}
    with subprocess.Popen(
        [sys.executable, SERVER, str(LATENCY_S)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{int(server.stdout.readline())}/v1", seen
        seen |= json.loads(server.communicate()[0])


def ask(folder: Path, rows: int, name: str, processes: int = 1, **options: Any) -> tuple[dict[str, Any], float]:
    """Have an endpoint answer the rows; return what it saw, and the CPU seconds of the job."""
    table = folder / f"{name}.parquet"
    pq.write_table(pa.table({"text": [f"Is review {row} good or bad? It was a film." for row in range(rows)]}), table)
    cpu = cpu_seconds()
    with serving() as (url, seen):
        tl.predict(None, table, folder / name, endpoint=url, model_name="small", engine=tl.Local(processes), **options)
        used = cpu_seconds() - cpu
    return seen, used


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its ended children."""
    times = psutil.Process().cpu_times()
    return times.user + times.system + times.children_user + times.children_system


def limited(folder: Path, limit: int) -> dict[str, Any]:
    """Return how much of a limit of requests per minute four processes use."""
    seen, used = ask(folder, 3 * limit, "limited", processes=4, requests_per_minute=limit)
    times = sorted(seen["times"])
    most = max(sum(start <= one < start + 60 for one in times) for start in times[:limit])
    return {**rates("4 processes, a limit", times, used), "limit": limit, "most_in_a_minute": most}


def opened(folder: Path, rows: int) -> dict[str, Any]:
    """Return how many rows one process asks in a minute."""
    seen, used = ask(folder, rows, "open", concurrency=256)
    return rates("1 process, 256 open", sorted(seen["times"]), used)


def rates(name: str, times: list[float], used: float) -> dict[str, Any]:
    """Return the rows per minute by the clock and of CPU time, with the start of the processes in the latter."""
    rows_per_min = (len(times) - 1) / (times[-1] - times[0]) * 60
    return {"name": name, "rows_per_min": rows_per_min, "rows_per_cpu_min": len(times) / used * 60}


def main() -> None:
    options = arguments(__doc__, rows=8000, limit=1000)
    with tempfile.TemporaryDirectory() as name:
        measured = [limited(Path(name), options.limit), opened(Path(name), options.rows)]
    note = f"{3 * options.limit:,} and {options.rows:,} rows, {LATENCY_S * 1000:.0f} ms latency"
    finish("endpoint", measured, as_json=options.json, note=note)


if __name__ == "__main__":
    main()
