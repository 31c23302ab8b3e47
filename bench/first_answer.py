"""How long from the start of a process to the first answers? Ten reviews and an encoder of MiniLM's shape.

Each contender is a new process, in turn; the files are in the page cache. `torchlake predict` is timed until it ends,
with its output committed; the others until they have printed the answers. "cpu" is the processor time of the whole
process, which depends less on what else runs. The labels and scores of all are compared with those of transformers'
pipeline.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from _common import SCRATCH, arguments, finish, random_model, reviews

PIPELINE = """
import json, sys
from transformers import pipeline
classify = pipeline("text-classification", model=sys.argv[1], device=-1)
found = classify(json.loads(sys.argv[2]))
print(json.dumps([[one["label"], one["score"]] for one in found]), flush=True)
"""
LOAD = """
import json, sys
import torchlake as tl
found = tl.load(sys.argv[1])(json.loads(sys.argv[2]))
print(json.dumps([[one["label"], one["score"]] for one in found]), flush=True)
"""
TORCH = "import torch; print('[]', flush=True)"
Answers = list[tuple[str, float]]


def until_answers(code: str, *parameters: str) -> tuple[float, Answers]:
    """Seconds until a new Python process has printed its answers."""
    began = time.perf_counter()
    with subprocess.Popen([sys.executable, "-c", code, *parameters], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - began
    return seconds, [(label, score) for label, score in json.loads(line)]


def until_committed(model: Path, table: Path, *options: str) -> tuple[float, Answers]:
    """Seconds until `torchlake predict` has ended."""
    output = SCRATCH / "first-answer"
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "-m", "torchlake", "predict", str(model), str(table), str(output), "--quiet", *options]
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - began
    rows = pq.read_table(output, columns=["label", "score"]).to_pylist()
    return seconds, [(row["label"], row["score"]) for row in rows]


def cpu_of_children() -> float:
    """Processor seconds of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    options = arguments(__doc__, rows=10, rounds=5)
    os.environ["HF_HUB_OFFLINE"] = "1"
    shape = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    model = random_model(SCRATCH / "minilm-shape", base="bert", **shape)
    table = SCRATCH / "first-answer.parquet"
    pq.write_table(pq.read_table(reviews() / "test.parquet").slice(0, options.rows), table)
    texts = json.dumps(pq.read_table(table)["text"].to_pylist())
    contenders: dict[str, Callable[[], tuple[float, Answers]]] = {
        "transformers.pipeline": lambda: until_answers(PIPELINE, str(model), texts),
        "torchlake.load": lambda: until_answers(LOAD, str(model), texts),
        "torchlake predict": lambda: until_committed(model, table),
        "torchlake predict --runtime eager --processes 1": lambda: until_committed(
            model, table, "--runtime", "eager", "--processes", "1"
        ),
        "import torch alone": lambda: until_answers(TORCH),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    cpu: dict[str, list[float]] = {name: [] for name in contenders}
    answers: dict[str, Answers] = {}
    for _ in range(options.rounds):
        for name, run in contenders.items():
            before = cpu_of_children()
            took, answers[name] = run()
            seconds[name].append(took)
            cpu[name].append(cpu_of_children() - before)
    expected = answers["transformers.pipeline"]
    finish(
        "first_answer",
        [
            {"name": name, "seconds": min(times), "cpu": min(cpu[name]), **compared(answers[name], expected)}
            for name, times in seconds.items()
        ],
        as_json=options.json,
        note=f"{options.rows} reviews, MiniLM's shape, best of {options.rounds}; from the start of the process",
    )


def compared(found: Answers, expected: Answers) -> dict[str, Any]:
    """The share of equal labels and the largest difference of a score; nothing where there are no answers."""
    if not found:
        return {}
    equal = sum(one[0] == other[0] for one, other in zip(found, expected, strict=True))
    difference = max(abs(one[1] - other[1]) for one, other in zip(found, expected, strict=True))
    return {"equal labels": equal / len(expected), "difference": difference}


if __name__ == "__main__":
    main()
