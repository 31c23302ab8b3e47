"""How fast does an epoch train, beside the loops that a user would write or take, at the same accuracy?

Fine-tuning a pretrained encoder on reviews: the seed's DDP notebook (fp32, every row padded to 128) and its FSDP twin
as plain loops, Hugging Face's Trainer, accelerate and Lightning with their usual settings, torchlake; on one process
and on two ranks over gloo, one core each; the same rows, weights, optimizer, schedule, global batch and learning rate.
The contenders run in turn. Those that ask for bf16 are left out where the CPU would emulate it, for minutes a step.
Then, one factor at a time, what the seed's 3.6x of FSDP over DDP is made of.
"""

import json
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from _common import SCRATCH, finish, minilm, parser, reviews
from _contender import ONE_THREAD

from torchlake.processes import hardware

RATE = 1e-4
BATCH = 64
LIMIT_S = 3_000


@dataclass(frozen=True)
class Contender:
    name: str
    kind: str
    ranks: int
    options: dict[str, Any] = field(default_factory=dict)
    ablation: bool = False

    def asks_bf16(self) -> bool:
        return bool(self.options.get("bf16")) or self.options.get("precision") == "bf16"


CONTENDERS = [
    contender
    for ranks in (2, 1)
    for contender in (
        Contender(
            "plain loop, padded to 128" if ranks == 1 else "seed: DDP, padded to 128", "plain", ranks, {"length": 128}
        ),
        *([Contender("seed: FSDP, padded to 128", "plain", 2, {"length": 128, "fsdp": True})] if ranks == 2 else []),
        Contender("Hugging Face Trainer", "trainer", ranks),
        Contender("accelerate", "accelerate", ranks),
        Contender("Lightning", "lightning", ranks),
        Contender("Hugging Face Trainer, bf16", "trainer", ranks, {"bf16": True}),
        Contender("torchlake, fp32", "torchlake", ranks, {"precision": "fp32"}),
        Contender("torchlake", "torchlake", ranks),
        *([Contender("torchlake, fsdp", "torchlake", 2, {"strategy": "fsdp"})] if ranks == 2 else []),
    )
]
SEED = {"length": 128, "batch": 48}
ABLATION = [
    Contender("seed's DDP: fp32, batch 48", "plain", 2, SEED, True),
    Contender("+ batch 96", "plain", 2, {**SEED, "batch": 96}, True),
    Contender("+ FSDP", "plain", 2, {**SEED, "batch": 96, "fsdp": True}, True),
    Contender("+ 16 bits (bf16): the seed's FSDP", "plain", 2, {**SEED, "batch": 96, "fsdp": True, "bf16": True}, True),
    Contender("seed's DDP, padded to the batch's longest", "plain", 2, {"batch": 48}, True),
    Contender("torchlake, fp32, batch 48", "torchlake", 2, {"batch": 48, "precision": "fp32"}, True),
    Contender("torchlake, bf16, batch 48", "torchlake", 2, {"batch": 48, "precision": "bf16"}, True),
]


def peer(contender: Contender, setup: dict[str, Any]) -> dict[str, Any]:
    """An epoch of a peer, under torchrun where there are several ranks."""
    out = SCRATCH / "training.out.json"
    out.unlink(missing_ok=True)
    options = {
        **setup,
        **contender.options,
        "kind": contender.kind,
        "out": str(out),
        "scratch": str(SCRATCH / "trainer"),
    }
    script = [str(Path(__file__).parent / "_training_peers.py"), json.dumps(options)]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(contender.ranks), "--standalone"]
    command = [sys.executable, *(torchrun if contender.ranks > 1 else []), *script]
    log = SCRATCH / "training.log"
    with open(log, "w") as file:
        done = subprocess.run(command, stdout=file, stderr=file, timeout=LIMIT_S, check=False)
    if done.returncode != 0 or not out.exists():
        lines = [line for line in log.read_text().splitlines() if "Error" in line]
        return {"reason": (lines or ["failed"])[-1][:200]}
    return dict(json.loads(out.read_text()))


def torchlake(contender: Contender, setup: dict[str, Any]) -> dict[str, Any]:
    """An epoch of torchlake, by the times of its own steps, as the peers' clock has it."""
    out = SCRATCH / "training.out.json"
    out.unlink(missing_ok=True)
    # In a process of its own, whose children are the ranks: the largest of them is what it says of its children.
    process = multiprocessing.get_context("spawn").Process(target=train_torchlake, args=(contender, setup, str(out)))
    process.start()
    process.join()
    return dict(json.loads(out.read_text())) if out.exists() else {"reason": f"ended with {process.exitcode}"}


def train_torchlake(contender: Contender, setup: dict[str, Any], out: str) -> None:
    import torchlake as tl

    data = pq.read_table(setup["train"])
    subset = SCRATCH / "training.parquet"
    pq.write_table(data.take(np.random.default_rng(0).permutation(len(data))[: setup["rows"]]), subset)
    run = SCRATCH / "training-run"
    shutil.rmtree(run, ignore_errors=True)
    tl.train(
        run=run,
        data={"train": str(subset), "validation": None},
        model={"base": setup["model"]},
        train={
            "epochs": 1,
            "batch_size": contender.options.get("batch", BATCH),
            "learning_rate": RATE,
            "checkpoint_every": "10h",
            "precision": contender.options.get("precision", "auto"),
            "seed": setup["seed"],
            "strategy": contender.options.get("strategy", "auto"),
        },
        engine=tl.Local(processes=contender.ranks),
    )
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    result = {
        "seconds": sum(line["seconds"] for line in steps),
        "computed_tokens": sum(line["padded_tokens"] for line in steps),
        "tokens": sum(line["tokens"] for line in steps),
        "peak_memory_mib": peak,
    }
    if setup["score"]:
        result["accuracy"] = tl.evaluate(run / "model", setup["test"]).metrics["accuracy"].value
    Path(out).write_text(json.dumps(result))


def measure(contenders: list[Contender], setup: dict[str, Any], rounds: int) -> list[dict[str, Any]]:
    """A row for each contender: the best of its rounds; ratios to the first one with as many ranks."""
    best: dict[Contender, dict[str, Any]] = {}
    for _ in range(rounds):
        for number, contender in enumerate(contenders):
            run = torchlake if contender.kind == "torchlake" else peer
            refusal = hardware.bf16_refusal() if contender.asks_bf16() else None
            result = {"reason": refusal} if refusal else run(contender, setup)
            print(f"  {contender.name}, {contender.ranks} rank(s): {result}", file=sys.stderr)
            if number not in best or result.get("seconds", 1e9) < best[number].get("seconds", 1e9):
                best[number] = result
    tokens = next(result["tokens"] for result in best.values() if "tokens" in result)
    base = {}
    for number, contender in enumerate(contenders):
        base.setdefault(contender.ranks, best[number].get("seconds"))
    rows = []
    for number, contender in enumerate(contenders):
        result = best[number]
        row: dict[str, Any] = {"name": f"{'ablation: ' * contender.ablation}{contender.name}", "ranks": contender.ranks}
        if "seconds" in result:
            row |= {
                "rows_per_s": setup["rows"] / result["seconds"],
                "tokens_per_s": tokens / result["seconds"],
                "ratio": base[contender.ranks] / result["seconds"],
                "padding": 1 - tokens / result["computed_tokens"],
                "peak_memory_mib": result["peak_memory_mib"],
                "accuracy": result.get("accuracy"),
            }
        rows.append({**row, **({"reason": result["reason"]} if "reason" in result else {})})
    return rows


def main() -> None:
    options_parser = parser(__doc__, rows=1536, ablation_rows=192, rounds=1)
    options_parser.add_argument("--only", nargs="*", default=[], help="kinds to measure (default: all)")
    options = options_parser.parse_args()
    os.environ.update(ONE_THREAD)
    data = reviews()
    setup = {
        "model": str(minilm()),
        "train": str(data / "train.parquet"),
        "test": str(data / "test.parquet"),
        "rate": RATE,
        "batch": BATCH,
        "rows": options.rows,
        "score": True,
        "seed": 0,
        "threads": 1,
    }
    chosen = [contender for contender in CONTENDERS if not options.only or contender.kind in options.only]
    rows = measure(chosen, setup, options.rounds)
    if not options.only:
        rows += measure(ABLATION, {**setup, "rows": options.ablation_rows, "score": False}, options.rounds)
    note = (
        f"{options.rows} reviews ({options.ablation_rows} in the ablation), one epoch, a pretrained MiniLM, batch "
        f"{BATCH}, one core per rank, gloo; ratios to the first row with as many ranks, best of {options.rounds}"
    )
    finish("training", rows, as_json=options.json, note=note, keep=options.rows == 1536 and not options.only)


if __name__ == "__main__":
    main()
