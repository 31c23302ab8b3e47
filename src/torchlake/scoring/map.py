"""Predictions inside other people's queries: a model as a function of Spark SQL, and as stages of Ray Data.

`predict` of a Spark DataFrame or Ray Dataset adds the prediction columns to a whole frame; this is for expressions, and
for pipelines with steps of their own between tokenizing and scoring.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from torchlake.config.task_spec import TaskSpec
from torchlake.engines import make_engine
from torchlake.engines._frames import cached_worker
from torchlake.processes.serialization import pack
from torchlake.scoring.options import (
    added_columns,
    check_options,
    checked_input,
    make_export,
    refuse_collisions,
    scoring_settings,
)
from torchlake.scoring.scorer import Runtime, ScoringSettings
from torchlake.scoring.worker import make_reading_worker, make_table_worker, make_token_worker

if TYPE_CHECKING:
    import pandas as pd
    import ray.data
    from pyspark.sql import Column, SparkSession

Stage = Callable[["ray.data.Dataset"], "ray.data.Dataset"]


def spark_udf(
    model: str | Path,
    session: "SparkSession | None" = None,
    *,
    name: str | None = None,
    all_probabilities: bool = False,
    runtime: Runtime | None = None,
    null: Literal["error", "score"] = "error",
    batch_tokens: int | None = None,
) -> "Callable[[str | Column], Column]":
    """The model as a function of one text column, whose value is a struct of the prediction columns.

        classify = tl.spark_udf("runs/reviews/model", name="classify")
        frame.select("id", classify("text").label)          # or: spark.sql("SELECT id, classify(text).label FROM t")

    `name` registers it in `session` (default: the running one) for SQL. The model is loaded once per Python process of
    an executor. The other options are those of `predict`. Needs pandas.
    """
    from pyspark.sql import SparkSession
    from pyspark.sql.functions import pandas_udf  # type: ignore[attr-defined]  # it is imported there, not defined
    from pyspark.sql.pandas.types import from_arrow_schema

    settings, spec = _asked(
        model, runtime, null, batch_tokens, text=None, all_probabilities=all_probabilities, prefix=""
    )
    engine: Any = make_engine("spark", None, session=session)
    make_export(settings, engine)
    columns = added_columns(settings, spec, pa.schema([(settings.text, pa.string())]))
    payload = pack(partial(make_table_worker, settings))
    score = partial(_score, payload, settings.text, [column.name for column in columns])

    def predictions(texts: "Iterator[pd.Series]") -> "Iterator[pd.DataFrame]":
        return map(score, texts)

    # Spark reads the kind of function from its annotations, as types rather than as text.
    import pandas as pd

    predictions.__annotations__ = {"texts": Iterator[pd.Series], "return": Iterator[pd.DataFrame]}
    udf = pandas_udf(predictions, returnType=from_arrow_schema(pa.schema(columns)))
    if name is not None:
        (session or SparkSession.getActiveSession() or engine.session.get()).udf.register(name, udf)
    return udf


def ray_stages(
    model: str | Path,
    *,
    text: str | None = None,
    all_probabilities: bool = False,
    prefix: str = "",
    runtime: Runtime | None = None,
    null: Literal["error", "score"] = "error",
    batch_tokens: int | None = None,
    processes: int | None = None,
    gpus_per_process: float | None = None,
) -> tuple[Stage, Stage]:
    """Two steps of a Ray Data pipeline, each from Dataset to Dataset: tokenize on CPUs, score where the model is.

        tokenize, score = tl.ray_stages("runs/reviews/model", processes=2, gpus_per_process=1)
        scored = score(tokenize(dataset).map_batches(own_step))

    The first adds the columns `input_ids`, `truncated` and `error` in Ray tasks; the second puts the prediction columns
    in their place, in up to `processes` actors with `gpus_per_process` GPUs each. Ray Data streams blocks from one to
    the other and holds the first back when the second cannot follow; without GPUs it may run both in one process. The
    other options are those of `predict`; the first step raises what `predict` raises for a frame that does not fit.
    """
    settings, spec = _asked(
        model, runtime, null, batch_tokens, text=text, all_probabilities=all_probabilities, prefix=prefix
    )
    engine: Any = make_engine("ray", processes, gpus_per_process=gpus_per_process)
    engine.join()  # before the first dataset does, which would start a Ray of other settings
    make_export(settings, engine)

    def tokenize(dataset: Any) -> Any:
        schema = engine.frame_schema(dataset)
        asked = checked_input(settings, spec, schema, "the dataset")
        added = [column.name for column in added_columns(settings, spec, schema)]
        refuse_collisions([*schema.names, "input_ids", *added], ["input_ids", *added])
        return engine.map_in_tasks(dataset, partial(make_reading_worker, asked))

    def score(dataset: Any) -> Any:
        return engine.map_frame(dataset, partial(make_token_worker, settings), None)

    return tokenize, score


def _asked(
    model: str | Path, runtime: Runtime | None, null: str, batch_tokens: int | None, **settings: Any
) -> tuple[ScoringSettings, TaskSpec]:
    """What workers have to know. Raises UsageError for a value that means nothing, or that the model cannot do."""
    check_options({"null": null, "batch_tokens": batch_tokens})
    asked, spec, _ = scoring_settings(model, runtime, {}, null=null, batch_tokens=batch_tokens, **settings)
    return asked, spec


def _score(payload: bytes, text: str, names: list[str], texts: "pd.Series") -> "pd.DataFrame":
    """The predictions for a column of texts, in a Python process of an executor."""
    table = pa.table({text: pa.Array.from_pandas(texts, type=pa.string())})
    return cached_worker(payload)(table).select(names).to_pandas()
