"""What do rows cost, and how many are lost, if an endpoint refuses 1 % of them, and if the job is killed once?

One endpoint with 50 ms latency (the fake one of the tests), 1,000 prompts; torchlake and Ray keep 16 requests open,
Daft what it chooses; further options stand in the names. `refused`: ten prompts are answered with status 400, each
time. `killed`: nothing is refused; the job gets SIGKILL when half of the requests were sent, then the same command runs
again. `answered` are rows with their own answer in the output, `named` rows with an error in it, `lost` all others.
`requests` are those that are paid for.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from _common import arguments, finish
from _environments import python_of

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from fake_endpoint import FakeEndpoint, serving

NAMES = {
    "torchlake": ("torchlake", "main"),
    "Daft prompt": ("daft", "daft-prompt"),
    'Daft prompt, on_error="log"': ("daft_log", "daft-prompt"),
    "Ray HttpRequestProcessorConfig": ("ray", "main"),
    "Ray, max_errored_blocks=-1": ("ray_blocks", "main"),
}
MARK = "[refused]"
LATENCY_S = 0.05


def start(kind: str, python: Path, table: Path, output: Path, endpoint: FakeEndpoint) -> subprocess.Popen[bytes]:
    script = Path(__file__).with_name("_endpoint_peers.py")
    command = [str(python), str(script), kind, str(table), str(output), endpoint.url]
    with (output.parent / f"{output.name}.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "RAY_DEDUP_LOGS": "0"})


def counted(output: Path, rows: int) -> tuple[int, int]:
    """Return how many rows have their own answer in the output, and how many have an error there."""
    answered: set[int] = set()
    named: set[int] = set()
    for file in output.glob("*.parquet"):
        for row in pq.read_table(file).to_pylist():
            text = row.get("generated_text", row.get("answer"))
            if row.get("error") is not None:
                named.add(row["id"])
            elif text is not None and f"review {row['id']} " in text:
                answered.add(row["id"])
    return len(answered), len(named)


def measure(name: str, rows: int, folder: Path) -> list[dict[str, Any]]:
    kind, environment = NAMES[name]
    python = python_of(environment)
    if isinstance(python, str):
        print(f"{name}: {python}", file=sys.stderr)
        return []
    found = []
    for case in ("refused", "killed"):
        refused = range(0, rows, 100) if case == "refused" else ()
        texts = [f"Is review {row} good or bad? {MARK * (row in refused)}" for row in range(rows)]
        table, output = folder / f"{kind}-{case}.parquet", folder / f"{kind}-{case}"
        pq.write_table(pa.table({"id": range(rows), "text": texts}), table, row_group_size=100)
        with serving(faults={MARK: "400"}, latency_s=LATENCY_S) as endpoint:
            began, status = time.monotonic(), 0
            if case == "killed":
                job = start(kind, python, table, output, endpoint)
                while len(endpoint.requests) < rows // 2 and job.poll() is None:
                    time.sleep(0.01)
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
            status = start(kind, python, table, output, endpoint).wait()
            seconds = time.monotonic() - began
            requests = len(endpoint.requests)
        answered, named = counted(output, rows) if output.exists() else (0, 0)
        lost = rows - answered - named
        found.append({"name": f"{case}: {name}", "status": status, "answered": answered, "named": named})
        found[-1] |= {"lost": lost, "requests": requests, "seconds": seconds}
    return found


def main() -> None:
    options = arguments(__doc__, rows=1000)
    folder = Path(tempfile.mkdtemp())
    try:
        rows = [row for name in NAMES for row in measure(name, options.rows, folder)]
        note = f"{options.rows:,} rows, {LATENCY_S * 1000:.0f} ms latency, 1 % refused or one SIGKILL at half"
        finish(
            "endpoint_faults", sorted(rows, key=lambda row: row["name"], reverse=True), as_json=options.json, note=note
        )
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
