"""The table job: read a table, and write an output with one row for each of its rows, exactly once.

    open -> fit -> plan -> fingerprint -> begin -> run the pending chunks -> commit

`predict`, `map`, `rank` and `prepare` are table jobs; each says what it makes of the rows by a `Work`. The plan is
stored first; an engine runs each pending chunk at least once; after a kill, the same call runs only the missing chunks.
Failed rows are counted meanwhile, so that a job that cannot succeed ends early.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import pyarrow as pa

from torchlake.display import Shown, count
from torchlake.engines import Engine
from torchlake.engines.local import Local
from torchlake.jobs.increments import Increment, new_rows, only_new
from torchlake.jobs.options import OutputOptions
from torchlake.jobs.work import Work
from torchlake.jobs.worker.read_ahead import Workspace, WrittenChunk
from torchlake.jobs.worker.task_progress import TaskProgress
from torchlake.outputs.compatibility import AllowedChanges
from torchlake.outputs.find import Output
from torchlake.outputs.parts import part_name, stored_schema
from torchlake.outputs.staging.spool import spooled
from torchlake.outputs.transaction import Transaction, WriteRequest
from torchlake.processes.interrupts import announce_interrupt
from torchlake.progress import progress
from torchlake.redaction import redacted
from torchlake.storage.spread import in_process
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.failures import check_error_rate, read_failures
from torchlake.tables.keys import check_key
from torchlake.tables.plan import ChunkPlan, InputFile
from torchlake.tables.sources.files import StoredTable
from torchlake.tables.table import Table, open_table

log = logging.getLogger(__name__)

KEPT = "finished chunks are kept"


R = TypeVar("R", bound=WrittenChunk)


class TableOutcome(NamedTuple):
    """The fields that the results of all table jobs have; `Scored` documents them."""

    path: Path | str
    rows_in: int
    rows_out: int
    rows_failed: int
    seconds: float
    rows_per_s: float
    record: dict[str, Any]
    quarantined: tuple[tuple[str, str], ...]
    errors: dict[str, int]
    example: str | None


@dataclass(frozen=True, kw_only=True)
class Finished(Generic[R]):
    """A committed job: its outcome, the reports of this call and, unless it was complete before, seconds by step."""

    outcome: TableOutcome
    made: list[R]
    seconds: dict[str, float]


def table_job(work: Work[R], table: Any, output: Output, options: OutputOptions, engine: Engine) -> Finished[R]:
    """Do the work on every row of a stored table or a stream, or on those that are new since the last call.

    Raises TableError for an input that cannot be read, a key with nulls or duplicates and a schema that Parquet cannot
    store; UsageError if the input is inside the output; TooManyErrors when more rows fail than allowed (nothing is
    published, finished chunks are kept); and as `transaction`.
    """
    began = time.perf_counter()
    if not options.incremental:
        with spooled(table, output.place) as stored:
            done = _commit_rows(work, stored, output, options, engine)
        assert done is not None, "only an increment may have nothing to read"
        return done
    finished = []
    # Lazy: each increment is looked for after the commit of the one before.
    for one in new_rows(work, table, output, options):
        with spooled(one.table, one.output.place) as stored:
            done = _commit_rows(work, stored, one.output, options, engine, one)
        finished += [] if done is None else [done]
    return _in_all(finished, output, time.perf_counter() - began)


def _commit_rows(
    work: Work[R],
    table: StoredTable,
    output: Output,
    options: OutputOptions,
    engine: Engine,
    increment: Increment | None = None,
) -> Finished[R] | None:
    """Open, plan, run and commit; None if an increment has nothing to read."""
    began = time.perf_counter()
    source = _open(work, table, output, options, engine)
    schema = work.fit(source)
    earlier = output.earlier()
    plan = _plan(work, source, schema, output, earlier.inputs, options, engine)
    fingerprint = work.fingerprint(source, earlier.fingerprint)
    new = only_new(plan, output, fingerprint, increment)
    if new is None:
        return None
    plan, positions = new
    request = WriteRequest(
        plan=plan,
        fingerprint=fingerprint,
        schema=schema,
        key=work.key,
        commit_id=options.commit_id,
        # A line of a text file that cannot be read has no key. Other keys were checked with the plan.
        never_null="row_id" if work.key is None else None if source.format in ("csv", "jsonl") else work.key,
        allowed=AllowedChanges(
            overwrite=options.overwrite,
            new_input=options.accept_new_input,
            removed_input=options.accept_removed_input,
        ),
        environment=work.environment,
        quarantined=source.quarantined,
        spread=engine.spread,
        positions=positions,
        deleted_keys=increment.deleted_keys if increment else None,
    )
    with output.begin(request) as out:
        made: list[R] = []
        rows, seconds = 0, {}
        if not out.complete:
            rows = sum(chunk.rows for chunk in out.pending)
            planned = time.perf_counter()
            made = _run(work, out, fingerprint, options.max_error_rate)
            ran = time.perf_counter()
            parts = [*out.done, *(chunk.part for chunk in made)]
            out.commit(parts, work.provenance(out, made, ran - began))
            seconds = {"plan": planned - began, "run": ran - planned, "commit": time.perf_counter() - ran}
    assert out.record is not None, "a complete output has a record"
    total = time.perf_counter() - began
    outcome = TableOutcome(
        path=output.path,
        rows_in=out.plan.rows,
        rows_out=out.record["rows"],
        rows_failed=out.record["failed"],
        seconds=total,
        rows_per_s=rows / total,
        record=out.record,
        quarantined=tuple(source.quarantined),
        **read_failures(out.committed_in, out.record, out.plan)._asdict(),
    )
    return Finished(outcome=outcome, made=made, seconds=seconds)


def _open(work: Work[R], table: StoredTable, output: Output, options: OutputOptions, engine: Engine) -> Table:
    """Open the input. Raises TableError as `open_table`, and UsageError if the input is inside the output."""
    source = open_table(
        table, columns=work.columns, on_bad_file=options.on_bad_file, options=options.read, spread=engine.spread
    )
    output.refuse_input(source.files)
    for file, reason in source.quarantined:
        log.warning("%s is skipped: %s", file, reason)
    return source


def _plan(
    work: Work[R],
    source: Table,
    schema: pa.Schema,
    output: Output,
    cached: Sequence[InputFile],
    options: OutputOptions,
    engine: Engine,
) -> ChunkPlan:
    """Split the input into chunks, and check its key and the output's schema."""
    stored_schema(schema)
    plan = plan_chunks(
        source,
        columns=work.columns,
        chunk_rows=options.chunk_rows,
        cached=cached,
        spread=engine.spread,
    )
    if work.key is not None:
        # Hashes of keys need a folder that all processes can reach; without one they are computed in this process.
        here = isinstance(engine, Local)
        folder = None if here else output.shared_folder
        check_key(source, plan, work.key, spread=engine.spread if here or folder else in_process, scratch=folder)
    return plan


def _run(work: Work[R], out: Transaction, fingerprint: Mapping[str, Any], max_error_rate: float) -> list[R]:
    """Run the pending chunks. Raises TooManyErrors as soon as 1,000 rows are done."""
    made: list[R] = []
    examples: list[str] = []
    total = out.plan.rows
    before = rows = sum(part.rows for part in out.done) // out.samples
    failed = sum(part.failed for part in out.done) // out.samples
    ahead = TaskProgress(out.staging / "journal")
    chunks = work.start(out, [(chunk, part_name(out.plan, chunk, fingerprint)) for chunk in out.pending])
    with (
        announce_interrupt(KEPT),
        closing(chunks),
        progress(work.name, total, "rows", done=before, ahead=ahead.rows, measured=ahead.speed) as advance,
    ):
        check_error_rate(failed, rows, total, max_error_rate, examples)  # counts the chunks of earlier runs
        for chunk in chunks:
            made.append(chunk)
            rows += chunk.part.rows // out.samples
            failed += chunk.part.failed // out.samples
            examples = [*examples, *chunk.examples][:3]
            advance(chunk.part.rows // out.samples)
            ahead.written += chunk.written
            check_error_rate(failed, rows, total, max_error_rate, examples)
    return made


def _in_all(finished: Sequence[Finished[R]], output: Output, seconds: float) -> Finished[R]:
    """Return the outcome of all increments of a call, of which there may be none."""
    if not finished:
        record = output.latest_record()
        nothing = TableOutcome(output.path, 0, 0, 0, seconds, 0.0, record, (), {}, None)
        return Finished(outcome=nothing, made=[], seconds={})
    last, outcomes = finished[-1], [one.outcome for one in finished]
    rows = {name: sum(getattr(one, name) for one in outcomes) for name in ("rows_in", "rows_out", "rows_failed")}
    made = [chunk for one in finished for chunk in one.made]
    return Finished(outcome=last.outcome._replace(**rows, seconds=seconds), made=made, seconds=last.seconds)


def workspace_of(out: Transaction) -> Workspace:
    """Return where the workers of a write write."""
    return Workspace(
        journal=str(out.staging.absolute() / "journal"), parts=out.parts, rows=out.state.rows, samples=out.samples
    )


def shown_outcome(done: Any) -> Shown:
    """Return the line of the output of a table job, and its failed rows by reason."""
    skipped = f", {count(len(done.quarantined), 'file')} skipped" if done.quarantined else ""
    failed = [[("error", "rows"), *done.errors.items()]] if done.errors else []
    return f"{count(done.rows_out, 'row')}, {done.rows_failed:,} failed{skipped} -> {redacted(str(done.path))}", failed
