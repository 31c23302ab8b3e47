"""How fast are tables planned, read, checked and verified, before and besides any model?

A Parquet table of one file and of 500, an Arrow file of compressed batches, CSV, JSON lines, a key column, the output
of a million rows, and an increment of one file on an output of 50 parts. Each measurement is a process of its own, in
turn with plain pyarrow's and, with --before, with that of an earlier version; the best of the rounds counts:

    git worktree add /tmp/before COMMIT; python bench/reading.py --before /tmp/before/src
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq
from _common import SCRATCH, finish, parser

HOME = SCRATCH / "reading"
SOURCE = Path(__file__).parents[1] / "src"
FILES, BATCHES, PARTS = 500, 60, 50
COLUMNS = ("id", "text")
KEYS = ("int64", "timestamp", "string")
FINGERPRINT = {"model": "0" * 64, "key": "id"}
PEERS: dict[str, Callable[[Path], Any]] = {
    "parquet": pq.read_table,
    "files": pq.read_table,
    "arrow": lambda path: pa.ipc.open_file(str(path)).read_all(),
    "csv": pyarrow.csv.read_csv,
    "jsonl": pyarrow.json.read_json,
}
SOURCES = {
    "parquet": "table.parquet",
    "files": "files",
    "arrow": "table.arrow",
    "csv": "text.csv",
    "jsonl": "text.jsonl",
    **{f"key-{name}": f"key-{name}.parquet" for name in KEYS},
}
Seconds = dict[str, float]


def texts(rows: int, seed: int = 0) -> pa.Array:
    """Texts of 5 to 30 made-up words, no two alike."""
    rng = np.random.default_rng(seed)
    words = pa.array([f"w{number:04x}" for number in range(5_000)])
    lengths = rng.integers(5, 31, rows)
    drawn = words.take(pa.array(rng.zipf(1.3, int(lengths.sum())) % len(words)))
    lists = pa.ListArray.from_arrays(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), drawn)
    return pc.binary_join(lists, " ")


def write_tables(rows: int) -> None:
    """The tables that are read, each once."""
    shutil.rmtree(HOME, ignore_errors=True)
    (HOME / "files").mkdir(parents=True)
    table = pa.table({"id": range(rows), "text": texts(rows)})
    pq.write_table(table, HOME / SOURCES["parquet"], row_group_size=rows // 8)
    small = max(1, rows // FILES)
    for number in range(FILES):
        pq.write_table(table.slice(number * small, small), HOME / "files" / f"part-{number:05d}.parquet")
    compressed = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(HOME / SOURCES["arrow"], table.schema, options=compressed) as file:
        file.write_table(table, max_chunksize=-(-rows // BATCHES))
    few = table.slice(0, rows // 4)
    pa.csv.write_csv(few, HOME / SOURCES["csv"])
    with open(HOME / SOURCES["jsonl"], "w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in few.to_pylist())
    numbers = np.random.default_rng(1).permutation(2 * rows)
    kinds = {
        "int64": pa.array(numbers),
        "timestamp": pa.array(numbers, pa.timestamp("us")),
        "string": pa.array([f"user-{number:012d}" for number in numbers.tolist()]),
    }
    for name, column in kinds.items():
        pq.write_table(pa.table({"id": column}), HOME / f"key-{name}.parquet")


@contextmanager
def clock(seconds: Seconds, name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - began


def planned(source: Path, columns: tuple[str, ...], **options: Any) -> tuple[Any, Any]:
    """The table of `source` and its plan."""
    from torchlake.tables.chunks import plan_chunks
    from torchlake.tables.table import open_table

    table = open_table(source, columns=columns)
    return table, plan_chunks(table, columns=columns, **options)


def plan_and_read(source: Path, seconds: Seconds) -> None:
    """Plan the table, then read all its chunks in one process."""
    from torchlake.tables.reading import ChunkReader

    with clock(seconds, "plan"):
        _, plan = planned(source, COLUMNS)
    with clock(seconds, "read"):
        reader = ChunkReader(COLUMNS)
        rows = sum(reader.read(chunk)[0].num_rows for chunk in plan.chunks)
    assert rows == plan.rows


def check_keys(source: Path, seconds: Seconds) -> None:
    """Whether the key column is one."""
    from torchlake.tables.keys import check_key

    table, plan = planned(source, ("id",))
    with clock(seconds, "check"):
        check_key(table, plan, "id")


def write_output(source: Path, output: Path, *, increment: bool = False, chunk_rows: int | None = None) -> None:
    """An output of the table's key and text; with `increment` only of the files that it has gained."""
    from torchlake.outputs.compatibility import AllowedChanges
    from torchlake.outputs.find import folder_output
    from torchlake.outputs.parts import part_name
    from torchlake.outputs.transaction import WriteRequest
    from torchlake.tables.reading import ChunkReader

    place = folder_output(output)
    _, plan = planned(source, COLUMNS, cached=place.earlier().inputs, chunk_rows=chunk_rows)
    reader = ChunkReader(COLUMNS)
    allowed = AllowedChanges(new_input=increment)
    request = WriteRequest(plan=plan, fingerprint=FINGERPRINT, schema=plan.schema, allowed=allowed)
    with place.begin(request) as out:
        parts = list(out.done)
        for chunk in out.pending:
            rows = reader.read(chunk)[0].append_column("error", pa.nulls(chunk.rows, pa.string()))
            name = part_name(out.plan, chunk, FINGERPRINT)
            parts.append(out.parts.write(name, rows, chunk=chunk.index))
        out.commit(parts, {})


def verify_output(rows: int, seconds: Seconds) -> None:
    """Verify an output of the given number of rows, with a key."""
    from torchlake.tables.verification.verify import verify

    source, output = HOME / "verified.parquet", HOME / "verified"
    pq.write_table(pa.table({"id": range(rows), "text": texts(rows)}), source)
    write_output(source, output)
    with clock(seconds, "verify"):
        found = verify(output)
    assert found.problems == []
    assert found.rows_out == rows


def resume_increment(rows: int, seconds: Seconds) -> None:
    """Plan, score and publish one new file on an output of many parts; the scoring itself takes no time."""
    source, output = HOME / "growing", HOME / "grown"
    source.mkdir()
    each = rows // PARTS
    table = pa.table({"id": range(rows + each), "text": texts(rows + each)})
    for number in range(PARTS + 1):
        path = source / f"part-{number:05d}.parquet"
        pq.write_table(table.slice(number * each, each), path)
        if number == PARTS - 1:
            write_output(source, output, chunk_rows=each)
    with clock(seconds, "increment"):
        write_output(source, output, increment=True, chunk_rows=each)


def measure(name: str, rows: int) -> Seconds:
    """The seconds of each step of one measurement, in this process."""
    seconds: Seconds = {}
    if name == "verify":
        verify_output(rows, seconds)
    elif name == "increment":
        resume_increment(rows, seconds)
    elif name.startswith("pyarrow-"):
        name = name.removeprefix("pyarrow-")
        with clock(seconds, "read"):
            PEERS[name](HOME / SOURCES[name])
    elif name.startswith("key-"):
        check_keys(HOME / SOURCES[name], seconds)
    else:
        plan_and_read(HOME / SOURCES[name], seconds)
    return seconds


def measured(name: str, rows: int, source: Path) -> Seconds:
    """The same in a process of its own, with the torchlake in that folder."""
    for left in ("verified", "growing", "grown"):
        shutil.rmtree(HOME / left, ignore_errors=True)
    done = subprocess.run(
        [sys.executable, __file__, "--measure", name, "--rows", str(rows)],
        env={**os.environ, "PYTHONPATH": str(source)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    print(f"  {name} {source}: {done.stdout.strip()}", file=sys.stderr)
    seconds: Seconds = json.loads(done.stdout)
    return seconds


def best(rounds: list[Seconds]) -> Seconds:
    return {step: min(one[step] for one in rounds) for step in rounds[0]}


WORDS = {
    "parquet": "1 Parquet file",
    "files": f"{FILES} Parquet files",
    "arrow": f"1 Arrow file, {BATCHES} compressed batches",
    "csv": "CSV",
    "jsonl": "JSON lines",
    **{f"key-{name}": f"{name} keys" for name in KEYS},
    "verify": "an output with a key",
    "increment": f"one file on {PARTS} parts",
}


def rows_of(name: str, rows: int) -> int:
    """How many rows a measurement is about."""
    return {"csv": rows // 4, "jsonl": rows // 4, "files": max(1, rows // FILES) * FILES}.get(
        name, 2 * rows if name.startswith("key-") else rows
    )


def bytes_of(name: str) -> int | None:
    """The size of the table that a measurement reads; None where it writes its own."""
    if name not in SOURCES:
        return None
    path = HOME / SOURCES[name]
    return sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path]))


def compared(name: str, rows: int, rounds: int, before: Path | None) -> list[dict[str, Any]]:
    """A line for each step: its seconds now and before, and plain pyarrow's; the contenders take turns."""
    contenders = {"seconds": (name, SOURCE)}
    if before is not None:
        contenders["before"] = (name, before)
    if name in PEERS:
        contenders["pyarrow"] = (f"pyarrow-{name}", SOURCE)
    every: dict[str, list[Seconds]] = {column: [] for column in contenders}
    for _ in range(rounds):
        for column, (what, source) in contenders.items():
            every[column].append(measured(what, rows, source))
    found = {column: best(seconds) for column, seconds in every.items()}
    size = bytes_of(name)
    lines = []
    for step, seconds in found["seconds"].items():
        line: dict[str, Any] = {"name": f"{step}: {WORDS[name]}", "rows": rows_of(name, rows), "seconds": seconds}
        if "before" in found:
            line |= {"before": found["before"][step], "ratio": found["before"][step] / seconds}
        line["pyarrow"] = found.get("pyarrow", {}).get(step)
        line["rows_per_s"] = line["rows"] / seconds
        line["mb_per_s"] = None if size is None else size / 1e6 / seconds
        lines.append(line)
    return lines


def main() -> None:
    options_parser = parser(__doc__, rows=1_000_000, rounds=3)
    options_parser.add_argument("--before", type=Path, help="the src folder of an earlier version")
    options_parser.add_argument("--measure", help="one measurement, in this process")
    options = options_parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.rows)))
        return
    write_tables(options.rows)
    names = [*SOURCES, "verify", "increment"]
    rows = [line for name in names for line in compared(name, options.rows, options.rounds, options.before)]
    shutil.rmtree(HOME)
    note = f"best of {options.rounds} rounds; ratio: times faster than before; files in the page cache, one process"
    finish("reading", rows, as_json=options.json, note=note, keep=options.before is not None)


if __name__ == "__main__":
    main()
