"""Do rows a second stay the same from a thousand rows to a million?

`tl.predict` of generated rows with a 2-layer model, stored table in, Parquet out, on one core. How the job's cost grows
is measured with its worker in this very process, warm, so that nothing but the rows differs; the price of a job of one
row (plan, lease, commit) is taken off. A shared core changes its speed by more in five minutes than a job's cost grows
with its rows, so every size has a yardstick: whole jobs of ten thousand rows, before each job and, in the large ones,
again and again between two of its chunks. What a start costs is measured apart, with the local engine: the worker's
process and its model, and what its first thousand rows take longer than later ones. Chunks have the same size at every
scale, or their smaller share of padding in large tables would be measured too.
"""

import os
import shutil
import statistics
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch
from _clocked import Clocked
from _common import SCRATCH, finish, parser, two_layers
from memory import write_rows

import torchlake as tl
from torchlake import plugins

TURNS = {1_000: 20, 100_000: 3, 1_000_000: 1}
"Jobs of each size."
YARDSTICK = 10_000
EVERY = 64
"Chunks of a job between two of its yardsticks."
FIRST_ROWS = 1_000
CHUNK_ROWS = 1_024
"By default chunks grow with the table, up to 32,768 rows, which leaves less padding in the larger ones."
READY = SCRATCH / "growth-ready"


class InThisProcess(tl.Local):
    """Chunk jobs without processes: the worker is made here; `pause` is called at regular intervals."""

    def __init__(self, pause: Callable[[], None] | None = None) -> None:
        super().__init__(processes=1)
        self.pause = pause

    def run_chunks(self, make_worker: Any, chunks: Any, **options: Any) -> Generator[Any, None, None]:
        for number, done in enumerate(make_worker()(iter(chunks)), start=1):
            yield done
            if self.pause is not None and number % EVERY == 0:
                self.pause()


def eager_with_a_mark(folder: Path, spec: Any, *, device: str) -> Any:
    """`eager`; the clock at the end of loading stands in a file, the same clock in every process of the machine."""
    forward = plugins.load("runtimes", "eager").load(folder, spec, device=device)
    READY.write_text(str(time.monotonic()))
    return forward


def run(model: Path, source: Path, engine: tl.Local) -> float:
    """Seconds of one job."""
    output = SCRATCH / f"{source.stem}-out"
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


def against_the_yardstick(model: Path, sources: dict[int, Path], size: int) -> tuple[float, float, list[float]]:
    """Seconds of a job of one row, of `size` rows, and of the yardsticks before the latter and between its chunks."""
    yardsticks: list[float] = []

    def measure() -> None:
        yardsticks.append(run(model, sources[YARDSTICK], InThisProcess()))

    measure()
    price = run(model, sources[1], InThisProcess())
    seconds = run(model, sources[size], InThisProcess(measure))
    return price, seconds - sum(yardsticks[1:]), yardsticks


def main() -> None:
    options_parser = parser(__doc__)
    options_parser.add_argument("--rows", type=int, default=max(TURNS), help="the largest size")
    options = options_parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    sizes = [size for size in sorted((1, *TURNS, YARDSTICK)) if size <= options.rows]
    model = two_layers()
    sources = {size: SCRATCH / f"growth-{size}.parquet" for size in sizes}
    for size, source in sources.items():
        write_rows(source, size)
    start, first = start_up(model, sources, 5)
    for size in (FIRST_ROWS, YARDSTICK) * 3:
        run(model, sources[size], InThisProcess())
    taken = {
        size: [against_the_yardstick(model, sources, size) for _ in range(turns)]
        for size, turns in TURNS.items()
        if size in sizes
    }
    price = statistics.median(price for turns in taken.values() for price, _, _ in turns)
    beside = [seconds for turns in taken.values() for _, _, yardsticks in turns for seconds in yardsticks]
    rates = {YARDSTICK: (YARDSTICK - 1) / (statistics.median(beside) - price)}
    ratios, runs = {YARDSTICK: 1.0}, {YARDSTICK: len(beside)}
    for size, turns in taken.items():
        # A small job's price is as large as its rows', so it is taken from jobs of the same minutes, by their median.
        mine = statistics.median(price for price, _, _ in turns)
        seconds = statistics.median(seconds for _, seconds, _ in turns) - mine
        yardstick = statistics.median(statistics.mean(yardsticks) for _, _, yardsticks in turns) - mine
        rates[size], runs[size] = (size - 1) / seconds, len(turns)
        ratios[size] = rates[size] / ((YARDSTICK - 1) / yardstick)
    rows: list[dict[str, Any]] = [
        {"name": "start-up: the worker's process and its model", "seconds": start, "runs": 5},
        {
            "name": "start-up: first batches",
            "seconds": first - (FIRST_ROWS - 1) / rates[FIRST_ROWS] - price,
            "runs": 5,
        },
        {"name": "each job: plan and commit", "seconds": price, "runs": sum(map(len, taken.values()))},
    ]
    for size in sizes[1:]:
        rows.append(
            {
                "name": f"{size:,} rows",
                "rows_per_s": rates[size],
                "to_the_yardstick": ratios[size],
                "runs": runs[size],
            }
        )
    note = (
        f"one core, 2-layer model, chunks of {CHUNK_ROWS:,} rows, medians; rows/s without a job's fixed price, and "
        f"their ratio to jobs of {YARDSTICK:,} rows before the job and between its chunks"
    )
    finish("growth", rows, as_json=options.json, note=note, keep=options.rows == max(TURNS))


if __name__ == "__main__":
    main()
