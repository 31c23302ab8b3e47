"""`predict`: a table in, the same rows with predictions out, exactly once.

A stored table becomes a chunk job: the plan is written first, the engine's workers score chunks into parts, and one
commit record makes them visible at once. Even if processes are killed, the same command run again scores only what is
missing. A frame becomes a frame of the same kind, without files or a plan.
"""

import logging
import platform
import time
import warnings
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Unpack, overload

from torchlake.config.task_spec import TaskSpec
from torchlake.engines import Engine, as_engine, make_engine
from torchlake.engines.local import Local
from torchlake.errors import UsageError
from torchlake.processes.hardware import gpus
from torchlake.processes.interrupts import announce_interrupt
from torchlake.progress import progress
from torchlake.scoring.frames import map_frame, predict_frame
from torchlake.scoring.in_flight import InFlight
from torchlake.scoring.in_process import start_chunks
from torchlake.scoring.options import (
    OutputOptions,
    PredictOptions,
    check_devices,
    checked_input,
    fingerprint_of,
    make_export,
    refuse_collisions,
    scoring_settings,
    split_options,
)
from torchlake.scoring.rows import Runtime, ScoringSettings, runtime_name
from torchlake.scoring.runtime_choice import RuntimeChoice
from torchlake.scoring.worker import ScoredChunk, output_schema
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.keys import check_key
from torchlake.tables.output.compatibility import AllowedChanges
from torchlake.tables.output.failures import check_error_rate, read_failures
from torchlake.tables.output.parts import part_name, stored_schema
from torchlake.tables.output.spool import spooled
from torchlake.tables.sinks._find import Output, Write, output_of
from torchlake.tables.sinks._write import WriteRequest
from torchlake.tables.sources.frames import FrameT, engine_of, is_frame
from torchlake.tables.sources.streams import Input
from torchlake.tables.storage.spread import in_process
from torchlake.tables.table import open_table

log = logging.getLogger(__name__)

KEPT = "Stopping. Finished chunks are kept; run the same command again to resume."


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

    @property
    def output(self) -> Path | str:
        """The earlier name of `path`."""
        warnings.warn("Scored.output is now Scored.path.", DeprecationWarning, stacklevel=2)
        return self.path


@overload
def predict(
    model: str | Path,
    table: Input,
    output: str | Path,
    *,
    text: str | None = None,
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
    text: str | None = None,
    runtime: Runtime | None = None,
    engine: Engine | str | None = None,
    **options: Unpack[PredictOptions],
) -> FrameT: ...


def predict(
    model: str | Path,
    table: Any,
    output: str | Path | None = None,
    *,
    text: str | None = None,
    key: str | None = None,
    columns: Sequence[str] = (),
    runtime: Runtime | None = None,
    engine: Engine | str | None = None,
    **options: Unpack[PredictOptions],
) -> Any:
    """Score `table` with the model folder `model`.

    `table` is a file, folder, glob or URL (Parquet, CSV, JSON lines, Arrow IPC), or a Delta or Iceberg table, scored
    into `output` and returned as `Scored`; or a pyarrow, pandas or polars frame, returned as a frame of its kind with
    the prediction columns added; or a Spark DataFrame or Ray Dataset, returned likewise but lazily: its engine scores
    it when its rows are needed. With an `output`, it may also be a frame in memory, anything with `__arrow_c_stream__`
    (a DuckDB relation, a pyarrow reader), a polars LazyFrame or a Hugging Face dataset: its rows are stored beside the
    output until the job ends, and the same rows resume a job that was killed.

    Columns: `text` is the text column (default: as in training); `key` a column of unique values without nulls, copied
    instead of a generated `row_id`; `columns` are further columns to copy; `prefix` is put before the names of the
    prediction columns; `all_probabilities` adds a column per class.

    Rows of stored tables: those for which `where` is true ("stars >= 3 and lang = 'en'"), of these a `sample` (a share;
    `seed` and the row ids decide which), of these the first `limit`. The record says how many were left out. `csv` says
    how CSV files are written: {"delimiter": ";", "quote": "'", "encoding": "latin-1"}.

    Model: `runtime` is a runtime's name, or a module-level function like a runtime's `load` (default: what `optimize`
    chose for this model, with its batches and threads; else `varlen` or `eager`). `batch_tokens` limits the padded
    tokens of a batch. `null="score"` scores rows without text as the empty string; by default they are error rows. Rows
    whose tokenizing, forward pass or generation takes longer than `row_timeout_s` seconds (default: 600) are tried
    alone, and become error rows the second time.

    Output: a Parquet folder, local or by URL; a Delta table by path or URL with `format="delta"`, or if one is there;
    an Iceberg table by its name, "iceberg:catalog.namespace.table". `mode` says what happens to rows that are there:
    with "create" (default) there may be none, "append" adds to a table, "overwrite" replaces all, "replace-where"
    replaces those with the same `key`. `partition_by` names the partition columns of a new table, `add_columns` adds
    columns that a table lacks. `target_file_size` ("256MiB") writes files with the rows of several chunks.

    Stored tables: `chunk_rows` limits the rows of a chunk. `overwrite` replaces an output of another job; in an
    unfinished write of this job it scores the chunks with failed rows again. `accept_new_input` scores only files that
    are new or have changed, `accept_removed_input` drops the rows of files that are gone.
    `on_bad_file="quarantine"` leaves out files that cannot be read. `max_error_rate` (default: 0.5) is below. A small
    table is scored in this process unless `engine` is given; a row that crashes it is isolated in the next call.

    Text generation: `max_new_tokens` limits each answer (default: 64). By default the most likely token is taken; with
    a `temperature` above 0 tokens are sampled, from the `top_k` most likely ones, or from the most likely ones with
    total probability `top_p`. Sampling depends on `seed` and the row's text, so equal rows get equal answers on every
    retry. Strings in `stop` end an answer. A column of conversations (lists of structs with `role` and `content`) goes
    through the tokenizer's chat template; with `chat`, so does a column of JSON strings. `batch_tokens` then counts
    prompts and the longest possible answers.

    `gpus_per_process` above 1 is for a model larger than one GPU: so many GPUs of each process share it, by tensor
    parallelism if transformers has a plan for the model, else layer by layer. Without GPUs so many ranks on CPUs share
    it, which needs such a plan. Its runtime is `eager`; labels are the same, and scores differ by rounding.

    Raises TooManyErrors when more than `max_error_rate` of the rows fail (nothing is published, finished chunks are
    kept), FingerprintError when `output` belongs to another job, Locked when another writer holds it, TableError and
    UsageError for mistakes found before any work.
    """
    scoring, generation, output_options = split_options(options)
    native, engine = engine_of(table), as_engine(engine)
    place = None if native is not None or output is None else output_of(output, output_options.sink)
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
                f"A frame of {native} is returned as one: write it with {native}, or save it as Parquet first and "
                "score that into an output folder."
            )
        return _predict_frame(table, native, settings, spec, engine, output_options)
    if place is None:
        raise UsageError(
            "predict: a stored table or a stream needs an output folder: predict(model, table, output). For texts in "
            "memory: torchlake.load(model)([...])."
        )
    if settings.gpus_per_process > 1:
        check_devices(settings, has_gpus=bool(gpus()) or not isinstance(engine or Local(), Local))
    with spooled(table, place.place) as table:
        return _predict_table(table, place, settings, spec, engine, choice, output_options)


def _predict_frame(
    frame: Any,
    native: str | None,
    settings: ScoringSettings,
    spec: TaskSpec,
    engine: Engine | None,
    options: OutputOptions,
) -> Any:
    """The frame with predictions; `native` is the engine that a lazy frame belongs to."""
    options.read.refuse_for_frames()
    if settings.gpus_per_process > 1:
        raise UsageError(
            f"gpus_per_process={settings.gpus_per_process} is for an output folder, whose processes are restarted if "
            "one of their ranks dies: give one."
        )
    if native is None:
        return predict_frame(frame, settings, spec, engine or Local(), options.max_error_rate)
    engine = engine or make_engine(native, None)
    if type(engine).__name__.lower() != native:
        raise UsageError(f"A frame of {native} is scored by the engine {native}: give that engine, or none.")
    return map_frame(frame, engine.frame_schema(frame), settings, spec, engine)


def _predict_table(
    table: str | Path | Sequence[str | Path],
    output: Output,
    settings: ScoringSettings,
    spec: TaskSpec,
    engine: Engine | None,
    choice: RuntimeChoice,
    options: OutputOptions,
) -> Scored:
    began = time.perf_counter()
    columns = tuple(dict.fromkeys((*settings.keep, settings.text)))
    spread = (engine or Local()).spread
    source = open_table(table, columns=columns, on_bad_file=options.on_bad_file, options=options.read, spread=spread)
    settings = checked_input(settings, spec, source.schema, source.source)
    schema = output_schema(settings, spec, source.schema)
    refuse_collisions(schema.names, schema.names)
    stored_schema(schema)  # refuses what cannot be written, before hours of scoring
    output.refuse_input(source.files)
    for file, reason in source.quarantined:
        log.warning("%s is skipped: %s", file, reason)
    plan = plan_chunks(
        source, columns=columns, chunk_rows=options.chunk_rows, cached=output.earlier().inputs, spread=spread
    )
    if settings.key is not None:
        # The hashes of the keys go through a folder that all processes reach.
        scratch = None if isinstance(engine or Local(), Local) else output.shared_folder
        compare = spread if scratch or isinstance(engine or Local(), Local) else in_process
        check_key(source, plan, settings.key, spread=compare, scratch=scratch)
    make_export(settings, engine or Local())
    fingerprint = fingerprint_of(settings, spec)
    request = WriteRequest(
        plan=plan,
        fingerprint=fingerprint,
        schema=schema,
        key=settings.key,
        allowed=AllowedChanges(
            overwrite=options.overwrite,
            new_input=options.accept_new_input,
            removed_input=options.accept_removed_input,
        ),
        environment=_environment(),
        quarantined=source.quarantined,
        spread=spread,
    )
    with output.begin(request) as out:
        if out.complete:
            assert out.record is not None
            record = out.record
            scored_rows = 0
            profile = {}
        else:
            items = [(chunk, part_name(out.plan, chunk, fingerprint)) for chunk in out.pending]
            scored_rows = sum(chunk.rows for chunk in out.pending)
            planned = time.perf_counter()
            chunks = start_chunks(out, items, settings, spec, engine, choice.threads)
            made = _score(out, chunks, max_error_rate=options.max_error_rate)
            scored = time.perf_counter()
            provenance = _provenance(settings, engine, choice, made, seconds=scored - began, rows=scored_rows)
            record = out.commit([*out.done, *(chunk.part for chunk in made)], provenance)
            profile = _profile(made, began, planned, scored)
    seconds = time.perf_counter() - began
    return Scored(
        path=output.path,
        rows_in=out.plan.rows,
        rows_out=record["rows"],
        rows_failed=record["failed"],
        seconds=seconds,
        rows_per_s=scored_rows / seconds,
        record=record,
        quarantined=tuple(source.quarantined),
        profile=profile,
        **read_failures(out.committed_in, record, out.plan)._asdict(),
    )


def _score(out: Write, chunks: Generator[ScoredChunk, None, None], *, max_error_rate: float) -> list[ScoredChunk]:
    """Run the pending chunks. Raises TooManyErrors early, from the first thousand rows on."""
    made: list[ScoredChunk] = []
    examples: list[str] = []
    total = out.plan.rows
    rows = sum(part.rows for part in out.done)
    failed = sum(part.failed for part in out.done)
    before, ahead = rows, InFlight(out.staging / "journal").rows
    with (
        announce_interrupt(KEPT),
        closing(chunks),
        progress("predict", total, "rows", done=before, ahead=ahead) as advance,
    ):
        check_error_rate(failed, rows, total, max_error_rate, examples)  # of a run before this one
        for chunk in chunks:
            made.append(chunk)
            rows += chunk.part.rows
            failed += chunk.part.failed
            examples = (examples + list(chunk.examples))[:3]
            advance(chunk.part.rows)
            check_error_rate(failed, rows, total, max_error_rate, examples)
    return made


def _provenance(
    settings: ScoringSettings,
    engine: Engine | None,
    choice: RuntimeChoice,
    made: list[ScoredChunk],
    *,
    seconds: float,
    rows: int,
) -> dict[str, Any]:
    tokens, padded = sum(chunk.tokens for chunk in made), sum(chunk.padded_tokens for chunk in made)
    return {
        "model": settings.model,
        "engine": "local" if engine is None else type(engine).__name__.lower(),
        "runtime": ", ".join(sorted({chunk.runtime for chunk in made} - {""})) or runtime_name(choice.runtime),
        "runtime_by": choice.why,
        "batch_tokens": settings.batch_tokens,
        "threads": choice.threads,
        "gpus_per_process": settings.gpus_per_process,
        **_environment(),
        "rows_scored": rows,
        "seconds": round(seconds, 3),
        "forward_seconds": round(sum(chunk.seconds for chunk in made), 3),
        "tokens": tokens,
        "padding": round(1 - tokens / padded, 4) if padded else 0.0,
        "errors": [example for chunk in made for example in chunk.examples][:20],
    }


def _profile(made: Sequence[ScoredChunk], began: float, planned: float, scored: float) -> dict[str, float]:
    """Return the seconds of each step, in order; "other rows" includes starting child processes."""
    names = dict.fromkeys(step for chunk in made for step in chunk.startup)
    steps = {name: max(chunk.startup.get(name, 0.0) for chunk in made) for name in names}
    rest = max(0.0, scored - planned - sum(steps.values()))
    now = time.perf_counter()
    return {"plan": planned - began, **steps, "other rows": rest, "commit": now - scored}


def _environment() -> dict[str, str]:
    """Return the versions that may change the last digits of a score."""
    versions = {name: version(name) for name in ("torchlake", "torch", "transformers")}
    return {**versions, "python": platform.python_version()}
