"""`evaluate`: how good a model is on a labeled table, with intervals.

    read the label column -> predict into a temporary folder -> metrics over the rows that have both

Labels are read first: a label that the model does not know ends the job before anything is scored. A row without a
label, or one that could not be scored, is in no metric; it is counted, under its reason. Cost: a prediction of the
table, a second read of one column, and the probabilities of all rows in memory (4 bytes per row and class).
"""

import math
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Unpack

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from torchlake import plugins
from torchlake.engines import Engine, as_engine
from torchlake.engines.local import Local
from torchlake.errors import DataError, TableError, UsageError
from torchlake.evaluation.perplexity import measure_texts
from torchlake.metrics import Metric, evaluate_metrics
from torchlake.models.load import Label, TaskSpec, load_spec
from torchlake.scoring import predict as predicting
from torchlake.scoring.rows import Runtime
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.keys import ITEM_ROWS, READ_BYTES, bundled
from torchlake.tables.output.failures import count_reasons
from torchlake.tables.output.spool import spooled
from torchlake.tables.plan import Chunk
from torchlake.tables.reading import ChunkReader
from torchlake.tables.record import committed_files
from torchlake.tables.sources._find import pinned
from torchlake.tables.sources._options import ReadArguments, ReadOptions, read_options
from torchlake.tables.sources.files import StoredTable
from torchlake.tables.sources.frames import engine_of, is_frame, to_arrow
from torchlake.tables.sources.streams import Input
from torchlake.tables.storage.spread import Spread
from torchlake.tables.table import open_table

PREFIX = "predicted_"
RESAMPLES = 1000
RESAMPLED_NUMBERS = 100_000_000
"Probabilities drawn by all resamples together, about a minute of work; larger tables get fewer resamples."
RESAMPLE_PRICE = 4000
"The fixed cost of a resample, in rows: scikit-learn's checks of its input."


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

    def to_json(self) -> dict[str, Any]:
        """Plain values; a metric that is undefined on this table is null."""
        value = asdict(self)
        for metric in value["metrics"].values():
            metric.update({name: None for name, number in metric.items() if not math.isfinite(number)})
        return {**value, "labels": list(self.labels)}


def evaluate(
    model: str | Path,
    table: Input,
    *,
    text: str | None = None,
    label: str | None = None,
    engine: Engine | str | None = None,
    runtime: Runtime | None = None,
    **read: Unpack[ReadArguments],
) -> Evaluation:
    """Measure `model` on `table`: a stored table (file, folder, glob, URL or a list of them), a frame or a stream.

    `text` and `label` name the columns if they differ from those of the training table; `runtime` is as in `predict`,
    and so are the rows of a stored table that are measured (`where`, `sample` with `seed`, `limit`) and `csv`.
    A language model is measured on the texts only (`perplexity.py`).

    Raises DataError for a label that the model does not know and for a table without usable rows, TableError for a
    missing column, and the errors of `predict`.
    """
    if engine_of(table) is not None:
        raise UsageError(
            "evaluate brings all labels to this process: give it a stored table, or the frame as pandas "
            "(frame.select(...).toPandas() of Spark, dataset.to_pandas() of Ray)."
        )
    options = read_options(read)
    if is_frame(table):
        options.refuse_for_frames()
    spec, engine, table = load_spec(model), as_engine(engine), pinned(table)
    if spec.label is None:
        if label is not None:
            raise UsageError(f"label: {spec.task} is measured on the texts only; leave it out.")
        return _of_texts(model, table, replace(spec, text=text or spec.text), engine, runtime, options)
    spec = replace(spec, text=text or spec.text, label=label or spec.label)
    with tempfile.TemporaryDirectory(prefix="torchlake-evaluate-", ignore_cleanup_errors=True) as folder:
        predict = partial(
            predicting.predict,
            model,
            text=spec.text,
            all_probabilities=True,
            prefix=PREFIX,
            engine=engine,
            runtime=runtime,
            max_error_rate=1.0,  # failed rows are counted here; a table without usable rows is refused below
        )
        if is_frame(table):
            frame = to_arrow(table)
            targets, reasons = _frame_targets(frame, spec)
            scored = predict(frame.select([spec.text]))
        else:
            output = Path(folder, "scored")
            with spooled(table, output) as stored:
                targets, reasons = _stored_targets(stored, spec, options, (engine or Local()).spread)
                predict(stored, output, **read)
            scored = _read_scored(committed_files(output), spec)
    return _measure(scored, targets, reasons, spec)


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


def _frame_targets(frame: pa.Table, spec: TaskSpec) -> tuple[pa.Array, dict[int, str]]:
    for column in spec.columns:
        if column not in frame.column_names:
            raise TableError(f"the frame has no column {column!r}; it has: {', '.join(frame.column_names)}")
    return _task(spec).encode_labels(frame[spec.label], spec), {}


def _stored_targets(
    table: StoredTable, spec: TaskSpec, options: ReadOptions, spread: Spread
) -> tuple[pa.Array, dict[int, str]]:
    """Return the encoded labels of all rows, in the table's order, and the reasons of unreadable ones."""
    source = open_table(table, columns=spec.columns, options=options, spread=spread)
    plan = plan_chunks(source, columns=(spec.label or "",), hashed=False, spread=spread)
    bundles = bundled(plan.chunks, [chunk.rows for chunk in plan.chunks], ITEM_ROWS)
    pieces: list[pa.Array] = []
    reasons: dict[int, str] = {}
    first = 0
    parts = spread(partial(_targets, spec), bundles, size=plan.rows * READ_BYTES, name="read the labels")
    with closing(parts):
        for targets, unreadable in parts:
            pieces.append(targets)
            reasons |= {first + row: reason for row, reason in unreadable.items()}
            first += len(targets)
    return pa.concat_arrays(pieces) if pieces else pa.array([], _task(spec).target_type(spec)), reasons


def _targets(spec: TaskSpec, chunks: Sequence[Chunk]) -> tuple[pa.Array, dict[int, str]]:
    """The encoded labels of some chunks, and the reasons of their unreadable rows."""
    assert spec.label is not None, "a task without labels is measured on its texts"
    reader = ChunkReader((spec.label,))
    pieces: list[pa.Array] = []
    reasons: dict[int, str] = {}
    first = 0
    try:
        for chunk in chunks:
            rows, unreadable = reader.read(chunk)
            try:
                pieces.append(_task(spec).encode_labels(rows[spec.label], spec))
            except DataError as error:
                raise DataError(f"{chunk.file}, {chunk.where}: {error}") from error
            reasons |= {first + row: reason for row, reason in unreadable.items()}
            first += chunk.rows
    finally:
        reader.close()
    return pa.concat_arrays(pieces), reasons


def _task(spec: TaskSpec) -> ModuleType:
    return plugins.load("tasks", spec.task)


def _read_scored(files: Sequence[Path], spec: TaskSpec) -> pa.Table:
    names = [PREFIX + name for name in _task(spec).probability_names(spec)]
    tables = [pq.read_table(file, columns=[*names, "error"], page_checksum_verification=True) for file in files]
    if not tables:
        raise DataError("the table has no rows to evaluate on")
    return pa.concat_tables(tables)


def _measure(scored: pa.Table, targets: pa.Array, reasons: dict[int, str], spec: TaskSpec) -> Evaluation:
    if len(scored) != len(targets):
        raise DataError(f"the table had {len(targets):,} rows, then {len(scored):,}: it changed while it was evaluated")
    failures = dict.fromkeys(pc.indices_nonzero(targets.is_null()).to_pylist(), "null_label") | reasons
    reason_column = scored["error"].combine_chunks()
    for row in pc.indices_nonzero(reason_column.is_valid()).to_pylist():
        failures[row] = reason_column[row].as_py()
    usable = np.ones(len(targets), dtype=bool)
    usable[list(failures)] = False
    errors = dict(count_reasons(pa.array(failures.values(), pa.string())).most_common())
    if not usable.any():
        raise DataError(
            f"no row of {len(targets):,} has both a label in {spec.label!r} and a prediction: "
            + (", ".join(f"{reason} {rows:,}" for reason, rows in errors.items()) or "the table is empty")
        )
    names = [PREFIX + name for name in _task(spec).probability_names(spec)]
    probabilities = np.column_stack([scored[name].to_numpy() for name in names])[usable]
    wanted = targets.filter(pa.array(usable))
    if spec.problem == "multi_label":
        truth = wanted.flatten().to_numpy(zero_copy_only=False).reshape(len(wanted), len(spec.labels))
    else:
        truth = wanted.to_numpy(zero_copy_only=False)
    price = probabilities.shape[1] * (len(truth) + RESAMPLE_PRICE)
    resamples = min(RESAMPLES, max(100, RESAMPLED_NUMBERS // price))
    metrics, confusion = evaluate_metrics(probabilities, truth, spec.problem, spec.labels, resamples=resamples)
    return Evaluation(
        rows=len(targets),
        failed=len(failures),
        errors=errors,
        metrics=metrics,
        confusion=None if confusion is None else confusion.tolist(),
        labels=spec.labels,
        resamples=resamples,
    )
