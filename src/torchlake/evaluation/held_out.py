"""The page of a run's validation rows, `eval/` in the run folder, from the answers of the best validation.

    rank 0 stores the answers at each best validation -> after the training, texts and labels are read for those rows

Nothing is computed by the model again. Tasks whose answers are one number, or one per class, have the page.
"""

import io
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from torchlake import atomic_io, plugins
from torchlake.config.job import Job
from torchlake.config.task_spec import TaskSpec
from torchlake.errors import TorchlakeError
from torchlake.evaluation.report import FACTS, publish
from torchlake.evaluation.sections.hints import KINDS, hints_of
from torchlake.evaluation.sections.judged import JudgedRows, read_judged
from torchlake.evaluation.sections.rows import FILE, RowColumns, is_content, judged_parts, kind_of, write_rows
from torchlake.evaluation.sections.sums import drawn, groups_of
from torchlake.metrics import confusion_counts
from torchlake.models.folders import model_hash
from torchlake.runs.tables import read_options_of, stored_tables
from torchlake.scoring.workers.output import non_finite_rows
from torchlake.storage.spread import Spread
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.failures import count_reasons
from torchlake.tables.reading import ChunkReader
from torchlake.tables.record import committed_files
from torchlake.tables.table import Table, open_table
from torchlake.tasks import ColumnOptions

log = logging.getLogger(__name__)

STORED = "validation.parquet"
PAGE = "eval"
PREFIX = "predicted_"


def has_page(spec: TaskSpec) -> bool:
    """Return whether the task's answers are one number, or one per class, of labeled rows."""
    if spec.label is None or not hasattr(plugins.load("tasks", spec.task), "probability_names"):
        return False
    try:
        return kind_of(spec) in ("classes", "labels", "number")
    except TorchlakeError:  # a task that trains only
        return False


def store(run: Path, outcome: Mapping[str, float], numbers: np.ndarray, answers: np.ndarray) -> None:
    """Store the answers (N, C) of the rows `numbers` (N,) of the prepared table, with the validation's metrics."""
    flat = pa.array(np.ascontiguousarray(answers, dtype=np.float32).ravel())
    columns = {"number": numbers, "answers": pa.FixedSizeListArray.from_arrays(flat, answers.shape[1])}
    table = pa.table(columns).replace_schema_metadata({"outcome": json.dumps(dict(outcome))})
    out = io.BytesIO()
    pq.write_table(table, out)
    atomic_io.write_bytes(run / STORED, out.getvalue(), site="run.validation")


def write_page(run: Path, job: Job, spec: TaskSpec, result: Mapping[str, Any], spread: Spread) -> None:
    """Write the page of the best validation's rows, if there was one. A failure is a warning: the model is trained."""
    if not (run / STORED).is_file():
        return
    try:
        _write(run, job, spec, result, spread)
    except Exception as error:
        log.warning("%s: the page of the validation rows was not written: %s: %s", run, type(error).__name__, error)


def _write(run: Path, job: Job, spec: TaskSpec, result: Mapping[str, Any], spread: Spread) -> None:
    stored = pq.read_table(run / STORED)
    if json.loads(stored.schema.metadata[b"outcome"]) != result["metrics"]:
        log.info("%s: has no page of its validation rows: they are not those of the best step", run)
        return
    name, table = next(reversed(stored_tables(job).items()))
    folder = run / PAGE
    folder.mkdir(exist_ok=True)
    atomic_io.remove([folder / FACTS])
    source = open_table(table, columns=spec.columns, options=read_options_of(job, name), spread=spread)
    inputs = [column for column in spec.input_columns if not is_content(source.schema.field(column).type)]
    columns = RowColumns(key=job.data.key, label=spec.label, prefix=PREFIX, inputs=inputs)
    wanted = dict.fromkeys([*([job.data.key] if job.data.key else []), str(spec.label), *inputs])
    scored = _scored(run, job, spec, stored, name, lambda places: _rows_at(source, tuple(wanted), places, spread))
    kind, by = kind_of(spec), None
    if kind in KINDS:
        by, hints = hints_of(scored, scored[spec.label], spec, kind, PREFIX)
        columns = replace(columns, hints=hints)
    write_rows(folder / FILE, judged_parts([scored], columns, spec))
    judged, errors = read_judged(folder / FILE, kind, spec.labels), count_reasons(scored["error"].drop_null())
    found = {
        "rows": len(scored),
        "failed": errors.total(),
        "errors": dict(errors),
        "metrics": _metrics(judged, result["metrics"]),
        "confusion": _confusion(judged) if kind == "classes" else None,
        "labels": list(spec.labels),
    }
    made: dict[str, Any] = {
        "model": str(run / "model"),
        "task": spec.task,
        "table": table,
        "rows": "the validation rows",
    }
    made |= {"label": spec.label, "columns": list(spec.input_columns)}
    publish(
        folder, found, kind=kind, identity={"run": str(run), "model": model_hash(run / "model")}, made=made, hints=by
    )


def _confusion(judged: JudgedRows) -> list[list[int]] | None:
    answers = (judged.codes("label"), judged.codes("prediction"))
    return None if (found := confusion_counts(*answers, len(judged.labels))) is None else found.tolist()


def _metrics(judged: JudgedRows, values: Mapping[str, float]) -> dict[str, Any]:
    """Return the validation's metrics, with intervals where they are sums over rows."""
    found = {}
    intervals = {
        metric: np.quantile(draws[:, 0], (0.025, 0.975))
        for group in groups_of([judged])
        for metric, (_, draws) in drawn(group).items()
    }
    for metric, value in values.items():
        low, high = intervals.get(metric, (None, None))
        found[metric] = {"value": value, "low": low, "high": high}
    return {name: one for name, one in found.items() if name != "loss" or len(found) == 1}


def _scored(
    run: Path,
    job: Job,
    spec: TaskSpec,
    stored: pa.Table,
    name: str,
    rows_at: Callable[[np.ndarray], Iterator[pa.Table]],
) -> pa.Table:
    """Return the validation rows as `predict` writes them, with their inputs and labels."""
    prepared = pa.concat_tables(
        pq.read_table(file, columns=["row_id", "length", "cut", "error"])
        for file in committed_files(run / "prepared" / name)
    )
    trained = np.flatnonzero(prepared["error"].is_null().to_numpy())
    places = trained[stored["number"].to_numpy()]
    about = prepared.take(pa.array(places))
    answers = stored["answers"].combine_chunks()
    matrix = np.asarray(answers.flatten().to_numpy()).reshape(len(stored), answers.type.list_size)
    bad = non_finite_rows(np.arange(len(matrix)), matrix)
    task = plugins.load("tasks", spec.task)
    predicted = task.output_columns(matrix, None, spec, ColumnOptions(all_probabilities=True))
    source = pa.concat_tables(rows_at(places))
    columns = {column: source[column] for column in source.column_names}
    return pa.table(
        {
            **({} if job.data.key else {"row_id": about["row_id"]}),
            **columns,
            **{PREFIX + column: predicted[column] for column in predicted.column_names},
            f"{PREFIX}tokens": about["length"],
            "truncated": pa.array(about["cut"].to_numpy() > 0),
            "error": pa.array([bad.get(row) for row in range(len(about))], pa.string()),
        }
    )


def _rows_at(source: Table, columns: tuple[str, ...], places: np.ndarray, spread: Spread) -> Iterator[pa.Table]:
    """Yield the rows at ascending places of a table."""
    plan = plan_chunks(source, columns=columns, hashed=False, spread=spread)
    reader, first = ChunkReader(columns), 0
    try:
        for chunk in plan.chunks:
            inside = places[(places >= first) & (places < first + chunk.rows)]
            if len(inside):
                yield reader.read(chunk)[0].take(pa.array(inside - first))
            first += chunk.rows
    finally:
        reader.close()
