"""`predict`: a table in, the same rows with predictions out, exactly once.

A stored table becomes a chunk job: the plan is written first, the engine's workers score chunks into parts, and one
commit record makes them visible at once. Even if processes are killed, the same command run again scores only what is
missing. A frame becomes a frame of the same kind, without files or a plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack, overload

from torchlake.config.arguments import plain_numbers, refuse_unknown
from torchlake.config.options import PredictOptions
from torchlake.config.task_spec import TaskSpec
from torchlake.display import Shown, shown
from torchlake.engines import Engine, as_engine, make_engine
from torchlake.engines.local import Local
from torchlake.errors import UsageError
from torchlake.jobs.options import OutputOptions, output_options
from torchlake.jobs.table_job import Finished, shown_outcome, table_job
from torchlake.outputs.find import output_of
from torchlake.processes.hardware import gpus
from torchlake.scoring.frames import map_frame, predict_frame
from torchlake.scoring.options.given import refuse_for_frames, split_options, with_common_names
from torchlake.scoring.options.job import (
    chunk_rows_of,
    with_time,
)
from torchlake.scoring.options.settings import check_devices, scoring_settings
from torchlake.scoring.rows import Runtime, ScoringSettings
from torchlake.scoring.table_work import Scoring
from torchlake.scoring.workers.chunks import ScoredChunk
from torchlake.tables.sources.files import is_image_folder
from torchlake.tables.sources.frames import FrameT, engine_of, is_frame
from torchlake.tables.sources.streams import Input


@shown
@dataclass(frozen=True, kw_only=True)
class Scored:
    """The output of `predict`: `rows_out` always equals `rows_in`; `rows_failed` of them have an `error`."""

    path: Path | str
    "The output: a folder's path, else a URL or the name of a table."
    rows_in: int
    rows_out: int
    rows_failed: int
    seconds: float
    rows_per_s: float
    "Rows this call scored, per second of the whole call."
    record: dict[str, Any]
    "The commit record, with the provenance."
    quarantined: tuple[tuple[str, str], ...] = ()
    'Skipped files, each with the reason (`on_bad_file="quarantine"`); their rows are not counted.'
    errors: dict[str, int]
    "Rows that failed, by reason."
    profile: dict[str, float]
    "Seconds of each step of this call; up to `first batch` those of the slowest process."
    example: str | None
    "File and row of the first failed row, and its error."

    def _shown(self) -> Shown:
        return shown_outcome(self)


@overload
def predict(
    model: str | Path | None,
    table: Input,
    output: str | Path,
    *,
    text: str | Sequence[str] | None = None,
    key: str | None = None,
    columns: Sequence[str] = (),
    runtime: Runtime | None = None,
    engine: Engine | str | None = None,
    **options: Unpack[PredictOptions],
) -> Scored: ...


@overload
def predict(
    model: str | Path,
    table: FrameT,
    *,
    text: str | Sequence[str] | None = None,
    runtime: Runtime | None = None,
    engine: Engine | str | None = None,
    **options: Unpack[PredictOptions],
) -> FrameT: ...


def predict(
    model: str | Path | None,
    table: Any,
    output: str | Path | None = None,
    *,
    text: str | Sequence[str] | None = None,
    key: str | None = None,
    columns: Sequence[str] = (),
    runtime: Runtime | None = None,
    engine: Engine | str | None = None,
    **options: Unpack[PredictOptions],
) -> Any:
    """Score `table` with the model folder `model`.

    `table` is a file, folder, glob or URL (Parquet, CSV, JSON lines, Arrow IPC), or a Delta or Iceberg table, scored
    into `output` and returned as `Scored`; or a pyarrow, pandas or polars frame, returned as a frame of its kind with
    the prediction columns added; or a Spark DataFrame or Ray Dataset, returned in the same form, but lazily: its engine
    scores it when its rows are needed. With an `output`, it may also be a frame in memory, anything with
    `__arrow_c_stream__` (a DuckDB relation, a pyarrow reader), a polars LazyFrame or a Hugging Face dataset: its rows
    are stored beside the output until the job ends, and the same rows resume a job that was killed.

    The options are those of `torchlake predict --help`, which the reference lists, too; here is what it does not say.
    `text` is the text column, or several that are joined as in training; `key` a column of unique values
    without nulls, copied instead of a generated `row_id`; `columns` are further columns to copy. `embedding` is
    "float32", "int8" (256 steps of ranges that are found on a sample and recorded) or "binary" (signs, 8 in a byte).

    Rows of stored tables: those for which `where` is true ("stars >= 3 and lang = 'en'"), of these a `sample` (a share;
    `seed` and the row ids decide which), of these the first `limit`. The record says how many were left out. `csv` says
    how CSV files are written: {"delimiter": ";", "quote": "'", "encoding": "latin-1"}.

    Model: `task` is your own task that the model was trained with; an installed one is found by its name.
    `runtime` is a runtime's name, or a module-level function like a runtime's `load` (default: what `optimize` chose
    for this model, with its batches and threads; else `varlen`, `fused` or `eager`). Rows whose tokenizing, forward
    pass or generation takes longer than `row_timeout_s` seconds are tried alone, and become error rows the second time;
    a batch of texts has this time for each token, and for each of its rows in all.

    Output: a Parquet folder, local or by URL; a Delta table by path or URL with `format="delta"`, or if one is there;
    an Iceberg table by its name, "iceberg:catalog.namespace.table". `target_file_size` ("256MiB") writes files with the
    rows of several chunks.

    `incremental` scores only what is new since the last call with this output, a Delta or Iceberg table, and adds it:
    the versions of a Delta table since then, or new files. It does nothing if nothing is new. Rows of a Delta table
    with a change data feed that were changed or deleted are followed by `key`. An increment leaves the output as a full
    run would; where it cannot, it is refused. `commit_id` names the commit: a call with a name that was committed does
    nothing, so that a scheduler may repeat a batch, in any order of its rows.

    Models behind an `endpoint`, without `model`: how-to guide.

    `overwrite` replaces an output of another job; in an unfinished write of this job it scores the chunks with failed
    rows again. A small table is scored in this process unless `engine` is given; a row that crashes it is isolated in
    the next call.

    Text generation: by default the most likely token is taken. Sampling depends on `seed` and the row's text, so equal
    rows get equal answers on every retry. A column of conversations (lists of structs with `role` and `content`) goes
    through the tokenizer's chat template; with `chat`, so does a column of JSON strings. `batch_tokens` then counts
    prompts and the longest possible answers.

    `gpus_per_process` above 1 is for a model larger than one GPU: this number of GPUs in each process share it, by
    tensor parallelism if transformers has a plan for the model, else layer by layer. Without GPUs, this number of ranks
    on CPUs share it, which needs such a plan. Its runtime is `eager`; labels are the same, and scores differ by
    rounding.

    Raises TooManyErrors if more than `max_error_rate` of the rows fail (nothing is published, finished chunks are
    kept), FingerprintError if `output` belongs to another job, Locked if another writer holds it, TableError and
    UsageError for mistakes found before any work.
    """
    if runtime == "http" or (runtime is None and options.get("endpoint")):
        return _predict_by_endpoint(
            model, table, output, options, as_engine(engine), text=text, key=key, columns=columns
        )
    if model is None:
        raise UsageError("predict needs a model folder; only the runtime 'http' (endpoint, model_name) has none.")
    scoring, generation, job_options = split_options(options)
    native, engine = engine_of(table), as_engine(engine)
    key = "image" if key is None and is_image_folder(table) else key
    place = None if native is not None or output is None else output_of(output, job_options.target)
    settings, spec, choice = scoring_settings(
        model,
        runtime,
        generation,
        text=text,
        key=key,
        columns=columns,
        recorded=None if place is None else place.earlier().fingerprint.get("runtime"),
        **scoring,
    )
    if native is not None or (is_frame(table) and output is None):
        if key is not None or columns:
            raise UsageError("A frame is returned with all its columns: key and columns are for an output folder.")
        if output is not None:
            raise UsageError(
                f"predict returns a {native} frame with predictions. Write that with {native}, or save the frame as "
                "Parquet first and score that into an output folder."
            )
        refuse_for_frames(options, native)
        settings, _ = with_time(settings, spec, {})
        return _predict_frame(table, native, settings, spec, engine, job_options)
    if place is None:
        raise UsageError(
            "predict: a stored table or a stream needs an output folder: predict(model, table, output). For texts in "
            "memory: torchlake.load(model)([...])."
        )
    if settings.gpus_per_process > 1:
        check_devices(settings, has_gpus=bool(gpus()) or not isinstance(engine or Local(), Local))
    job_options = replace(job_options, chunk_rows=job_options.chunk_rows or chunk_rows_of(settings, spec))
    work = Scoring(settings=settings, spec=spec, choice=choice, engine=engine)
    done = table_job(work, table, place, job_options, engine or Local())
    return Scored(**done.outcome._asdict(), profile=_profile(done))


def _predict_by_endpoint(
    model: Any,
    table: Any,
    output: str | Path | None,
    options: Any,
    engine: Engine | None,
    *,
    text: str | Sequence[str] | None,
    key: str | None,
    columns: Sequence[str],
) -> Scored:
    """Have the rows of a table answered by an endpoint."""
    # Imported here: a job of a model folder reads none of these files.
    from torchlake.scoring.endpoint.job import with_chunks
    from torchlake.scoring.endpoint.options import endpoint_job

    given = plain_numbers(with_common_names(options))
    refuse_unknown("predict", given, PredictOptions.__annotations__)
    if model is not None:
        raise UsageError("The runtime 'http' reads no model folder: leave it out (None in Python).")
    if engine_of(table) is not None or output is None:
        raise UsageError("The runtime 'http' needs a stored table or a frame in memory, and an output folder.")
    work = endpoint_job(given, text=text, key=key, columns=columns, engine=engine)
    work.settings.endpoint.key()  # before any work; processes read it from their own environment
    chosen = output_options(given)
    done = table_job(
        work,
        table,
        output_of(output, chosen.target),
        with_chunks(chosen, batch_api=work.settings.batch_api),
        work.engine,
    )
    return Scored(**done.outcome._asdict(), profile={})


def _predict_frame(
    frame: Any,
    native: str | None,
    settings: ScoringSettings,
    spec: TaskSpec,
    engine: Engine | None,
    options: OutputOptions,
) -> Any:
    """Return the frame with predictions; `native` is the engine that a lazy frame belongs to."""
    options.read.refuse_for_frames()
    if settings.embedding == "int8":
        raise UsageError("embedding='int8' needs an output folder, which records the ranges of the 8 bits. Name one.")
    if settings.gpus_per_process > 1:
        raise UsageError(
            f"gpus_per_process={settings.gpus_per_process} needs an output folder, whose processes are restarted if "
            "one of their ranks dies. Name one."
        )
    if native is None:
        return predict_frame(frame, settings, spec, engine or Local(), options.max_error_rate)
    engine = engine or make_engine(native, None)
    if type(engine).__name__.lower() != native:
        raise UsageError(f"A {native} frame is scored by the engine {native}. Pass that engine, or none.")
    return map_frame(frame, engine.frame_schema(frame), settings, spec, engine)


def _profile(finished: Finished[ScoredChunk]) -> dict[str, float]:
    """Return the seconds of each step, in order; "other rows" includes starting child processes."""
    if not finished.seconds:
        return {}
    names = dict.fromkeys(step for chunk in finished.made for step in chunk.startup)
    steps = {name: max(chunk.startup.get(name, 0.0) for chunk in finished.made) for name in names}
    seconds = finished.seconds
    rest = max(0.0, seconds["run"] - sum(steps.values()))
    return {"plan": seconds["plan"], **steps, "other rows": rest, "commit": seconds["commit"]}
