"""Do rows a second and memory stay the same while a table of embeddings grows?

The vectors of a 2-layer encoder, so that the job around it shows: stored table in, Parquet out, two processes, each job
in a fresh process tree. Jobs of 10,000 rows before and after the large one are the yardstick; a job's start is taken
off. Peak resident memory is the operating system's, of the parent and of the largest worker.
"""

import json
import shutil
import statistics
import subprocess
import sys
from typing import Any

from _common import SCRATCH, arguments, finish, two_layers
from memory import write_rows

JOB = """
import json, resource, sys
import torchlake as tl
scored = tl.predict(*sys.argv[1:4], task="feature_extraction", engine=tl.Local(processes=2), chunk_rows=4096)
peak = {who: resource.getrusage(getattr(resource, "RUSAGE_" + who)).ru_maxrss / 1024 for who in ("SELF", "CHILDREN")}
assert scored.rows_in == scored.rows_out and scored.rows_failed == 0
start = sum(scored.profile[step] for step in ("torch", "tokenizer", "model", "first batch"))
print(json.dumps({"parent_mib": peak["SELF"], "worker_mib": peak["CHILDREN"], "seconds": scored.seconds - start,
                  "distinct": scored.record["provenance"]["distinct"]}))
"""
YARDSTICK = 10_000
TURNS = 2
"Yardsticks before the large job, and after it."


def run(rows: int) -> dict[str, Any]:
    """One job."""
    source, output = SCRATCH / f"embeddings-{rows}.parquet", SCRATCH / f"embeddings-{rows}-out"
    if not source.exists():
        write_rows(source, rows)
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "-c", JOB, str(two_layers()), str(source), str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "rows_per_s": rows / found["seconds"]}


def main() -> None:
    options = arguments(__doc__, rows=1_000_000)
    small = [run(YARDSTICK) for _ in range(TURNS)]
    large = run(options.rows)
    small += [run(YARDSTICK) for _ in range(TURNS)]
    median = {name: statistics.median(each[name] for each in small) for name in small[0]}
    rows = [
        {"name": f"{YARDSTICK:,} rows", **median, "ratio": 1.0},
        {"name": f"{options.rows:,} rows", **large, "ratio": large["rows_per_s"] / median["rows_per_s"]},
    ]
    note = f"2-layer encoder, two processes, without a process's start; {YARDSTICK:,} rows: median of {2 * TURNS} jobs"
    finish("embeddings_rows", rows, as_json=options.json, note=note)


if __name__ == "__main__":
    main()
