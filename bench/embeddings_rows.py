"""Do rows a second and memory stay the same while a table of embeddings grows?

The vectors of a 2-layer encoder in the shape of BERT-tiny, so that the job around it shows: stored table in, Parquet
out, two processes, each job in a fresh process tree. Jobs of 10,000 and of 100,000 rows before and after the large one
are the yardsticks; the start of a job's workers is taken off, but not the rest of its start, which shows in the
smallest one. Peak resident memory is the operating system's, of the parent and of the largest worker.

Then the large job is done once more, with all its processes killed when a third and when two thirds of its parts are
written. Its output is verified: every key once, checksums, and the same vectors.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
from _common import SCRATCH, arguments, finish, random_model
from memory import write_rows

import torchlake as tl

JOB = """
import json, resource, sys
import torchlake as tl
options = {"task": "feature_extraction", "engine": tl.Local(processes=2), "chunk_rows": int(sys.argv[4])}
scored = tl.predict(*sys.argv[1:4], **options)
own = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))  # ru_maxrss begins at the parent's
workers = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
assert scored.rows_in == scored.rows_out and scored.rows_failed == 0
start = sum(scored.profile[step] for step in ("torch", "tokenizer", "model", "first batch"))
memory = {"parent_mib": int(own.split()[1]) / 1024, "worker_mib": workers / 1024}
distinct = scored.record["provenance"]["distinct"]
print(json.dumps({**memory, "seconds": scored.seconds - start, "distinct": distinct}))
"""
CHUNK_ROWS = 500
YARDSTICKS = (10_000, 100_000)


def tiny() -> Path:
    """An encoder in the shape of BERT-tiny (Turc et al. 2019) with random weights."""
    shape = {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 512}
    return random_model(SCRATCH / "bert-tiny", base="bert", **shape)


def run(rows: int) -> dict[str, Any]:
    """One job."""
    source, output = SCRATCH / f"embeddings-{rows}.parquet", SCRATCH / f"embeddings-{rows}-out"
    if not source.exists():
        write_rows(source, rows)
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "-c", JOB, str(tiny()), str(source), str(output), str(CHUNK_ROWS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "rows_per_s": rows / found["seconds"]}


def killed(rows: int) -> dict[str, Any]:
    """The job, killed twice and then left to finish; its output is compared with that of `run`."""
    source, whole = SCRATCH / f"embeddings-{rows}.parquet", SCRATCH / f"embeddings-{rows}-out"
    output = SCRATCH / f"embeddings-{rows}-killed"
    staging = output.with_name(f".{output.name}.staging")
    for folder in (output, staging):
        shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-c", JOB, str(tiny()), str(source), str(output), str(CHUNK_ROWS)]
    for share in (1 / 3, 2 / 3):
        job = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        while len([*staging.glob("table/*.parquet")]) < share * rows / CHUNK_ROWS:
            if job.poll() is not None:
                raise SystemExit(f"the job ended before {share:.0%} of its parts were written")
            time.sleep(0.05)
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    problems = tl.verify(output).problems
    assert not problems, problems
    columns = [pq.read_table(folder).sort_by("row_id") for folder in (whole, output)]
    assert columns[0].equals(columns[1]), "the killed job has other rows"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "each_row_once": len(columns[1]) == rows == len(pc.unique(columns[1]["row_id"]))}


def main() -> None:
    options = arguments(__doc__, rows=1_000_000)
    small = [run(rows) for rows in YARDSTICKS]
    large = run(options.rows)
    small = [*small, *(run(rows) for rows in YARDSTICKS)]
    again = killed(options.rows)
    best = [max(small[at :: len(YARDSTICKS)], key=lambda one: one["rows_per_s"]) for at in range(len(YARDSTICKS))]
    rows = [
        *({"name": f"{count:,} rows", **one} for count, one in zip(YARDSTICKS, best, strict=True)),
        {"name": f"{options.rows:,} rows", **large},
        {"name": "the same, killed twice, its last third", **again},
    ]
    for row in rows[:-1]:
        row["ratio"] = row["rows_per_s"] / best[0]["rows_per_s"]
    note = "BERT-tiny, two processes, without the start of workers; smaller jobs: the better of two"
    finish("embeddings_rows", rows, as_json=options.json, note=note)


if __name__ == "__main__":
    main()
