"""What grows with rows, files and processes, before any model does work?

Chunks of one row each through torchlake's own functions, so that nothing but their number counts: planning, beginning
a write, running the chunks on every engine with a worker that does nothing, committing, the same command again. Then
as many files instead of chunks, more processes, and what depends on bytes and rows. Every measurement is a process of
its own; memory is its peak over what it held before. At full size the tables of docs/explanation/scale.md are replaced.
"""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from _common import SCRATCH, finish, parser
from _contender import forget_peak, peak_mib
from _scale_page import CHUNK_ROWS, page_tables, write_page

SIZES = (100, 1_000, 10_000, 100_000)
PROCESSES = (1, 4, 8, 16)
"Besides two."
HOME = SCRATCH / "scale"
FINGERPRINT = {"model": "0" * 64, "task": "text_classification", "runtime": "eager", "text": "text", "columns": []}


def apart(measure: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """What `measure` says, in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        row = pool.submit(measure, *args).result()
    print(f"  {row}", file=sys.stderr)
    return row


@contextmanager
def clock(row: dict[str, Any], name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    row[name] = time.perf_counter() - began


@contextmanager
def memory(row: dict[str, Any]) -> Iterator[None]:
    """The peak of this process over what it held before."""
    forget_peak()
    before = peak_mib() or 0.0
    yield
    row["driver_mib"] = (peak_mib() or 0.0) - before


def one_file(rows: int) -> Path:
    """A Parquet file of that many rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = HOME / f"rows-{rows}.parquet"
    pq.write_table(pa.table({"id": range(rows), "text": ["a quiet film"] * rows}), path)
    return path


def planned(source: Path, chunk_rows: int | None = 1, column: str = "text") -> tuple[Any, Any]:
    """The table of `source` and its plan."""
    from torchlake.tables.chunks import plan_chunks
    from torchlake.tables.table import open_table

    table = open_table(source, columns=(column,))
    return table, plan_chunks(table, columns=(column,), chunk_rows=chunk_rows)


def tables(chunks: int) -> dict[str, Any]:
    """Plan, begin, the same command with every part written, commit, and the same command once more."""
    from torchlake.outputs.find import folder_output
    from torchlake.outputs.transaction import WriteRequest

    row: dict[str, Any] = {"name": "tables", "chunks": chunks}
    source, output = one_file(chunks), HOME / f"out-{chunks}"
    shutil.rmtree(output, ignore_errors=True)
    with memory(row):
        with clock(row, "plan_s"):
            _, plan = planned(source)
        place, request = folder_output(output), WriteRequest(plan=plan, fingerprint=FINGERPRINT, schema=plan.schema)
        with ExitStack() as stack:
            with clock(row, "begin_s"):
                out = stack.enter_context(place.begin(request))
            row["plan_mib"] = os.path.getsize(out.staging / "plan.json") / 2**20
            write_parts(out)
        with ExitStack() as stack:
            with clock(row, "resume_s"):
                out = stack.enter_context(place.begin(request))
            with clock(row, "commit_s"):
                out.commit(out.done, {})
        row["record_mib"] = os.path.getsize(output / "_torchlake" / "commit.json") / 2**20
        with clock(row, "again_s"), place.begin(request):
            pass
    shutil.rmtree(output)
    return row


def write_parts(out: Any) -> None:
    """A part of one row for every chunk; but for the first without waiting for the disk, which is a worker's price."""
    import pyarrow as pa

    from torchlake.outputs.parts import part_name

    names = [part_name(out.plan, chunk, FINGERPRINT) for chunk in out.pending]
    scored = pa.table({"row_id": ["0"], "label": ["good"], "score": [0.5], "error": pa.nulls(1, pa.string())})
    out.parts.write(names[0], scored, chunk=0)
    content = (out.staging / "table" / names[0]).read_bytes()
    for name in names[1:]:
        (out.staging / "table" / name).write_bytes(content)


def make_idle_worker() -> Callable[[Iterator[Any]], Iterator[Any]]:
    """A worker that does nothing, and says of each chunk what `predict`'s worker says."""
    from torchlake.outputs.parts import Part

    def worker(items: Iterator[Any]) -> Iterator[Any]:
        for chunk, name in items:
            yield Part(name=name, chunk=chunk.index, rows=chunk.rows, failed=0, sha256="0" * 64, bytes=1000)

    return worker


def handing_out(name: str, chunks: int, processes: int) -> dict[str, Any]:
    """Chunks to idle workers on a warm engine: until the first result, from there to the last, and the end."""
    from torchlake.engines import make_engine

    row: dict[str, Any] = {"name": name, "chunks": chunks, "processes": processes}
    _, plan = planned(one_file(chunks))
    items = [(chunk, f"part-{chunk.index:05d}-0123456789abcdef.parquet") for chunk in plan.chunks]
    engine = make_engine(name, processes, **slots(name, processes))
    list(engine.run_chunks(make_idle_worker, items[:1]))
    with memory(row):
        results = engine.run_chunks(make_idle_worker, items)
        with clock(row, "first_s"):
            kept = [next(results)]
        with clock(row, "rest_s"):
            kept.extend(islice(results, chunks - 1))
        with clock(row, "end_s"):
            assert len(kept) == chunks
            assert next(results, None) is None
    row["chunks_per_s"] = (chunks - 1) / row["rest_s"]
    if name == "spark":
        engine.session.get().stop()
    return row


def slots(name: str, processes: int) -> dict[str, Any]:
    """Start the engine with as many task slots as processes, on however few cores; what `make_engine` has to know."""
    return {"master": f"local[{processes},4]"} if name == "spark" else {}  # Ray starts with as many by itself


def files(count: int) -> dict[str, Any]:
    """The plan of as many files of one row."""
    row: dict[str, Any] = {"name": "files", "files": count}
    content, folder = one_file(1).read_bytes(), HOME / f"files-{count}"
    folder.mkdir()
    for number in range(count):
        (folder / f"part-{number:06d}.parquet").write_bytes(content)
    with memory(row), clock(row, "plan_s"):
        planned(folder, None)
    shutil.rmtree(folder)
    return row


def spread_over(processes: int) -> Any:
    """What hands items to that many child processes, however little they read."""
    from torchlake import engines
    from torchlake.engines.local import Local

    engines.SPREAD_BYTES = 0
    return Local(processes).spread


def keys(rows: int, processes: int) -> dict[str, Any]:
    """Whether a column of keys in no order is one."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    from torchlake.tables.keys import check_key

    row: dict[str, Any] = {"name": "keys", "rows": rows, "processes": processes}
    path = HOME / "keys.parquet"
    pq.write_table(pa.table({"id": np.random.default_rng(0).permutation(rows)}), path)
    table, plan = planned(path, None, "id")
    with memory(row), clock(row, "seconds"):
        check_key(table, plan, "id", spread=spread_over(processes), scratch=HOME)
    return row


def hashing(mib: int, processes: int) -> dict[str, Any]:
    """The sha256 of an input file, in blocks of a quarter."""
    from torchlake.storage import versions

    row: dict[str, Any] = {"name": "hashing", "mib": mib, "processes": processes}
    path = HOME / "bytes"
    path.write_bytes(os.urandom(1 << 20) * mib)
    versions.HASHED_BYTES = mib << 18
    blocks = versions.hashed_blocks(str(path), versions.version_of(str(path)))
    with clock(row, "seconds"):
        list(spread_over(processes)(versions.block_id, blocks, size=mib << 20, name="hash"))
    return row


def verifying(rows: int, processes: int) -> dict[str, Any]:
    """`verify` of an output of parts with 32,768 rows, with row ids."""
    import pyarrow as pa

    from torchlake.outputs.find import folder_output
    from torchlake.outputs.parts import part_name
    from torchlake.outputs.transaction import WriteRequest
    from torchlake.tables.keys import row_ids
    from torchlake.tables.verification.verify import verify

    source, out = one_file(rows), HOME / "verified"
    _, plan = planned(source, CHUNK_ROWS)
    with folder_output(out).begin(WriteRequest(plan=plan, fingerprint={}, schema=plan.schema)) as write:
        parts = []
        for chunk in write.pending:
            columns = {
                "row_id": row_ids(chunk),
                "score": np_random(chunk.rows),
                "error": pa.nulls(chunk.rows, pa.string()),
            }
            part = write.parts.write(part_name(plan, chunk, {}), pa.table(columns), chunk=chunk.index)
            parts.append(part)
        write.commit(parts, {})
    row: dict[str, Any] = {"name": "verify", "rows": rows, "processes": processes}
    row["mib"] = sum(part.bytes for part in parts) / 2**20
    with memory(row), clock(row, "seconds"):
        assert verify(out, spread=spread_over(processes)).problems == []
    shutil.rmtree(out)
    return row


def np_random(rows: int) -> Any:
    """As many random numbers, which do not compress."""
    import numpy as np

    return np.random.default_rng(0).random(rows)


def main() -> None:
    options_parser = parser(__doc__, most=SIZES[-1], rows=10_000_000)
    options_parser.add_argument("--engines", nargs="*", default=["local", "spark", "ray"], help="default: all three")
    options_parser.add_argument("--markdown", action="store_true", help="print the tables of docs/explanation/scale.md")
    options = options_parser.parse_args()
    shutil.rmtree(HOME, ignore_errors=True)
    HOME.mkdir(parents=True)
    sizes = [size for size in SIZES if size <= options.most]
    rows = [apart(tables, size) for size in sizes]
    rows += [apart(handing_out, name, size, 2) for name in options.engines for size in sizes]
    many = min(10_000, options.most)
    # But for Ray, whose start costs more than all that it would hand out.
    several = [name for name in options.engines if name != "ray"]
    rows += [apart(handing_out, name, many, count) for name in several for count in PROCESSES]
    rows += [apart(files, size) for size in sizes]
    for count in (1, 2):
        rows += [apart(keys, options.rows, count), apart(hashing, 4096, count), apart(verifying, options.rows, count)]
    shutil.rmtree(HOME)
    full = options.most == SIZES[-1] and len(options.engines) == 3
    note = f"{'full' if full else 'reduced'} run, up to {options.most:,} chunks of one row, two idle workers"
    finish("scale", rows, as_json=options.json, note=note, keep=full)
    if options.markdown:
        print(page_tables(rows, note))
    if full:
        write_page(rows, note)


if __name__ == "__main__":
    main()
