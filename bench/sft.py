"""How fast does a language model learn answers and preferences, beside TRL on the same rows?

Conversations of mixed length, of words drawn from a seed; two shapes with random weights, a Llama of two layers and
GPT-2 small's. TRL trains them unpacked (each batch padded to its longest row) and packed (`packing=True`, best-fit
decreasing), torchlake as always; an epoch of about as many tokens a step, fp32, AdamW, one thread. Pairs: TRL's DPO
with its reference beside the model, and with log-probabilities made before, and torchlake's. Rendering: a chat template
by `datasets.map` and by torchlake's renderer in its own process. The contenders run in turn; CPU seconds, since other
work shares the machine, the least of all rounds.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from _clocked import CLOCK, tick
from _common import SCRATCH, finish, parser
from _contender import ONE_THREAD
from _environments import python_of
from _fresh import alone
from _sft_rows import build_model, conversations, preferences

HOME = SCRATCH / "sft"
LIMIT_S = 3_000
LENGTH, RATE = 512, 1e-4
PARTS = "parts.json"
"What calls for parts of the measurements have measured, so that the whole need not run at once."
Result = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """A model, the rows of its epoch, and the rows of a step where they are not packed."""

    name: str
    rows: int
    batch: int
    pairs: int
    pairs_batch: int


SHAPES = (Shape("two-layers", 192, 16, 64, 8), Shape("gpt2-small", 16, 4, 8, 2))


def peer(kind: str, setup: dict[str, Any]) -> Result:
    """What TRL does, in its environment."""
    python = python_of("trl")
    if isinstance(python, str):
        return {"reason": python}
    out = HOME / "peer.json"
    out.unlink(missing_ok=True)
    asked = {**setup, "kind": kind, "out": str(out), "scratch": str(HOME / "trainer")}
    with open(HOME / "peer.log", "w") as log:
        script = str(Path(__file__).parent / "_sft_peer.py")
        command = [str(python), script, json.dumps(asked)]
        done = subprocess.run(command, stdout=log, stderr=log, timeout=LIMIT_S, check=False)
    if done.returncode or not out.exists():
        return {"reason": (HOME / "peer.log").read_text().strip().splitlines()[-1][:200]}
    return dict(json.loads(out.read_text()))


def learn(kind: str, setup: dict[str, Any]) -> Result:
    """An epoch of torchlake. A line is written when the next step has been computed, so the first step measured is the
    third."""
    import torchlake as tl

    run, clock = HOME / "run", HOME / "clock"
    shutil.rmtree(run, ignore_errors=True)
    clock.unlink(missing_ok=True)
    os.environ[CLOCK] = str(clock)
    data = {"train": setup["table"], "validation": None}
    train = {"epochs": 1, "batch_size": setup["batch"], "learning_rate": RATE, "schedule": "constant", "warmup": 0.0}
    train |= {"weight_decay": 0.0, "clip_norm": 1.0, "precision": "fp32", "checkpoint_every": "10h"}
    if kind == "dpo":
        data |= {"text": "prompt", "chosen": "chosen", "rejected": "rejected"}
        train["preference"] = {"loss": "dpo", "beta": 0.1}
    else:
        data |= {"text": "messages", "learn": "assistant"}
    model = {"base": setup["model"], "task": "text_generation", "max_length": LENGTH}
    tl.train(run=run, data=data, model=model, train=train, engine=tl.Local(processes=1), on_step=tick)
    lines = [line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "loss" in line]
    counts = targets_of(run) if kind != "dpo" else [line["rows"] for line in lines]
    times = [float(each) for each in clock.read_text().split()]
    assert len(times) == len(lines) == len(counts)
    return {
        "cpu_s": times[-1] - times[0],
        "learned": sum(counts[2:]),
        "steps": len(lines),
        "loss": sum(n * line["loss"] for n, line in zip(counts, lines, strict=True)) / sum(counts),
        "peak_memory_mib": max(line["peak_memory_bytes"] for line in lines) / 2**20,
    }


def targets_of(run: Path) -> list[int]:
    """Return the targets of each step of a run's first epoch, which its plan tells."""
    from torchlake.config.job import load_job
    from torchlake.data import bins, loading, packing
    from torchlake.models.spec import load_spec
    from torchlake.training.rows import Rows, planned_batches, steps_per_epoch

    table = loading.open_tokens(next((run / "cache").iterdir()))
    job, spec = load_job(run / "job.yaml"), load_spec(run / "model")
    rows = Rows(table, np.arange(len(table)))
    steps, counts = range(steps_per_epoch(rows, job.train, spec)), []
    for _, batch in planned_batches(rows, job.train, steps, spec):
        assert isinstance(batch.table.tokens, bins.Bins)
        counts.append(int(packing.target_counts(batch.table.tokens, batch.numbers).sum()))
    return counts


def render(kind: str, setup: dict[str, Any]) -> Result:
    """The same rows by torchlake: rendered in a process of its own, whose CPU time counts; the best of three passes."""
    from transformers import AutoTokenizer

    from torchlake.config.task_spec import RowOptions
    from torchlake.tasks import _rendering
    from torchlake.tasks._whole_rows import whole_rows

    tokenizer = AutoTokenizer.from_pretrained(setup["model"])
    column = pq.read_table(setup["table"])["messages"].combine_chunks()

    def clock() -> float:
        """CPU seconds of this process and its renderer."""
        running = _rendering._renderer
        if running is None:
            return time.process_time()
        fields = Path(f"/proc/{running.process.pid}/stat").read_text().rpartition(")")[2].split()
        return time.process_time() + sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    def spent(rows: int) -> tuple[float, int]:
        began = clock()
        made = whole_rows(tokenizer, {"text": column[:rows]}, RowOptions(), LENGTH, "answers")
        assert not made.errors
        return clock() - began, int(made.lengths.sum())

    start, _ = spent(8)
    seconds, tokens = min(spent(len(column)) for _ in range(3))
    _rendering.close()
    return {"cpu_s": seconds, "rows": len(column), "tokens": tokens, "start_cpu_s": start}


Contender = tuple[str, Any, str, dict[str, Any]]
"Name, the function that measures it, and its two arguments."
Measured = dict[str, dict[str, Result]]
"What was measured, by kind and contender: the round with the least CPU time, and the number of rounds."


def measure(what: str, contenders: list[Contender], options: Any, known: Measured) -> None:
    """Measure the contenders of a kind in turn; rounds of earlier calls count as well."""
    best = known.setdefault(what, {})
    for _ in range(options.rounds):
        for name, work, kind, setup in contenders:
            if options.contenders and name not in options.contenders:
                continue
            result = (
                peer(kind, setup) if work is peer else alone(work, kind, setup, out=HOME / "out.json", limit_s=LIMIT_S)
            )
            print(f"  {what}, {name}: {result}", file=sys.stderr, flush=True)
            before = best.get(name, {})
            faster = result.get("cpu_s", 1e9) <= before.get("cpu_s", 1e9)
            best[name] = {**(result if faster else before), "rounds": before.get("rounds", 0) + ("cpu_s" in result)}
            (HOME / PARTS).write_text(json.dumps(known))


def rows_of(what: str, best: dict[str, Result]) -> list[Result]:
    """Return a row for each contender; ratios of what it learns a second to those of the first."""
    rows, base = [], 0.0
    for name, result in best.items():
        row: Result = {"name": f"{what}: {name}"}
        if "cpu_s" in result:
            row["per_cpu_second"] = result.get("learned", result.get("rows", 0)) / result["cpu_s"]
            base = base or row["per_cpu_second"]
            row["ratio"] = row["per_cpu_second"] / base
            shown = ("rounds", "steps", "loss", "peak_memory_mib", "start_cpu_s")
            row |= {key: result[key] for key in shown if key in result}
        rows.append({**row, **({"reason": result["reason"]} if "reason" in result else {})})
    return rows


def answers(shape: Shape, model: str) -> list[Contender]:
    """Return the contenders that learn a shape's conversations: tokens learned per CPU second."""
    from transformers import AutoTokenizer

    table, chats = HOME / f"{shape.name}.parquet", conversations(shape.rows)
    pq.write_table(pa.Table.from_pylist(chats), table)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokens = sum(len(tokenizer.apply_chat_template(row["messages"])["input_ids"]) for row in chats)
    blocks = max(1, round(tokens / LENGTH * shape.batch / shape.rows))
    setup = {"model": model, "table": str(table), "length": LENGTH, "rate": RATE}
    packed = {**setup, "batch": blocks}
    return [
        ("TRL, unpacked", peer, "sft", {**setup, "batch": shape.batch}),
        ("TRL, packing=True", peer, "packed", packed),
        ("torchlake", learn, "sft", packed),
    ]


def pairs(shape: Shape, model: str) -> list[Contender]:
    """Return the contenders that learn a shape's pairs by DPO: pairs per CPU second."""
    table = HOME / f"{shape.name}-pairs.parquet"
    pq.write_table(pa.Table.from_pylist(preferences(shape.pairs)), table)
    setup = {"model": model, "table": str(table), "length": LENGTH, "rate": RATE, "batch": shape.pairs_batch}
    return [
        ("TRL", peer, "dpo", {**setup, "precompute": False}),
        ("TRL, reference computed before", peer, "dpo", {**setup, "precompute": True}),
        ("torchlake", learn, "dpo", setup),
    ]


def main() -> None:
    options_parser = parser(__doc__, rounds=2, conversations=1000)
    options_parser.add_argument("--only", nargs="*", default=[], help="of answers, pairs, rendering (default: all)")
    options_parser.add_argument("--shapes", nargs="*", default=[shape.name for shape in SHAPES])
    options_parser.add_argument("--contenders", nargs="*", default=[], help="their names in the table (default: all)")
    options = options_parser.parse_args()
    os.environ.update(ONE_THREAD)
    HOME.mkdir(parents=True, exist_ok=True)
    part = bool(options.only or options.contenders) or len(options.shapes) < len(SHAPES)
    known: Measured = json.loads((HOME / PARTS).read_text()) if part and (HOME / PARTS).exists() else {}
    for shape in SHAPES:
        model = HOME / shape.name
        if not (model / "tokenizer.json").exists():
            build_model(model, shape.name)
        for name, what, make in (("answers", "answers", answers), ("pairs", "DPO pairs", pairs)):
            if shape.name in options.shapes and (not options.only or name in options.only):
                measure(f"{shape.name}, {what}", make(shape, str(model)), options, known)
    if not options.only or "rendering" in options.only:
        table = HOME / "rendering.parquet"
        pq.write_table(pa.Table.from_pylist(conversations(options.conversations)), table)
        setup = {"model": str(HOME / "two-layers"), "table": str(table)}
        contenders: list[Contender] = [("datasets.map", peer, "render", setup), ("torchlake", render, "render", setup)]
        measure("conversations rendered", contenders, options, known)
    note = (
        f"conversations and pairs of mixed length, at most {LENGTH} tokens; fp32, AdamW, one thread; tokens learned, "
        "pairs or conversations per CPU second, best of the rounds; ratios to the first row of each kind"
    )
    whole = len(known) == 2 * len(SHAPES) + 1
    finish(
        "sft",
        [row for kind in sorted(known) for row in rows_of(kind, known[kind])],
        as_json=options.json,
        note=note,
        keep=whole,
    )


if __name__ == "__main__":
    main()
