"""Predictions for frames: whole frames, a function for Spark SQL, and stages of a Ray Data pipeline.

`predict` adds the prediction columns to a whole frame. The function is for expressions; the stages are for pipelines
with further steps between tokenizing and scoring.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from torchlake import plugins
from torchlake.config.arguments import check_arguments
from torchlake.config.options import PredictOptions
from torchlake.config.task_spec import TaskSpec
from torchlake.engines import Engine, make_engine
from torchlake.engines._frames import cached_worker
from torchlake.errors import UsageError
from torchlake.plugins import carried
from torchlake.processes.serialization import pack
from torchlake.scoring.options.job import with_export
from torchlake.scoring.options.settings import scoring_settings
from torchlake.scoring.options.table import added_columns, checked_input, refuse_collisions, with_table
from torchlake.scoring.rows import Runtime, ScoringSettings
from torchlake.scoring.workers.tables import make_reading_worker, make_table_worker, make_token_worker, stage_types
from torchlake.tables.arrays import without_dictionaries
from torchlake.tables.chunks import FIRST_ROWS
from torchlake.tables.failures import check_error_rate
from torchlake.tables.sources.frames import to_arrow, to_original_frame
from torchlake.tasks import TEXT
from torchlake.tasks._inputs import columns_of
from torchlake.tasks._row_options import OPTIONS

if TYPE_CHECKING:
    import pandas as pd
    import ray.data
    from pyspark.sql import Column, SparkSession

log = logging.getLogger(__name__)

Stage = Callable[["ray.data.Dataset"], "ray.data.Dataset"]


def predict_frame(frame: Any, settings: ScoringSettings, spec: TaskSpec, engine: Engine, max_error_rate: float) -> Any:
    """Return a frame in memory with the prediction columns added, as a frame of its kind."""
    if settings.explode and not isinstance(frame, pa.Table):
        kind = type(frame).__name__
        raise UsageError(f"explode: a {kind} keeps its rows. Give the rows as a pyarrow table, or leave explode out.")
    table = to_arrow(frame)
    scored = map_frame(table, table.schema, settings, spec, engine)
    failed = len(scored) - scored["error"].null_count
    examples = [f"{reason}" for reason in pc.unique(scored["error"].drop_null()).to_pylist()[:3]]
    check_error_rate(failed, len(scored), len(scored), max_error_rate, examples)
    return to_original_frame(frame, scored)


def map_frame(frame: Any, schema: pa.Schema | None, settings: ScoringSettings, spec: TaskSpec, engine: Engine) -> Any:
    """Return the engine's own frame, of Arrow schema `schema`, with the prediction columns added.

    A frame without rows that would show its columns (None) is returned as it is.
    """
    if schema is None:
        log.warning("The frame has no rows and no known columns: there is nothing to score.")
        return frame
    first = frame.slice(0, FIRST_ROWS).select if isinstance(frame, pa.Table) else None
    settings, spec = with_table(settings, spec, schema, None if first is None else lambda column: first([column]))
    settings = checked_input(settings, spec, schema, "the frame")
    added = added_columns(settings, spec, schema)
    new = [column.name for column in added]
    refuse_collisions([*schema.names, *new], new)
    settings = with_export(settings, engine)
    if first is None:  # Spark has no dictionaries, and the blocks of Ray would each have their own
        added = [column.with_type(without_dictionaries(column.type)) for column in added]
    worker = partial(make_table_worker, settings, plain=first is None)
    return engine.map_frame(frame, carried(spec.task, worker), pa.schema([*schema, *added]))


def spark_udf(
    model: str | Path,
    session: "SparkSession | None" = None,
    *,
    name: str | None = None,
    task: Any = None,
    all_probabilities: bool = False,
    runtime: Runtime | None = None,
    null: Literal["error", "score"] = "error",
    batch_tokens: int | None = None,
) -> "Callable[..., Column]":
    """Return the model as a function of its input columns; its value is a struct of the prediction columns.

        classify = tl.spark_udf("runs/reviews/model", name="classify")
        frame.select("id", classify("text").label)          # or: spark.sql("SELECT id, classify(text).label FROM t")

    A model of several columns takes them in the order of training: `classify("question", "answer")`. `name` registers
    it for SQL in `session` (default: the active one). The model is loaded once per Python process of an executor. The
    other options are those of `predict`. Needs pandas.
    """
    from pyspark.sql import SparkSession
    from pyspark.sql.functions import pandas_udf  # type: ignore[attr-defined]  # it is imported there, not defined

    from torchlake.engines._spark_types import spark_struct

    settings, spec = _settings(
        model, runtime, null, batch_tokens, text=None, task=task, all_probabilities=all_probabilities, prefix=""
    )
    engine: Any = make_engine("spark", None, session=session)
    settings = with_export(settings, engine)
    columns = added_columns(settings, spec, pa.schema([]))
    payload = pack(carried(spec.task, partial(make_table_worker, settings)))
    score = partial(_score, payload, text_columns(spec), [column.name for column in columns])

    def predictions(batches: "Iterator[Any]") -> "Iterator[pd.DataFrame]":
        return map(score, batches)

    # Spark reads the kind of function from its annotations, as types, not as strings.
    import pandas as pd

    several = len(spec.input_columns) > 1
    taken = Iterator[tuple[pd.Series, ...]] if several else Iterator[pd.Series]
    predictions.__annotations__ = {"batches": taken, "return": Iterator[pd.DataFrame]}
    udf: Callable[..., Column] = pandas_udf(predictions, returnType=spark_struct(pa.schema(columns)))
    if name is not None:
        (session or SparkSession.getActiveSession() or engine.session.get()).udf.register(name, udf)
    return udf


def ray_stages(
    model: str | Path,
    *,
    text: str | Sequence[str] | None = None,
    text_pair: str | Sequence[str] | None = None,
    inputs: Mapping[str, str | Sequence[str]] | None = None,
    task: Any = None,
    all_probabilities: bool = False,
    prefix: str = "",
    runtime: Runtime | None = None,
    null: Literal["error", "score"] = "error",
    batch_tokens: int | None = None,
    processes: int | None = None,
    gpus_per_process: float | None = None,
) -> tuple[Stage, Stage]:
    """Return two functions from Dataset to Dataset for a Ray Data pipeline: tokenize on CPUs, and score.

        tokenize, score = tl.ray_stages("runs/reviews/model", processes=2, gpus_per_process=1)
        scored = score(tokenize(dataset).map_batches(own_step))

    The first adds the task's features (of texts `input_ids`), `truncated` and `error` as columns, in Ray tasks; the
    second replaces them by the prediction columns, in up to `processes` actors with `gpus_per_process` GPUs each. Ray
    Data streams blocks from one to the other, and slows the first down if the second cannot follow; without GPUs it may
    run both in one process. The other options are those of `predict`; the first function raises the errors of `predict`
    for a frame that does not fit.
    """
    columns = {"text": text, "text_pair": text_pair, "inputs": inputs}
    settings, spec = _settings(
        model, runtime, null, batch_tokens, **columns, task=task, all_probabilities=all_probabilities, prefix=prefix
    )
    engine: Any = make_engine("ray", processes, gpus_per_process=gpus_per_process)
    engine.join()  # before the first dataset does, which would start a Ray of other settings
    settings = with_export(settings, engine)

    def tokenize(dataset: Any) -> Any:
        schema = engine.frame_schema(dataset)
        if schema is None:
            return dataset
        checked = checked_input(*with_table(settings, spec, schema, None), schema, "the dataset")
        if OPTIONS in checked.inputs:
            raise UsageError(f"{checked.inputs[OPTIONS]!r} holds options of rows, for predict only; drop the column.")
        added = [column.name for column in added_columns(settings, spec, schema)]
        between = list(stage_types(settings))
        refuse_collisions([*schema.names, *between, *added], [*between, *added])
        return engine.map_in_tasks(dataset, carried(spec.task, partial(make_reading_worker, checked)))

    def score(dataset: Any) -> Any:
        return engine.map_frame(dataset, carried(spec.task, partial(make_token_worker, settings)), None)

    return tokenize, score


def _settings(
    model: str | Path, runtime: Runtime | None, null: str, batch_tokens: int | None, **settings: Any
) -> tuple[ScoringSettings, TaskSpec]:
    """Return the workers' settings. Raises UsageError for an invalid value, or one that the model does not support."""
    check_arguments({"null": null, "batch_tokens": batch_tokens}, PredictOptions.__annotations__)
    checked, spec, _ = scoring_settings(model, runtime, {}, null=null, batch_tokens=batch_tokens, **settings)
    return checked, spec


def text_columns(spec: TaskSpec) -> dict[str, bool]:
    """Return the model's input columns in their order, and whether each holds text."""
    kinds = plugins.load("tasks", spec.task).inputs
    read = columns_of(kinds, spec)
    texts = {column for name, columns in read.items() for column in columns if kinds[name] == TEXT}
    return {column: column in texts for column in spec.input_columns}


def _score(payload: bytes, columns: Mapping[str, bool], names: list[str], batch: Any) -> "pd.DataFrame":
    """Return the predictions for a batch of the columns, in a Python process of an executor."""
    given = batch if isinstance(batch, tuple) else (batch,)
    if len(given) != len(columns):
        raise UsageError(f"The model reads the columns {', '.join(columns)}, but it was called with {len(given)}.")
    table = pa.table(
        {
            name: pa.Array.from_pandas(values, type=pa.string() if is_text else None)
            for (name, is_text), values in zip(columns.items(), given, strict=True)
        }
    )
    return cached_worker(payload)(table).select(names).to_pandas()
