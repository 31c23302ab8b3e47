"""A summary of the training data, logged before the first step: kind of label, classes, rows, lengths.

    single_label, 2 classes: good 245 (51 %), bad 235 (49 %)
    480 rows to train on, 120 to validate on
    tokens per row: median 21, 95 % at most 40, longest 64

Computed from the prepared tokens, so rows that were left out are not counted. Cost: one pass over the columns of
lengths and targets, 12 bytes per row in memory; about 2 s for a million rows.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from torchlake.config.job import Job
from torchlake.config.task_spec import TaskSpec, label_name
from torchlake.data import order
from torchlake.tables.failures import count_reasons
from torchlake.tables.record import committed_files, read_commit

SHOWN_CLASSES = 10
FILE = "data.json"
"The summary's file in the run folder."


def summarize(job: Job, spec: TaskSpec, prepared: Sequence[Path]) -> dict[str, Any]:
    """Return the summary as plain values; `prepared` are the folders of token Parquet, the training table's first.

    `problem`, `rows` ({training, validation}; validation None without one), `classes` ({label: training rows}), `mean`
    and `deviation` of a regression, `tokens` ({median, p95, longest, total}) of the training rows, `left_out` ({reason:
    rows}) of all tables, and `truncated` of the training table ({rows, tokens, of_rows, of_tokens, max_length}; None if
    an earlier version prepared it).
    """
    lengths, targets, reasons = _read(prepared[0])
    training, validation = np.arange(len(lengths)), None
    share = job.data.validation
    if len(prepared) > 1:
        others, _, more = _read(prepared[1])
        reasons, validation = reasons + more, len(others)
    elif share is not None and len(lengths) > 1:
        assert not isinstance(share, str | tuple), "a validation table has its own folder"
        classes = targets if spec.problem == "single_label" else None
        training, held_out = order.hold_out(len(lengths), share, job.train.seed, classes)
        validation = len(held_out)
    tokens = lengths[training]
    median, often = np.quantile(tokens, [0.5, 0.95], method="higher") if len(tokens) else (0, 0)
    facts: dict[str, Any] = {
        "problem": spec.problem,
        "rows": {"training": len(training), "validation": validation},
        "tokens": {
            "median": int(median),
            "p95": int(often),
            "longest": int(tokens.max(initial=0)),
            "total": int(tokens.sum()),
        },
        "left_out": dict(reasons.most_common()),
        "truncated": read_commit(prepared[0])["provenance"].get("truncated"),
    }
    if spec.labels and targets is not None:
        found = targets[training]
        counts = found.sum(axis=0) if found.ndim == 2 else np.bincount(found, minlength=len(spec.labels))
        facts["classes"] = {label_name(label): int(rows) for label, rows in zip(spec.labels, counts, strict=True)}
    elif spec.mean is not None:
        facts |= {"mean": spec.mean, "deviation": spec.deviation}
    return facts


def summary_lines(facts: Mapping[str, Any]) -> list[str]:
    """Return the summary as text, with the 10 largest classes."""
    rows, tokens = facts["rows"], facts["tokens"]
    first = str(facts["problem"])
    if classes := facts.get("classes"):
        first += f", {len(classes):,} class{'es' * (len(classes) != 1)}: {describe_classes(classes, rows['training'])}"
    elif "mean" in facts:
        first += f": mean {facts['mean']:.4g}, standard deviation {facts['deviation']:.4g}"
    validated = "no validation" if rows["validation"] is None else f"{rows['validation']:,} to validate on"
    lines = [
        first,
        f"{rows['training']:,} rows to train on, {validated}",
        f"tokens per row: median {tokens['median']:,}, 95 % at most {tokens['p95']:,}, longest {tokens['longest']:,}",
    ]
    if (cut := facts.get("truncated")) and cut["rows"]:
        lines.append(describe_truncation(cut))
    if left_out := facts["left_out"]:
        why = ", ".join(f"{reason} {number:,}" for reason, number in left_out.items())
        lines.append(f"{sum(left_out.values()):,} rows left out: {why}")
    return lines


def describe_truncation(cut: Mapping[str, int]) -> str:
    """Return a sentence about `truncated` of a prepared table's record."""
    rows, tokens = cut["rows"] / max(1, cut["of_rows"]), cut["tokens"] / max(1, cut["of_tokens"])
    return (
        f"{cut['rows']:,} of {cut['of_rows']:,} rows ({rows:.1%}) are cut to {cut['max_length']:,} tokens, and "
        f"{cut['tokens']:,} of {cut['of_tokens']:,} tokens ({tokens:.1%}) are left out (model.max_length)"
    )


def describe_classes(classes: Mapping[str, int], rows: int) -> str:
    """Return the 10 largest classes with their rows and shares."""
    ranked = sorted(classes.items(), key=lambda pair: (-pair[1], pair[0]))
    shown = ", ".join(f"{name} {number:,} ({number / max(1, rows):.0%})" for name, number in ranked[:SHOWN_CLASSES])
    rest = ranked[SHOWN_CLASSES:]
    return shown + (f" and {len(rest):,} more, the smallest with {rest[-1][1]:,} rows" if rest else "")


def _read(prepared: Path) -> tuple[np.ndarray, np.ndarray | None, Counter[str]]:
    """Return lengths (N,) and targets (None without labels) of the rows that can be trained on, and why others
    cannot."""
    lengths: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    reasons: Counter[str] = Counter()
    for path in committed_files(prepared):
        with pq.ParquetFile(path) as file:
            names = [name for name in ("length", "target", "error") if name in file.schema_arrow.names]
            table = file.read(columns=names)
        reasons += count_reasons(table["error"].drop_null())
        table = table.filter(pc.is_null(table["error"]))
        lengths.append(table["length"].to_numpy())
        if "target" in names and not _is_of_tokens(table["target"].type):
            targets.append(_numbers(table["target"].combine_chunks()))
    whole = np.concatenate(lengths) if lengths else np.zeros(0, dtype=np.int32)
    return whole, np.concatenate(targets) if targets else None, reasons


def _is_of_tokens(kind: pa.DataType) -> bool:
    """Return whether a row has a target for each token, not one in all."""
    return bool(pa.types.is_list(kind) and pa.types.is_integer(kind.value_type))


def _numbers(targets: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Return the targets (N,), or (N, C) bool where a row has a list of them."""
    array = pa.concat_arrays(targets.chunks) if isinstance(targets, pa.ChunkedArray) else targets
    if not pa.types.is_list(array.type):
        return np.asarray(array.to_numpy(zero_copy_only=False))
    flat = array.flatten().to_numpy(zero_copy_only=False) > 0
    return np.asarray(flat.reshape(len(array), -1)) if len(array) else np.zeros((0, 0), dtype=bool)
