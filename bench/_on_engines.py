"""What the benchmarks of Spark and Ray share: the table, the model, a peer's scorer, turns, answers and first lines.

A contender is a function of a folder: it reads the table, scores every row and writes `id`, `label` and `score` as
Parquet into that folder. All of them use the same number of cores, with one thread on each.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from _common import SCRATCH, distinct_texts, random_model, reviews
from _contender import ONE_THREAD
from _scoring_peers import transformers_

FILES = 8
Contender = Callable[[Path], object]


def set_up() -> None:
    """What the engines' processes have to find in their environment: one thread each, and this folder's modules."""
    os.environ.update(ONE_THREAD, TORCHLAKE_PROGRESS="0")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.path.dirname(__file__), os.environ.get("PYTHONPATH")]))


def table_of(rows: int) -> Path:
    """A folder of eight Parquet files: the test reviews, as often as it takes, each time another word, in no order."""
    folder = SCRATCH / f"on-engines-{rows}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    test = pq.read_table(reviews() / "test.parquet")["text"].to_pylist()
    order = np.random.default_rng(0).permutation(rows)
    for number, which in enumerate(np.array_split(order, FILES)):
        table = pa.table({"id": which, "text": distinct_texts(test, which.tolist())})
        pq.write_table(table, folder / f"part-{number}.parquet")
    return folder


def model_of(given: str | None) -> Path:
    """The model folder that was asked for, else the fine-tuned one that accuracy.py left, else MiniLM's shape."""
    tuned = SCRATCH / "accuracy-run" / "model"
    if given or (tuned / "config.json").exists():
        return Path(given or tuned)
    shape = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    return random_model(SCRATCH / "minilm-shape", base="bert", **shape)


def peer(way: str, model: str) -> Callable[[list[str]], dict[str, np.ndarray]]:
    """One of the ways of bench/scoring.py, loaded: texts in, a label and its probability for each out."""
    from transformers import AutoConfig

    score = transformers_({"model": model})[way]
    names = np.array([name for _, name in sorted(AutoConfig.from_pretrained(model).id2label.items())], dtype=object)

    def label(texts: list[str]) -> dict[str, np.ndarray]:
        probabilities, _ = score(texts)
        return {"label": names[probabilities.argmax(axis=1)], "score": probabilities.max(axis=1).astype(float)}

    return label


def in_turn(contenders: Mapping[str, Contender], rounds: int, rows: int) -> list[dict[str, Any]]:
    """A row for each contender, the best of its rounds; the first is the peer, the last the local engine."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    answers: dict[str, pa.Table] = {}
    for _ in range(rounds):
        for name, contender in contenders.items():
            output = SCRATCH / "on-engines-out"
            shutil.rmtree(output, ignore_errors=True)
            began = time.monotonic()
            contender(output)
            seconds[name].append(time.monotonic() - began)
            answers[name] = pq.read_table(output, columns=["id", "label", "score"]).sort_by("id")
    base, local = min(next(iter(seconds.values()))), next(reversed(seconds))
    table = []
    for name, taken in seconds.items():
        best = min(taken)
        table.append(
            {
                "name": name,
                "seconds": best,
                "rows_per_s": rows / best,
                "ratio": base / best,
                "over_local": best / min(seconds[local]) - 1,
                **compare(answers[name], answers[local]),
            }
        )
    return table


def compare(answers: pa.Table, reference: pa.Table) -> dict[str, float]:
    """The share of rows with the reference's label, and the largest difference of a score."""
    assert answers["id"].equals(reference["id"]), "every row comes out once"
    same = answers["label"].to_numpy() == reference["label"].to_numpy()
    return {
        "agreement": float(same.mean()),
        "largest_difference": float(np.abs(answers["score"].to_numpy() - reference["score"].to_numpy()).max()),
    }


def beyond_start(name: str, engines: Mapping[str, Any], model: Path, rows: int, rounds: int) -> dict[str, Any]:
    """What the first engine's job takes over the second's beyond start-up: each less its seconds for 64 rows."""
    import torchlake as tl

    best: dict[tuple[str, int], float] = {}
    for _ in range(rounds):
        for number in (64, rows):
            source = table_of(number)
            for which, engine in engines.items():
                output = SCRATCH / "on-engines-out"
                shutil.rmtree(output, ignore_errors=True)
                began = time.monotonic()
                tl.predict(model, source, output, key="id", engine=engine)
                seconds = time.monotonic() - began
                best[which, number] = min(seconds, best.get((which, number), seconds))
    first, second = (best[which, rows] - best[which, 64] for which in engines)
    return {
        "name": name,
        "seconds": best[next(iter(engines)), rows],
        "local_seconds": best[list(engines)[1], rows],
        "beyond_start_over_local": first / second - 1,
    }


def empty_chunks(name: str, engine: Any, rounds: int, chunks: int = 10_000) -> dict[str, Any]:
    """Chunks a second to a worker that does nothing, once the engine's workers run."""
    times = []
    for number in (100, *[chunks] * rounds):
        began = time.monotonic()
        assert sum(1 for _ in engine.run_chunks(_no_work, range(number))) == number
        times.append(time.monotonic() - began)
    return {"name": name, "seconds": min(times[1:]), "chunks_per_s": chunks / min(times[1:])}


def _no_work() -> Callable[[Any], Any]:
    return lambda chunks: (chunk for chunk in chunks)


def ranks_begin(folder: str) -> None:
    """What is launched: each rank notes when its first line ran, and when it had found the others."""
    first = time.monotonic()
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    dist.barrier()
    (Path(folder) / str(os.getpid())).write_text(json.dumps([first, time.monotonic()]))


def launch_row(name: str, launch: Callable[[str], object], times: int, ranks: int) -> dict[str, Any]:
    """Seconds from the call until the last rank ran its first line, until all had met, and until the call returned."""
    runs = []
    for _ in range(times):
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            launch(folder)
            ended = time.monotonic()
            marks = [json.loads(file.read_text()) for file in Path(folder).iterdir()]
        assert len(marks) == ranks, f"{len(marks)} of {ranks} ranks began"
        runs.append([max(moment) - began for moment in zip(*marks, strict=True)] + [ended - began])
    first, met, whole = (min(moments) for moments in zip(*runs, strict=True))
    return {"name": name, "first_line_s": first, "ranks_met_s": met, "seconds": whole}
