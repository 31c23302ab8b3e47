"""Evaluations without a model: scored rows are made up, and everything after scoring is real."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import tiny
from torchlake.evaluation.report import publish
from torchlake.evaluation.sections.hints import hints_of
from torchlake.evaluation.sections.rows import FILE, RowColumns, judged_parts, kind_of, write_rows
from torchlake.models.load import TaskSpec

NUMBERS = replace(tiny.SPEC, labels=(), problem="regression")
ABOUT = {"model": "model", "task": "text_classification", "table": "table.parquet", "columns": ["text"]}


def classes_spec(labels: Sequence[str]) -> TaskSpec:
    return replace(tiny.SPEC, labels=tuple(labels))


def scored_classes(chances: np.ndarray, truth: np.ndarray, labels: Sequence[str], **more: Any) -> pa.Table:
    """What `predict` would have written for these probabilities (N, C)."""
    names = pa.array(labels)
    columns = {
        "id": pa.array(np.arange(len(truth))),
        "label": names.take(pa.array(truth)),
        "p_label": names.take(pa.array(chances.argmax(axis=1))),
        "p_score": pa.array(chances.max(axis=1).astype(np.float32)),
        **{f"p_prob_{label}": pa.array(chances[:, at].astype(np.float32)) for at, label in enumerate(labels)},
        "p_tokens": pa.array(np.arange(len(truth), dtype=np.int32) % 40 + 3),
        "truncated": pa.array(np.zeros(len(truth), dtype=bool)),
        "error": pa.nulls(len(truth), pa.string()),
        "text": [f"row {row}" for row in range(len(truth))],
    }
    return pa.table({**columns, **more})


def scored_numbers(truth: np.ndarray, said: np.ndarray, **more: Any) -> pa.Table:
    """What `predict` would have written for these numbers (N,)."""
    about = scored_classes(np.ones((len(truth), 1)), np.zeros(len(truth), dtype=int), ["a"])
    kept = about.select(["id", "truncated", "error", "text"])
    return pa.table({**dict(zip(kept.column_names, kept.columns, strict=True)), "label": truth} | more).append_column(
        "p_prediction", pa.array(said.astype(np.float32))
    )


def evaluated(
    folder: Path,
    scored: pa.Table,
    spec: TaskSpec,
    *,
    slices: Sequence[str] = (),
    hints: bool = False,
    texts: Sequence[str] = ("text",),
) -> dict[str, Any]:
    """Write an evaluation into `folder` and return the values of eval.json."""
    folder.mkdir(parents=True, exist_ok=True)
    columns, by = RowColumns(key="id", label="label", prefix="p_", slices=slices, inputs=texts), None
    if hints:
        by, found = hints_of(scored, scored["label"], spec, kind_of(spec), "p_")
        columns = replace(columns, hints=found)
    write_rows(folder / FILE, judged_parts([scored.slice(0, 7), scored.slice(7)], columns, spec))
    measured = {"rows": len(scored), "failed": scored["error"].length() - scored["error"].null_count, "errors": {}}
    measured |= {"metrics": {"accuracy": {"value": 0.5, "low": 0.4, "high": 0.6}}, "labels": list(spec.labels)}
    return publish(folder, measured, kind=kind_of(spec), identity={}, made=ABOUT, slices=slices, hints=by)


def chances_of(truth: np.ndarray, classes: int, *, accuracy: float, seed: int = 0) -> np.ndarray:
    """Probabilities (N, C) whose largest is that of the true class in a share of the rows."""
    generator = np.random.default_rng(seed)
    said = np.where(generator.random(len(truth)) < accuracy, truth, generator.integers(0, classes, len(truth)))
    chances = generator.random((len(truth), classes)) * 0.3 + 0.01
    chances[np.arange(len(truth)), said] += 0.5 + generator.random(len(truth))
    return np.asarray(chances / chances.sum(axis=1, keepdims=True))
