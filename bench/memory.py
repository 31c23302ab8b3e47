"""How much more memory does scoring two million rows take than scoring twenty thousand?

Each size is scored by a fresh process tree with a 2-layer model; the peak resident memory of the parent and of the
largest worker come from the operating system's own accounting.
"""

import json
import shutil
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from _common import SCRATCH, arguments, finish, two_layers

JOB = """
import json, resource, sys
import torchlake as tl
scored = tl.predict(sys.argv[1], sys.argv[2], sys.argv[3], engine=tl.Local(processes=2))
peak = {who: resource.getrusage(getattr(resource, "RUSAGE_" + who)).ru_maxrss / 1024 for who in ("SELF", "CHILDREN")}
print(json.dumps({"parent_mib": peak["SELF"], "worker_mib": peak["CHILDREN"], "seconds": scored.seconds,
                  "rows_out": scored.rows_out, "rows_failed": scored.rows_failed}))
"""

WORDS = [
    "a",
    "the",
    "film",
    "story",
    "actor",
    "scene",
    "never",
    "quite",
    "good",
    "bad",
    "dull",
    "bright",
    "long",
    "slow",
]


def write_rows(path, rows: int) -> None:
    """Generated rows of 3 to 40 words, in one Parquet file with row groups of 500,000."""
    rng = np.random.default_rng(0)
    writer = None
    for first in range(0, rows, 50_000):
        lengths = rng.integers(3, 40, min(50_000, rows - first))
        texts = [" ".join(WORDS[word] for word in rng.integers(0, len(WORDS), length)) for length in lengths]
        table = pa.table({"id": np.arange(first, first + len(texts)), "text": texts})
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table, row_group_size=500_000)
    assert writer is not None
    writer.close()


def main() -> None:
    options = arguments(__doc__, rows=2_000_000, small=20_000)
    model = two_layers()
    rows = []
    for count in (options.small, options.rows):
        source, output = SCRATCH / f"memory-{count}.parquet", SCRATCH / f"memory-{count}"
        shutil.rmtree(output, ignore_errors=True)
        write_rows(source, count)
        done = subprocess.run(
            [sys.executable, "-c", JOB, str(model), str(source), str(output)],
            capture_output=True,
            text=True,
            check=True,
        )
        rows.append({"name": f"{count:,} rows", **json.loads(done.stdout.splitlines()[-1])})
    growth = {name: rows[1][name] - rows[0][name] for name in ("parent_mib", "worker_mib")}
    rows.append({"name": "growth", **growth})
    finish("memory", rows, as_json=options.json, note="two worker processes, 2-layer model, peak resident memory")


if __name__ == "__main__":
    main()
