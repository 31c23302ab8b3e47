"""`evaluate`: how good a model is on a labeled table, with intervals.

    read the label column -> predict into a temporary folder -> metrics over the rows that have both

Labels are read first: a label that the model does not know ends the job before anything is scored. A row without a
label, or one that could not be scored, is in no metric; it is counted, under its reason. Cost: a prediction of the
table, a second read of one column, and the probabilities of all rows in memory (4 bytes per row and class).
"""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from torchlake import atomic_io, plugins
from torchlake.config.arguments import refuse_unknown
from torchlake.config.options import AnswerArguments, EvaluateOptions, ReadArguments
from torchlake.config.task_spec import as_columns
from torchlake.data.features import as_matrix, from_arrow
from torchlake.display import Shown, Table, count, plain, shown
from torchlake.engines import Engine, as_engine
from torchlake.engines.local import Local
from torchlake.errors import DataError, TableError, UsageError
from torchlake.evaluation.embeddings import measure_pairs, pair_rows
from torchlake.evaluation.perplexity import measure_texts
from torchlake.evaluation.preferences import measure_preferences, pairs_spec
from torchlake.evaluation.report import (
    FACTS,
    OF_REPORT,
    ReportRequest,
    as_command,
    evaluating,
    provenance_of,
    publish,
    refuse_row_options,
)
from torchlake.evaluation.sections.hints import KINDS, hints_of, refuse_trained
from torchlake.evaluation.sections.rows import FILE as ROWS
from torchlake.evaluation.sections.rows import RowColumns, kind_of, scored_parts, stored_name, write_rows, write_table
from torchlake.evaluation.writing import estimator
from torchlake.metrics import Metric, bootstrapped, evaluate_metrics
from torchlake.models.folders import model_hash
from torchlake.models.load import Label, TaskSpec, model_folder
from torchlake.outputs.staging.spool import spooled
from torchlake.scoring import predict as predicting
from torchlake.scoring.options.settings import known_spec, with_columns
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
from torchlake.tables.sources._options import ReadOptions, read_options, refuse_seed_alone
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
    report: Path | None = None
    "The folder of the page, if it was asked for."

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
        return {name: value for name, value in plain(self).items() if name != "report"}


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
    """Measure `model` on `table`: a stored table, a frame or a stream, as in `predict`.

    `text`, `text_pair`, `inputs` and `label` name the columns if they differ from those of the training table. `task`,
    `runtime`, `csv` and the rows of a stored table (`where`, `sample` with `seed`, `limit`) are as in `predict`.
    A model that writes is measured by what it writes, with the options of `predict` for text generation, beside a
    column of texts or JSON, `label` (`writing.py`). Without one a language model is measured on the texts only
    (`perplexity.py`). An embedding model is measured on pairs of `text` and `text_pair`: by the correlation of their
    cosines with `label`, or without one by how well the second text is found among those of all rows
    (`embeddings.py`). A language model is measured on pairs of answers if it learned from them
    or `inputs` names their columns, chosen and rejected (`preferences.py`), relative to the `reference` that it learned
    with, or to another.

    `report` is a folder for `rows.parquet` (each row with its label, prediction and loss), `eval.json` and the page
    `eval.html`. `key` is a column of unique values that names its rows, `no_texts` leaves out the input columns,
    `slices` are columns whose values are measured each by itself, `label_hints` lists labels that may be wrong, and
    `overwrite` replaces the report of another model or table.

    Raises DataError for a label that the model does not know and for a table without usable rows, TableError for a
    missing column, and the errors of `predict`.
    """
    if engine_of(table) is not None:
        raise UsageError(
            "evaluate brings all labels to this process: give it a stored table, or the frame as pandas "
            "(frame.select(...).toPandas() of Spark, dataset.to_pandas() of Ray)."
        )
    if unmeasured := sorted(options.keys() & AnswerArguments.__annotations__.keys()):
        raise UsageError(f"{', '.join(unmeasured)}: evaluate measures one answer of each row; leave it out.")
    refuse_unknown("evaluate", options, EvaluateOptions.__annotations__)
    read: Any = {name: value for name, value in options.items() if name in ReadArguments.__annotations__}
    writing = {name: value for name, value in options.items() if name not in (*read, *OF_REPORT, "report")}
    own, reading, request = model_folder(model), read_options(read), ReportRequest.of(options)
    if is_frame(table):
        reading.refuse_for_frames()
    spec, engine, table = known_spec(own, task), as_engine(engine), pinned(table)
    writes = plugins.load("tasks", spec.task).generates and bool(label or spec.label)
    if not writes and (given := sorted(writing)):
        raise UsageError(f"{', '.join(given)}: for a model that writes what is measured; name a label, its answers.")
    if not writes:
        refuse_seed_alone(read)
    refuse_unable(runtime, spec.task)
    job = _Measuring(model, own, table, task, engine, runtime, reading, read)
    columns: dict[str, Any] = {"text": text, "text_pair": text_pair, "inputs": inputs}
    if request is not None and request.label_hints:
        refuse_trained(own, table)
    if isinstance(plugins.load("tasks", spec.task), FeatureExtraction):
        return _of_vectors(job, spec, columns, label, request)
    if (pairs := pairs_spec(spec, text, inputs)) is not None and label is None and text_pair is None:
        asked: dict[str, Any] = {"reference": reference, "engine": engine, "options": reading}
        return _described(job, pairs, lambda: _of_pairs(*measure_preferences(own, table, pairs, **asked)), request)
    if reference is not None:
        raise UsageError("reference: only pairs of answers (inputs chosen and rejected) are measured relative to one.")
    spec = with_columns(spec, own, **columns)
    if writes:
        named = {"text": text, "inputs": inputs, "task": task, "engine": engine, "runtime": runtime}
        spec = replace(spec, label=label or spec.label)
        written = partial(_of_written, model, table, spec, named, {**read, **writing}, reading)
        return _described(job, spec, written, request)
    if spec.label is None:
        if label is not None:
            raise UsageError(f"label: {spec.task} is measured on the texts only; leave it out.")
        if not plugins.load("tasks", spec.task).packs:
            raise UsageError(f"{spec.task} learns no label, so there is nothing to evaluate its predictions by.")
        return _described(job, spec, partial(_of_texts, model, table, spec, engine, runtime, reading), request)
    spec = replace(spec, label=label or spec.label)
    if request is not None:
        with evaluating(request, job.identity(spec)) as work:
            return _reported(job, spec, request, work / "scored")
    with tempfile.TemporaryDirectory(prefix="torchlake-evaluate-", ignore_cleanup_errors=True) as folder:
        if is_frame(table):
            frame = to_arrow(table)
            labels, reasons = _frame_labels(frame, spec)
            scored = job.predict(spec, frame.select(list(spec.input_columns)))
        else:
            labels, reasons = job.score(spec, output := Path(folder, "scored"))
            scored = _read_scored(committed_files(output), spec)
    return _measure(scored, labels, reasons, spec)


@dataclass(frozen=True)
class _Measuring:
    """What is measured, and how."""

    model: str | Path
    folder: Path
    table: Any
    task: Any
    engine: Engine | None
    runtime: Runtime | None
    options: ReadOptions
    read: dict[str, Any]

    def predict(self, spec: TaskSpec, *arguments: Any, **more: Any) -> Any:
        """Score a frame, or a stored table into an output, with all probabilities."""
        options: dict[str, Any] = {
            "text": spec.text or None,
            **({} if spec.text_pair is None else {"text_pair": spec.text_pair}),
            "inputs": spec.inputs,
            "all_probabilities": True,
            "prefix": PREFIX,
            "engine": self.engine,
            "runtime": self.runtime,
            "max_error_rate": 1.0,  # failed rows are counted; a table without usable rows is refused
        }
        score: Any = predicting.predict  # a frame alone, or a table and an output
        return score(self.model, *arguments, **options, **more)

    def score(self, spec: TaskSpec, output: Path, **more: Any) -> tuple[pa.ChunkedArray, dict[int, str]]:
        """Score the table into `output`; return its labels, and the reasons of unreadable ones."""
        with spooled(self.table, output) as stored:
            labels = _stored_labels(stored, spec, self.options, (self.engine or Local()).spread)
            self.predict(spec, stored, output, **self.read, **more)
        return labels

    def identity(self, spec: TaskSpec) -> dict[str, Any]:
        """Return what an evaluation's folder belongs to."""
        return {"model": model_hash(self.folder), "table": self.named, "label": spec.label}

    @property
    def named(self) -> Any:
        """The table as the caller names it."""
        if isinstance(self.table, list | tuple):
            return [str(one) for one in self.table]
        return str(self.table) if isinstance(self.table, str | Path) else f"a {type(self.table).__name__} in memory"

    def made(self, spec: TaskSpec) -> dict[str, Any]:
        """Return how the evaluation is made."""
        return {
            "model": str(self.folder),
            "model_sha256": model_hash(self.folder),
            "task": spec.task,
            "table": self.named,
            **({} if spec.label is None else {"label": spec.label}),
            "columns": list(spec.input_columns),
            **{name: str(value) for name, value in self.read.items() if value is not None},
        }


def _reported(job: _Measuring, spec: TaskSpec, request: ReportRequest, output: Path) -> Evaluation:
    """Measure a table with labels and write the report; `output` keeps the scored rows until it is complete."""
    inputs = () if request.no_texts else tuple(name for name in spec.input_columns if name != request.key)
    columns = RowColumns(key=request.key, label=spec.label, prefix=PREFIX, slices=request.slices, inputs=inputs)
    kind, kept = kind_of(spec), [str(spec.label), *columns.copied.values()]
    if request.label_hints and kind not in KINDS:
        raise UsageError(f"label_hints: labels are judged of classes, one or several; {spec.task} predicts {kind}.")
    labels, reasons = job.score(
        spec, output, columns=list(dict.fromkeys(kept)), key=request.key, token_counts=True, overwrite=request.overwrite
    )
    files = committed_files(output)
    scored = _read_scored(files, spec)
    found, by = _measure(scored, labels, reasons, spec), None
    if request.label_hints:
        by, hints = hints_of(scored, labels, spec, kind, PREFIX)
        columns = replace(columns, hints=hints)
    atomic_io.remove([request.folder / FACTS])
    write_rows(request.folder / ROWS, scored_parts(files), columns, spec)
    made = {**job.made(spec), **provenance_of(output), "command": as_command(request, job.model, job.named)}
    names = [stored_name(name) for name in request.slices]
    identity = job.identity(spec)
    publish(request.folder, found.to_json(), kind=kind, identity=identity, made=made, slices=names, hints=by)
    return replace(found, report=request.folder)


def _described(
    job: _Measuring, spec: TaskSpec, measure: Callable[[], Evaluation], request: ReportRequest | None
) -> Evaluation:
    """Measure, and write a report without rows, of a task that is not measured row by row."""
    if request is None:
        return measure()
    refuse_row_options(request, spec.task)
    with evaluating(request, job.identity(spec)):
        found = measure()
        atomic_io.remove([request.folder / FACTS, request.folder / ROWS])  # rows of another model, with overwrite
        publish(request.folder, found.to_json(), kind="other", identity=job.identity(spec), made=job.made(spec))
    return replace(found, report=request.folder)


def _of_vectors(
    job: _Measuring, spec: TaskSpec, columns: dict[str, Any], label: str | None, request: ReportRequest | None
) -> Evaluation:
    """Measure the vectors of pairs of texts."""
    spec = with_columns(spec, job.folder, text=columns["text"], inputs=columns["inputs"])
    options = {"task": job.task, "engine": job.engine, "runtime": job.runtime, "prefix": PREFIX, "max_error_rate": 1.0}
    score, pair = partial(predicting.predict, job.model, **options), columns["text_pair"]
    chosen: dict[str, Any] = {"text": spec.text, "text_pair": pair, "label": label, "read": job.read}
    if request is None:
        with tempfile.TemporaryDirectory(prefix="torchlake-evaluate-", ignore_cleanup_errors=True) as folder:
            found = measure_pairs(score, job.table, Path(folder), **chosen)
        return _of_pairs(found.rows, found.errors, found.metrics)
    if request.label_hints:
        raise UsageError(f"label_hints: labels are judged of classes, one or several; {spec.task} predicts vectors.")
    with evaluating(request, identity := {**job.identity(spec), "label": label}) as work:
        second = as_columns(pair or ())
        texts = [*as_columns(spec.text), *second]
        found = measure_pairs(score, job.table, work, **chosen, keep=[*request.slices, *texts], key=request.key)
        rows = pair_rows(found, key=request.key or "row_id", second=second[0], label=label, no_texts=request.no_texts)
        names = [stored_name(name) for name in request.slices]
        rows = rows.drop_columns([stored_name(name) for name in texts]) if request.no_texts else rows
        atomic_io.remove([request.folder / FACTS])
        write_table(request.folder / ROWS, rows)
        done = _of_pairs(found.rows, found.errors, found.metrics)
        made = {**job.made(spec), "columns": texts, **({} if label is None else {"label": label})}
        publish(request.folder, done.to_json(), kind="vectors", identity=identity, made=made, slices=names)
    return replace(done, report=request.folder)


def _of_written(
    model: str | Path, table: Any, spec: TaskSpec, named: Mapping[str, Any], options: Any, reading: ReadOptions
) -> Evaluation:
    """Return the metrics of written texts; `named` are arguments of `predict`, `options` those of the caller."""
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
            scored: Any = predict(frame.drop_columns([spec.label]), **options)
            own = [name for name in scored.column_names if name.startswith(PREFIX) or name == "error"]
            scored = scored.select(own)
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
    if task.generates:  # what does not fit its structure is measured as it is
        usable |= np.asarray(scored[f"{PREFIX}generated_text"].combine_chunks().is_valid()) & ~np.asarray(missing)
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
