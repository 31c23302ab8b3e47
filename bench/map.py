"""What does `tl.map` cost over calling a function by hand, and beside Ray Data, Spark and Daft?

One function (MinHash signatures of texts, a quarter of a millisecond each) over one table of Parquet files, from stored
table to stored table, with one process per core: by hand in a pool of processes, `tl.map` on three engines,
`map_batches` of Ray Data, `mapInArrow` of Spark and a class of Daft. In turn, best of the rounds. Ray and Spark are
warm; starting processes counts for the others. The CPU time of the first two is given too: other jobs on the
machine disturb it less. Only `tl.map` resumes after a kill, names the row that failed, and publishes all or nothing.
"""

import json
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from _common import SCRATCH, arguments, finish
from _environments import python_of
from _map_function import BATCH, make_signature, make_worker

import torchlake as tl

FILES = 64
SCHEMA = {"signature": pa.string()}
OWN_PROCESSES = ("by hand", "torchlake, local")
"Their processes are this one's children; the other engines' end elsewhere, where their CPU time is not found."
Contender = Callable[[Path, Path, int], float]


def write_texts(folder: Path, rows: int) -> None:
    """Texts of 20 to 60 words of a vocabulary of 5,000, in Parquet files with one row group each."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    chance = np.random.default_rng(7)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = np.array(["".join(chance.choice(letters, chance.integers(3, 9))) for _ in range(5000)])
    for number, ids in enumerate(np.array_split(np.arange(rows), FILES)):
        texts = [" ".join(chance.choice(words, chance.integers(20, 60))) for _ in ids]
        pq.write_table(pa.table({"id": ids, "text": texts}), folder / f"part-{number:03d}.parquet")


def map_file(source: Path, output: Path) -> None:
    """By hand: one file, batch by batch."""
    global _function
    _function = _function or make_worker()
    table = pq.read_table(source)
    batches = [_function(table.slice(first, BATCH)) for first in range(0, len(table), BATCH)]
    pq.write_table(pa.concat_tables(batches).append_column("id", table["id"]), output)


_function: Any = None


def clocked(run: Callable[[Path, Path, int], object], source: Path, output: Path, processes: int) -> float:
    began = time.monotonic()
    run(source, output, processes)
    return time.monotonic() - began


def by_hand(source: Path, output: Path, processes: int) -> None:
    output.mkdir()
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        files = sorted(source.iterdir())
        list(pool.map(map_file, files, [output / file.name for file in files]))


def torchlake(engine: type, source: Path, output: Path, processes: int) -> None:
    options = {"cpus_per_process": 1} if engine is tl.Ray else {}
    made = engine(processes=processes, **options)
    tl.map(make_worker, source, output, schema=SCHEMA, columns=["text"], key="id", batch_rows=BATCH, engine=made)


class Signature:
    """The function as the kind of class that Ray Data makes once in every process."""

    def __init__(self) -> None:
        self.function = make_worker()

    def __call__(self, batch: pa.Table) -> pa.Table:
        return self.function(batch).append_column("id", batch["id"])


def ray_data(source: Path, output: Path, processes: int) -> None:
    import ray.data

    dataset = ray.data.read_parquet(str(source), override_num_blocks=FILES)
    compute = ray.data.ActorPoolStrategy(size=processes)
    mapped = dataset.map_batches(Signature, batch_size=BATCH, batch_format="pyarrow", compute=compute)
    mapped.write_parquet(str(output))


def signatures(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The function for `mapInArrow`: made once for each task."""
    signature = make_signature()
    for batch in batches:
        made = pa.array([signature(text) for text in batch["text"].to_pylist()])
        yield pa.record_batch({"id": batch["id"], "signature": made})


def spark_arrow(session: Any, source: Path, output: Path, processes: int) -> None:
    frame = session.read.parquet(str(source))
    frame.mapInArrow(signatures, "id bigint, signature string").write.parquet(str(output))


def daft(python: Path, source: Path, output: Path, processes: int) -> float:
    command = [str(python), str(Path(__file__).with_name("_map_daft.py")), str(source), str(output), str(processes)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"])


def seconds_in_function(source: Path) -> float:
    """Seconds of this process for the table's rows, without reading and writing."""
    function, table = make_worker(), pq.read_table(source)
    began = time.process_time()
    function(table)
    return time.process_time() - began


def cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def contenders_of(session: Any) -> tuple[dict[str, Contender], list[str]]:
    """The contenders by name, and why one is left out."""
    made: dict[str, Contender] = {
        "by hand": partial(clocked, by_hand),
        "torchlake, local": partial(clocked, partial(torchlake, tl.Local)),
        "Ray Data, map_batches": partial(clocked, ray_data),
        "torchlake, Ray": partial(clocked, partial(torchlake, tl.Ray)),
        "Spark, mapInArrow": partial(clocked, partial(spark_arrow, session)),
        "torchlake, Spark": partial(clocked, partial(torchlake, tl.Spark)),
    }
    python = python_of("daft")
    if isinstance(python, str):
        return made, [f"Daft: {python}"]
    return {**made, "Daft, class": partial(daft, python)}, []


def row_of(
    name: str, seconds: dict[str, list[float]], cpu: dict[str, list[float]], answers: dict[str, pa.Table], rows: int
) -> dict[str, Any]:
    best, base = min(seconds[name]), min(seconds["by hand"])
    found, expected = answers[name], answers["by hand"]
    used = {"cpu_s": min(cpu[name]), "cpu_over_by_hand": min(cpu[name]) / min(cpu["by hand"]) - 1}
    same = np.asarray(found["signature"].to_numpy() == expected["signature"].to_numpy())
    return {
        "name": name,
        "seconds": best,
        "rows_per_s": rows / best,
        "over_by_hand": best / base - 1,
        **(used if name in OWN_PROCESSES else {}),
        "each_row_once": found["id"].equals(expected["id"]),
        "agreement": float(same.mean()),
        "rounds": [round(one, 2) for one in seconds[name]],
    }


def main() -> None:
    options = arguments(__doc__, seconds=60, rounds=2, processes=2, rows=0)
    os.environ.update({"TORCHLAKE_PROGRESS": "0", "OMP_NUM_THREADS": "1", "RAY_DATA_DISABLE_PROGRESS_BARS": "1"})
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.path.dirname(__file__), os.environ.get("PYTHONPATH")]))
    source, output, ranks = SCRATCH / "map", SCRATCH / "map-out", options.processes
    rows = options.rows
    if not rows:
        write_texts(source, 2048)
        rows = round(2.048 * ranks * options.seconds / seconds_in_function(source)) * 1000
    write_texts(source, rows)

    import ray

    ray.init(
        address="local",
        num_cpus=2 * ranks,  # by Ray's count: a fixed pool that takes every CPU leaves none for reading, and hangs
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        _system_config={"worker_niceness": 0},
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    session = tl.Spark(master=f"local[{ranks}]").session.get()
    contenders, left_out = contenders_of(session)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    cpu: dict[str, list[float]] = {name: [] for name in contenders}
    answers: dict[str, pa.Table] = {}
    for _ in range(options.rounds):
        for name, contender in contenders.items():
            before = cpu_of_children()
            seconds[name].append(contender(source, fresh(output), ranks))
            cpu[name].append(cpu_of_children() - before)
            answers[name] = pq.read_table(output, columns=["id", "signature"]).sort_by("id")
    session.stop()
    ray.shutdown()
    note = (
        f"{rows:,} texts in {FILES} files, {ranks} processes, best of {options.rounds}; agreement: share of rows with "
        f"the signature of the first. {' '.join(left_out)}"
    )
    made = [row_of(name, seconds, cpu, answers, rows) for name in contenders]
    finish("map", made, as_json=options.json, note=note.strip(), keep=options.seconds == 60)


def fresh(folder: Path) -> Path:
    """The folder, removed."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder


if __name__ == "__main__":
    main()
