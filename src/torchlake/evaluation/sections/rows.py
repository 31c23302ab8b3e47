"""rows.parquet: each row of an evaluation with its label, prediction and loss, from which the page is computed.

    key or row_id  label  prediction  score  probability  loss  right  tokens  truncated  error  slices  inputs

`loss` orders rows from good to bad: of a class the negative logarithm of its `probability`, of several labels the mean
cross entropy, of a number the absolute difference, of spans the missed and the spurious ones, of answers and texts one
minus the F1 of words, of pairs of vectors the rank of the second text, or the difference from the wanted similarity.
Rows without a label or a prediction have an `error` and null in these columns. The rows are those of the scored parts,
in the table's order; only a batch of them is in memory, with fewer rows if there are many classes.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from torchlake import atomic_io, plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.evaluation.sections.labels import encoded_labels, targets_of
from torchlake.evaluation.writing import OF_EACH
from torchlake.labels.encoding import label_array
from torchlake.labels.predictions import THRESHOLD
from torchlake.tables.arrays import from_numpy
from torchlake.tasks import ColumnOptions

FILE = "rows.parquet"
BATCH_ROWS = 16_384
BATCH_NUMBERS = 8_000_000
"Values of a batch, with a column for each class."
BATCH_BYTES, READ_ROWS = 64 << 20, 256
"Bytes from which a batch is complete, and the rows that are read at once."
FIXED = ("label", "prediction", "score", "probability", "loss", "right", "tokens", "truncated", "error")
"The columns after the key."
FURTHER = ("label_quality", "label_issue", "trained_on", "random")
"Columns that some files have, which the page is computed from."
RESERVED = (*FIXED, *FURTHER, "suggested", "probabilities", "rank")
"Columns of the input, slices and keys of these names get the prefix `input_`."
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
    def named_by(self) -> str:
        """The column of the input that names a row."""
        return self.key or "row_id"

    @property
    def id(self) -> str:
        """The column that names a row in rows.parquet."""
        return stored_name(self.named_by)

    @property
    def copied(self) -> dict[str, str]:
        """The column of the input behind each further column of the file."""
        names = dict.fromkeys([*self.slices, *self.inputs])
        return {stored_name(name): name for name in names if name != self.named_by}


def stored_name(column: str) -> str:
    """Return the name in rows.parquet of a column of the input."""
    return f"input_{column}" if column in RESERVED else column


def kind_of(spec: TaskSpec) -> str:
    """Return what is judged: classes, labels, number, spans, answers, texts, or other for tasks that are not known."""
    task = plugins.load("tasks", spec.task)
    names = set(task.output_schema(spec, ColumnOptions(all_probabilities=True)).names)
    if hasattr(task, "probability_names") and names >= set(task.probability_names(spec)):
        return {"single_label": "classes", "multi_label": "labels"}.get(spec.problem, "number")
    if hasattr(task, "judge"):
        return "answers"
    return next(
        (kind for name, kind in {"spans": "spans", "generated_text": "texts"}.items() if name in names), "other"
    )


def judged_parts(parts: Iterable[pa.Table], columns: RowColumns, spec: TaskSpec) -> Iterator[pa.Table]:
    """Yield the rows of rows.parquet for parts of the scored rows."""
    kind, first = kind_of(spec), 0
    for part in parts:
        made = judged(part, columns, spec, kind)
        for name, values in columns.hints.items():
            made = made.append_column(name, values.slice(first, len(made)))
        first += len(made)
        yield made


def write_rows(path: Path, parts: Iterable[pa.Table]) -> None:
    """Write rows.parquet from its parts, atomically."""
    building, writer = atomic_io.temporary_path(path), None
    try:
        for part in parts:
            writer = writer or pq.ParquetWriter(building, part.schema, write_page_checksum=True)
            fitting = len(part) * BATCH_BYTES // max(1, part.nbytes)
            writer.write_table(part.cast(writer.schema), row_group_size=min(BATCH_ROWS, max(1, fitting)))
        if writer is not None:
            writer.close()
            atomic_io.move_into_place(building, path, site="evaluation.rows")
    finally:
        atomic_io.remove([building])


def scored_parts(files: Sequence[Path], columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """Yield the rows of committed parts, some thousands at a time, fewer of long texts or many classes."""
    for file in files:
        with pq.ParquetFile(file, page_checksum_verification=True, buffer_size=1 << 16) as stored:
            width = len(columns or stored.schema_arrow.names)
            most, kept, full = min(BATCH_ROWS, max(READ_ROWS, BATCH_NUMBERS // width)), list[pa.RecordBatch](), 0.0
            for batch in stored.iter_batches(READ_ROWS, columns=columns):
                kept.append(batch)
                full += max(len(batch) / most, batch.nbytes / BATCH_BYTES)
                if full >= 1:
                    yield pa.Table.from_batches(kept)
                    kept, full = [], 0.0
            if kept:
                yield pa.Table.from_batches(kept)


def errors_and_usable(scored: pa.Table, labels: pa.Array, spec: TaskSpec, prefix: str) -> tuple[pa.Array, pa.Array]:
    """Return why rows failed, and which have a label and a prediction: also texts that do not fit their structure."""
    missing = encoded_labels(labels, spec).is_null()
    errors = scored["error"].combine_chunks().cast(pa.string())
    errors = pc.if_else(pc.and_(missing, errors.is_null()), "null_label", errors)
    usable = errors.is_null()
    if plugins.load("tasks", spec.task).generates:
        written = scored[f"{prefix}generated_text"].combine_chunks().is_valid()
        usable = pc.or_(usable, pc.and_not(written, missing))
    return errors, usable


def judged(scored: pa.Table, columns: RowColumns, spec: TaskSpec, kind: str) -> pa.Table:
    """Return the rows of rows.parquet for scored rows."""
    labels = scored[columns.label].combine_chunks() if columns.label else pa.nulls(len(scored))
    errors, usable = errors_and_usable(scored, labels, spec, columns.prefix)
    names = [name for name in scored.column_names if name.startswith(columns.prefix)]
    predicted = scored.select(names).rename_columns([name.removeprefix(columns.prefix) for name in names])
    found = JUDGES[kind](predicted.filter(usable), labels.filter(usable), spec)
    empty = pa.nulls(len(scored), pa.float64())
    made: dict[str, Any] = {columns.id: scored[columns.named_by]}
    made["label"] = among_all(found.pop("label"), usable) if "label" in found else labels
    for name in ("prediction", "score", "probability", "loss", "right"):
        values = found.pop(name, None)
        kept = pa.nulls(len(scored), pa.bool_()) if name == "right" else empty
        made[name] = kept if values is None else among_all(values, usable)
    tokens = next((name for name in ("tokens", "prompt_tokens") if name in predicted.column_names), None)
    made["tokens"] = pa.nulls(len(scored), pa.int32()) if tokens is None else predicted[tokens]
    made |= {"truncated": scored["truncated"], "error": errors}
    made |= {name: among_all(values, usable) for name, values in found.items()}
    return pa.table({**made, **{name: scored[column] for name, column in columns.copied.items()}})


def is_content(kind: pa.DataType) -> bool:
    """Return whether a column holds files, such as images, which are not read for the rows."""
    if pa.types.is_struct(kind):
        return any(is_content(field.type) for field in kind)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def among_all(values: Any, usable: pa.Array) -> pa.Array:
    """Return the values of usable rows among all rows, null for the others."""
    mask = usable.to_numpy(zero_copy_only=False)
    array = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    array = array if isinstance(array, pa.Array) else pa.array(array)
    return array.take(from_numpy(np.where(mask, np.cumsum(mask) - 1, -1), null=~mask))


def _classes(predicted: pa.Table, labels: pa.Array, spec: TaskSpec) -> Judgment:
    chances, truth = plugins.load("tasks", spec.task).read_answers(predicted, spec), targets_of(labels, spec)
    given = chances[np.arange(len(truth)), truth].astype(np.float64)
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
    chances = plugins.load("tasks", spec.task).read_answers(predicted, spec).astype(np.float64)
    truth = targets_of(labels, spec).reshape(-1, len(spec.labels)) > 0
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
        # Not lists of a fixed size: Arrow reads no nulls among them from Parquet, and failed rows are null.
        "probabilities": pa.ListArray.from_arrays(
            pa.array(np.arange(len(chances) + 1, dtype=np.int32) * len(spec.labels)),
            pa.array(chances.astype(np.float32).ravel()),
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
    """Judge answers by the best of a row's true ones, as the metrics do; without one, by saying so."""
    found = plugins.load("tasks", spec.task).judge(predicted, labels, spec)
    made = {"prediction": predicted["answer"], "score": predicted["score"]}
    return {**made, "loss": 1 - found["f1"], "right": found["exact_match"] == 1}


def _texts(predicted: pa.Table, labels: pa.Array, spec: TaskSpec) -> Judgment:
    """Judge written texts by what was expected."""
    written, wanted = predicted["generated_text"], encoded_labels(labels, spec)
    pairs = list(zip(written.to_pylist(), wanted.to_pylist(), strict=True))
    f1, same = (np.array([OF_EACH[name](*pair) for pair in pairs], np.float64) for name in ("token_f1", "exact_match"))
    return {"label": wanted, "prediction": written, "loss": 1 - f1, "right": same == 1}


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
