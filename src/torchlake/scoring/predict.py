"""`predict`: a table in, the same rows with predictions out, exactly once.

A stored table becomes a chunk job: the plan is fixed and written first, the engine's workers score chunks into parts,
and one commit record makes them visible at once. Even if processes are killed, the same command run again scores only
what is missing. A frame in memory becomes a frame of the same kind, without files or a plan.
"""

import logging
import os
import platform
import time
import warnings
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Unpack, overload

import pyarrow as pa
import pyarrow.compute as pc

from torchlake.config.arguments import FrameT, StoredTable
from torchlake.config.task_spec import TaskSpec
from torchlake.engines import Engine, as_engine, make_engine
from torchlake.engines.local import Local
from torchlake.errors import TooManyErrors, UsageError
from torchlake.processes.interrupts import announce_interrupt
from torchlake.progress import progress
from torchlake.scoring.in_flight import InFlight
from torchlake.scoring.options import (
    OutputOptions,
    PredictOptions,
    added_columns,
    checked_input,
    fingerprint_of,
    make_export,
    refuse_collisions,
    scoring_settings,
    split_options,
)
from torchlake.scoring.runtime_choice import RuntimeChoice
from torchlake.scoring.scorer import Runtime, ScoringSettings, runtime_name, worker_memory
from torchlake.scoring.worker import ScoredChunk, make_chunk_worker, make_table_worker, output_schema, with_staging
from torchlake.tables.chunks import Chunk, chunk_label, plan_chunks
from torchlake.tables.failures import read_failures
from torchlake.tables.keys import check_key
from torchlake.tables.output.commit import WriteTransaction, write_transaction
from torchlake.tables.output.compatibility import AllowedChanges, planned_inputs
from torchlake.tables.output.parts import part_name, stored_schema
from torchlake.tables.record import local_output
from torchlake.tables.sources.frames import engine_of, is_frame, to_arrow, to_original_frame
from torchlake.tables.table import Table, open_table

log = logging.getLogger(__name__)

ROWS_BEFORE_STOPPING = 1000
KEPT = "Stopping. Finished chunks are kept; run the same command again to resume."


@dataclass(frozen=True, kw_only=True)
class Scored:
    """What `predict` wrote: `rows_out` always equals `rows_in`; `rows_failed` of them carry an `error`."""

    path: Path
    "The output folder."
    rows_in: int
    rows_out: int
    rows_failed: int
    seconds: float
    rows_per_s: float
    "Rows this call scored, per second of the whole call."
    record: dict[str, Any]
    "The commit record, with the provenance."
    quarantined: tuple[tuple[str, str], ...] = ()
    'Files left out, each with the reason (`on_bad_file="quarantine"`); their rows are in no count.'
    errors: dict[str, int]
    "Why rows failed, and how many for each reason."
    example: str | None
    "File and row of the first failed row, and its error."

    @property
    def output(self) -> Path:
        """The earlier name of `path`."""
        warnings.warn("Scored.output is now Scored.path.", DeprecationWarning, stacklevel=2)
        return self.path


@overload
def predict(
    model: str | Path,
    table: StoredTable,
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

    `table` is a file, folder, glob or URL (Parquet, CSV, JSON lines, Arrow IPC), scored into the Parquet folder
    `output` and returned as `Scored`; or a pyarrow, pandas or polars frame, which comes back as a frame of its kind
    with every column kept and the predictions added; or a Spark DataFrame or Ray Dataset, which comes back likewise and
    lazily: its own engine scores it when its rows are asked for, and rows that fail carry their `error`.

    Columns: `text` is the text column (default: the name of the training table's); `key` a column of unique values
    without nulls, carried instead of a generated `row_id`; `columns` are more columns to carry; `prefix` comes before
    the names of the prediction columns; `all_probabilities` adds a column per class.

    Model: `runtime` is a runtime's name, or a module-level function like a runtime's `load` (default: what `optimize`
    chose for this model, with its batches and threads, else `eager`). `batch_tokens` limits the padded tokens of a
    batch. `null="score"` scores rows without text as the empty string; by default they are error rows. Rows whose
    tokenizing, forward pass or generation takes longer than `row_timeout_s` seconds (default: 600) are tried alone, and
    become error rows the second time.

    Stored tables: `chunk_rows` limits the rows of a chunk. `overwrite` replaces an output of another job; in an
    unfinished write of this job it scores the chunks with failed rows again. `accept_new_input` scores only files that
    are new or have changed, `accept_removed_input` drops the rows of files that are gone.
    `on_bad_file="quarantine"` leaves out files that cannot be read. `max_error_rate` (default: 0.5) is below.

    Text generation: `max_new_tokens` limits each answer (default: 64). By default the likeliest token is taken; with
    a `temperature` above 0 tokens are sampled, among the `top_k` likeliest or those that together have the probability
    `top_p`. Sampling depends on `seed` and the row's own text, so equal rows get equal answers on every retry. Strings
    in `stop` end an answer. A column of conversations (lists of structs with `role` and `content`) goes through the
    tokenizer's chat template; with `chat`, so does a column of JSON strings. `batch_tokens` then counts prompts and
    the longest possible answers.

    Raises TooManyErrors when more than `max_error_rate` of the rows fail (nothing is published, finished chunks are
    kept), FingerprintError when `output` belongs to another job, Locked when another writer holds it, TableError and
    UsageError for mistakes found before any work.
    """
    scoring, generation, output_options = split_options(options)
    settings, spec, choice = scoring_settings(
        model, runtime, generation, text=text, key=key, columns=columns, **scoring
    )
    native, engine = engine_of(table), as_engine(engine)
    if native is not None:
        engine = engine or make_engine(native, None)
        if type(engine).__name__.lower() != native:
            raise UsageError(f"A frame of {native} is predicted by {native}: give no engine, or one of that kind.")
    engine = engine or Local()
    if native is not None or is_frame(table):
        if output is not None or key is not None or columns:
            raise UsageError(
                "A frame comes back as a frame with all its columns: output, key and columns are for stored tables. "
                "To write an output folder, save the frame as Parquet and predict that."
            )
        if native is not None:
            return _map_frame(table, engine.frame_schema(table), settings, spec, engine)
        return _predict_frame(table, settings, spec, engine, output_options.max_error_rate)
    if output is None:
        raise UsageError(
            "predict: a stored table needs an output folder: predict(model, table, output). For texts in memory: "
            "torchlake.load(model)([...])."
        )
    return _predict_table(table, local_output(output), settings, spec, engine, choice, output_options)


def _predict_frame(frame: Any, settings: ScoringSettings, spec: TaskSpec, engine: Engine, max_error_rate: float) -> Any:
    table = to_arrow(frame)
    scored = _map_frame(table, table.schema, settings, spec, engine)
    failed = len(scored) - scored["error"].null_count
    examples = [f"{reason}" for reason in pc.unique(scored["error"].drop_null()).to_pylist()[:3]]
    _refuse_too_many(failed, len(scored), len(scored), max_error_rate, examples)
    return to_original_frame(frame, scored)


def _map_frame(frame: Any, schema: pa.Schema, settings: ScoringSettings, spec: TaskSpec, engine: Engine) -> Any:
    """The frame of that Arrow schema with the prediction columns added, by the engine whose kind of frame it is."""
    settings = checked_input(settings, spec, schema, "the frame")
    added = added_columns(settings, spec, schema)
    new = [column.name for column in added]
    refuse_collisions([*schema.names, *new], new)
    make_export(settings, engine)
    return engine.map_frame(frame, partial(make_table_worker, settings), pa.schema([*schema, *added]))


def _predict_table(
    table: str | Path | Sequence[str | Path],
    output: Path,
    settings: ScoringSettings,
    spec: TaskSpec,
    engine: Engine,
    choice: RuntimeChoice,
    options: OutputOptions,
) -> Scored:
    began = time.perf_counter()
    columns = tuple(dict.fromkeys((*settings.keep, settings.text)))
    source = open_table(table, columns=columns, on_bad_file=options.on_bad_file)
    settings = checked_input(settings, spec, source.schema, source.source)
    schema = output_schema(settings, spec, source.schema)
    refuse_collisions(schema.names, schema.names)
    stored_schema(schema)  # refuses what cannot be written, before hours of scoring
    _refuse_own_input(source, output)
    for file, reason in source.quarantined:
        log.warning("%s is left out: %s", file, reason)
    plan = plan_chunks(source, columns=columns, chunk_rows=options.chunk_rows, cached=planned_inputs(output))
    if settings.key is not None:
        check_key(source, plan, settings.key)
    make_export(settings, engine)
    fingerprint = fingerprint_of(settings, spec)
    with write_transaction(
        output,
        plan=plan,
        fingerprint=fingerprint,
        schema=schema,
        allowed=AllowedChanges(
            overwrite=options.overwrite,
            new_input=options.accept_new_input,
            removed_input=options.accept_removed_input,
        ),
        environment=_environment(),
        quarantined=source.quarantined,
    ) as out:
        if out.complete:
            assert out.record is not None
            record = out.record
            scored_rows = 0
        else:
            items = [(chunk, part_name(out.plan, chunk, fingerprint)) for chunk in out.pending]
            scored_rows = sum(chunk.rows for chunk in out.pending)
            made = _score(out, items, settings, engine, choice.threads, max_error_rate=options.max_error_rate)
            seconds = time.perf_counter() - began
            provenance = _provenance(settings, engine, choice, made, seconds=seconds, rows=scored_rows)
            record = out.commit([*out.done, *(chunk.part for chunk in made)], provenance)
    seconds = time.perf_counter() - began
    return Scored(
        path=output,
        rows_in=out.plan.rows,
        rows_out=record["rows"],
        rows_failed=record["failed"],
        seconds=seconds,
        rows_per_s=scored_rows / seconds,
        record=record,
        quarantined=tuple(source.quarantined),
        **read_failures(out.output, record, out.plan)._asdict(),
    )


def _score(
    out: WriteTransaction,
    items: list[tuple[Chunk, str]],
    settings: ScoringSettings,
    engine: Engine,
    threads: int | None,
    *,
    max_error_rate: float,
) -> list[ScoredChunk]:
    """Run the pending chunks; raises TooManyErrors as soon as it is certain, or well founded, that too many failed."""
    made: list[ScoredChunk] = []
    examples: list[str] = []
    total = out.plan.rows
    rows = sum(part.rows for part in out.done)
    failed = sum(part.failed for part in out.done)
    make_worker = partial(make_chunk_worker, with_staging(settings, out.staging.absolute()))
    chunks = engine.run_chunks(
        make_worker,
        items,
        gpus_per_process=None,
        memory_per_process=worker_memory(settings.model),
        threads_per_process=threads,
        name=f"predict {out.output.name}",
        label=chunk_label,
    )
    before, ahead = rows, InFlight(out.staging / "journal").rows
    with (
        announce_interrupt(KEPT),
        closing(chunks),
        progress("predict", total, "rows", done=before, ahead=ahead) as advance,
    ):
        _refuse_too_many(failed, rows, total, max_error_rate, examples)  # of a run before this one
        for chunk in chunks:
            made.append(chunk)
            rows += chunk.part.rows
            failed += chunk.part.failed
            examples = (examples + list(chunk.examples))[:3]
            advance(chunk.part.rows)
            _refuse_too_many(failed, rows, total, max_error_rate, examples)
    return made


def _refuse_too_many(failed: int, rows: int, total: int, max_error_rate: float, examples: Sequence[str]) -> None:
    """Raise TooManyErrors once more than the allowed share of all rows, or of the first thousand or more, failed."""
    if failed <= max_error_rate * min(total, max(rows, ROWS_BEFORE_STOPPING)):
        return
    shown = f" For example: {'; '.join(examples)}." if examples else ""
    raise TooManyErrors(
        f"{failed:,} of {rows:,} rows failed, more than max_error_rate={max_error_rate} allows.{shown} Nothing was "
        "published; finished chunks are kept. Fix the rows, or allow more with a higher max_error_rate; overwrite "
        "scores the chunks with failed rows again."
    )


def _provenance(
    settings: ScoringSettings,
    engine: Engine,
    choice: RuntimeChoice,
    made: list[ScoredChunk],
    *,
    seconds: float,
    rows: int,
) -> dict[str, Any]:
    tokens, padded = sum(chunk.tokens for chunk in made), sum(chunk.padded_tokens for chunk in made)
    return {
        "model": settings.model,
        "engine": type(engine).__name__.lower(),
        "runtime": runtime_name(choice.runtime),
        "runtime_by": choice.why,
        "batch_tokens": settings.batch_tokens,
        "threads": choice.threads,
        **_environment(),
        "rows_scored": rows,
        "seconds": round(seconds, 3),
        "forward_seconds": round(sum(chunk.seconds for chunk in made), 3),
        "tokens": tokens,
        "padding": round(1 - tokens / padded, 4) if padded else 0.0,
        "errors": [example for chunk in made for example in chunk.examples][:20],
    }


def _environment() -> dict[str, str]:
    """The versions that may change a score's last digits."""
    versions = {name: version(name) for name in ("torchlake", "torch", "transformers")}
    return {**versions, "python": platform.python_version()}


def _refuse_own_input(source: Table, output: Path) -> None:
    for file in source.files:
        if Path(os.path.realpath(file)).is_relative_to(os.path.realpath(output)):
            raise UsageError(
                f"{output}: holds {file}, which is being scored; publishing would replace it. Give another."
            )
