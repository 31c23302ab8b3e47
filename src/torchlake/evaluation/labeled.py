"""Rows with labels or answers: scored, and measured by them.

    read the label column -> predict into a folder -> metrics over the rows that have both

Labels are read first: a label that the model does not know ends the job before anything is scored. A row without a
label, or one that could not be scored, is in no metric; it is counted, under its reason. Cost: a prediction of the
table and a second read of one column; in memory what the metrics need, which are all probabilities up to 100 classes.
"""

import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchlake import atomic_io, plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.engines import Engine
from torchlake.engines.local import Local
from torchlake.errors import DataError, UsageError
from torchlake.evaluation.report import FACTS, ReportRequest, as_command, evaluating, provenance_of, publish
from torchlake.evaluation.result import Evaluation
from torchlake.evaluation.sections.label_hints import KINDS, hints_of, trained_on, training_hashes, word_hints
from torchlake.evaluation.sections.labels import encoded_labels, labels_of, prompt_columns, targets_of
from torchlake.evaluation.sections.rows import FILE as ROWS
from torchlake.evaluation.sections.rows import (
    RowColumns,
    errors_and_usable,
    is_content,
    judged_parts,
    kind_of,
    scored_parts,
    stored_name,
    write_rows,
)
from torchlake.evaluation.sections.slices import refuse_slices
from torchlake.evaluation.writing import estimator
from torchlake.metrics import (
    MAX_RANKED_CLASSES,
    ClassAnswers,
    Metric,
    bootstrapped,
    evaluate_classes,
    evaluate_metrics,
)
from torchlake.models.folders import model_hash
from torchlake.outputs.staging.spool import spooled
from torchlake.scoring import predict as predicting
from torchlake.scoring.rows import Runtime
from torchlake.storage.spread import Spread
from torchlake.tables.arrays import plain_column
from torchlake.tables.failures import count_reasons
from torchlake.tables.record import committed_files
from torchlake.tables.sources._options import ReadOptions
from torchlake.tables.sources.frames import is_frame, to_arrow
from torchlake.tables.table import Table, missing_column, open_table
from torchlake.tasks import ColumnOptions

PREFIX = "predicted_"
RESAMPLES = 1000
RESAMPLES_OF_TASKS = 200
"The number of resamples for metrics that a task computes itself."
RESAMPLED_NUMBERS = 100_000_000
"Probabilities drawn by all resamples together, about a minute of work; larger tables get fewer resamples."
RESAMPLE_PRICE = 4000
"The fixed cost of a resample, in rows: scikit-learn's checks of its input."


@dataclass(frozen=True)
class Measuring:
    """What is measured, and how."""

    folder: Path
    "Of the model."
    table: Any
    task: Any
    engine: Engine | None
    runtime: Runtime | None
    options: ReadOptions
    read: Mapping[str, Any]
    writing: Mapping[str, Any]
    "How a model writes that is measured by what it writes; its columns as the caller names them."
    asked: Mapping[str, Any]
    "All arguments of the caller."
    label_hints: bool = False
    "Whether the probabilities of all tags of words are kept."
    validation_of: Any = None
    "The table of which these are the validation rows."

    @property
    def spread(self) -> Spread:
        """The engine's."""
        return (self.engine or Local()).spread

    @property
    def scoring(self) -> dict[str, Any]:
        """The options of every prediction."""
        named = {"task": self.task, "engine": self.engine, "runtime": self.runtime}
        given = {name: value for name, value in named.items() if value is not None}
        # Failed rows are counted; a table without usable rows is refused.
        return {**given, "prefix": PREFIX, "max_error_rate": 1.0}

    def predict(self, spec: TaskSpec, *arguments: Any, **more: Any) -> Any:
        """Score a frame, or a stored table into an output, with all probabilities."""
        columns: dict[str, Any] = dict(self.writing)
        if not _writes(spec):
            columns = {"text": spec.text or None, "inputs": spec.inputs}
            columns["all_probabilities"] = self.label_hints or kind_of(spec) != "spans"
            columns |= {} if spec.text_pair is None else {"text_pair": spec.text_pair}
        score: Any = predicting.predict  # a frame alone, or a table and an output
        return score(self.folder, *arguments, **self.scoring, **columns, **more)

    def score(self, spec: TaskSpec, output: Path, stored: Any, **more: Any) -> None:
        """Score a stored table into `output`."""
        self.predict(spec, stored, output, **self.read, **more)

    def open(self, stored: Any, columns: Sequence[str]) -> Table:
        """Return the table with some of its columns; without, with all."""
        return open_table(stored, columns=columns, options=self.options, spread=self.spread)

    def identity(self, spec: TaskSpec) -> dict[str, Any]:
        """Return what an evaluation's folder belongs to."""
        return {"model": model_hash(self.folder), "table": self.named, "label": spec.label}

    @property
    def named(self) -> Any:
        """The table as the caller names it."""
        table = self.table if self.validation_of is None else self.validation_of
        if isinstance(table, list | tuple):
            return [str(one) for one in table]
        return str(table) if isinstance(table, str | Path) else f"a {type(table).__name__} in memory"

    def made(self, spec: TaskSpec) -> dict[str, Any]:
        """Return how the evaluation is made."""
        return {
            "model": str(self.folder),
            "model_sha256": model_hash(self.folder),
            "task": spec.task,
            "table": self.named,
            **({} if self.validation_of is None else {"rows": "the validation rows"}),
            **({} if spec.label is None else {"label": spec.label}),
            "columns": list(spec.input_columns),
            **{name: str(value) for name, value in {**self.read, **self.writing}.items() if value is not None},
            **({} if not self.asked or (command := as_command(self.asked)) is None else {"command": command}),
        }


def measure_labeled(job: Measuring, spec: TaskSpec, request: ReportRequest | None) -> Evaluation:
    """Measure a table by its labels, and write the report if one is asked for."""
    if request is not None:
        with evaluating(request, job.identity(spec)) as work:
            return _reported(job, spec, request, work / "scored")
    assert spec.label is not None, "there is a label to measure by"
    if is_frame(job.table):
        frame = to_arrow(job.table)
        for column in (spec.label,) if _writes(spec) else spec.columns:
            if column not in frame.column_names:
                raise missing_column("the frame", column, frame.schema)
        labels = plain_column(frame[spec.label])
        encoded_labels(labels, spec)  # refuses unknown labels
        inputs = frame.drop_columns([spec.label]) if _writes(spec) else frame.select(list(spec.input_columns))
        known = pa.table({"label": labels, "unreadable": pa.nulls(len(labels), pa.string())})
        return measured([job.predict(spec, inputs).select(_scored_columns(spec))], known, spec)
    with tempfile.TemporaryDirectory(prefix="torchlake-evaluate-", ignore_cleanup_errors=True) as folder:
        output = Path(folder, "scored")
        with spooled(job.table, output) as stored:
            source = job.open(stored, (spec.label,) if _writes(spec) else spec.columns)
            known = labels_of(source, spec, job.spread)
            job.score(spec, output, stored)
        return measured(scored_parts(committed_files(output), _scored_columns(spec)), known, spec)


def _writes(spec: TaskSpec) -> bool:
    return bool(plugins.load("tasks", spec.task).generates)


def _scored_columns(spec: TaskSpec) -> list[str]:
    options = ColumnOptions(all_probabilities=kind_of(spec) != "spans")
    schema = plugins.load("tasks", spec.task).output_schema(spec, options)
    return [*(PREFIX + name for name in schema.names), "error"]


def _reported(job: Measuring, spec: TaskSpec, request: ReportRequest, output: Path) -> Evaluation:
    """Measure a table with labels and write the report; `output` keeps the scored rows until it is complete."""
    kind, writes, folder = kind_of(spec), _writes(spec), request.folder
    if request.label_hints and kind not in KINDS:
        raise UsageError(
            f"label_hints: labels are judged of classes, one or several, and of spans; {spec.task} predicts {kind}."
        )
    assert spec.label is not None, "there is a label to measure by"
    with spooled(job.table, output) as stored:
        inputs = spec.input_columns
        if writes:
            inputs = prompt_columns(spec, job.writing.get("prompt"), job.open(stored, ()).schema)
        named = [*inputs, spec.label, *request.slices, *([] if request.key is None else [request.key])]
        source = job.open(stored, tuple(dict.fromkeys(named)))
        refuse_slices(source.schema, request.slices)
        shown = [name for name in inputs if not (request.no_texts or is_content(source.schema.field(name).type))]
        columns = RowColumns(key=request.key, label=spec.label, prefix=PREFIX, slices=request.slices, inputs=shown)
        unseen = writes or job.validation_of is not None or "image" in plugins.load("tasks", spec.task).inputs
        trained = [] if unseen else training_hashes(job.folder)
        known = labels_of(source, spec, job.spread, hashed=bool(trained))
        kept = list(dict.fromkeys([spec.label, *columns.copied.values()]))
        more = {} if writes else {"token_counts": True}
        job.score(spec, output, stored, columns=kept, key=request.key, overwrite=request.overwrite, **more)
    files, names, by = committed_files(output), _scored_columns(spec), None
    found = measured(scored_parts(files, names), known, spec)
    if request.label_hints:
        if kind == "spans":
            by, hints = word_hints(scored_parts(files, [*names, f"{PREFIX}words"]), known["label"], spec, PREFIX)
        else:
            by, hints = hints_of(pa.concat_tables(scored_parts(files, names)), known["label"], spec, kind, PREFIX)
        columns = replace(columns, hints=hints)
    if trained:
        columns = replace(
            columns, hints={**columns.hints, "trained_on": pa.array(trained_on(trained, np.asarray(known["hash"])))}
        )
    atomic_io.remove([folder / FACTS])
    write_rows(folder / ROWS, judged_parts(scored_parts(files), columns, spec))
    made = {**job.made(spec), **provenance_of(output), "columns": list(inputs)}
    slices = [stored_name(name) for name in request.slices]
    publish(folder, found.to_json(), kind=kind, identity=job.identity(spec), made=made, slices=slices, hints=by)
    return replace(found, report=folder)


def measured(parts: Iterable[pa.Table], known: pa.Table, spec: TaskSpec) -> Evaluation:
    """Return the metrics of scored rows, part by part, beside their labels (`labels_of`).

    Raises DataError if there are more or fewer rows than labels, or no row has both.
    """
    task, errors, first, kept = plugins.load("tasks", spec.task), Counter[str](), 0, list[tuple[Any, pa.Array]]()
    single = task.measures_classes and spec.problem == "single_label"
    for part in parts:
        about = known.slice(first, len(part))
        first += len(part)
        if len(about) < len(part):
            continue
        labels, unreadable = (about[name].combine_chunks() for name in ("label", "unreadable"))
        reasons, usable = errors_and_usable(part, labels, spec, PREFIX)
        usable = pc.and_(usable, unreadable.is_null())
        errors += count_reasons(pc.coalesce(reasons, unreadable).drop_null())
        rows = part.rename_columns([name.removeprefix(PREFIX) for name in part.column_names]).filter(usable)
        labels = labels.filter(usable)
        answers = ClassAnswers.of(task.read_answers(rows, spec), targets_of(labels, spec)) if single else rows
        kept.append((answers, labels))
    if first != len(known):
        raise DataError(f"the table had {len(known):,} rows, then {first:,}: it changed while it was evaluated")
    if not any(len(labels) for _, labels in kept):
        raise DataError(
            f"no row of {len(known):,} has both a label in {spec.label!r} and a prediction: "
            + (", ".join(f"{reason} {rows:,}" for reason, rows in errors.most_common()) or "the table is empty")
        )
    metrics, confusion, resamples = _metrics(task, kept, spec, single=single)
    return Evaluation(
        rows=first,
        failed=errors.total(),
        errors=dict(errors.most_common()),
        metrics=metrics,
        confusion=None if confusion is None else confusion.tolist(),
        labels=spec.labels,
        resamples=resamples,
    )


def _metrics(
    task: Any, parts: Sequence[tuple[Any, pa.Array]], spec: TaskSpec, *, single: bool
) -> tuple[dict[str, Metric], np.ndarray | None, int]:
    """Return the metrics, the confusion matrix, and the number of resamples."""
    labels, width = pa.concat_arrays([label for _, label in parts]), max(1, len(spec.labels))
    if single and width > MAX_RANKED_CLASSES:
        width = 4  # the numbers of a row that are kept
    resamples = min(RESAMPLES, max(100, RESAMPLED_NUMBERS // (width * (len(labels) + RESAMPLE_PRICE))))
    if single:
        return *evaluate_classes([one for one, _ in parts], len(spec.labels), resamples=resamples), resamples
    rows = pa.concat_tables(part for part, _ in parts)
    if task.measures_classes:
        answers = (task.read_answers(rows, spec), targets_of(labels, spec))
        return *evaluate_metrics(*answers, spec.problem, spec.labels, resamples=resamples), resamples
    if task.generates:
        written = estimator(rows["generated_text"].to_pylist(), encoded_labels(labels, spec).to_pylist())
        return bootstrapped(written, len(labels), resamples=RESAMPLES), None, RESAMPLES
    if kind_of(spec) == "answers":
        judged = task.judge(rows, labels, spec)

        def means(some: np.ndarray) -> dict[str, float]:
            return {name: float(each[some].mean()) for name, each in judged.items()}

        return bootstrapped(means, len(labels), resamples=RESAMPLES), None, RESAMPLES

    def measure(some: np.ndarray) -> dict[str, float]:
        found: dict[str, float] = task.measure(rows.take(pa.array(some)), labels.take(pa.array(some)), spec)
        return found

    return bootstrapped(measure, len(labels), resamples=RESAMPLES_OF_TASKS), None, RESAMPLES_OF_TASKS
