"""Does torchlake train to the accuracy of the loops that a user would take instead?

A pretrained encoder, one epoch over all reviews, with one process (on all cores) and with two ranks, several seeds
each; the same rows, batch, rate, schedule and precision (bf16 autocast) for all. Each accuracy is kept as soon as it
is known, so an interrupted run resumes. Intervals are those of the mean over the seeds (Student's t, 95 %).
"""

import json
import os
import statistics
import sys
from typing import Any

from _common import SCRATCH, finish, minilm, parser, reviews
from _contender import ONE_THREAD
from scipy import stats
from training import BATCH, RATE, Contender, peer, torchlake

CONTENDERS = [
    ("torchlake, bf16", "torchlake", {"precision": "bf16"}),
    ("Hugging Face Trainer, bf16", "trainer", {"bf16": True}),
    ("accelerate, bf16", "accelerate", {"bf16": True}),
    ("Lightning, bf16", "lightning", {"bf16": True}),
]


def main() -> None:
    options = parser(__doc__, seeds=3, fresh=0).parse_args()
    data = reviews()
    kept = SCRATCH / "training-accuracy.json"
    known: dict[str, float] = json.loads(kept.read_text()) if kept.exists() and not options.fresh else {}
    for seed in range(options.seeds):
        for ranks in (2, 1):
            threads = 1 if ranks > 1 else len(os.sched_getaffinity(0))
            os.environ.update(ONE_THREAD, OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
            setup: dict[str, Any] = {
                "model": str(minilm()),
                "train": str(data / "train.parquet"),
                "test": str(data / "test.parquet"),
                "rate": RATE,
                "batch": BATCH,
                "rows": None,
                "score": True,
                "seed": seed,
                "threads": threads,
            }
            for name, kind, extra in CONTENDERS:
                key = f"{name}, {ranks} rank(s), seed {seed}"
                if key in known:
                    continue
                run = torchlake if kind == "torchlake" else peer
                result = run(Contender(name, kind, ranks, extra), setup)
                print(f"  {key}: {result}", file=sys.stderr, flush=True)
                if "accuracy" in result:
                    known[key] = result["accuracy"]
                    kept.write_text(json.dumps(known, indent=1))
    rows = [
        row(name, ranks, [known.get(f"{name}, {ranks} rank(s), seed {seed}") for seed in range(options.seeds)])
        for ranks in (2, 1)
        for name, _, _ in CONTENDERS
    ]
    note = f"all training reviews, one epoch, {options.seeds} seeds; 1,066 test rows (standard error 1.2 points)"
    complete = all(row["seeds"] == options.seeds for row in rows)
    finish("training_accuracy", rows, as_json=options.json, note=note, keep=complete)


def row(name: str, ranks: int, accuracies: list[float | None]) -> dict[str, Any]:
    """Mean and interval of those accuracies that are known."""
    found = [one for one in accuracies if one is not None]
    result: dict[str, Any] = {"name": name, "ranks": ranks, "seeds": len(found)}
    if found:
        result |= {"accuracy": statistics.mean(found), "lowest": min(found), "highest": max(found)}
    if len(found) > 1:
        half = stats.t.ppf(0.975, len(found) - 1) * statistics.stdev(found) / len(found) ** 0.5
        result |= {"low": result["accuracy"] - half, "high": result["accuracy"] + half}
    return result


if __name__ == "__main__":
    main()
