"""A summary of the training data, logged before the first step: kind of label, classes, rows, lengths.

    single_label, 2 classes: good 245 (51 %), bad 235 (49 %)
    480 rows to train on, 120 to validate on
    tokens per row: median 21, 95 % at most 40, longest 64

Computed from the prepared tokens, so rows that were left out are not counted. The data checks (`findings.py`) read the
same. Cost: one pass over the columns of lengths, targets and hashes, about 40 bytes per row in memory; about 1 s for a
million rows.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from torchlake import plugins
from torchlake.config.job import Job
from torchlake.config.sections.data import Fold, Fraction
from torchlake.config.task_spec import TaskSpec, label_name
from torchlake.data.copies import divide
from torchlake.data.loading import HASHES, MARKS
from torchlake.preparation.conversations import packed_facts, packed_lines
from torchlake.preparation.findings import (
    CheckedRows,
    Finding,
    both_sides,
    row_findings,
    similar_classes,
    small_for_folds,
)
from torchlake.preparation.row_checks import check_fields, hashed_columns, numbers_of
from torchlake.tables.failures import count_reasons
from torchlake.tables.record import committed_files, read_commit

SHOWN_CLASSES = 10
FILE = "data.json"
"The summary's file in the run folder."


def summarize(job: Job, spec: TaskSpec, prepared: Sequence[Path]) -> dict[str, Any]:
    """Return the summary as plain values; `prepared` are the folders of token Parquet, the training table's first.

    `problem`, `rows` ({training, validation}; validation None without one), `classes` ({label: training rows}), `mean`
    and `deviation` of a regression, `tokens` ({median, p95, longest, total}) of the training rows, `left_out` ({reason:
    rows}) of all tables, `truncated` of the training table ({rows, tokens, of_rows, of_tokens, max_length}), `packed`
    of the training rows of a task that packs (`packed_facts`), and `findings` of the data checks, as of `Finding`.
    """
    lengths, table, reasons = _read(prepared[0], spec)
    targets, share = table.targets, job.data.validation
    training, held_out, validation = np.arange(len(lengths)), None, None
    if len(lengths) > 1 or not isinstance(share, Fraction | Fold):
        training, held_out = divide(job, targets if spec.problem == "single_label" else None, table.hashes)
        validation = None if held_out is None else len(held_out)
    findings = [*similar_classes(spec.labels), *row_findings(table, spec, deduplicate=job.data.deduplicate)]
    if len(prepared) > 1:
        others, other, more = _read(prepared[1], spec)
        reasons, validation = reasons + more, len(others)
        findings += both_sides(table, training, other, np.arange(validation))
    elif held_out is not None:
        findings += both_sides(table, training, table, held_out)
    truncated = read_commit(prepared[0])["provenance"]["truncated"]
    if cut := truncated["rows"]:
        findings.append(Finding("truncated", describe_truncation(truncated), cut, truncated["of_rows"]))
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
        "truncated": truncated,
    }
    if plugins.load("tasks", spec.task).packs:
        facts["packed"] = packed_facts(prepared[0], training, spec)
    if spec.labels and targets is not None:
        facts["classes"] = _class_rows(targets[training], spec)
        if isinstance(share, Fold):
            findings += small_for_folds(_class_rows(targets, spec), share.folds)
    elif spec.mean is not None:
        facts |= {"mean": spec.mean, "deviation": spec.deviation}
    facts["findings"] = [asdict(one) for one in findings]
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
    if packed := facts.get("packed"):
        lines += packed_lines(packed)
    if left_out := facts["left_out"]:
        why = ", ".join(f"{reason} {number:,}" for reason, number in left_out.items())
        lines.append(f"{sum(left_out.values()):,} rows left out: {why}")
    return lines


def findings_of(facts: Mapping[str, Any]) -> tuple[Finding, ...]:
    """Return the findings of a summary."""
    return tuple(Finding(**{**one, "examples": tuple(one["examples"])}) for one in facts.get("findings", ()))


def _class_rows(targets: np.ndarray, spec: TaskSpec) -> dict[str, int]:
    counts = targets.sum(axis=0) if targets.ndim == 2 else np.bincount(targets, minlength=len(spec.labels))
    return {label_name(label): int(rows) for label, rows in zip(spec.labels, counts, strict=True)}


def truncation_of(parts: Sequence[Path], spec: TaskSpec) -> dict[str, int]:
    """Return the truncated rows and tokens of token Parquet, and their totals; the targets of a task that learns texts
    are truncated, too."""
    rows = tokens = of_rows = of_tokens = 0
    for part in parts:
        with pq.ParquetFile(part) as file:
            if "cut" not in file.schema_arrow.names:  # staged by an earlier version
                continue
            table = file.read(columns=["length", "cut"])
        cut = table["cut"].to_numpy()
        rows, tokens = rows + int((cut > 0).sum()), tokens + int(cut.sum())
        lengths = table["length"].to_numpy()
        of_rows, of_tokens = of_rows + int((lengths > 0).sum()), of_tokens + int(lengths.sum())
    return {
        "rows": rows,
        "tokens": tokens,
        "of_rows": of_rows,
        "of_tokens": of_tokens + tokens,
        "max_length": spec.max_length,
        **({"max_target_tokens": most} if (most := spec.options.get("max_target_tokens")) else {}),
    }


def describe_truncation(cut: Mapping[str, int]) -> str:
    """Return a sentence about `truncated` of a prepared table's record."""
    rows, tokens = cut["rows"] / max(1, cut["of_rows"]), cut["tokens"] / max(1, cut["of_tokens"])
    most, targets, setting = cut.get("max_target_tokens"), "", ""
    if most is not None:
        targets, setting = f", or their targets to {most:,}", ", model.task_options.max_target_tokens"
    return (
        f"{cut['rows']:,} of {cut['of_rows']:,} rows ({rows:.1%}) are cut to {cut['max_length']:,} tokens{targets}, "
        f"and {cut['tokens']:,} of {cut['of_tokens']:,} tokens ({tokens:.1%}) are left out (model.max_length{setting})"
    )


def describe_classes(classes: Mapping[str, int], rows: int) -> str:
    """Return the 10 largest classes with their rows and shares."""
    ranked = sorted(classes.items(), key=lambda pair: (-pair[1], pair[0]))
    shown = ", ".join(f"{name} {number:,} ({number / max(1, rows):.0%})" for name, number in ranked[:SHOWN_CLASSES])
    rest = ranked[SHOWN_CLASSES:]
    return shown + (f" and {len(rest):,} more, the smallest with {rest[-1][1]:,} rows" if rest else "")


def _read(prepared: Path, spec: TaskSpec) -> tuple[np.ndarray, CheckedRows, Counter[str]]:
    """Return lengths (N,) of the rows that can be trained on, what is checked of them, and why others cannot."""
    pieces, targets = list[pa.Table](), list[np.ndarray]()
    reasons: Counter[str] = Counter()
    for path in committed_files(prepared):
        with pq.ParquetFile(path) as file:
            wanted = ("length", "target", HASHES, *MARKS, "error")
            names = [name for name in wanted if name in file.schema_arrow.names]
            if "target" in names and _is_of_tokens(file.schema_arrow.field("target").type):
                names.remove("target")
            table = file.read(columns=names)
        reasons += count_reasons(table["error"].drop_null())
        pieces.append(table.filter(pc.is_null(table["error"])).select(["length", HASHES, *MARKS]))
        if "target" in names:
            targets.append(numbers_of(table["target"].filter(pc.is_null(table["error"])).combine_chunks()))
    task = plugins.load("tasks", spec.task)
    if not pieces:
        pieces = [pa.schema([pa.field("length", pa.int32()), *check_fields(task, spec)]).empty_table()]
    whole = pa.concat_tables(pieces)
    hashes = whole[HASHES].combine_chunks()
    checked = CheckedRows(
        columns=hashed_columns(task, spec),
        hashes=np.asarray(hashes.flatten()).reshape(len(whole), hashes.type.list_size),
        **{name: np.asarray(whole[name]) for name in MARKS},
        targets=np.concatenate(targets) if targets else None,
        names=partial(_row_ids, prepared, np.cumsum([len(piece) for piece in pieces])),
    )
    return np.asarray(whole["length"]), checked, reasons


def _row_ids(prepared: Path, ends: np.ndarray, rows: Sequence[int]) -> list[str]:
    """Return the ids of some of the rows that can be trained on; `ends` are the rows up to the end of each part."""
    found = []
    files = committed_files(prepared)
    for row in rows:
        part = int(np.searchsorted(ends, row, side="right"))
        with pq.ParquetFile(files[part]) as file:
            table = file.read(columns=["row_id", "error"])
        ids = table["row_id"].filter(pc.is_null(table["error"]))
        found.append(ids[row - (int(ends[part - 1]) if part else 0)].as_py())
    return found


def _is_of_tokens(kind: pa.DataType) -> bool:
    """Return whether a row has a target for each token, not one in all."""
    return bool(pa.types.is_list(kind) and pa.types.is_integer(kind.value_type))
