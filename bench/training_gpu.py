"""How many tokens a second does a GPU train on, and what share of the card's matrix rate is that?

A classifier of roberta-large's shape on short texts, and a language model of Llama 3.2 1B's shape on packed blocks of
4,096 tokens, with random weights in bf16: torchlake and Hugging Face's Trainer, each plain and compiled, in turn, each
in a process of its own. The first steps (warm-up, compilation) are not counted. The share is that of the operations
which the real tokens need, so padding and recomputation do not raise it. Without a GPU, `--tiny 1` runs small shapes.
"""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _gpu
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from _common import SCRATCH, arguments, finish

import torchlake as tl
from torchlake.planning import costs

RATE = 1e-4
WARM_UP = 4
LIMIT_S = 240


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and its batches."""

    name: str
    shape: str
    language_model: bool
    rows: int
    "Rows (or blocks) of a batch."
    max_length: int


CASES = (
    Case(name="roberta-large, 512 short rows", shape="roberta-large", language_model=False, rows=512, max_length=128),
    Case(name="llama-1b, 4 blocks of 4,096", shape="llama-1b", language_model=True, rows=4, max_length=4096),
)
TINY = (
    Case(name="tiny encoder", shape="tiny", language_model=False, rows=16, max_length=128),
    Case(name="tiny llama", shape="tiny", language_model=True, rows=2, max_length=64),
)
CONTENDERS = {
    "Hugging Face Trainer": {"compile": False},
    "torchlake": {"compile": False},
    "Hugging Face Trainer, compiled": {"compile": True},
    "torchlake, compiled": {"compile": True},
}


def main() -> None:
    options = arguments(__doc__, steps=20, rounds=1, tiny=0, compiled=1)
    if _gpu.device() == "cpu" and not options.tiny:
        print("training_gpu: skipped: torch finds no GPU here")
        return
    rate = _gpu.matrix_rates(256 if options.tiny else _gpu.SIZE)["bf16"]
    assert rate is not None, "every device multiplies bf16"
    rows: list[dict[str, Any]] = [{"name": f"{_gpu.card()}: bf16 matrix product", "tflops": rate / 1e12, "share": 1.0}]
    for case in TINY if options.tiny else CASES:
        rows += measure(case, options.steps, options.rounds, rate, compiled=bool(options.compiled) and not options.tiny)
        if options.json:
            print(json.dumps({"rows": rows}), flush=True)  # what is left of a run that is stopped
    note = f"{_gpu.card()}, bf16, {options.steps} steps, the first {WARM_UP} not counted, best of {options.rounds}"
    finish("training_gpu", rows, as_json=options.json, note=note, keep=not options.tiny and bool(options.compiled))


def measure(case: Case, steps: int, rounds: int, rate: float, *, compiled: bool) -> list[dict[str, Any]]:
    """A row per contender; `ratio` is its rate of tokens over that of the plain Trainer."""
    setup = prepare(case, steps)
    operations = operations_of(case, setup)
    best: dict[str, dict[str, Any]] = {}
    for _ in range(rounds):
        for name, choice in CONTENDERS.items():
            if choice["compile"] and not compiled:
                continue
            run = torchlake if name.startswith("torchlake") else peer
            result = summary(run({**setup, **choice}), operations, rate)
            print(f"  {case.name}: {name}: {result}", file=sys.stderr)
            if result.get("tokens_per_s", 0) >= best.get(name, {}).get("tokens_per_s", 0):
                best[name] = result
    base = best["Hugging Face Trainer"].get("tokens_per_s")
    return [
        {"name": f"{case.name}: {name}", **row, "ratio": row["tokens_per_s"] / base}
        if base and "tokens_per_s" in row
        else {"name": f"{case.name}: {name}", **row}
        for name, row in best.items()
    ]


def prepare(case: Case, steps: int) -> dict[str, Any]:
    """Write the table and the model; returns the settings of every contender."""
    kind = _gpu.language_model if case.language_model else _gpu.encoder
    model = kind(SCRATCH / f"gpu-{case.shape}-{'language-model' if case.language_model else 'encoder'}", case.shape)
    # 22 words per text on average; one batch more than is trained on.
    wanted = case.rows * (steps + 1) * (case.max_length // 20 if case.language_model else 1)
    texts = _gpu.texts(wanted)
    table = SCRATCH / "training_gpu.parquet"
    pq.write_table(pa.table({"text": texts, "label": _gpu.labels(texts)}), table)
    return {
        "model": str(model),
        "table": str(table),
        "language_model": case.language_model,
        "max_length": case.max_length,
        "batch": case.rows,
        "steps": steps,
        "rate": RATE,
        "checkpointing": False,
        "scratch": str(SCRATCH / "trainer"),
        "out": str(SCRATCH / "training_gpu.out.json"),
    }


def sections_of(setup: dict[str, Any]) -> dict[str, Any]:
    """The job of torchlake."""
    task = {"task": "text_generation"} if setup["language_model"] else {}
    return {
        "data": {"train": setup["table"], "validation": None},
        "model": {"base": setup["model"], "max_length": setup["max_length"], **task},
        "train": {
            "epochs": 1,
            "max_steps": setup["steps"],
            "batch_size": setup["batch"],
            "learning_rate": setup["rate"],
            "checkpoint_every": "10h",
            "compile": bool(setup.get("compile")),
        },
    }


def operations_of(case: Case, setup: dict[str, Any]) -> float:
    """Operations of a training step per token, including attention."""
    planned = tl.plan(**sections_of(setup), flops=1e12, sample_rows=100)
    lengths = np.array([len(text.split()) + 2 for text in pq.read_table(setup["table"])["text"].to_pylist()])
    # A token of a language model attends to half of its block on average, one of an encoder to its whole row.
    attended = case.max_length / 2 if case.language_model else float((lengths**2).sum() / lengths.sum())
    per_token = costs.token_flops(planned.parameters, planned.shape, planned.setting)
    return per_token + attended * costs.pair_flops(planned.shape, planned.setting)


def peer(setup: dict[str, Any]) -> dict[str, Any]:
    """Train with Hugging Face's Trainer; returns its steps and peak memory, or the reason of a failure."""
    script = Path(__file__).parent / "_training_gpu_peer.py"
    return _run([str(script), json.dumps(setup)], setup)


def torchlake(setup: dict[str, Any]) -> dict[str, Any]:
    """Train with torchlake; returns its steps, or the reason of a failure."""
    return _run([str(Path(__file__)), "--torchlake", json.dumps(setup)], setup)


def _run(words: list[str], setup: dict[str, Any]) -> dict[str, Any]:
    out, log = Path(setup["out"]), SCRATCH / "training_gpu.log"
    out.unlink(missing_ok=True)
    with open(log, "w") as file:
        try:
            subprocess.run([sys.executable, *words], stdout=file, stderr=file, timeout=LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            return {"reason": f"not finished after {LIMIT_S} s"}
    if not out.exists():
        lines = [line for line in log.read_text().splitlines() if "rror" in line]
        return {"reason": (lines or ["failed"])[-1][:200]}
    return dict(json.loads(out.read_text()))


def train_torchlake(setup: dict[str, Any]) -> None:
    """The contender torchlake, in a process of its own; its times are those of metrics.jsonl."""
    run = SCRATCH / "training_gpu-run"
    shutil.rmtree(run, ignore_errors=True)
    tl.train(run=run, engine=tl.Local(processes=1), **sections_of(setup))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [{name: line[name] for name in ("seconds", "tokens", "loss")} for line in lines if "loss" in line]
    peaks = [line["peak_memory_bytes"] for line in lines if line.get("peak_memory_bytes")]
    Path(setup["out"]).write_text(json.dumps({"steps": steps, "peak_memory": max(peaks, default=None)}))


def summary(result: dict[str, Any], operations: float, rate: float) -> dict[str, Any]:
    """Tokens per second after the warm-up, their share of the matrix rate, the mean loss of the last steps."""
    if "reason" in result:
        return result
    steps = result["steps"][min(WARM_UP, len(result["steps"]) - 1) :]
    seconds, tokens = sum(step["seconds"] for step in steps), sum(step["tokens"] for step in steps)
    return {
        "tokens_per_s": tokens / seconds,
        "step_s": seconds / len(steps),
        "share": tokens * operations / seconds / rate,
        "loss": sum(step["loss"] for step in steps[-5:]) / len(steps[-5:]),
        "peak_gib": result["peak_memory"] and result["peak_memory"] / 2**30,
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--torchlake"]:
        train_torchlake(json.loads(sys.argv[2]))
    else:
        main()
