"""The page of a run's validation rows, `eval/` in the run folder.

    rank 0 stores the answers at each best validation -> after the training, texts and labels are read for those rows
    other answers: after the training, the best model is measured on a copy of those rows, as by `evaluate`

Answers of one number, or one per class, are stored, and the model computes nothing again. Spans, answers in texts,
vectors and losses of texts cost one more pass over the validation rows, on the run's engine.
"""

import io
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from torchlake import atomic_io, plugins
from torchlake.config.job import Job
from torchlake.config.task_spec import TaskSpec
from torchlake.data import loading
from torchlake.data.copies import divide
from torchlake.engines import Engine
from torchlake.errors import Interrupted, TorchlakeError
from torchlake.evaluation.report import FACTS, ReportRequest, publish
from torchlake.evaluation.sections.judged import JudgedRows, read_judged
from torchlake.evaluation.sections.label_hints import KINDS, hints_of
from torchlake.evaluation.sections.rows import FILE, RowColumns, is_content, judged_parts, kind_of, write_rows
from torchlake.evaluation.sections.sums import drawn, groups_of
from torchlake.metrics import confusion_counts
from torchlake.models.folders import model_hash
from torchlake.models.spec import EMBEDS, load_spec
from torchlake.runs.tables import read_options_of, stored_tables
from torchlake.scoring.workers.output import non_finite_rows
from torchlake.storage.spread import Spread
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.failures import count_reasons
from torchlake.tables.reading import ChunkReader
from torchlake.tables.record import committed_files
from torchlake.tables.sources._options import ReadOptions
from torchlake.tables.table import Table, open_table
from torchlake.tasks import ColumnOptions

log = logging.getLogger(__name__)

STORED = "validation.parquet"
PAGE = "eval"
PREFIX = "predicted_"


def has_page(spec: TaskSpec) -> bool:
    """Return whether the task's answers are one number, or one per class, of labeled rows."""
    labeled = spec.label is not None and hasattr(plugins.load("tasks", spec.task), "probability_names")
    return labeled and _kind(spec) in ("classes", "labels", "number")


def _kind(spec: TaskSpec) -> str | None:
    try:
        return kind_of(spec)
    except TorchlakeError:  # a task that trains only
        return None


def store(run: Path, outcome: Mapping[str, float], numbers: np.ndarray, answers: np.ndarray) -> None:
    """Store the answers (N, C) of the rows `numbers` (N,) of the prepared table, with the validation's metrics."""
    flat = pa.array(np.ascontiguousarray(answers, dtype=np.float32).ravel())
    columns = {"number": numbers, "answers": pa.FixedSizeListArray.from_arrays(flat, answers.shape[1])}
    table = pa.table(columns).replace_schema_metadata({"outcome": json.dumps(dict(outcome))})
    out = io.BytesIO()
    pq.write_table(table, out)
    atomic_io.write_bytes(run / STORED, out.getvalue(), site="run.validation")


def write_page(run: Path, job: Job, spec: TaskSpec, result: Mapping[str, Any], engine: Engine) -> dict[str, str]:
    """Write the page of the validation rows of the best model, if there are any; return {}, or as `page` why not.

    A failure is a warning: the model is trained.
    """
    atomic_io.remove([run / PAGE / FACTS])  # of the model before more epochs
    if job.data.validation is None:
        return {}
    try:
        why = _left_out(run, job, spec, result)
        if why is None and has_page(spec):
            _write(run, job, spec, result, engine.spread)
        elif why is None:
            _measure(run, job, spec, engine)
        return {} if why is None else {"page": f"There is no page: {why}."}
    except Interrupted:
        raise
    except Exception as error:
        log.warning("%s: the page of the validation rows was not written: %s: %s", run, type(error).__name__, error)
        return {"page": f"The page was not written: {type(error).__name__}: {error}"}


def _left_out(run: Path, job: Job, spec: TaskSpec, result: Mapping[str, Any]) -> str | None:
    """Return why the rows of a run have no page."""
    task = plugins.load("tasks", spec.task)
    if has_page(spec):
        stored = run / STORED
        outcome = pq.read_schema(stored).metadata[b"outcome"] if stored.is_file() else b"{}"
        found, wanted = (json.dumps(one, sort_keys=True) for one in (json.loads(outcome), result["metrics"]))
        return None if found == wanted else "the answers of the best step are not stored"  # NaN is equal as text
    if spec.task == "preference":
        return "the metrics of the validation are all that is measured of pairs of answers"
    if task.generates and not task.packs and job.train.validate_writing is None:
        return "it takes long to write all texts; set train.validate_writing, or run torchlake evaluate"
    if not (task.packs or task.generates or spec.task == EMBEDS or _kind(spec) in ("spans", "answers")):
        return f"the task {spec.task} does not measure single rows"
    return None


def _measure(run: Path, job: Job, spec: TaskSpec, engine: Engine) -> None:
    """Write the page as `evaluate` does, of a copy of the validation rows, which is removed then."""
    from torchlake.evaluation import evaluate, labeled, perplexity

    name, table = next(reversed(stored_tables(job).items()))
    key, writing = job.data.key, job.train.validate_writing if spec.label is not None else None
    prepared = _prepared(run, name, ["row_id", "error"])
    places = np.flatnonzero(prepared["error"].is_null().to_numpy())
    if name == "train":
        loading.build_cache(run / "prepared" / name, run / "cache" / name)
        hashes = loading.open_tokens(run / "cache" / name).hashes
        assert hashes is not None, "prepared with the rows"
        places = places[divide(job, None, hashes)[1]]  # these tasks have no classes, by which rows are stratified
    if writing is not None:
        places = places[np.unique(np.linspace(0, len(places) - 1, min(writing.rows, len(places))).astype(np.int64))]
    source = open_table(table, columns=spec.columns, options=read_options_of(job, name), spread=engine.spread)
    wanted = tuple(dict.fromkeys([*([key] if key else []), *spec.columns]))
    rows = _rows_at(source, wanted, places, engine.spread)
    if key is None:
        rows = _with_ids(rows, prepared["row_id"].take(pa.array(places)))
    first = next(rows)
    measuring = labeled.Measuring(
        folder=run / "model",
        table=pa.RecordBatchReader.from_batches(
            first.schema, (batch for part in chain([first], rows) for batch in part.to_batches())
        ),
        task=None,
        engine=engine,
        runtime=None,
        options=ReadOptions(),
        read={},
        writing={} if writing is None else {"max_new_tokens": writing.max_new_tokens},
        asked={},
        label_hints=_kind(spec) == "spans",
        validation_of=table,
    )
    request = ReportRequest(folder=run / PAGE, key=key or "row_id", overwrite=True, label_hints=measuring.label_hints)
    if spec.task == EMBEDS:
        columns = {"text": spec.text, "text_pair": spec.text_pair, "inputs": None}
        evaluate.measure_vectors(measuring, load_spec(run / "model"), columns, spec.label, request)
    else:
        measure = perplexity.measure_texts if spec.label is None else labeled.measure_labeled
        measure(measuring, load_spec(run / "model"), request)


def _with_ids(parts: Iterator[pa.Table], ids: pa.ChunkedArray) -> Iterator[pa.Table]:
    first = 0
    for part in parts:
        yield part.add_column(0, "row_id", ids.slice(first, len(part)))
        first += len(part)


def _prepared(run: Path, name: str, columns: Sequence[str]) -> pa.Table:
    return pa.concat_tables(pq.read_table(file, columns=columns) for file in committed_files(run / "prepared" / name))


def _write(run: Path, job: Job, spec: TaskSpec, result: Mapping[str, Any], spread: Spread) -> None:
    """Write the page from the stored answers."""
    stored = pq.read_table(run / STORED)
    name, table = next(reversed(stored_tables(job).items()))
    folder = run / PAGE
    folder.mkdir(exist_ok=True)
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
    prepared = _prepared(run, name, ["row_id", "length", "cut", "error"])
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
