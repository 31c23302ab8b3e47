"""How fast is each source read, and how little of it, beside pyarrow, polars and DuckDB on the same table?

10 million rows of an id and a string as loose Parquet files, a Delta table, an Iceberg table and an Arrow stream: all
rows, then the two percent that a condition on the id selects. Each measurement is a separate process and the
contenders take turns; the best of the rounds counts. Memory is the peak over what the process held after its imports.
Bytes are what the process asked the kernel to read. torchlake hashes local files while it plans, and reads on one
thread, as each of its processes does; the others use all cores. Last, many small files are planned: a folder of them,
and a Delta table.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from _common import SCRATCH, finish, parser
from _contender import forget_peak, peak_mib
from reading import texts

HOME = SCRATCH / "sources"
FILES, SMALL_FILES = 20, 100_000
COLUMNS = ("id", "text")
TABLES = ("files", "delta", "iceberg", "stream")
CONTENDERS = ("torchlake", "pyarrow", "polars", "duckdb")
CATALOG = {"uri": f"sqlite:///{HOME}/catalog.db", "warehouse": f"file://{HOME}/warehouse"}


def write_tables(rows: int) -> None:
    """The same rows in each table, in files of equal sizes."""
    import deltalake
    from pyiceberg.catalog.sql import SqlCatalog

    shutil.rmtree(HOME, ignore_errors=True)
    (HOME / "files").mkdir(parents=True)
    catalog = SqlCatalog("bench", **CATALOG)
    catalog.create_namespace("db")
    each = rows // FILES
    for number in range(FILES):
        part = pa.table({"id": range(number * each, (number + 1) * each), "text": texts(each, seed=number)})
        pq.write_table(part, HOME / "files" / f"part-{number:05d}.parquet", row_group_size=100_000)
        deltalake.write_deltalake(HOME / "delta", part, mode="append")
        catalog.create_table_if_not_exists("db.t", part.schema).append(part)
    (HOME / "metadata").write_text(catalog.load_table("db.t").metadata_location)
    catalog.close()


def write_small_files() -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"id": range(10), "text": ["some words"] * 10}), sink)
    content = sink.getvalue().to_pybytes()
    for number in range(SMALL_FILES):
        path = HOME / "small" / f"day={number // 1000:03d}" / f"part-{number % 1000:05d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def write_small_delta() -> None:
    """A Delta table of the same small files, in one commit."""
    from deltalake import DeltaTable, write_deltalake
    from deltalake.transaction import AddAction

    place, root = HOME / "small_delta", HOME / "small"
    write_deltalake(place, pa.table({"id": pa.array([], pa.int64()), "text": pa.array([], pa.string())}))
    actions = []
    for number in range(SMALL_FILES):
        name = f"{number // 1000:03d}/part-{number % 1000:05d}.parquet"
        path = place / name
        path.parent.mkdir(exist_ok=True)
        os.link(root / f"day={number // 1000:03d}" / path.name, path)
        stats = json.dumps({"numRecords": 10, "minValues": {"id": 0}, "maxValues": {"id": 9}, "nullCount": {"id": 0}})
        actions.append(AddAction(name, path.stat().st_size, {}, 0, True, stats))
    table = DeltaTable(place)
    table.create_write_transaction(actions, "append", table.schema())


def iceberg() -> str:
    return (HOME / "metadata").read_text()


def planned(source: Any, where: str | None = None) -> Any:
    from torchlake.tables.chunks import plan_chunks
    from torchlake.tables.sources._options import read_options
    from torchlake.tables.table import open_table

    options = read_options({"where": where} if where else {})
    return plan_chunks(open_table(source, columns=COLUMNS, options=options), columns=COLUMNS)


def by_torchlake(name: str, limit: int | None) -> Iterator[int]:
    """The numbers of rows in the pieces that are read; the same for the others."""
    from torchlake.tables.reading import ChunkReader
    from torchlake.tables.sources import streams

    sources: dict[str, Any] = {"files": HOME / "files", "delta": HOME / "delta", "iceberg": iceberg()}
    if name == "stream":
        import pyarrow.dataset as ds

        streams.store(ds.dataset(HOME / "files").scanner(columns=list(COLUMNS)).to_reader(), HOME / "input.parquet")
        sources["stream"] = streams.Stored(HOME / "input.parquet", "RecordBatchReader")
    reader = ChunkReader(COLUMNS)
    for chunk in planned(sources[name], None if limit is None else f"id < {limit}").chunks:
        yield reader.read(chunk)[0].num_rows


def by_pyarrow(name: str, limit: int | None) -> Iterator[int]:
    import pyarrow.dataset as ds

    if name == "iceberg":
        from pyiceberg.table import StaticTable

        scan = StaticTable.from_metadata(iceberg()).scan(**({} if limit is None else {"row_filter": f"id < {limit}"}))
        yield from (batch.num_rows for batch in scan.to_arrow_batch_reader())
        return
    if name == "delta":
        import deltalake

        dataset = deltalake.DeltaTable(HOME / "delta").to_pyarrow_dataset()
    else:
        dataset = ds.dataset(HOME / "files")
    condition = None if limit is None else ds.field("id") < limit
    yield from (batch.num_rows for batch in dataset.to_batches(columns=list(COLUMNS), filter=condition))


def by_polars(name: str, limit: int | None) -> Iterator[int]:
    import polars as pl

    frames: dict[str, Callable[[], pl.LazyFrame]] = {
        "files": lambda: pl.scan_parquet(HOME / "files" / "*.parquet"),
        "delta": lambda: pl.scan_delta(str(HOME / "delta")),
        "iceberg": lambda: pl.scan_iceberg(iceberg()),
    }
    frame = frames[name]()
    frame = frame if limit is None else frame.filter(pl.col("id") < limit)
    yield from (batch.height for batch in frame.collect_batches())


def by_duckdb(name: str, limit: int | None) -> Iterator[int]:
    import duckdb
    import duckdb_extension_avro
    import duckdb_extension_delta
    import duckdb_extension_iceberg

    connection = duckdb.connect(config={"autoinstall_known_extensions": "false"})
    modules = {"delta": [duckdb_extension_delta], "iceberg": [duckdb_extension_avro, duckdb_extension_iceberg]}
    for module in modules.get(name, []):
        connection.execute(f"LOAD '{next(Path(module.__file__).parent.rglob('*.duckdb_extension'))}'")
    tables = {
        "files": f"read_parquet('{HOME}/files/*.parquet')",
        "delta": f"delta_scan('{HOME}/delta')",
        "iceberg": f"iceberg_scan('{iceberg()}')",
    }
    condition = "" if limit is None else f"WHERE id < {limit}"
    query = connection.sql(f"SELECT id, text FROM {tables[name]} {condition}")
    yield from (batch.num_rows for batch in query.to_arrow_reader(100_000))


READERS = {"torchlake": by_torchlake, "pyarrow": by_pyarrow, "polars": by_polars, "duckdb": by_duckdb}


def bytes_asked() -> int:
    """What this process asked the kernel to read so far."""
    line = Path("/proc/self/io").read_text().splitlines()[0]
    return int(line.removeprefix("rchar:"))


def measure(contender: str, name: str, limit: int | None) -> dict[str, float]:
    """Seconds, rows, memory and bytes of one reading, in this process, after a small one that imports everything."""
    if name != "stream":
        sum(READERS[contender](name, 1))
    forget_peak()
    before, asked, began = peak_mib() or 0.0, bytes_asked(), time.perf_counter()
    rows = sum(READERS[contender](name, limit))
    return {
        "seconds": time.perf_counter() - began,
        "rows": rows,
        "mib": (peak_mib() or 0.0) - before,
        "megabytes": (bytes_asked() - asked) / 1e6,
    }


def measure_small(name: str) -> dict[str, float]:
    """Seconds until the small files in this folder are planned."""
    planned(HOME / "files")
    began = time.perf_counter()
    plan = planned(HOME / name)
    return {"seconds": time.perf_counter() - began, "rows": plan.rows}


def measured(*what: str) -> dict[str, float]:
    """A measurement in a process of its own."""
    command = [sys.executable, __file__, "--measure", *what]
    source = str(Path(__file__).parents[1] / "src")
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": source}, stdout=subprocess.PIPE, check=True)
    print(f"  {' '.join(what)}: {done.stdout.decode().strip()}", file=sys.stderr)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def compared(name: str, rows: int, rounds: int, limit: int | None) -> Iterator[dict[str, Any]]:
    """A line for each contender; the ratio is torchlake's speed over its."""
    contenders = CONTENDERS if name != "stream" else ("torchlake",)
    every: dict[str, list[dict[str, float]]] = {contender: [] for contender in contenders}
    for _ in range(rounds):
        for contender in contenders:
            every[contender].append(measured(contender, name, str(limit or 0)))
    best = {contender: min(found, key=lambda one: one["seconds"]) for contender, found in every.items()}
    for contender, one in best.items():
        assert one["rows"] == (limit or rows), f"{contender} reads {one['rows']:,.0f} rows of {name}"
        yield {
            "name": f"{name}: {'all rows' if limit is None else 'two percent'}",
            "contender": contender,
            "rows": one["rows"],
            "seconds": one["seconds"],
            "rows_per_s": one["rows"] / one["seconds"],
            "torchlake_is": one["seconds"] / best["torchlake"]["seconds"],
            "mib": one["mib"],
            "megabytes_read": one["megabytes"],
        }


def main() -> None:
    options_parser = parser(__doc__, rows=10_000_000, rounds=2)
    options_parser.add_argument("--measure", nargs="+", help="one measurement, in this process")
    options = options_parser.parse_args()
    if options.measure:
        what = options.measure
        found = measure_small(what[0]) if len(what) == 1 else measure(what[0], what[1], int(what[2]) or None)
        print(json.dumps(found))
        return
    rows = options.rows // FILES * FILES
    write_tables(rows)
    lines = [
        line
        for name in TABLES
        for limit in ((None, rows // 50) if name != "stream" else (None,))
        for line in compared(name, rows, options.rounds, limit)
    ]
    write_small_files()
    write_small_delta()
    for name, of in (("small", ""), ("small_delta", " of a Delta table")):
        small = min((measured(name) for _ in range(options.rounds)), key=lambda one: one["seconds"])
        lines.append(
            {"name": f"plan {SMALL_FILES:,} files{of}", "contender": "torchlake", **small,
             "rows_per_s": small["rows"] / small["seconds"]}
        )  # fmt: skip
    shutil.rmtree(HOME)
    note = f"best of {options.rounds} rounds; torchlake_is: times as fast as the contender; files in the page cache"
    finish("sources", lines, as_json=options.json, note=note, keep=True)


if __name__ == "__main__":
    main()
