"""Read golden Delta tables of another project, and compare every value: `python tests/golden_tables.py FOLDER`.

A golden table is a folder with `delta/`, a table as Spark wrote it, and `expected/`, its rows as Parquet; Delta's own
projects keep such folders (for example `kernel/tests/golden_data` of delta-kernel-rs, whose archives have to be
unpacked first). Each table ends as the same, as different, as refused by name, or as a bare exception.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import torchlake as tl
from torchlake.errors import TorchlakeError
from torchlake.tables.table import open_table


def read(table: Path, scratch: Path) -> list[dict[str, Any]]:
    """The rows as a job of one process reads them, by way of every reader that a worker uses."""
    columns = open_table(str(table)).schema.names
    output = scratch / "out"

    def make() -> Callable[[pa.Table], pa.Table]:
        return lambda batch: batch.rename_columns([f"c{place}" for place in range(batch.num_columns)])

    types = {f"c{place}": field.type for place, field in enumerate(open_table(str(table)).schema)}
    tl.map(make, str(table), output, schema=types, columns=columns, version="1", engine=tl.Local(1))
    found = tl.open(output).to_table().select(list(types))
    return found.rename_columns(columns).to_pylist()


def plain(value: Any) -> Any:
    """A value that compares and sorts: a map as its entries, NaN as a word, times without a zone in UTC."""
    if isinstance(value, dict):
        return tuple((name, plain(one)) for name, one in value.items())
    if isinstance(value, list | tuple):
        return tuple(plain(one) for one in value)
    if isinstance(value, float) and value != value:
        return "NaN"
    return value.replace(tzinfo=None) if hasattr(value, "tzinfo") and hasattr(value, "hour") else value


def rows(found: list[dict[str, Any]]) -> Counter[str]:
    return Counter(repr(sorted((name, plain(value)) for name, value in row.items())) for row in found)


def outcome(golden: Path) -> str:
    """What becomes of one golden table."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            found = read(golden / "delta", Path(scratch))
        except TorchlakeError as error:
            return f"refused: {str(error).splitlines()[0][:200]}"
        except Exception as error:
            return f"BARE EXCEPTION: {error!r:.300}"
    parts = [pq.ParquetFile(file).read() for file in sorted((golden / "expected").rglob("*.parquet"))]
    expected = [row for part in parts for row in part.to_pylist()]
    return "the same" if rows(found) == rows(expected) else f"DIFFERENT: {len(found)} rows for {len(expected)}"


def main(folder: str) -> None:
    counts: Counter[str] = Counter()
    for golden in sorted(Path(folder).iterdir()):
        if (golden / "delta" / "_delta_log").is_dir() and (golden / "expected").is_dir():
            said = outcome(golden)
            counts[said.partition(":")[0]] += 1
            print(f"{golden.name}: {said}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in counts.most_common()))


if __name__ == "__main__":
    main(*sys.argv[1:])
