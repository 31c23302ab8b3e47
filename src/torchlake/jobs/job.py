"""The driver's part of a chunk job: open and plan the input, run the pending chunks, publish them with one commit.

    open_input -> the caller's checks -> plan_input -> run_job: begin -> chunks -> commit

The plan is stored first; an engine runs each pending chunk at least once; after a kill, the same call runs only the
missing chunks. Failed rows are counted meanwhile, so that a job that cannot succeed ends early.
"""

import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import pyarrow as pa

from torchlake.display import Shown, count
from torchlake.engines import Engine
from torchlake.engines.local import Local
from torchlake.jobs.options import OutputOptions
from torchlake.jobs.worker.read_ahead import Workspace
from torchlake.jobs.worker.task_progress import TaskProgress
from torchlake.outputs.compatibility import AllowedChanges
from torchlake.outputs.find import Output
from torchlake.outputs.parts import Part, part_name, stored_schema
from torchlake.outputs.transaction import Transaction, WriteRequest
from torchlake.processes.interrupts import announce_interrupt
from torchlake.progress import progress
from torchlake.redaction import redacted
from torchlake.storage.spread import Spread, in_process
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.failures import check_error_rate, read_failures
from torchlake.tables.keys import check_key
from torchlake.tables.plan import Chunk, Plan
from torchlake.tables.sources.files import StoredTable
from torchlake.tables.table import Table, open_table

log = logging.getLogger(__name__)

KEPT = "finished chunks are kept"


class WrittenChunk(Protocol):
    """A worker's report about a chunk."""

    @property
    def part(self) -> Part:
        """The part that the worker wrote."""

    @property
    def examples(self) -> Sequence[str]:
        """Up to three errors, each with file and row."""


R = TypeVar("R", bound=WrittenChunk)
Start = Callable[[Transaction, list[tuple[Chunk, str]]], Generator[R, None, None]]
"Yields the workers' reports, for the transaction and the pending chunks with their part names."
Provenance = Callable[[list[R], int, float], Mapping[str, Any]]
"Returns the job's entries in the commit record, from the reports, the number of pending rows and the seconds so far."


@dataclass(frozen=True, kw_only=True)
class Job:
    """A checked and planned chunk job."""

    name: str
    "The command, for messages."
    output: Output
    source: Table
    plan: Plan
    schema: pa.Schema
    "The schema of the output."
    fingerprint: Mapping[str, Any]
    key: str | None
    environment: Mapping[str, str]
    "Versions of libraries."
    options: OutputOptions
    spread: Spread
    positions: Mapping[str, int] = field(default_factory=dict)
    "How far each source is read, for increments."
    deleted_keys: pa.Array | None = None
    "Keys whose rows are removed from the output."


class Outcome(NamedTuple):
    """The fields that the results of all chunk jobs have; `Scored` documents them."""

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


def shown_outcome(done: Any) -> Shown:
    """Return the line of the output of a chunk job, and its failed rows by reason."""
    skipped = f", {count(len(done.quarantined), 'file')} skipped" if done.quarantined else ""
    failed = [[("error", "rows"), *done.errors.items()]] if done.errors else []
    return f"{count(done.rows_out, 'row')}, {done.rows_failed:,} failed{skipped} -> {redacted(str(done.path))}", failed


@dataclass(frozen=True, kw_only=True)
class Finished(Generic[R]):
    """A committed job: its outcome, the reports of this call and, unless it was complete before, seconds by step."""

    outcome: Outcome
    made: list[R]
    seconds: dict[str, float]


def open_input(
    table: StoredTable, output: Output, columns: Sequence[str], options: OutputOptions, spread: Spread
) -> Table:
    """Open the input. Raises TableError as `open_table`, and UsageError if the input is inside `output`."""
    source = open_table(table, columns=columns, on_bad_file=options.on_bad_file, options=options.read, spread=spread)
    output.refuse_input(source.files)
    for file, reason in source.quarantined:
        log.warning("%s is skipped: %s", file, reason)
    return source


def plan_input(
    source: Table,
    output: Output,
    columns: Sequence[str],
    options: OutputOptions,
    *,
    schema: pa.Schema,
    key: str | None,
    engine: Engine,
) -> Plan:
    """Split the input into chunks and check its key.

    Raises TableError for a key with nulls or duplicates, and for an output `schema` that Parquet cannot store.
    """
    stored_schema(schema)
    plan = plan_chunks(
        source, columns=columns, chunk_rows=options.chunk_rows, cached=output.earlier().inputs, spread=engine.spread
    )
    if key is not None:
        # Hashes of keys need a folder that all processes can reach; without one they are computed in this process.
        here = isinstance(engine, Local)
        folder = None if here else output.shared_folder
        check_key(source, plan, key, spread=engine.spread if here or folder else in_process, scratch=folder)
    return plan


def run_job(job: Job, start: Start[R], provenance: Provenance[R], *, began: float) -> Finished[R]:
    """Run the pending chunks and commit; `began` is the `perf_counter` at the beginning of the call.

    Raises as `transaction`, and TooManyErrors when more rows fail than allowed: nothing is published, finished
    chunks are kept.
    """
    options = job.options
    request = WriteRequest(
        plan=job.plan,
        fingerprint=job.fingerprint,
        schema=job.schema,
        key=job.key,
        allowed=AllowedChanges(
            overwrite=options.overwrite,
            new_input=options.accept_new_input,
            removed_input=options.accept_removed_input,
        ),
        environment=job.environment,
        quarantined=job.source.quarantined,
        spread=job.spread,
        positions=job.positions,
        deleted_keys=job.deleted_keys,
    )
    with job.output.begin(request) as out:
        made: list[R] = []
        rows, seconds = 0, {}
        if out.complete:
            assert out.record is not None
            record = out.record
        else:
            items = [(chunk, part_name(out.plan, chunk, job.fingerprint)) for chunk in out.pending]
            rows = sum(chunk.rows for chunk in out.pending)
            planned = time.perf_counter()
            made = _run(job, out, start(out, items))
            ran = time.perf_counter()
            record = out.commit([*out.done, *(chunk.part for chunk in made)], provenance(made, rows, ran - began))
            seconds = {"plan": planned - began, "run": ran - planned, "commit": time.perf_counter() - ran}
    total = time.perf_counter() - began
    outcome = Outcome(
        path=job.output.path,
        rows_in=out.plan.rows,
        rows_out=record["rows"],
        rows_failed=record["failed"],
        seconds=total,
        rows_per_s=rows / total,
        record=record,
        quarantined=tuple(job.source.quarantined),
        **read_failures(out.committed_in, record, out.plan)._asdict(),
    )
    return Finished(outcome=outcome, made=made, seconds=seconds)


def workspace_of(out: Transaction) -> Workspace:
    """Return where the workers of a write write."""
    return Workspace(journal=str(out.staging.absolute() / "journal"), parts=out.parts)


def _run(job: Job, out: Transaction, chunks: Generator[R, None, None]) -> list[R]:
    """Run the pending chunks. Raises TooManyErrors as soon as 1,000 rows are done."""
    made: list[R] = []
    examples: list[str] = []
    rate, total = job.options.max_error_rate, out.plan.rows
    rows = sum(part.rows for part in out.done)
    failed = sum(part.failed for part in out.done)
    before, ahead = rows, TaskProgress(out.staging / "journal").rows
    with (
        announce_interrupt(KEPT),
        closing(chunks),
        progress(job.name, total, "rows", done=before, ahead=ahead) as advance,
    ):
        check_error_rate(failed, rows, total, rate, examples)  # counts the chunks of earlier runs
        for chunk in chunks:
            made.append(chunk)
            rows += chunk.part.rows
            failed += chunk.part.failed
            examples = [*examples, *chunk.examples][:3]
            advance(chunk.part.rows)
            check_error_rate(failed, rows, total, rate, examples)
    return made
