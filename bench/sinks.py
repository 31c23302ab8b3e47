"""What does a table cost as an output, beside a local folder?

A job of a million rows of a label and a score, in a process of its own for each sink, in turn. The model is a wait of a
fixed time for each chunk of 10,000 rows, so that all else is the sink's. Memory is the peak over what the process held
after its imports. Then outputs of many tiny parts: a plan, a resumed job that finds every part, its commit, `verify`
and `open`, whose memory is that of pyarrow's dataset of that many files. Parts of these are written without waiting for
the disk: that time is the disk's, and the same for each.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from _common import SCRATCH, finish, parser
from _contender import forget_peak, peak_mib

from torchlake.outputs.find import output_of
from torchlake.outputs.parts import part_name
from torchlake.outputs.target import TargetOptions
from torchlake.outputs.transaction import WriteRequest
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.reading import ChunkReader
from torchlake.tables.table import open_table

HOME = SCRATCH / "sinks"
SINKS = {"folder": TargetOptions(), "delta": TargetOptions(format="delta"), "iceberg": TargetOptions(format="iceberg")}
CATALOG = {
    "PYICEBERG_CATALOG__BENCH__URI": f"sqlite:///{HOME}/iceberg/catalog.db",
    "PYICEBERG_CATALOG__BENCH__WAREHOUSE": f"file://{HOME}/iceberg/warehouse",
}
SCHEMA = pa.schema([("id", pa.int64()), ("label", pa.string()), ("score", pa.float32()), ("error", pa.string())])
CHUNK_ROWS = 10_000


def scored(ids: pa.ChunkedArray) -> pa.Table:
    """What a classifier gives: numbers that do not compress well."""
    numbers = ids.to_numpy()
    labels = pa.array(["good", "bad"]).take(pa.array(numbers % 7 % 2))
    scores = pa.array((numbers * 0.6180339887) % 1, pa.float64()).cast(pa.float32())
    return pa.table([ids, labels, scores, pa.nulls(len(numbers), pa.string())], schema=SCHEMA)


def job(sink: str, model_s: float) -> dict[str, float]:
    """Score a million rows; seconds by the wall and of this process, and MiB."""
    forget_peak()
    before, began, used = peak_mib(), time.perf_counter(), time.process_time()
    write_all(HOME / "rows.parquet", new_output(sink), SINKS[sink], CHUNK_ROWS, model_s)
    return {
        "seconds": time.perf_counter() - began,
        "cpu_s": time.process_time() - used,
        "mib": peak_mib() - before,
    }


def new_output(sink: str) -> str:
    """A path below `HOME / sink`, or the name of a table in a catalog there."""
    folder = HOME / sink
    folder.mkdir()
    if sink != "iceberg":
        return str(folder / "out")
    from pyiceberg.catalog import load_catalog

    with load_catalog("bench") as catalog:
        catalog.create_namespace("db")
    return "iceberg:bench.db.out"


def write_all(source: Path, output: str, options: TargetOptions, chunk_rows: int, model_s: float = 0.0) -> None:
    table, place = open_table(source), output_of(output, options)
    plan = plan_chunks(table, columns=["id"], chunk_rows=chunk_rows, cached=place.earlier().inputs)
    with place.begin(WriteRequest(plan=plan, fingerprint={"key": "id"}, schema=SCHEMA)) as write:
        reader, parts = ChunkReader(["id"]), []
        for chunk in write.pending:
            due = time.perf_counter() + model_s
            rows = scored(reader.read(chunk)[0]["id"])
            time.sleep(max(0.0, due - time.perf_counter()))
            name = part_name(write.plan, chunk, write.job.fingerprint)
            parts.append(write.parts.write(name, rows, chunk=chunk.index))
        write.commit([*write.done, *parts], {})


def many_parts(sink: str, count: int) -> dict[str, float]:
    """Seconds for an output of `count` parts of ten rows."""
    import torchlake as tl

    source, output, options = HOME / f"{count}.parquet", new_output(sink), SINKS[sink]
    pq.write_table(pa.table({"id": range(10 * count)}), source, row_group_size=100_000)
    forget_peak()
    before, clocked, began = peak_mib(), {}, time.perf_counter()

    def lap(name: str) -> None:
        nonlocal began
        clocked[f"{name}_s"] = time.perf_counter() - began
        began = time.perf_counter()

    plan = plan_chunks(open_table(source), columns=["id"], chunk_rows=10)
    request = WriteRequest(plan=plan, fingerprint={"key": "id"}, schema=SCHEMA)
    lap("plan")
    fsync, os.fsync = os.fsync, lambda descriptor: None
    with output_of(output, options).begin(request) as write:
        reader = ChunkReader(["id"])
        for chunk in write.pending:
            rows = scored(reader.read(chunk)[0]["id"])
            write.parts.write(part_name(write.plan, chunk, write.job.fingerprint), rows, chunk=chunk.index)
    os.fsync = fsync
    lap("write")
    with output_of(output, options).begin(request) as write:
        lap("resume")
        assert not write.pending
        write.commit(write.done, {})
    lap("commit")
    with output_of(output, options).begin(request) as write:
        assert write.complete
    lap("again")
    assert tl.verify(output).problems == []
    lap("verify")
    clocked["mib"] = peak_mib() - before
    forget_peak()
    assert tl.open(output).count_rows() == 10 * count
    lap("open")
    return {**clocked, "open_mib": peak_mib() - before}


def measured(*arguments: Any) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", json.dumps(arguments)]
    done = subprocess.run(command, env={**os.environ, **CATALOG}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    options = parser(__doc__ or "", rows=1_000_000, model_s=60, rounds=2, parts=100_000)
    options.add_argument("--measure", help="one measurement, in this process")
    asked = options.parse_args()
    if asked.measure:
        name, *arguments = json.loads(asked.measure)
        print(json.dumps({"job": job, "many_parts": many_parts}[name](*arguments)))
        return
    shutil.rmtree(HOME, ignore_errors=True)
    HOME.mkdir(parents=True)
    pq.write_table(pa.table({"id": range(asked.rows)}), HOME / "rows.parquet")
    best: dict[str, dict[str, float]] = {}
    for _ in range(asked.rounds):
        for sink in SINKS:
            found = measured("job", sink, asked.model_s * CHUNK_ROWS / asked.rows)
            shutil.rmtree(HOME / sink)
            if sink not in best or found["seconds"] < best[sink]["seconds"]:
                best[sink] = found
    base = best["folder"]["seconds"]
    lines: list[dict[str, Any]] = [
        {"sink": sink, "parts": asked.rows // CHUNK_ROWS, **rounded(one), "to_folder": round(one["seconds"] / base, 3)}
        for sink, one in best.items()
    ]
    for count in (asked.parts // 10, asked.parts * 3 // 10, asked.parts):
        for sink in SINKS:
            lines.append({"sink": sink, "parts": count, **rounded(measured("many_parts", sink, count))})
            shutil.rmtree(HOME / sink)
    note = f"{asked.rows:,} rows with a wait of {asked.model_s} s in all; best of {asked.rounds} rounds"
    finish("sinks", lines, as_json=asked.json, note=note)


def rounded(found: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in found.items()}


if __name__ == "__main__":
    main()
