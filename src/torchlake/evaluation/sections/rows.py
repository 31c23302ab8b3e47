"""rows.parquet: each row of an evaluation with its label, prediction and loss, from which the page is computed.

    key or row_id  label  prediction  score  probability  loss  right  tokens  truncated  error  slices  inputs

`loss` orders rows from good to bad: of a class the negative logarithm of its `probability`, of several labels the mean
cross entropy, of a number the absolute difference, of spans the missed and the spurious ones, of answers and texts one
minus the F1 of words, of pairs of vectors the rank of the second text, or the difference from the wanted similarity.
Rows without a label or a prediction have an `error` and null in these columns. The rows are those of the scored parts,
in the table's order; only a batch of them is in memory.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from torchlake import atomic_io, plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.data.features import as_matrix, from_arrow
from torchlake.evaluation.writing import exact_match, token_f1
from torchlake.labels.encoding import label_array
from torchlake.labels.predictions import THRESHOLD
from torchlake.tables.arrays import from_numpy
from torchlake.tasks import ColumnOptions

FILE = "rows.parquet"
BATCH_ROWS = 16_384
FIXED = ("label", "prediction", "score", "probability", "loss", "right", "tokens", "truncated", "error")
"The columns after the key; input columns and slices of these names get the prefix `input_`."
SMALLEST = 1e-12
Judgment = dict[str, Any]
"Columns of rows that have a label and a prediction."


@dataclass(frozen=True, kw_only=True)
class RowColumns:
    """The columns of rows.parquet besides the fixed ones."""

    key: str | None
    "None: `row_id`."
    label: str | None
    prefix: str
    "Of the prediction columns."
    slices: Sequence[str] = ()
    inputs: Sequence[str] = ()
    "Input columns that are kept."
    hints: Mapping[str, Any] = field(default_factory=dict)
    "Further columns, one value a row."

    @property
    def id(self) -> str:
        """The column that names a row."""
        return self.key or "row_id"

    @property
    def copied(self) -> dict[str, str]:
        """The column of the input behind each further column of the file."""
        names = dict.fromkeys([*self.slices, *self.inputs])
        return {stored_name(name): name for name in names if name != self.id}


def stored_name(column: str) -> str:
    """Return the name in rows.parquet of a column of the input."""
    return f"input_{column}" if column in FIXED else column


def kind_of(spec: TaskSpec) -> str:
    """Return what is judged: classes, labels, number, spans, answers, texts, or other for tasks that are not known."""
    task = plugins.load("tasks", spec.task)
    names = set(task.output_schema(spec, ColumnOptions(all_probabilities=True)).names)
    if hasattr(task, "probability_names") and names >= set(task.probability_names(spec)):
        return {"single_label": "classes", "multi_label": "labels"}.get(spec.problem, "number")
    known = {"spans": "spans", "answer": "answers", "generated_text": "texts"}
    return next((kind for name, kind in known.items() if name in names), "other")


def write_rows(path: Path, parts: Iterator[pa.Table], columns: RowColumns, spec: TaskSpec) -> None:
    """Write rows.parquet from scored rows, atomically."""
    building, kind, writer = atomic_io.temporary_path(path), kind_of(spec), None
    first = 0
    try:
        for part in parts:
            made = judged(part, columns, spec, kind)
            for name, values in columns.hints.items():
                made = made.append_column(name, values.slice(first, len(made)))
            first += len(made)
            writer = writer or pq.ParquetWriter(building, made.schema, write_page_checksum=True)
            writer.write_table(made.cast(writer.schema))
        if writer is not None:
            writer.close()
            atomic_io.move_into_place(building, path, site="evaluation.rows")
    finally:
        atomic_io.remove([building])


def write_table(path: Path, rows: pa.Table) -> None:
    """Write rows.parquet from rows in memory, atomically."""
    building = atomic_io.temporary_path(path)
    try:
        pq.write_table(rows, building, row_group_size=BATCH_ROWS, write_page_checksum=True)
        atomic_io.move_into_place(building, path, site="evaluation.rows")
    finally:
        atomic_io.remove([building])


def scored_parts(files: Sequence[Path]) -> Iterator[pa.Table]:
    """Yield the rows of committed parts, some thousands at a time."""
    for file in files:
        with pq.ParquetFile(file, page_checksum_verification=True) as stored:
            for batch in stored.iter_batches(BATCH_ROWS):
                yield pa.Table.from_batches([batch])


def judged(scored: pa.Table, columns: RowColumns, spec: TaskSpec, kind: str) -> pa.Table:
    """Return the rows of rows.parquet for scored rows."""
    task = plugins.load("tasks", spec.task)
    labels = scored[columns.label].combine_chunks() if columns.label else pa.nulls(len(scored))
    errors = scored["error"].combine_chunks().cast(pa.string())
    missing = task.encode_labels(labels, spec).is_null()
    errors = pc.if_else(pc.and_(missing, errors.is_null()), "null_label", errors)
    usable = errors.is_null()
    rows = np.flatnonzero(usable.to_numpy(zero_copy_only=False))
    names = [name for name in scored.column_names if name.startswith(columns.prefix)]
    predicted = scored.select(names).rename_columns([name.removeprefix(columns.prefix) for name in names])
    found = JUDGES[kind](predicted.filter(usable), labels.filter(usable), spec)
    place = np.full(len(scored), -1, dtype=np.int64)
    place[rows] = np.arange(len(rows))
    places = from_numpy(place, null=place < 0)
    empty = pa.nulls(len(scored), pa.float64())
    made: dict[str, Any] = {columns.id: scored[columns.id]}
    made["label"] = found.pop("label").take(places) if "label" in found else labels
    for name in ("prediction", "score", "probability", "loss", "right"):
        values = found.pop(name, None)
        kept = pa.nulls(len(scored), pa.bool_()) if name == "right" else empty
        made[name] = kept if values is None else _array(values).take(places)
    made["tokens"] = predicted["tokens"] if "tokens" in predicted.column_names else pa.nulls(len(scored), pa.int32())
    made |= {"truncated": scored["truncated"], "error": errors}
    made |= {name: _array(values).take(places) for name, values in found.items()}
    copied = {name: scored[column] for name, column in columns.copied.items()}
    return pa.table({**made, **{name: column for name, column in copied.items() if not _is_content(column.type)}})


def _is_content(kind: pa.DataType) -> bool:
    """Return whether a column holds files, such as images, which the rows leave out."""
    if pa.types.is_struct(kind):
        return any(_is_content(field.type) for field in kind)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _array(values: Any) -> pa.Array:
    if isinstance(values, pa.ChunkedArray):
        return values.combine_chunks()
    return values if isinstance(values, pa.Array) else pa.array(values)


def chances_of_rows(predicted: pa.Table, spec: TaskSpec) -> np.ndarray:
    """Return the probabilities (N, C) float64."""
    names = plugins.load("tasks", spec.task).probability_names(spec)
    return np.column_stack([predicted[name].to_numpy() for name in names]).astype(np.float64)


def targets_of(labels: pa.Array, spec: TaskSpec) -> np.ndarray:
    encoded = plugins.load("tasks", spec.task).encode_labels(labels, spec)
    return np.asarray(as_matrix(from_arrow(encoded))) if len(labels) else np.zeros(0, dtype=np.int64)


def _classes(predicted: pa.Table, labels: pa.Array, spec: TaskSpec) -> Judgment:
    chances, truth = chances_of_rows(predicted, spec), targets_of(labels, spec)
    given = chances[np.arange(len(truth)), truth]
    return {
        "label": label_array(spec).take(pa.array(truth)),
        "prediction": predicted["label"],
        "score": predicted["score"],
        "probability": given,
        "loss": -np.log(np.maximum(given, SMALLEST)),
        "right": chances.argmax(axis=1) == truth if len(truth) else np.zeros(0, dtype=bool),
    }


def _labels(predicted: pa.Table, labels: pa.Array, spec: TaskSpec) -> Judgment:
    """Judge several labels; `probability` is that of the least likely of a row's true answers, yes or no."""
    chances, truth = chances_of_rows(predicted, spec), targets_of(labels, spec).reshape(-1, len(spec.labels)) > 0
    agreed = np.where(truth, chances, 1 - chances)
    row, column = np.nonzero(truth)
    offsets = np.searchsorted(row, np.arange(len(truth) + 1)).astype(np.int32)
    return {
        "label": pa.ListArray.from_arrays(pa.array(offsets), label_array(spec).take(pa.array(column))),
        "prediction": predicted["label"],
        "score": np.maximum(chances, 1 - chances).min(axis=1) if len(truth) else np.zeros(0),
        "probability": agreed.min(axis=1) if len(truth) else np.zeros(0),
        "loss": -np.log(np.maximum(agreed, SMALLEST)).mean(axis=1) if len(truth) else np.zeros(0),
        "right": ((chances >= THRESHOLD) == truth).all(axis=1),
        "probabilities": pa.FixedSizeListArray.from_arrays(
            pa.array(chances.astype(np.float32).ravel()), len(spec.labels)
        ),
    }


def _number(predicted: pa.Table, labels: pa.Array, spec: TaskSpec) -> Judgment:
    numbers, truth = predicted["prediction"].to_numpy().astype(np.float64), targets_of(labels, spec).astype(np.float64)
    return {"label": pa.array(truth), "prediction": numbers, "loss": np.abs(numbers - truth)}


def _spans(predicted: pa.Table, labels: pa.Array, spec: TaskSpec) -> Judgment:
    """Judge spans: `loss` is the number of missed and spurious ones, `score` that of the least sure one."""
    from torchlake.tasks.token_classification import SPANS, true_spans

    true = [
        [{"start": a, "end": b, "label": name} for a, b, name in true_spans(row, spec)] for row in labels.to_pylist()
    ]
    found = predicted["spans"].to_pylist()
    wrong = [len(_places(one) ^ _places(other)) for one, other in zip(true, found, strict=True)]
    plain = pa.list_(pa.struct({name: SPANS.value_type.field(name).type for name in ("start", "end", "label")}))
    return {
        "label": pa.array(true, plain),
        "prediction": predicted["spans"],
        "score": pa.array([min((span["score"] for span in row), default=None) for row in found], pa.float64()),
        "loss": np.array(wrong, dtype=np.float64),
        "right": np.array(wrong) == 0 if wrong else np.zeros(0, dtype=bool),
    }


def _places(spans: Sequence[Mapping[str, Any]]) -> set[tuple[int, int, str]]:
    return {(span["start"], span["end"], span["label"]) for span in spans}


def _answers(predicted: pa.Table, labels: pa.Array, spec: TaskSpec) -> Judgment:
    """Judge answers by the best of a row's true ones; without one, by saying so."""
    said = [text or "" for text in predicted["answer"].to_pylist()]
    true = [_texts_of(label) for label in labels.to_pylist()]
    return {"prediction": predicted["answer"], "score": predicted["score"], **_compared(said, true)}


def _texts_of(label: Any) -> list[str]:
    texts = label["text"] if isinstance(label, dict) else label
    return ([texts] if isinstance(texts, str) else list(texts or [])) or [""]


def _texts(predicted: pa.Table, labels: pa.Array, spec: TaskSpec) -> Judgment:
    written = predicted["generated_text"]
    return {"prediction": written, **_compared(written.to_pylist(), [[str(text)] for text in labels.to_pylist()])}


def _compared(said: Sequence[str], true: Sequence[Sequence[str]]) -> Judgment:
    pairs = list(zip(said, true, strict=True))
    best = [max(token_f1([text], [wanted]) for wanted in some) for text, some in pairs]
    right = [any(exact_match([text], [wanted]) for wanted in some) for text, some in pairs]
    return {"loss": 1 - np.array(best, dtype=np.float64), "right": pa.array(right, pa.bool_())}


def _other(predicted: pa.Table, labels: pa.Array, spec: TaskSpec) -> Judgment:
    """Keep the first prediction column of a task that is not known; its rows have no loss."""
    return {"prediction": pa.array([_shown(value) for value in predicted.column(0).to_pylist()], pa.string())}


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


JUDGES: Mapping[str, Callable[[pa.Table, pa.Array, TaskSpec], Judgment]] = {
    "classes": _classes,
    "labels": _labels,
    "number": _number,
    "spans": _spans,
    "answers": _answers,
    "texts": _texts,
    "other": _other,
}
