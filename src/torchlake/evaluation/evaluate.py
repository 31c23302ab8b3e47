"""`evaluate`: how good a model is on a labeled table, with intervals.

    read the label column -> predict into a temporary folder -> metrics over the rows that have both

Labels are read first: a label that the model does not know ends the job before anything is scored. A row without a
label, or one that could not be scored, is in no metric; it is counted, under its reason. Cost: a prediction of the
table, a second read of one column, and the probabilities of all rows in memory (4 bytes per row and class).
"""

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from torchlake import plugins
from torchlake.config.arguments import check_arguments
from torchlake.config.options import EvaluateOptions, ReadArguments
from torchlake.data.features import as_matrix, from_arrow
from torchlake.display import Shown, Table, count, shown
from torchlake.engines import Engine, as_engine
from torchlake.engines.local import Local
from torchlake.errors import DataError, TableError, UsageError
from torchlake.evaluation.embeddings import measure_pairs
from torchlake.evaluation.perplexity import measure_texts
from torchlake.evaluation.preferences import measure_preferences, pairs_spec
from torchlake.evaluation.writing import estimator
from torchlake.metrics import Metric, bootstrapped, evaluate_metrics
from torchlake.models.load import Label, TaskSpec, model_folder
from torchlake.outputs.staging.spool import spooled
from torchlake.scoring import predict as predicting
from torchlake.scoring.options import known_spec, with_columns
from torchlake.scoring.rows import Runtime
from torchlake.scoring.runtime_choice import refuse_unable
from torchlake.storage.spread import Spread
from torchlake.tables.arrays import string_column
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.failures import count_reasons
from torchlake.tables.keys import ITEM_ROWS, READ_BYTES, bundled
from torchlake.tables.plan import Chunk
from torchlake.tables.reading import ChunkReader
from torchlake.tables.record import committed_files
from torchlake.tables.sources._find import pinned
from torchlake.tables.sources._options import ReadOptions, read_options
from torchlake.tables.sources.files import StoredTable
from torchlake.tables.sources.frames import engine_of, is_frame, to_arrow
from torchlake.tables.sources.streams import Input
from torchlake.tables.table import missing_column, open_table
from torchlake.tasks import ColumnOptions
from torchlake.tasks._chat import without_fillers
from torchlake.tasks.feature_extraction import FeatureExtraction

PREFIX = "predicted_"
MATRIX_SHOWN = 7
"Classes up to which the text of an `Evaluation` has the confusion matrix."
RESAMPLES = 1000
RESAMPLES_OF_TASKS = 200
"The number of resamples for metrics that a task computes itself."
RESAMPLED_NUMBERS = 100_000_000
"Probabilities drawn by all resamples together, about a minute of work; larger tables get fewer resamples."
RESAMPLE_PRICE = 4000
"The fixed cost of a resample, in rows: scikit-learn's checks of its input."


@shown
@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result of `evaluate`. The metrics are over `rows - failed` rows."""

    rows: int
    failed: int
    "Rows without a label or without a prediction."
    errors: dict[str, int]
    "The number of failed rows for each reason."
    metrics: dict[str, Metric]
    confusion: list[list[int]] | None
    "Rows by true class, then by predicted class, in the order of `labels`; None unless each row has one class."
    labels: tuple[Label, ...]
    resamples: int
    "Bootstrap resamples behind each interval."
    tokens: int | None = None
    "Tokens that a language model predicted; None for a task with labels."

    def _shown(self) -> Shown:
        rows = [(name, one.value, f"{one.low:.4f} to {one.high:.4f}") for name, one in self.metrics.items()]
        tables: list[Table] = [[("metric", "value", "95 % interval"), *rows]]
        if self.confusion is not None and len(self.labels) <= MATRIX_SHOWN:
            matrix = [(label, *row) for label, row in zip(self.labels, self.confusion, strict=False)]
            tables.append([("label \\ predicted", *self.labels), *matrix])
        reasons = ", ".join(f"{reason} {rows:,}" for reason, rows in list(self.errors.items())[:3])
        return f"{count(self.rows, 'row')}, {self.failed:,} left out{f' ({reasons})' if reasons else ''}", tables

    def to_json(self) -> dict[str, Any]:
        """Return plain values; a metric that is undefined on this table is null."""
        value = asdict(self)
        for metric in value["metrics"].values():
            metric.update({name: None for name, number in metric.items() if not math.isfinite(number)})
        return {**value, "labels": list(self.labels)}


def evaluate(
    model: str | Path,
    table: Input,
    *,
    text: str | Sequence[str] | None = None,
    label: str | None = None,
    text_pair: str | Sequence[str] | None = None,
    inputs: Mapping[str, str | Sequence[str]] | None = None,
    task: Any = None,
    engine: Engine | str | None = None,
    runtime: Runtime | None = None,
    reference: str | Path | None = None,
    **options: Unpack[EvaluateOptions],
) -> Evaluation:
    """Measure `model` on `table`: a stored table (file, folder, glob, URL or a list of them), a frame or a stream.

    `text`, `text_pair`, `inputs` and `label` name the columns if they differ from those of the training table; `task`
    and `runtime` are as in `predict`, and so are the rows of a stored table that are measured (`where`, `sample` with
    `seed`, `limit`) and `csv`.
    A model that writes is measured by what it writes, with the options of `predict` for text generation, beside a
    column of texts or JSON, `label` (`writing.py`). Without one a language model is measured on the texts only
    (`perplexity.py`). An embedding model is measured on pairs of `text` and `text_pair`: by the correlation of their
    cosines with `label`, or without one by how well the second text is found among those of all rows
    (`embeddings.py`). A language model is measured on pairs of answers if it learned from them
    or `inputs` names their columns, chosen and rejected (`preferences.py`), relative to the `reference` that it learned
    with, or to another.

    Raises DataError for a label that the model does not know and for a table without usable rows, TableError for a
    missing column, and the errors of `predict`.
    """
    if engine_of(table) is not None:
        raise UsageError(
            "evaluate brings all labels to this process: give it a stored table, or the frame as pandas "
            "(frame.select(...).toPandas() of Spark, dataset.to_pandas() of Ray)."
        )
    check_arguments(options, EvaluateOptions.__annotations__)
    read: Any = {name: value for name, value in options.items() if name in ReadArguments.__annotations__}
    own, reading = model_folder(model), read_options(read)
    if is_frame(table):
        reading.refuse_for_frames()
    spec, engine, table = known_spec(own, task), as_engine(engine), pinned(table)
    writes = plugins.load("tasks", spec.task).generates and bool(label or spec.label)
    if not writes and (given := sorted(options.keys() - read.keys())):
        raise UsageError(f"{', '.join(given)}: for a model that writes what is measured; name a label, its answers.")
    refuse_unable(runtime, spec.task)
    if isinstance(plugins.load("tasks", spec.task), FeatureExtraction):
        spec = with_columns(spec, own, text=text, inputs=inputs)
        options_of = {"task": task, "engine": engine, "runtime": runtime, "prefix": PREFIX, "max_error_rate": 1.0}
        score = partial(predicting.predict, model, **options_of)
        columns: Any = {"text": spec.text, "text_pair": text_pair, "label": label}
        with tempfile.TemporaryDirectory(prefix="torchlake-evaluate-", ignore_cleanup_errors=True) as folder:
            return _of_pairs(*measure_pairs(score, table, Path(folder), **columns, read=read))
    if (pairs := pairs_spec(spec, text, inputs)) is not None and label is None and text_pair is None:
        return _of_pairs(*measure_preferences(own, table, pairs, reference=reference, engine=engine, options=reading))
    if reference is not None:
        raise UsageError("reference: only pairs of answers (inputs chosen and rejected) are measured relative to one.")
    spec = with_columns(spec, own, text=text, text_pair=text_pair, inputs=inputs)
    if writes:
        named = {"text": text, "inputs": inputs, "task": task, "engine": engine, "runtime": runtime}
        return _of_written(model, table, replace(spec, label=label or spec.label), named, options, reading)
    if spec.label is None:
        if label is not None:
            raise UsageError(f"label: {spec.task} is measured on the texts only; leave it out.")
        if not plugins.load("tasks", spec.task).packs:
            raise UsageError(f"{spec.task} learns no label, so there is nothing to evaluate its predictions by.")
        return _of_texts(model, table, spec, engine, runtime, reading)
    return _of_labeled(model, table, replace(spec, label=label or spec.label), engine, runtime, read)


def _of_labeled(
    model: str | Path, table: Any, spec: TaskSpec, engine: Engine | None, runtime: Runtime | None, read: Any
) -> Evaluation:
    """Return the metrics of predictions beside labels; `read` are the caller's options of reading."""
    with tempfile.TemporaryDirectory(prefix="torchlake-evaluate-", ignore_cleanup_errors=True) as folder:
        predict = partial(
            predicting.predict,
            model,
            text=spec.text or None,
            **({} if spec.text_pair is None else {"text_pair": spec.text_pair}),
            inputs=spec.inputs,
            all_probabilities=True,
            prefix=PREFIX,
            engine=engine,
            runtime=runtime,
            max_error_rate=1.0,  # failed rows are counted here; a table without usable rows is refused below
        )
        if is_frame(table):
            frame = to_arrow(table)
            labels, reasons = _frame_labels(frame, spec)
            scored = predict(frame.select(list(spec.input_columns)))
        else:
            output = Path(folder, "scored")
            with spooled(table, output) as stored:
                labels, reasons = _stored_labels(stored, spec, read_options(read), (engine or Local()).spread)
                predict(stored, output, **read)
            scored = _read_scored(committed_files(output), spec)
    return _measure(scored, labels, reasons, spec)


def _of_written(
    model: str | Path, table: Any, spec: TaskSpec, named: Mapping[str, Any], options: Any, reading: ReadOptions
) -> Evaluation:
    """Return the metrics of written texts; `named` are arguments of `predict`, `options` those of the caller."""
    if options.get("n", 1) != 1:
        raise UsageError("n: evaluate measures one answer of each row; leave it out.")
    assert spec.label is not None, "there are answers to compare with"
    predict = partial(
        predicting.predict,
        model,
        prefix=PREFIX,
        max_error_rate=1.0,
        **{name: value for name, value in named.items() if value is not None},
    )
    with tempfile.TemporaryDirectory(prefix="torchlake-evaluate-", ignore_cleanup_errors=True) as folder:
        if is_frame(table):
            frame = to_arrow(table)
            if spec.label not in frame.column_names:
                raise missing_column("the frame", spec.label, frame.schema)
            labels, reasons = frame[spec.label], dict[int, str]()
            scored = predict(frame.drop_columns([spec.label]), **options)
        else:
            output, spread = Path(folder, "scored"), (named["engine"] or Local()).spread
            with spooled(table, output) as stored:
                labels, reasons = _stored_labels(stored, spec, reading, spread, columns=(spec.label,))
                predict(stored, output, **options)
            scored = _read_scored(committed_files(output), spec)
    return _measure(scored, labels, reasons, spec)


def _of_pairs(rows: int, errors: dict[str, int], metrics: dict[str, Metric]) -> Evaluation:
    return Evaluation(
        rows=rows,
        failed=sum(errors.values()),
        errors=errors,
        metrics=metrics,
        confusion=None,
        labels=(),
        resamples=RESAMPLES_OF_TASKS,
    )


def _of_texts(
    model: str | Path,
    table: Any,
    spec: TaskSpec,
    engine: Engine | None,
    runtime: Runtime | None,
    options: ReadOptions,
) -> Evaluation:
    found = measure_texts(model, table, spec, engine=engine, runtime=runtime, options=options)
    return Evaluation(
        rows=found.rows,
        failed=sum(found.errors.values()),
        errors=found.errors,
        metrics=found.metrics,
        confusion=None,
        labels=(),
        resamples=found.resamples,
        tokens=found.tokens,
    )


def _frame_labels(frame: pa.Table, spec: TaskSpec) -> tuple[pa.Array, dict[int, str]]:
    for column in spec.columns:
        if column not in frame.column_names:
            raise TableError(f"the frame has no column {column!r}; it has: {', '.join(frame.column_names)}")
    plugins.load("tasks", spec.task).encode_labels(frame[spec.label].combine_chunks(), spec)  # refuses unknown labels
    return frame[spec.label], {}


def _stored_labels(
    table: StoredTable, spec: TaskSpec, options: ReadOptions, spread: Spread, columns: Sequence[str] = ()
) -> tuple[pa.ChunkedArray, dict[int, str]]:
    """Return the labels of all rows, in the table's order, and the reasons of unreadable ones."""
    source = open_table(table, columns=columns or spec.columns, options=options, spread=spread)
    plan = plan_chunks(source, columns=(spec.label or "",), hashed=False, spread=spread)
    bundles = bundled(plan.chunks, [chunk.rows for chunk in plan.chunks], ITEM_ROWS)
    pieces: list[pa.Array] = []
    reasons: dict[int, str] = {}
    first = 0
    read = partial(_labels, plugins.load("tasks", spec.task), spec)
    parts = spread(read, bundles, size=plan.rows * READ_BYTES, name="read the labels")
    with closing(parts):
        for labels, unreadable in parts:
            pieces.append(labels)
            reasons |= {first + row: reason for row, reason in unreadable.items()}
            first += len(labels)
    return pa.chunked_array(pieces, source.schema.field(spec.label).type), reasons


def _labels(task: Any, spec: TaskSpec, chunks: Sequence[Chunk]) -> tuple[pa.Array, dict[int, str]]:
    """Return the labels of some chunks, and the reasons of their unreadable rows. Raises DataError for unknown
    labels."""
    assert spec.label is not None, "a task without labels is measured on its texts"
    reader = ChunkReader((spec.label,))
    pieces: list[pa.Array] = []
    reasons: dict[int, str] = {}
    first = 0
    try:
        for chunk in chunks:
            rows, unreadable = reader.read(chunk)
            labels = rows[spec.label].combine_chunks()
            try:
                _encoded(task, labels, spec)
            except DataError as error:
                raise DataError(f"{chunk.file}, {chunk.where}: {error}") from error
            pieces.append(labels)
            reasons |= {first + row: reason for row, reason in unreadable.items()}
            first += chunk.rows
    finally:
        reader.close()
    return pa.concat_arrays(pieces), reasons


def _read_scored(files: Sequence[Path], spec: TaskSpec) -> pa.Table:
    schema = plugins.load("tasks", spec.task).output_schema(spec, ColumnOptions(all_probabilities=True))
    names = [PREFIX + name for name in schema.names]
    tables = [pq.read_table(file, columns=[*names, "error"], page_checksum_verification=True) for file in files]
    if not tables:
        raise DataError("the table has no rows to evaluate on")
    return pa.concat_tables(tables)


def _measure(scored: pa.Table, labels: pa.ChunkedArray, reasons: dict[int, str], spec: TaskSpec) -> Evaluation:
    if len(scored) != len(labels):
        raise DataError(f"the table had {len(labels):,} rows, then {len(scored):,}: it changed while it was evaluated")
    task = plugins.load("tasks", spec.task)
    missing = _encoded(task, labels.combine_chunks(), spec).is_null()
    failures = dict.fromkeys(pc.indices_nonzero(missing).to_pylist(), "null_label") | reasons
    reason_column = scored["error"].combine_chunks()
    for row in pc.indices_nonzero(reason_column.is_valid()).to_pylist():
        failures[row] = reason_column[row].as_py()
    usable = np.ones(len(labels), dtype=bool)
    usable[list(failures)] = False
    errors = dict(count_reasons(pa.array(failures.values(), pa.string())).most_common())
    if not usable.any():
        raise DataError(
            f"no row of {len(labels):,} has both a label in {spec.label!r} and a prediction: "
            + (", ".join(f"{reason} {rows:,}" for reason, rows in errors.items()) or "the table is empty")
        )
    predictions = scored.rename_columns([name.removeprefix(PREFIX) for name in scored.column_names]).filter(usable)
    known = labels.filter(pa.array(usable)).combine_chunks()
    measured = _measure_written if task.generates else _measure_classes if task.measures_classes else _measure_task
    metrics, confusion, resamples = measured(task, predictions, known, spec)
    return Evaluation(
        rows=len(labels),
        failed=len(failures),
        errors=errors,
        metrics=metrics,
        confusion=None if confusion is None else confusion.tolist(),
        labels=spec.labels,
        resamples=resamples,
    )


def _measure_classes(
    task: Any, predictions: pa.Table, labels: pa.Array, spec: TaskSpec
) -> tuple[dict[str, Metric], np.ndarray | None, int]:
    """Return the metrics of classes or a number, the confusion matrix, and the number of resamples."""
    probabilities = np.column_stack([predictions[name].to_numpy() for name in task.probability_names(spec)])
    truth = np.asarray(as_matrix(from_arrow(task.encode_labels(labels, spec))))
    price = probabilities.shape[1] * (len(truth) + RESAMPLE_PRICE)
    resamples = min(RESAMPLES, max(100, RESAMPLED_NUMBERS // price))
    return *evaluate_metrics(probabilities, truth, spec.problem, spec.labels, resamples=resamples), resamples


def _encoded(task: Any, labels: pa.Array, spec: TaskSpec) -> pa.Array:
    """Return labels as the task encodes them, and of a task that writes as texts: structs and lists as JSON.

    Raises DataError for labels that the model does not know.
    """
    if not task.generates:
        encoded: pa.Array = task.encode_labels(labels, spec)
        return encoded
    if not pa.types.is_nested(labels.type):
        return string_column(pa.chunked_array([labels])).cast(pa.large_string())
    values = (without_fillers(each) for each in labels.to_pylist())
    return pa.array([None if each is None else json.dumps(each, default=str) for each in values], pa.large_string())


def _measure_written(
    task: Any, predictions: pa.Table, labels: pa.Array, spec: TaskSpec
) -> tuple[dict[str, Metric], np.ndarray | None, int]:
    """Return the same for a task that writes."""
    estimate = estimator(predictions["generated_text"].to_pylist(), _encoded(task, labels, spec).to_pylist())
    return bootstrapped(estimate, len(labels), resamples=RESAMPLES), None, RESAMPLES


def _measure_task(
    task: Any, predictions: pa.Table, labels: pa.Array, spec: TaskSpec
) -> tuple[dict[str, Metric], np.ndarray | None, int]:
    """Return the same for a task that computes its own metrics."""

    def estimate(rows: np.ndarray) -> dict[str, float]:
        places = pa.array(rows)
        found: dict[str, float] = task.measure(predictions.take(places), labels.take(places), spec)
        return found

    return bootstrapped(estimate, len(labels), resamples=RESAMPLES_OF_TASKS), None, RESAMPLES_OF_TASKS
