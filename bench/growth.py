"""Do rows a second stay the same from a thousand rows to a million?

`tl.predict` of generated rows with a 2-layer model, stored table in, Parquet out, one worker on one core. The job's
fixed price, measured apart by scoring one row (planning, starting the worker, loading the model, committing), is taken
off; how long the worker took to start is taken off each run by its own clock, because it varies more than a thousand
rows take. Small sizes are repeated and the median counts. Chunks have the same size at every scale, or their smaller
share of padding in large tables would be measured too.
"""

import os
import shutil
import statistics
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from _common import SCRATCH, finish, parser, random_model
from memory import write_rows

import torchlake as tl
from torchlake import plugins

# The larger, the fewer rounds: a long run averages the machine's noise by itself.
SIZES = {1_000: 1.0, 10_000: 0.5, 100_000: 0.25, 1_000_000: 0.1}
LARGEST = 1_000_000
CHUNK_ROWS = 1_024
"By default chunks grow with the table, up to 32,768 rows, which leaves less padding in the larger ones."
READY = SCRATCH / "growth-ready"


class Clocked(tl.Local):
    """The local engine, and when it was asked for workers."""

    asked = 0.0

    def run_chunks(self, *args: Any, **options: Any) -> Generator[Any, None, None]:
        self.asked = time.monotonic()
        return super().run_chunks(*args, **options)


def eager_with_a_mark(folder: Path, spec: Any, *, device: str) -> Any:
    """`eager`; the clock at the end of loading stands in a file, the same clock in every process of the machine."""
    forward = plugins.load("runtimes", "eager").load(folder, spec, device=device)
    READY.write_text(str(time.monotonic()))
    return forward


def run(model: Path, source: Path) -> tuple[float, float]:
    """Seconds of one job without its worker's start, and the seconds of that start."""
    output = SCRATCH / "growth-out"
    shutil.rmtree(output, ignore_errors=True)
    engine = Clocked(processes=1)
    began = time.monotonic()
    tl.predict(model, source, output, runtime=eager_with_a_mark, engine=engine, chunk_rows=CHUNK_ROWS)
    whole = time.monotonic() - began
    start = float(READY.read_text()) - engine.asked
    return whole - start, start


def main() -> None:
    options_parser = parser(__doc__, rounds=9)
    options_parser.add_argument("--rows", type=int, default=LARGEST, help="the largest size")
    options = options_parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    sizes = [size for size in SIZES if size <= options.rows]
    model = random_model(
        SCRATCH / "two-layers",
        base="bert",
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        intermediate_size=64,
    )
    sources = {size: SCRATCH / f"growth-{size}.parquet" for size in (1, *sizes)}
    for size, source in sources.items():
        write_rows(source, size)
    taken: dict[int, list[tuple[float, float]]] = {size: [] for size in sources}
    run(model, sources[1])  # imports what the parent needs
    for number in range(options.rounds):
        for size, source in sources.items():
            if number < max(1, round(options.rounds * SIZES.get(size, 1.0))):
                taken[size].append(run(model, source))
    seconds = {size: statistics.median(work for work, _ in runs) for size, runs in taken.items()}
    rows: list[dict[str, Any]] = [
        {
            "name": "start-up: worker and model",
            "seconds": statistics.median(start for _, start in taken[1]),
            "runs": len(taken[1]),
        },
        {"name": "start-up: plan and commit", "seconds": seconds[1], "runs": len(taken[1])},
    ]
    rates = {size: (size - 1) / (seconds[size] - seconds[1]) for size in sizes}
    for size in sizes:
        rows.append(
            {
                "name": f"{size:,} rows",
                "seconds": seconds[size],
                "rows_per_s": rates[size],
                "to_the_largest": rates[size] / rates[sizes[-1]],
                "runs": len(taken[size]),
            }
        )
    note = f"one worker on one core, 2-layer model, chunks of {CHUNK_ROWS:,} rows, start-up taken off; medians"
    finish("growth", rows, as_json=options.json, note=note, keep=options.rows == LARGEST)


if __name__ == "__main__":
    main()
