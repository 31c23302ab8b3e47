"""Do rows a second stay the same from a thousand rows to a million?

`tl.predict` of generated rows with a 2-layer model, stored table in, Parquet out, on one core. How the job's cost grows
is measured with its worker in this very process, warm, so that nothing but the rows differs: sizes in turn, the smaller
the more often, medians; the price of a job of one row (plan, lease, commit) is taken off. What a start costs is
measured apart, with the local engine: the worker's process and its model, and what its first thousand rows take longer
than later ones. Chunks have the same size at every scale, or their smaller share of padding in large tables would be
measured too.
"""

import os
import shutil
import statistics
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from _clocked import Clocked
from _common import SCRATCH, finish, parser, two_layers
from memory import write_rows

import torchlake as tl
from torchlake import plugins

TURNS = {1: 20, 1_000: 20, 10_000: 4, 100_000: 1}
"Jobs of each size in one round."
LARGEST = 1_000_000
FIRST_ROWS = 1_000
CHUNK_ROWS = 1_024
"By default chunks grow with the table, up to 32,768 rows, which leaves less padding in the larger ones."
READY = SCRATCH / "growth-ready"


class InThisProcess(tl.Local):
    """Chunk jobs without processes: the worker is made here."""

    def run_chunks(self, make_worker: Any, chunks: Any, **options: Any) -> Generator[Any, None, None]:
        yield from make_worker()(iter(chunks))


def eager_with_a_mark(folder: Path, spec: Any, *, device: str) -> Any:
    """`eager`; the clock at the end of loading stands in a file, the same clock in every process of the machine."""
    forward = plugins.load("runtimes", "eager").load(folder, spec, device=device)
    READY.write_text(str(time.monotonic()))
    return forward


def run(model: Path, source: Path, engine: tl.Local) -> float:
    """Seconds of one job."""
    output = SCRATCH / "growth-out"
    shutil.rmtree(output, ignore_errors=True)
    began = time.monotonic()
    tl.predict(model, source, output, runtime=eager_with_a_mark, engine=engine, chunk_rows=CHUNK_ROWS)
    return time.monotonic() - began


def start_up(model: Path, sources: dict[int, Path], turns: int) -> tuple[float, float]:
    """Seconds until a worker has its model, and what its first rows cost beyond that; medians."""
    starts, firsts = [], []
    for _ in range(turns):
        engine = Clocked(processes=1)
        whole = run(model, sources[FIRST_ROWS], engine)
        start = float(READY.read_text()) - engine.asked
        starts.append(start)
        firsts.append(whole - start)
    return statistics.median(starts), statistics.median(firsts)


def main() -> None:
    options_parser = parser(__doc__, rounds=4)
    options_parser.add_argument("--rows", type=int, default=LARGEST, help="the largest size")
    options = options_parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    sizes = [size for size in (*TURNS, LARGEST) if size <= options.rows]
    model = two_layers()
    sources = {size: SCRATCH / f"growth-{size}.parquet" for size in sizes}
    for size, source in sources.items():
        write_rows(source, size)
    taken: dict[int, list[float]] = {size: [] for size in sizes}
    start, first = start_up(model, sources, 5)
    here = InThisProcess()
    for size in sizes[:2] * 3:
        run(model, sources[size], here)
    for number in range(options.rounds):
        # The largest lies in the middle of the others, whatever the machine does meanwhile.
        for size, source in sources.items():
            turns = TURNS.get(size, int(number == options.rounds // 2))
            taken[size] += [run(model, source, here) for _ in range(turns)]
    seconds = {size: statistics.median(runs) for size, runs in taken.items()}
    rows: list[dict[str, Any]] = [
        {"name": "start-up: the worker's process and its model", "seconds": start, "runs": 5},
        {"name": "start-up: first batches", "seconds": first - seconds[FIRST_ROWS], "runs": 5},
        {"name": "each job: plan and commit", "seconds": seconds[1], "runs": len(taken[1])},
    ]
    rates = {size: (size - 1) / (seconds[size] - seconds[1]) for size in sizes[1:]}
    for size, rate in rates.items():
        rows.append(
            {
                "name": f"{size:,} rows",
                "seconds": seconds[size],
                "rows_per_s": rate,
                "to_the_largest": rate / rates[sizes[-1]],
                "runs": len(taken[size]),
            }
        )
    note = f"one core, 2-layer model, chunks of {CHUNK_ROWS:,} rows, medians; rows/s without a job's fixed price"
    finish("growth", rows, as_json=options.json, note=note, keep=options.rows == LARGEST)


if __name__ == "__main__":
    main()
