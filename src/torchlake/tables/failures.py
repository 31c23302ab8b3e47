"""Why rows failed: their errors grouped by the reason before the colon, counted, and put into lines.

Cost: of a scored table, the column `error` of those parts in which rows failed.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from torchlake.tables.chunks import Plan

LINES = 5


class Failures(NamedTuple):
    """The failed rows of a scored table."""

    errors: dict[str, int]
    "Why rows failed, and how many for each reason, the most frequent first."
    example: str | None
    "File and row of the first of them, and its error."


def count_reasons(errors: pa.Array | pa.ChunkedArray) -> Counter[str]:
    """How many of the errors, without nulls, have each reason; what follows a colon is about the one row."""
    if not len(errors):
        return Counter()
    reasons = pc.list_element(pc.split_pattern(errors, ":", max_splits=1), 0)
    return Counter({one["values"]: one["counts"] for one in pc.value_counts(reasons).to_pylist()})


def read_failures(output: Path, record: Mapping[str, Any], plan: Plan) -> Failures:
    """The failed rows of the output that has this commit record and plan."""
    counts: Counter[str] = Counter()
    example = None
    chunks = {chunk.index: chunk for chunk in plan.chunks}
    for part in record["parts"]:
        if part["failed"]:
            with pq.ParquetFile(output / part["name"]) as parquet:
                errors = parquet.read(columns=["error"])["error"]
            if example is None:
                chunk, row = chunks[part["chunk"]], pc.index(errors.is_valid(), True).as_py()
                example = f"{chunk.file} row {chunk.first_row + row}: {errors[row]}"
            counts += count_reasons(errors.drop_null())
    return Failures(dict(counts.most_common()), example)


def format_reasons(errors: Mapping[str, int], lines: int = LINES) -> list[str]:
    """A line for each reason, the last of them for all that have none."""
    shown = [f"{reason} {count:,}" for reason, count in errors.items()]
    if len(shown) <= lines:
        return shown
    rest = list(errors.values())[lines - 1 :]
    return [*shown[: lines - 1], f"{len(rest):,} other reasons {sum(rest):,}"]
