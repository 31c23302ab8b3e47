"""An endpoint with 50 ms latency: how well a rate limit is used, and how many rows one process asks on one core.

    python bench/endpoint.py [limited] [opened]

The server is the fake one of the tests, a process of its own. Prints a line for each measurement.
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


def limited(folder: Path, limit: int = 1000) -> None:
    """Print how much of a limit of requests per minute four processes use."""
    seen, _ = ask(folder, 3 * limit, "limited", processes=4, requests_per_minute=limit)
    times = sorted(seen["times"])
    most = max(sum(start <= one < start + 60 for one in times) for start in times[:limit])
    rate = (len(times) - 1) / (times[-1] - times[0]) * 60
    print(f"limit {limit}/min, 4 processes: {rate:,.0f}/min ({rate / limit:.1%}), most in a minute {most:,}")


def opened(folder: Path, rows: int = 4000) -> None:
    """Print how many rows one process asks in a minute of one core."""
    seen, used = ask(folder, rows, "open", concurrency=256)
    times = sorted(seen["times"])
    rate = (len(times) - 1) / (times[-1] - times[0]) * 60
    print(f"256 open, 1 process: {rate:,.0f} rows/min on this machine, {rows / used * 60:,.0f} in a minute of CPU time")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        for measure in (limited, opened):
            if not sys.argv[1:] or measure.__name__ in sys.argv[1:]:
                measure(Path(name))
