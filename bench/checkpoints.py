"""What do checkpoints cost while training, and what does resuming from one cost?

A pretrained MiniLM over reviews, one process on one core, the writing thread on another. A stretch of steps without
checkpoints, with one every 20 steps in the background, and with one every 20 steps while training waits; in turn, the
best of the rounds. Then a run is killed early and late in an epoch, and started again: the time until its next step is
done, beside the time that a fresh run takes to its first, which loads the same things.
"""

import json
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from _common import SCRATCH, finish, minilm, parser, reviews
from _contender import ONE_THREAD

EVERY = 20
LIMIT_S = 600.0


def train(run: str, steps: int, every: str, background: bool) -> None:
    import torchlake as tl

    tl.train(
        run=run,
        data={"train": str(SCRATCH / "checkpoints.parquet"), "validation": None},
        model={"base": str(minilm())},
        train={
            "epochs": 1,
            "batch_size": 32,
            "max_steps": steps,
            "checkpoint_every": every,
            "checkpoint_in_background": background,
        },
        engine=tl.Local(processes=1),
    )


def started(run: Path, steps: int, every: str, background: bool = True) -> multiprocessing.Process:
    process = multiprocessing.get_context("spawn").Process(target=train, args=(str(run), steps, every, background))
    process.start()
    return process


def loop_seconds(steps: int, every: str, background: bool) -> float:
    """Seconds of the training loop, from its first step to its last, checkpoints between them included."""
    run = SCRATCH / "checkpoints-run"
    shutil.rmtree(run, ignore_errors=True)
    started(run, steps, every, background).join()
    newest = sorted((run / "checkpoints").glob("step_*"))[-1]
    return float(json.loads((newest / "state.json").read_text())["position"]["seconds"])


def until_step(run: Path, steps: int, wanted: int) -> float:
    """Seconds from the start until step `wanted` is in metrics.jsonl; then the run is killed."""
    began = time.monotonic()
    process = started(run, steps, f"{EVERY}steps")
    metrics = run / "metrics.jsonl"
    while not (metrics.exists() and f'"step": {wanted},' in metrics.read_text()):
        if time.monotonic() - began > LIMIT_S or not process.is_alive():
            raise SystemExit(f"step {wanted} was not reached")
        time.sleep(0.005)
    seconds = time.monotonic() - began
    os.kill(process.pid or 0, signal.SIGKILL)  # its rank dies with it
    process.join()
    return seconds


def resumed(steps: int, at: int) -> tuple[float, float]:
    """Seconds from a fresh start to the first step, and from a start at step `at` to the one after it."""
    run = SCRATCH / "checkpoints-run"
    shutil.rmtree(run, ignore_errors=True)
    fresh = until_step(run, steps, 1)
    shutil.rmtree(run, ignore_errors=True)
    until_step(run, steps, at + EVERY - 2)
    newest = sorted((run / "checkpoints").glob("step_*"))[-1]
    step = int(json.loads((newest / "state.json").read_text())["step"])
    lines = (run / "metrics.jsonl").read_text().splitlines()
    kept = [line for line in lines if json.loads(line)["step"] <= step]
    (run / "metrics.jsonl").write_text("\n".join(kept) + "\n")
    return fresh, until_step(run, steps, step + 1)


def main() -> None:
    options = parser(__doc__, rows=2048, rounds=1).parse_args()
    os.environ.update(ONE_THREAD)
    table = pq.read_table(reviews() / "train.parquet")
    table = table.take(np.random.default_rng(0).permutation(len(table))[: options.rows])
    pq.write_table(table, SCRATCH / "checkpoints.parquet")
    steps = -(-options.rows // 32)
    kinds = {
        "no checkpoints": ("10h", True),
        f"one every {EVERY} steps, in the background": (f"{EVERY}steps", True),
        f"one every {EVERY} steps, training waits": (f"{EVERY}steps", False),
    }
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(options.rounds):
        for name, (every, background) in kinds.items():
            seconds[name].append(loop_seconds(steps, every, background))
    best = {name: min(taken) for name, taken in seconds.items()}
    base = best["no checkpoints"]
    rows: list[dict[str, Any]] = [
        {"name": name, "seconds": taken, "over_none": taken / base - 1} for name, taken in best.items()
    ]
    for at in (EVERY, 2 * EVERY):
        pairs = [resumed(steps, at) for _ in range(options.rounds)]
        fresh, again = (min(pair[side] for pair in pairs) for side in (0, 1))
        rows.append(
            {
                "name": f"killed after step {at} of {steps}: start to the next step",
                "seconds": again,
                "over_a_fresh_start": again - fresh,
            }
        )
    note = f"{options.rows} reviews, {steps} steps of MiniLM (87 MB, 260 MB a checkpoint), best of {options.rounds}"
    finish("checkpoints", rows, as_json=options.json, note=note, keep=options.rows == 2048)


if __name__ == "__main__":
    main()
