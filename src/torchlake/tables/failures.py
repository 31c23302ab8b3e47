"""Failed rows: errors are counted by their reason, which is the text before the first colon.

Cost: one read of the column `error`, of those parts that have failed rows.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from torchlake.errors import TooManyErrors
from torchlake.tables.formats.columnar import open_parquet
from torchlake.tables.plan import ChunkPlan, samples_of

LINES = 5
ENCODING_HINT = "bad_utf8: if a CSV file has an encoding other than UTF-8, give --csv encoding=latin-1 or its name."
ROWS_BEFORE_STOPPING = 1000


class Failures(NamedTuple):
    """The failed rows of a scored table."""

    errors: dict[str, int]
    "Failed rows by reason, the most frequent first."
    example: str | None
    "File and row of the first failed row, and its error."


def count_failed(rows: pa.Table | pa.RecordBatch) -> int:
    """Return how many rows have an error; 0 if there is no column `error`."""
    return rows.num_rows - rows["error"].null_count if "error" in rows.schema.names else 0


def count_reasons(errors: pa.Array | pa.ChunkedArray) -> Counter[str]:
    """Count the errors, none of them null, by reason; the text after the colon is about one row."""
    if not len(errors):
        return Counter()
    reasons = pc.list_element(pc.split_pattern(errors, ":", max_splits=1), 0)
    return Counter({one["values"]: one["counts"] for one in pc.value_counts(reasons).to_pylist()})


def read_failures(folder: str, record: Mapping[str, Any], plan: ChunkPlan) -> Failures:
    """Return the failed rows of a committed output, whose parts are in `folder` (a path or URL)."""
    counts: Counter[str] = Counter()
    example = None
    chunks = {chunk.index: chunk for chunk in plan.chunks}
    for part in record["parts"]:
        if part["failed"]:
            with open_parquet(f"{folder}/{part['name']}") as parquet:
                rows = parquet.read(columns=["error"])
            errors = rows["error"]
            if example is None:
                chunk, row = chunks[part["chunk"]], pc.index(errors.is_valid(), True).as_py()
                number = chunk.number(row // samples_of(record["fingerprint"]))
                example = f"{chunk.file} row {number}: {errors[row]}"
            counts += count_reasons(errors.drop_null())
    return Failures(dict(counts.most_common()), example)


def format_reasons(errors: Mapping[str, int], lines: int = LINES) -> list[str]:
    """Return one line per reason, at most `lines` in all; the last one sums up the rest."""
    shown = [f"{reason} {count:,}" for reason, count in errors.items()]
    if len(shown) <= lines:
        return shown
    rest = list(errors.values())[lines - 1 :]
    return [*shown[: lines - 1], f"{len(rest):,} other reasons {sum(rest):,}"]


def reason_hint(errors: Iterable[str]) -> str:
    """Return what to do about rows whose error, or its reason, is among these; empty if there is nothing to say."""
    return f" {ENCODING_HINT}" if any("bad_utf8" in error for error in errors) else ""


def check_error_rate(failed: int, rows: int, total: int, max_error_rate: float, examples: Sequence[str]) -> None:
    """Raise TooManyErrors if more than the allowed share failed, of all rows or of the first 1,000 or more."""
    if failed <= max_error_rate * min(total, max(rows, ROWS_BEFORE_STOPPING)):
        return
    shown = f" For example: {'; '.join(examples)}." if examples else ""
    shown += reason_hint(examples)
    raise TooManyErrors(
        f"{failed:,} of {rows:,} rows failed, more than max_error_rate={max_error_rate} allows.{shown} Nothing was "
        "published; finished chunks are kept. Fix the rows, or allow more with a higher max_error_rate; overwrite "
        "scores the chunks with failed rows again."
    )
