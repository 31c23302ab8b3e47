"""The worker of a job: it scores chunks, each into a Parquet part.

    read and tokenize (in a thread, chunks ahead of the model) -> score -> part

`scorer.py` does the scoring; `jobs/worker/read_ahead.py` reads the next chunks.

An engine runs the workers, but small tables are scored in the calling process: a new one imports torch and torchlake
again, which takes a second. The price is crash isolation: a row that kills the process kills the caller. A small job
therefore leaves a file in the staging folder while it runs; if the next run finds it, the process died, and child
processes score the table.
"""

import logging
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from torchlake import plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.engines import Engine, Resources
from torchlake.engines.local import Local
from torchlake.jobs.table_job import workspace_of
from torchlake.jobs.worker.poison_rows import Attempt, read_chunk
from torchlake.jobs.worker.read_ahead import More, Ready, WrittenChunk, examples_of, reading_ahead
from torchlake.jobs.worker.shared_batches import Attempts
from torchlake.jobs.worker.texts import Prompt
from torchlake.jobs.worker.writing import Writing
from torchlake.outputs.transaction import Transaction
from torchlake.processes.hardware import cores, gpus
from torchlake.scoring.rows import ReadyRows, ScoringSettings, within
from torchlake.scoring.runtime_choice import worker_memory
from torchlake.scoring.scorer import Scorer
from torchlake.scoring.workers.output import ScoredRows, folded, joined, output_of
from torchlake.tables.plan import Chunk, chunk_label
from torchlake.tables.reading import ChunkReader

log = logging.getLogger(__name__)

MARKER = "in_process"
SMALL_ROWS = 100
"Above this number of rows, child processes take no longer, and isolate crashes."
ROUNDS, ROWS_AHEAD = 2, 512
MOST_AHEAD = 64
"Chunks that are read ahead at most: each holds four open files."
CLUSTER_PROCESSES = 16
"The processes of a cluster that were not given, for the number of chunks that are read ahead only."


@dataclass(frozen=True, kw_only=True)
class ScoredChunk(WrittenChunk):
    """A worker's report on a chunk that it has scored."""

    rows: int = 0
    "The number of rows that could be scored."
    distinct: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    "These are the counts of `Scorer`; of chunks that share batches, the first has them."
    runtime: str = ""
    "The runtime that ran; empty for a part of an earlier attempt."
    startup: Mapping[str, float] = field(default_factory=dict)
    "Seconds of each step up to the end of the first batch of this process."


Rows = tuple[pa.Table, ReadyRows]
"A chunk's table, and its rows made ready."
Results = Generator[tuple[Ready[Rows], ScoredChunk], None, None]
COUNTED = ("distinct", "tokens", "padded_tokens", "written", "seconds", "waited")
"The counts of a scorer, over all its chunks."


def make_chunk_worker(settings: ScoringSettings) -> Callable[[Iterator[tuple[Chunk, str]]], Iterator[ScoredChunk]]:
    """Load the model; the returned worker scores (chunk, part name) pairs and yields a `ScoredChunk` for each."""
    scorer = Scorer(settings=settings)
    reader = ChunkReader(tuple(dict.fromkeys((*settings.keep, *scorer.spec.input_columns))))
    workspace = settings.workspace
    assert workspace is not None, "a job has a workspace"

    def read(chunk: Chunk, attempt: Attempt) -> tuple[pa.Table, ReadyRows]:
        table, unreadable = read_chunk(reader, chunk, attempt)

        # Called row by row if a row of this chunk is suspected of having killed the tokenizer, else for all rows at
        # once.
        def tokens(first: int, stop: int) -> ReadyRows:
            return scorer.read(table.slice(first, stop - first), within(unreadable, first, stop))

        return table, joined(attempt.tokenizing(tokens))

    score = partial(_scored if settings.generation is None or not workspace.rows else _written, scorer)

    return reading_ahead(
        workspace,
        settings.row_timeout_s,
        read=read,
        write=score,
        lost=lambda part: ScoredChunk(part=part),  # its process died before its report; the counts are lost
        most=settings.chunks_ahead,
    )


def _scored(scorer: Scorer, group: Sequence[Ready[Rows]], more: More[Rows]) -> Results:
    """Score chunks one after the other."""
    for one in group:
        before = _counts(scorer)
        yield one, _reported(scorer, one, scorer.score(one.read[1], one.attempt), before)


def _written(scorer: Scorer, group: Sequence[Ready[Rows]], more: More[Rows]) -> Results:
    """Write the texts of chunks, and of further ones as places become free; chunks end in their order."""
    settings, before = scorer.settings, _counts(scorer)
    assert settings.workspace is not None, "a job has a workspace"
    assert settings.generation is not None, "the task writes"
    attempts = Attempts(times=settings.samples)
    writing = Writing(settings.workspace.rows, attempts, logprobs=settings.generation.logprobs is not None)
    started: deque[tuple[Sequence[Ready[Rows]], ScoredRows]] = deque()
    waiting = [group]

    def prompts() -> Sequence[Prompt]:
        some = waiting.pop() if waiting else more()
        if not some:
            return []
        place = first = attempts.join([one.attempt for one in some])
        for one in some:
            writing.enter(place, one.name, one.read[1].rows, one.read[1].features)
            place += one.read[1].count
        part = scorer.start(joined([one.read[1] for one in some]), first, attempts.suspects, writing)
        started.append((some, part))
        return part.prompts

    def finished() -> Results:
        nonlocal before
        while started and not started[0][1].left:
            some, part = started.popleft()
            columns, place = scorer.finish(part), 0
            for one in some:
                done = _reported(scorer, one, columns.slice(place, one.read[1].count), before)
                before = _counts(scorer)
                writing.leave(part.first + place)
                place += one.read[1].count
                yield one, done

    with closing(writing), closing(attempts):
        for row, result in scorer.write(prompts, attempts, writing):
            next(part for _, part in started if row in part.left).end(row, result)
            yield from finished()
        attempts.idle()
        yield from finished()


def _counts(scorer: Scorer) -> dict[str, Any]:
    return {name: getattr(scorer, name) for name in COUNTED}


def _reported(scorer: Scorer, one: Ready[Rows], columns: pa.Table, before: Mapping[str, Any]) -> ScoredChunk:
    """Write the part of a chunk, and return the report, with the counts since `before`."""
    settings, now = scorer.settings, _counts(scorer)
    output = output_of(one.read[0], settings, one.chunk, folded(columns, settings))
    assert settings.workspace is not None, "a job has a workspace"
    return ScoredChunk(
        # Written before the report is sent: the commit trusts that a reported part exists.
        part=settings.workspace.parts.write(one.name, output, chunk=one.chunk.index),
        rows=len(one.read[1].rows),
        runtime=scorer.runtime,
        startup=scorer.startup,
        examples=examples_of(one.chunk, output["error"]),
        **{name: now[name] - before[name] for name in COUNTED},
    )


def start_chunks(
    out: Transaction,
    items: Sequence[tuple[Chunk, str]],
    settings: ScoringSettings,
    spec: TaskSpec,
    engine: Engine | None,
    threads: int | None,
) -> Generator[ScoredChunk, None, None]:
    """Score the pending chunks, with their part names; small jobs without an `engine` run in this process."""
    settings = replace(settings, workspace=workspace_of(out), chunks_ahead=_chunks_ahead(settings, engine, items))
    make_worker = plugins.carried(spec.task, partial(make_chunk_worker, settings))
    rows = sum(chunk.rows for chunk, _ in items)
    if engine is None and _is_small(settings, spec, rows, out.staging):
        return _run_here(make_worker, items, out.staging)
    devices = settings.gpus_per_process
    return (engine or Local()).run_chunks(
        make_worker,
        items,
        resources=Resources(
            gpus=None,
            devices=devices,
            memory=worker_memory(settings.model, devices),
            threads=max(threads or 1, devices),
        ),
        name=f"predict {out.title}",
        label=chunk_label,
    )


def _chunks_ahead(settings: ScoringSettings, engine: Engine | None, items: Sequence[tuple[Chunk, str]]) -> int:
    """Return how many chunks a process reads ahead: of slow rows several, so that chunks of a few rows fill batches.

    But so few that each process takes chunks at least `ROUNDS` times: the last ones end at about the same time.
    """
    if settings.generation is None or not items:
        return 1
    processes = None if engine is None else engine.processes
    if not processes and (engine is None or isinstance(engine, Local)):
        processes = len(gpus()) // settings.gpus_per_process or cores()
    processes = processes or CLUSTER_PROCESSES
    mean = sum(chunk.rows for chunk, _ in items) / len(items)
    return max(1, min(MOST_AHEAD, int(ROWS_AHEAD / mean), len(items) // (ROUNDS * processes)))


def _is_small(settings: ScoringSettings, spec: TaskSpec, rows: int, staging: Path) -> bool:
    """Return whether this process may score the rows.

    Not for functions as runtimes, on a GPU or several devices, for text generation, or after a crash of this job in a
    calling process.
    """
    if (staging / MARKER).exists():
        log.warning("The last run of this job died while it scored in the calling process; now child processes score.")
        return False
    generates = plugins.load("tasks", spec.task).generates
    alone = settings.gpus_per_process == 1 and not gpus()
    return rows <= SMALL_ROWS and isinstance(settings.runtime, str) and not generates and alone


def _run_here(
    make_worker: Callable[[], Callable[[Iterator[Any]], Iterator[ScoredChunk]]],
    items: Sequence[tuple[Chunk, str]],
    staging: Path,
) -> Generator[ScoredChunk, None, None]:
    marker = staging / MARKER
    marker.touch()
    try:
        worker = make_worker()
        with _all_cores():
            yield from worker(iter(items))
    finally:  # not reached if the process dies
        marker.unlink(missing_ok=True)


@contextmanager
def _all_cores() -> Iterator[None]:
    """Let torch use as many threads in the block as in a single child process, so that the bytes are the same."""
    import torch

    before = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cores())
    try:
        yield
    finally:
        torch.set_num_threads(before)
