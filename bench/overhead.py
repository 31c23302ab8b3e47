"""What does the chunk job itself cost, beside the model's work?

The same table is scored by the same job twice: with a model of MiniLM's shape, and with a runtime that does nothing.
What the second takes is planning, reading, tokenizing, writing, hashing and committing; its share of the first is the
job's own cost. The time to start the worker and load the model is in both, and is shown by scoring a table of one row.
"""

import shutil
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from _common import SCRATCH, arguments, finish, random_model, reviews

import torchlake as tl


def do_nothing(folder: Path, spec: object, *, device: str):
    """A runtime whose forward pass is free."""
    return lambda input_ids, **others: np.zeros((len(input_ids), 2), dtype=np.float32)


def main() -> None:
    options = arguments(__doc__, rows=8530, rounds=3)
    model = random_model(
        SCRATCH / "minilm-shape",
        base="bert",
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
    )
    source = SCRATCH / "overhead.parquet"
    SCRATCH.mkdir(exist_ok=True)
    table = pq.read_table(reviews() / "train.parquet").slice(0, options.rows)
    pq.write_table(table, source)
    one = SCRATCH / "one-row.parquet"
    pq.write_table(table.slice(0, 1), one)
    seconds: dict[str, list[float]] = {"eager": [], "nothing": [], "start": []}
    for _ in range(options.rounds):
        for name, rows, runtime in (
            ("start", one, do_nothing),
            ("nothing", source, do_nothing),
            ("eager", source, "eager"),
        ):
            output = SCRATCH / f"overhead-{name}"
            shutil.rmtree(output, ignore_errors=True)
            began = time.perf_counter()
            tl.predict(model, rows, output, runtime=runtime, engine=tl.Local(processes=1))
            seconds[name].append(time.perf_counter() - began)
    start = min(seconds["start"])
    own, whole = min(seconds["nothing"]) - start, min(seconds["eager"]) - start
    finish(
        "overhead",
        [
            {"name": "start of one worker", "seconds": start},
            {"name": "MiniLM's shape", "seconds": whole, "rows_per_s": len(table) / whole},
            {"name": "the job alone", "seconds": own, "rows_per_s": len(table) / own, "share": own / whole},
        ],
        as_json=options.json,
        note=f"{pa.table(table).num_rows} reviews, one worker process, best of {options.rounds}; start taken off",
    )


if __name__ == "__main__":
    main()
