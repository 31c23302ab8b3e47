"""`evaluate`: how good a model is on a table, with intervals.

By labels and answers (`labeled.py`), pairs of texts (`embeddings.py`), pairs of answers (`preferences.py`), or texts
alone (`perplexity.py`).
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from torchlake import atomic_io, plugins
from torchlake.config.arguments import check_arguments, plain_numbers, refuse_unknown
from torchlake.config.measuring import EvaluateOptions
from torchlake.config.options import AnswerArguments, ReadArguments
from torchlake.config.task_spec import TaskSpec, as_columns
from torchlake.engines import Engine, as_engine
from torchlake.errors import UsageError
from torchlake.evaluation.embeddings import (
    BASELINE_AFTER_TRAINING,
    BASELINE_PAIRS,
    before_training,
    measure_pairs,
    pair_rows,
    words_in_common,
)
from torchlake.evaluation.labeled import Measuring, measure_labeled
from torchlake.evaluation.perplexity import measure_texts
from torchlake.evaluation.preferences import measure_preferences, pairs_spec
from torchlake.evaluation.report import FACTS, OF_REPORT, ReportRequest, evaluating, publish
from torchlake.evaluation.result import Evaluation
from torchlake.evaluation.sections.label_hints import refuse_trained
from torchlake.evaluation.sections.rows import FILE as ROWS
from torchlake.evaluation.sections.rows import stored_name, write_rows
from torchlake.models.load import model_folder
from torchlake.scoring import predict as predicting
from torchlake.scoring.options.settings import known_spec, with_columns
from torchlake.scoring.rows import Runtime
from torchlake.scoring.runtime_choice import refuse_unable
from torchlake.tables.sources._find import pinned
from torchlake.tables.sources._options import read_options, refuse_seed_alone
from torchlake.tables.sources.frames import engine_of, is_frame
from torchlake.tables.sources.streams import Input
from torchlake.tasks.feature_extraction import FeatureExtraction


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
    options = plain_numbers(options)
    check_arguments({"label": label, "inputs": inputs, "reference": reference}, evaluate.__annotations__)
    columns: dict[str, Any] = {"text": text, "text_pair": text_pair, "inputs": inputs}
    asked = {"model": model, "table": table, **columns, "label": label, "task": task, "engine": engine}
    asked |= {"runtime": runtime, "reference": reference, **options}
    read: Any = {name: value for name, value in options.items() if name in ReadArguments.__annotations__}
    writing = {name: value for name, value in options.items() if name not in (*read, *OF_REPORT, "report")}
    own, reading, request = model_folder(model), read_options(read), ReportRequest.of(options)
    if is_frame(table):
        reading.refuse_for_frames()
    spec, engine, table = known_spec(own, task), as_engine(engine), pinned(table)
    known = plugins.load("tasks", spec.task)
    writes = known.generates and bool(label or spec.label)
    if not writes and (given := sorted(writing)):
        raise UsageError(f"{', '.join(given)}: for a model that writes what is measured; name a label, its answers.")
    if not writes:
        refuse_seed_alone(read)
    refuse_unable(runtime, spec.task)
    writing |= {"text": text, "inputs": inputs} if writes else {}
    hints = request is not None and request.label_hints
    job = Measuring(own, table, task, engine, runtime, reading, read, writing, asked, label_hints=hints)
    if hints:
        refuse_trained(own, table)
    if isinstance(known, FeatureExtraction):
        return measure_vectors(job, spec, columns, label, request)
    if (pairs := pairs_spec(spec, text, inputs)) is not None and label is None and text_pair is None:
        measure = partial(measure_preferences, own, table, pairs, reference=reference, engine=engine, options=reading)
        return _described(job, pairs, measure, request)
    if reference is not None:
        raise UsageError("reference: only pairs of answers (inputs chosen and rejected) are measured relative to one.")
    spec = with_columns(spec, own, **columns)
    if spec.label is None and not writes:
        if label is not None:
            raise UsageError(f"label: {spec.task} is measured on the texts only; leave it out.")
        if not known.packs:
            raise UsageError(f"{spec.task} learns no label, so there is nothing to evaluate its predictions by.")
        return measure_texts(job, spec, request)
    return measure_labeled(job, replace(spec, label=label or spec.label), request)


def _described(
    job: Measuring, spec: TaskSpec, measure: Callable[[], Evaluation], request: ReportRequest | None
) -> Evaluation:
    """Measure, and write a report without rows, of a task that is not measured row by row."""
    if request is None:
        return measure()
    if given := [name for name in OF_REPORT if name not in ("no_texts", "overwrite") and getattr(request, name)]:
        raise UsageError(f"{', '.join(given)}: {spec.task} is not measured row by row, so its report has no rows.")
    with evaluating(request, job.identity(spec)):
        found = measure()
        atomic_io.remove([request.folder / FACTS, request.folder / ROWS])  # rows of another model, with overwrite
        publish(request.folder, found.to_json(), kind="other", identity=job.identity(spec), made=job.made(spec))
    return replace(found, report=request.folder)


def measure_vectors(
    job: Measuring, spec: TaskSpec, columns: Mapping[str, Any], label: str | None, request: ReportRequest | None
) -> Evaluation:
    """Measure the vectors of pairs of texts, and write the report if one is asked for."""
    spec = with_columns(spec, job.folder, text=columns["text"], inputs=columns["inputs"])
    score: Callable[..., Any] = partial(predicting.predict, job.folder, **job.scoring)
    pair = columns["text_pair"]
    chosen: dict[str, Any] = {"text": spec.text, "text_pair": pair, "label": label, "read": job.read}
    if request is None:
        with tempfile.TemporaryDirectory(prefix="torchlake-evaluate-", ignore_cleanup_errors=True) as folder:
            return measure_pairs(score, job.table, Path(folder), **chosen).evaluation
    if request.label_hints:
        raise UsageError(f"label_hints: labels are judged of classes, one or several; {spec.task} predicts vectors.")
    with evaluating(request, identity := {**job.identity(spec), "label": label}) as work:
        second = as_columns(pair or ())
        texts = [*as_columns(spec.text), *second]
        chosen |= {"slices": request.slices, "keep": [] if request.no_texts else texts, "key": request.key}
        found = measure_pairs(score, job.table, work, **chosen)
        rows = pair_rows(
            found, key=request.key or "row_id", second=None if request.no_texts else second[0], label=label
        )
        names = [stored_name(name) for name in request.slices]
        atomic_io.remove([request.folder / FACTS])
        write_rows(request.folder / ROWS, [rows])
        done = found.evaluation
        made = {**job.made(spec), "columns": texts, **({} if label is None else {"label": label})}
        about: dict[str, Any] = {"identity": identity, "made": made, "slices": names}
        sides = as_columns(spec.text), second
        again: Callable[..., Any] = partial(predicting.predict, **{**job.scoring, "task": job.task or spec.task})
        most = BASELINE_PAIRS if job.validation_of is None else BASELINE_AFTER_TRAINING
        about["sections"] = words_in_common(found, *sides) | before_training(
            found, job.folder, spec, again, sides, most
        )
        publish(request.folder, done.to_json(), kind="vectors", **about)
    return replace(done, report=request.folder)
