"""Evaluations without a model: scored rows are made up, and everything after scoring is real."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa

import tiny
from torchlake.evaluation.report import publish
from torchlake.evaluation.sections.label_hints import hints_of
from torchlake.evaluation.sections.rows import FILE, RowColumns, judged_parts, kind_of, write_rows
from torchlake.models.load import TaskSpec

NUMBERS = replace(tiny.SPEC, labels=(), problem="regression")
ATTACK = "<script>alert(1)</script>"
STRANGE = (ATTACK, "גמל", "cat 🐈")
"Names of classes."
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


def scored_lists(chances: np.ndarray, truth: np.ndarray, labels: Sequence[str]) -> tuple[pa.Table, TaskSpec]:
    """What `predict` would have written for probabilities (N, C) of several labels, beside true ones (N, C)."""
    scored = scored_classes(chances, np.zeros(len(truth), dtype=int), labels).drop_columns(["label", "p_label"])
    for name, chosen in (("label", truth), ("p_label", chances >= 0.5)):
        scored = scored.append_column(name, pa.array([[labels[at] for at in np.flatnonzero(row)] for row in chosen]))
    return scored, replace(classes_spec(labels), problem="multi_label")


def scored_answers(contexts: Sequence[str]) -> tuple[pa.Table, TaskSpec]:
    """Scored questions: the answer is the first three letters of a context, or every fourth time none."""
    kind = pa.struct({"text": pa.list_(pa.string()), "answer_start": pa.list_(pa.int32())})
    true = [[] if row % 4 == 3 else [context[:3]] for row, context in enumerate(contexts)]
    table = pa.table(
        {
            "id": range(len(contexts)),
            "label": pa.array([{"text": one, "answer_start": [0] * len(one)} for one in true], kind),
            "p_answer": [None if row % 5 == 4 else context[: 2 + row % 3] for row, context in enumerate(contexts)],
            "p_score": pa.array(np.linspace(0.1, 0.9, len(contexts)), pa.float32()),
            "truncated": [False] * len(contexts),
            "error": pa.nulls(len(contexts), pa.string()),
            "context": contexts,
        }
    )
    options = {"no_answer": True}
    return table, replace(tiny.SPEC, task="question_answering", problem="answers", labels=(), options=options)


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
    about = {**ABOUT, "columns": list(texts) or ["text"]}
    measured |= {"metrics": {"accuracy": {"value": 0.5, "low": 0.4, "high": 0.6}}, "labels": list(spec.labels)}
    return publish(folder, measured, kind=kind_of(spec), identity={}, made=about, slices=slices, hints=by)


def chances_of(truth: np.ndarray, classes: int, *, accuracy: float, seed: int = 0) -> np.ndarray:
    """Probabilities (N, C) whose largest is that of the true class in a share of the rows."""
    generator = np.random.default_rng(seed)
    said = np.where(generator.random(len(truth)) < accuracy, truth, generator.integers(0, classes, len(truth)))
    chances = generator.random((len(truth), classes)) * 0.3 + 0.01
    chances[np.arange(len(truth)), said] += 0.5 + generator.random(len(truth))
    return np.asarray(chances / chances.sum(axis=1, keepdims=True))


def spans_table() -> tuple[pa.Table, TaskSpec]:
    """Scored rows with spans, right, missed, spurious and of another type."""
    kind = pa.list_(pa.struct({"start": pa.int32(), "end": pa.int32(), "label": pa.string()}))
    found = pa.list_(
        pa.struct({**{n: kind.value_type.field(n).type for n in ("start", "end", "label")}, "score": pa.float32()})
    )

    def span(start: int, end: int, label: str) -> dict[str, Any]:
        return {"start": start, "end": end, "label": label, "score": 0.9}

    true = [[span(0, 4, "PER")], [span(0, 4, "PER"), span(9, 13, "LOC")], [], [span(0, 4, "LOC")]]
    said = [[span(0, 4, "PER")], [span(0, 4, "LOC"), span(9, 12, "LOC")], [span(5, 8, "PER")], []]
    table = pa.table(
        {
            "id": range(4),
            "label": pa.array([[{k: v for k, v in one.items() if k != "score"} for one in row] for row in true], kind),
            "p_spans": pa.array(said, found),
            "truncated": [False] * 4,
            "error": pa.nulls(4, pa.string()),
            "text": ["Anna is in Rome"] * 4,
        }
    )
    labels = ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    return table, replace(tiny.SPEC, task="token_classification", problem="spans", labels=labels)


def page_of(
    folder: Path,
    rows: int,
    classes: int,
    texts: list[str] | None = None,
    slices: Mapping[str, Sequence[str]] = MappingProxyType({}),
    **options: Any,
) -> str:
    """The page of made-up rows of `classes` classes, with labels, texts and slices of any kind."""
    labels = [*STRANGE, *(f"class {at}" for at in range(classes))][:classes]
    truth = np.random.default_rng(0).integers(0, classes, rows)
    scored = scored_classes(chances_of(truth, classes, accuracy=0.7), truth, labels)
    if texts is not None:
        cycle = [texts[row % len(texts)] for row in range(rows)]
        scored = scored.set_column(scored.schema.get_field_index("text"), "text", pa.array(cycle))
    for name, values in slices.items():
        scored = scored.append_column(name, pa.array([values[row % len(values)] for row in range(rows)]))
    evaluated(folder, scored, classes_spec(labels), slices=list(slices), hints=True, **options)
    return (folder / "eval.html").read_text()
