"""How far are the memory and the time that `torchlake plan` names from what training takes?

Every job is planned, then trained for a few steps by fresh processes on generated rows. The peak is the largest
resident memory of a rank from its second step on, less what it held after its imports: the kernel counts it
(/proc/self/status), and the count is reset after each step, so that loading the model is not in it. It is measured
twice: as it is, and with glibc giving freed memory back at once (MALLOC_MMAP_THRESHOLD_), which leaves what tensors
really take. Linux only.
"""

import json
import os
import shutil
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from _common import SCRATCH, arguments, finish, random_model

import torchlake as tl
from torchlake import plugins
from torchlake.planning.terms import SHARDINGS

SHAPES: dict[str, dict[str, Any]] = {
    "small": {"base": "bert", "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4}
    | {"intermediate_size": 1024},
    "MiniLM": {"base": "bert", "num_hidden_layers": 6, "hidden_size": 384, "num_attention_heads": 12}
    | {"intermediate_size": 1536},
    "roberta-base": {"base": "roberta"},
}
BATCH, LONGEST = 32, 64
STRATEGIES = {"single": 1, "ddp": 2, "fsdp reshard=false": 2, "fsdp reshard=true": 2}


class Measuring(tl.Local):
    """Local processes, which report their resident memory while it trains."""

    def __init__(self, processes: int, folder: Path) -> None:
        super().__init__(processes=processes)
        self.folder = folder

    def launch(self, fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return super().launch(partial(measured, fn, str(self.folder)), *args, **options)


def measured(fn: Callable[..., Any], folder: str, *args: Any) -> Any:
    """Run a rank and write {after the imports, peak of its steps}, in bytes, to `folder`."""
    import transformers  # noqa: F401
    from torch.optim.optimizer import register_optimizer_step_post_hook

    import torchlake.training.loop

    def resident(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

    # What is imported when it is first used belongs to the imports too.
    from transformers import BertForSequenceClassification, RobertaForSequenceClassification  # noqa: F401

    import torchlake.strategies.ddp
    import torchlake.strategies.fsdp  # noqa: F401

    imported, peaks = resident("VmRSS"), []

    def stepped(*_: Any) -> None:
        peaks.append(resident("VmHWM"))
        Path("/proc/self/clear_refs").write_text("5")  # the kernel's way to reset the count

    handle = register_optimizer_step_post_hook(stepped)
    try:
        return fn(*args)
    finally:
        handle.remove()
        report = {"imported": imported, "peak": max(peaks[1:])}
        Path(folder, f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(report))


def write_rows(path: Path, rows: int) -> None:
    """Rows of 8 to 62 words of one token each."""
    rng = np.random.default_rng(0)
    texts = [" ".join(["film"] * length) for length in rng.integers(8, LONGEST - 1, rows)]
    pq.write_table(pa.table({"text": texts, "label": ["good", "bad"] * (rows // 2)}), path)


def compare(name: str, strategy: str, steps: int, table: Path) -> dict[str, Any]:
    """Plan a job and train it twice."""
    processes = STRATEGIES[strategy]
    plugin, _, option = strategy.partition(" reshard=")
    folder = random_model(SCRATCH / f"planning-{name}", **SHAPES[name])
    train = {"epochs": 1, "max_steps": steps, "batch_size": BATCH, "strategy": plugin}
    train |= {"checkpoint_every": "10h", "max_restarts": 0}
    if option:
        train["fsdp"] = {"reshard": option == "true"}
    sections = {
        "data": {"train": str(table), "validation": None},
        "model": {"base": str(folder), "max_length": LONGEST},
        "train": train,
    }
    planned = next(one for one in tl.plan(processes=processes, **sections).strategies if one.strategy == strategy)
    as_it_is, seconds = trained(sections, processes)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    try:
        tensors, _ = trained(sections, processes)
    finally:
        del os.environ["MALLOC_MMAP_THRESHOLD_"]
    return {
        "name": f"{name}, {strategy}",
        "ranks": processes,
        "planned_mib": planned.memory.peak / 2**20,
        "tensors_mib": tensors / 2**20,
        "ratio": planned.memory.peak / tensors,
        "resident_mib": as_it_is / 2**20,
        "ratio_resident": planned.memory.peak / as_it_is,
        "planned_s": planned.time.overlapped,
        "measured_s": seconds,
    }


def trained(sections: dict[str, Any], processes: int) -> tuple[float, float]:
    """The peak of the rank that needed most, in bytes; and the median step's seconds."""
    run, reports = SCRATCH / "planning-run", SCRATCH / "planning-reports"
    for each in (run, reports):
        shutil.rmtree(each, ignore_errors=True)
    reports.mkdir(parents=True)
    tl.train(run=run, engine=Measuring(processes, reports), **sections)
    ranks = [json.loads(file.read_text()) for file in reports.iterdir()]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = statistics.median(line["seconds"] for line in lines[1:] if "loss" in line)
    return max(rank["peak"] - rank["imported"] for rank in ranks), seconds


def main() -> None:
    options = arguments(__doc__, steps=3)
    table = SCRATCH / "planning.parquet"
    SCRATCH.mkdir(exist_ok=True)
    write_rows(table, BATCH * options.steps)
    known = [sharding.name for sharding in SHARDINGS if sharding.plugin in plugins.names("strategies")]
    rows = [
        compare(name, strategy, options.steps, table) for name in SHAPES for strategy in STRATEGIES if strategy in known
    ]
    finish(
        "planning",
        rows,
        as_json=options.json,
        note=f"{options.steps} steps of {BATCH} rows of up to {LONGEST} tokens, fp32, no dropout",
    )


if __name__ == "__main__":
    main()
