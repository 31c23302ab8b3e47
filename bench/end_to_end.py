"""How much of the runtime's own speed does `predict` deliver, and where does the rest go?

Two figures for the runtime alone, `Scorer.score` over tokens made before: one process alone on one core, times the
cores; and as many processes as cores at once, which share the caches and the memory's bandwidth. Against them
`tl.predict`: stored table in, read, tokenized, scored, written as Parquet and committed. In turn, best of the rounds.
"""

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from _clocked import Clocked
from _common import SCRATCH, distinct_texts, finish, parser, random_model, reviews
from _contender import ONE_THREAD, Contender

import torchlake as tl
from torchlake import plugins

PREFERRED = ("openvino_int8", "onnx_int8", "int8", "varlen", "eager")
CALIBRATION_ROWS = 200
MARKS = SCRATCH / "end-to-end-marks"


def load_with_a_mark(folder: Path, spec: Any, *, device: str) -> Any:
    """The measured runtime; the clock at the end of loading stands in a file, the same clock in every process."""
    forward = plugins.load("runtimes", os.environ["END_TO_END_RUNTIME"]).load(folder, spec, device=device)
    (MARKS / str(os.getpid())).write_text(str(time.monotonic()))
    return forward


class Alone:
    """One process per core that holds tokens and scores them on demand."""

    def __init__(self, model: Path, runtime: str, calibration: list[str], cores: list[int], batch_tokens: int) -> None:
        script = "_scoring_torchlake.py"
        setup = {"model": str(model), "runtime": runtime, "texts": calibration, "batch_tokens": batch_tokens}
        logs = SCRATCH / "end-to-end"
        preparing = Contender(Path(sys.executable), script, {**setup, "group": "prepare"}, logs / "prepare.log")
        preparing.close()
        self.reason = preparing.reason
        self.contenders: list[Contender] = []
        for core in cores if self.reason is None else []:
            log = logs / f"core-{core}.log"
            self.contenders.append(
                Contender(Path(sys.executable), script, {**setup, "group": "score", "core": core}, log)
            )

    def close(self) -> None:
        """End the processes."""
        for contender in self.contenders:
            contender.close()

    def seconds(self, step: str, texts: list[list[str]]) -> float:
        """Seconds until the slowest of the first `len(texts)` processes has done `step` for its texts, all at once."""
        at_work = self.contenders[: len(texts)]
        for contender, share in zip(at_work, texts, strict=True):
            contender.tell({"go": step, "texts": share})
        answers = [contender.hear() for contender in at_work]
        return max(answer["seconds"] for answer in answers)


def predict(model: Path, source: Path, runtime: str, processes: int, batch_tokens: int) -> dict[str, float]:
    """Seconds of one job, by part; `start` is until the last worker was ready."""
    output = SCRATCH / "end-to-end-out"
    for folder in (output, MARKS):
        shutil.rmtree(folder, ignore_errors=True)
    MARKS.mkdir(parents=True)
    os.environ["END_TO_END_RUNTIME"] = runtime
    engine = Clocked(processes=processes)
    began = time.monotonic()
    scored = tl.predict(
        model,
        source,
        output,
        runtime=load_with_a_mark,
        engine=engine,
        batch_tokens=batch_tokens,
        all_probabilities=True,
    )
    whole = time.monotonic() - began
    ready = max(float(mark.read_text()) for mark in MARKS.iterdir())
    return {
        "whole": whole,
        "plan": engine.asked - began,
        "start": ready - engine.asked,
        "forward": scored.record["provenance"]["forward_seconds"],
    }


def writing_seconds(source: Path, output: Path) -> tuple[float, float]:
    """Seconds to read the table's texts, and to write as Parquet what the job wrote."""
    began = time.perf_counter()
    pq.read_table(source, columns=["text"])
    read = time.perf_counter() - began
    scored = pq.read_table(output)
    began = time.perf_counter()
    pq.write_table(scored, SCRATCH / "end-to-end-written.parquet")
    return read, time.perf_counter() - began


def main() -> None:
    options_parser = parser(__doc__, rows=17060, rounds=2, batch_tokens=512)
    options_parser.add_argument("--runtime", help=f"default: the first that runs here of {', '.join(PREFERRED)}")
    options_parser.add_argument("--model", help="default: random weights in roberta-base's shape")
    options = options_parser.parse_args()
    os.environ.update(ONE_THREAD)
    cores = sorted(os.sched_getaffinity(0))
    model = Path(options.model) if options.model else random_model(SCRATCH / "roberta-base-shape")
    train = pq.read_table(reviews() / "train.parquet").select(["text"])
    order = np.random.default_rng(0).permutation(options.rows)
    table = pa.table({"text": distinct_texts(train["text"].to_pylist(), order.tolist())})
    texts = table["text"].to_pylist()
    source = SCRATCH / "end-to-end.parquet"
    pq.write_table(table, source)
    calibration = texts[:CALIBRATION_ROWS]
    wanted = [options.runtime] if options.runtime else [name for name in PREFERRED if name in plugins.names("runtimes")]
    for runtime in wanted:
        alone = Alone(model, runtime, calibration, cores, options.batch_tokens)
        if alone.reason is None:
            break
        print(f"{runtime}: {alone.reason}")
    else:
        raise SystemExit("no runtime runs here")
    # A quarter of the rows for the process alone: it has to be in turn with the others, not as long.
    quarter = texts[: len(texts) // 4]
    halves = [texts[index :: len(cores) * 2] for index in range(len(cores))]
    try:
        one, together, tokenizing, jobs = [], [], [], []
        for _ in range(options.rounds):
            tokenizing.append(alone.seconds("tokenize", [quarter]))
            one.append(alone.seconds("forward", [quarter]))
            alone.seconds("tokenize", halves)
            together.append(alone.seconds("forward", halves))
            jobs.append(predict(model, source, runtime, len(cores), options.batch_tokens))
    finally:
        alone.close()
    job = min(jobs, key=lambda job: job["whole"])
    read, write = writing_seconds(source, SCRATCH / "end-to-end-out")
    alone_rate = len(quarter) / min(one)
    together_rate = sum(map(len, halves)) / min(together)
    rate, after_start = len(texts) / job["whole"], len(texts) / (job["whole"] - job["plan"] - job["start"])
    core_seconds = job["whole"] * len(cores)
    tokenize = min(tokenizing) * len(texts) / len(quarter)
    parts = {
        "forward passes (the job's own count)": job["forward"],
        "start of the workers, model loaded": job["start"] * len(cores),
        "plan, before the workers": job["plan"] * len(cores),
        "tokenize (measured alone)": tokenize,
        "read (measured alone)": read,
        "write (measured alone)": write,
    }
    parts["waiting for the last chunk, commit, rest"] = core_seconds - sum(parts.values())
    limit = alone_rate * len(cores)
    rows: list[dict[str, Any]] = [
        {"name": f"{runtime} alone on one core, times {len(cores)}", "rows_per_s": limit, "share": 1.0},
        {
            "name": f"{runtime}, {len(cores)} processes at once",
            "rows_per_s": together_rate,
            "share": together_rate / limit,
        },
        {
            "name": "predict, after start-up (plan, workers, model)",
            "rows_per_s": after_start,
            "share": after_start / limit,
            "share_of_processes_at_once": after_start / together_rate,
        },
        {
            "name": "predict, all of it",
            "rows_per_s": rate,
            "share": rate / limit,
            "share_of_processes_at_once": rate / together_rate,
        },
        *({"name": name, "core_seconds": spent, "share_of_job": spent / core_seconds} for name, spent in parts.items()),
    ]
    note = (
        f"{len(texts):,} reviews, {model.name}, {len(cores)} processes of one thread, batches of "
        f"{options.batch_tokens} tokens, best of {options.rounds}; the job took {job['whole']:.1f} s"
    )
    finish("end_to_end", rows, as_json=options.json, note=note, keep=options.rows == 17060)


if __name__ == "__main__":
    main()
