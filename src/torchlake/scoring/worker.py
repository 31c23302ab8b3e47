"""The workers that engines run: functions that load the model once per process and then score chunks or tables.

    chunks   read and tokenize (in a thread, one chunk ahead of the model) -> score -> Parquet part
    tables   score -> the same table with the prediction columns added
    stages   add tokens to a table in one process, predictions in another
    vectors  the lowest and highest value of each number of a vector, for vectors in 8 bits

`scorer.py` does the scoring; `jobs/worker/read_ahead.py` reads the next chunk.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from torchlake import plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.data.batching import Ragged
from torchlake.data.features import INPUT_IDS, Features, from_arrow, to_arrow
from torchlake.data.features import joined as joined_features
from torchlake.engines import Engine, Resources
from torchlake.errors import DataError
from torchlake.jobs.worker.poison_rows import Attempt, Attempts, read_chunk
from torchlake.jobs.worker.read_ahead import More, Ready, WrittenChunk, examples_of, reading_ahead
from torchlake.jobs.worker.texts import Prompt
from torchlake.jobs.worker.writing import Writing
from torchlake.models import folders
from torchlake.outputs.parts import Part
from torchlake.scoring.rows import ReadyRows, RowReader, ScoringSettings, within
from torchlake.scoring.runtime_choice import foreign_python
from torchlake.scoring.scorer import ScoredRows, Scorer, prepare_runtime, worker_memory
from torchlake.tables.arrays import from_numpy, from_strings, without_dictionaries
from torchlake.tables.chunks import evenly_spaced, sample_rows
from torchlake.tables.keys import row_ids
from torchlake.tables.plan import SAMPLE, Chunk
from torchlake.tables.reading import ChunkReader, isolate_bad_text
from torchlake.tables.table import Table
from torchlake.tasks._writing import PROMPT_TOKENS

NUMBER = pa.field(SAMPLE, pa.int32())
LENGTH = "length"
"The column with a row's cost in a batch, if that is not its number of tokens."


@dataclass(frozen=True, kw_only=True)
class ScoredChunk(WrittenChunk):
    """A worker's report on a chunk that it has scored."""

    rows: int = 0
    "The number of rows that could be scored."
    distinct: int = 0
    "The number of rows that were computed: equal rows once."
    tokens: int = 0
    "The tokens of these rows, without padding."
    padded_tokens: int = 0
    "The tokens of these rows, with padding."
    seconds: float = 0.0
    "Seconds in forward passes."
    waited: float = 0.0
    "Seconds in which the model waited for the inputs of a batch."
    runtime: str = ""
    "The runtime that ran; empty for a part of an earlier attempt."
    startup: Mapping[str, float] = field(default_factory=dict)
    "Seconds of each step up to the end of the first batch of this process."


Rows = tuple[pa.Table, ReadyRows]
"A chunk's table, and its rows made ready."
Results = Generator[tuple[Ready[Rows], ScoredChunk], None, None]
RANGE_ROWS = 1_000
"The rows of the input from whose vectors the ranges of 8 bits are computed."
COUNTED = ("distinct", "tokens", "padded_tokens", "written", "seconds", "waited")
"The counts of a scorer over all its chunks; a report has those of one chunk."


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

    # The part is complete, but the process that wrote it died before its report; the counts are lost.
    def lost(part: Part) -> ScoredChunk:
        return ScoredChunk(part=part)

    most = settings.chunks_ahead
    return reading_ahead(workspace, settings.row_timeout_s, read=read, write=score, lost=lost, most=most)


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
        first = attempts.join([one.attempt for one in some])
        writing.enter(first, [(one.name, one.read[1]) for one in some])
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
    output = _output(one.read[0], settings, one.chunk, folded(columns, settings))
    assert settings.workspace is not None, "a job has a workspace"
    return ScoredChunk(
        # Written before the report is sent: the commit trusts that a reported part exists.
        part=settings.workspace.parts.write(one.name, output, chunk=one.chunk.index),
        rows=len(one.read[1].rows),
        runtime=scorer.runtime,
        startup=scorer.startup,
        examples=examples_of(one.chunk, output["error"]),
        # The scorer counts over its lifetime, but a report covers one chunk; of chunks that share batches, the first.
        **{name: now[name] - before[name] for name in COUNTED},
    )


def make_table_worker(settings: ScoringSettings, *, plain: bool = False) -> Callable[[pa.Table], pa.Table]:
    """Load the model; the returned worker adds the prediction columns to any Arrow table.

    `plain`: with strings in place of dictionaries.
    """
    scorer = Scorer(settings=settings)

    def worker(table: pa.Table) -> pa.Table:
        rows, unreadable = isolate_bad_text(table.select(scorer.spec.input_columns))
        predictions = folded(scorer.score(scorer.read(rows, unreadable)), settings)
        if len(predictions) > len(table):
            table = table.take(from_numpy(np.arange(len(table)).repeat(settings.samples)))
        for column in predictions.schema:
            kind = without_dictionaries(column.type) if plain else column.type
            table = table.append_column(column.with_type(kind), predictions[column.name].cast(kind))
        return table

    return worker


def make_reading_worker(settings: ScoringSettings) -> Callable[[pa.Table], pa.Table]:
    """Return a worker that adds the features (of texts `input_ids`), `truncated` and `error` to any Arrow table."""
    reader = RowReader(settings=settings)
    folders.check_hash(settings.model, settings.model_hash)
    types = stage_types(settings)

    def worker(table: pa.Table) -> pa.Table:
        rows, unreadable = isolate_bad_text(table.select(reader.spec.input_columns))
        work = reader.read(rows, unreadable)
        position = np.full(work.count, -1, dtype=np.int64)
        position[work.rows] = np.arange(len(work.rows))
        place = from_numpy(position, null=position < 0)
        made = {**work.features.arrays, LENGTH: work.features.lengths}
        truncated = np.zeros(work.count, dtype=bool)
        truncated[work.rows] = work.features.cut > 0
        for name, kind in types.items():
            table = table.append_column(name, to_arrow(made[name], kind).take(place))
        reasons = from_strings([work.errors.get(row) for row in range(work.count)])
        return table.append_column("truncated", from_numpy(truncated)).append_column("error", reasons)

    return worker


def make_token_worker(settings: ScoringSettings) -> Callable[[pa.Table], pa.Table]:
    """Load the model; the returned worker replaces the columns of `make_reading_worker` by predictions."""
    scorer = Scorer(settings=settings)
    types = stage_types(settings)

    def worker(table: pa.Table) -> pa.Table:
        columns = {name: table[name].combine_chunks() for name in types}
        reasons = table["error"].to_pylist()
        valid = next(iter(columns.values())).is_valid()
        arrays = {name: from_arrow(column.filter(valid).cast(types[name])) for name, column in columns.items()}
        sizes, ids = arrays.pop(LENGTH, None), arrays.get(INPUT_IDS)
        lengths = ids.lengths if isinstance(ids, Ragged) else np.asarray(sizes)
        rows = np.flatnonzero(valid.to_numpy(zero_copy_only=False))
        cut = table["truncated"].to_numpy()[rows].astype(np.int64)
        work = ReadyRows(
            len(table),
            rows,
            Features(arrays=arrays, lengths=lengths, cut=cut),
            {row: reason for row, reason in enumerate(reasons) if reason is not None},
        )
        table = table.drop_columns([*types, "truncated", "error"])
        predictions = scorer.score(work)
        for name in predictions.column_names:
            table = table.append_column(predictions.schema.field(name), predictions[name])
        return table

    return worker


def stage_types(settings: ScoringSettings) -> dict[str, pa.DataType]:
    """Return the columns between tokenizing and scoring, besides `truncated` and `error`."""
    spec = settings.spec
    types: dict[str, pa.DataType] = plugins.load("tasks", spec.task).feature_types(spec)
    return types if INPUT_IDS in types else {**types, LENGTH: pa.int64()}


def make_preparing_worker(settings: ScoringSettings) -> Callable[[Iterator[str]], Iterator[str]]:
    """Return a worker that exports the model for runtimes, given by name, that need no calibration."""

    def worker(runtimes: Iterator[str]) -> Iterator[str]:
        for runtime in runtimes:
            prepare_runtime(settings, runtime)
            yield runtime

    return worker


def make_versions_worker(settings: ScoringSettings) -> Callable[[Iterator[str]], Iterator[dict[str, str]]]:
    """Return a worker that finds the versions that runtimes, given by name, have in their own interpreters."""

    def worker(runtimes: Iterator[str]) -> Iterator[dict[str, str]]:
        for runtime in runtimes:
            python = foreign_python(settings)
            assert python is not None, "it has an interpreter of its own"
            yield plugins.load("runtimes", runtime).versions(python.path)

    return worker


def with_ranges(
    settings: ScoringSettings, source: Table, earlier: Mapping[str, Any], engine: Engine
) -> ScoringSettings:
    """Return the settings with ranges, if vectors are requested in 8 bits; `earlier` is the output's fingerprint.

    They are found once per output: if they came from the vectors of a chunk, a row's numbers would depend on other
    rows. An interrupted job, and one that adds to a table, use the recorded ones of the same model. Cost: scoring a
    sample.

    Raises DataError if no row of the sample has a vector.
    """
    if settings.embedding != "int8":
        return settings
    recorded = earlier.get("ranges")
    if recorded is not None and earlier.get("model") == settings.model_hash:
        return replace(settings, ranges=(tuple(recorded[0]), tuple(recorded[1])))
    rows, _ = sample_rows(source, settings.spec.input_columns)
    rows = rows.take(pa.array(evenly_spaced(len(rows), min(len(rows), RANGE_ROWS))))
    worker = partial(_make_vector_worker, replace(settings, embedding="float32"))
    memory = worker_memory(settings.model)
    (ranges,) = engine.run_chunks(worker, [rows], resources=Resources(processes=1, memory=memory))
    if ranges is None:
        raise DataError(f"{source.source}: no row of the sample has a vector, from which the 8-bit ranges are computed")
    return replace(settings, ranges=ranges)


def _make_vector_worker(settings: ScoringSettings) -> Callable[[Iterator[pa.Table]], Iterator[Any]]:
    scorer = Scorer(settings=settings)

    def worker(tables: Iterator[pa.Table]) -> Iterator[Any]:
        for table in tables:
            vectors = scorer.task.read_answers(scorer.score(scorer.read(table, {})), scorer.spec)
            vectors = vectors[np.isfinite(vectors).all(axis=1)]
            yield (tuple(vectors.min(axis=0).tolist()), tuple(vectors.max(axis=0).tolist())) if len(vectors) else None

    return worker


def output_schema(settings: ScoringSettings, spec: TaskSpec, source: pa.Schema) -> pa.Schema:
    """Return the schema of the scored table."""
    task = plugins.load("tasks", spec.task)
    predicted = task.output_schema(spec, settings.column_options)
    if settings.samples > 1 and not settings.explode:
        predicted = [_listed(column) for column in predicted]
    kept = [source.field(name).remove_metadata().with_nullable(True) for name in settings.keep]
    keys = [pa.field("row_id", pa.string())] if settings.key is None else kept[:1]
    return pa.schema(
        [
            *keys,
            *([NUMBER] if settings.explode else []),
            *(kept if settings.key is None else kept[1:]),
            *(column.with_name(settings.prefix + column.name) for column in predicted),
            *([pa.field(f"{settings.prefix}tokens", pa.int32())] if settings.token_counts else []),
            pa.field("truncated", pa.bool_()),
            pa.field("error", pa.string()),
        ]
    )


def joined(works: Sequence[ReadyRows]) -> ReadyRows:
    """Concatenate the work of consecutive rows."""
    if len(works) == 1:
        return works[0]
    starts = np.cumsum([0, *(work.count for work in works)])
    return ReadyRows(
        int(starts[-1]),
        np.concatenate([start + work.rows for start, work in zip(starts, works, strict=False)]),
        joined_features([work.features for work in works if len(work.rows)] or [works[0].features]),
        {int(start) + row: why for start, work in zip(starts, works, strict=False) for row, why in work.errors.items()},
        [one for work in works for one in work.options],
    )


def _output(table: pa.Table, settings: ScoringSettings, chunk: Chunk, predictions: pa.Table) -> pa.Table:
    """Return key (or row id), copied columns and predictions as one table."""
    columns = {"row_id": row_ids(chunk)} if settings.key is None else {settings.key: table[settings.key]}
    if settings.explode:
        columns[SAMPLE] = predictions[SAMPLE]
    columns |= {name: table[name] for name in settings.keep}
    if settings.explode:
        again = from_numpy(np.arange(len(table)).repeat(settings.samples))
        columns = {name: each if name == SAMPLE else each.take(again) for name, each in columns.items()}
    return pa.table({**columns, **{name: predictions[name] for name in predictions.column_names}})


def folded(predictions: pa.Table, settings: ScoringSettings) -> pa.Table:
    """Return the predictions of rows that have several answers: lists of a row's, or all with their numbers.

    A row of lists has the first error of its answers, and then no answer, but for texts that do not fit a structure.
    """
    samples = settings.samples
    if settings.explode:
        numbers = from_numpy(np.tile(np.arange(samples, dtype=np.int32), len(predictions) // samples))
        return predictions.add_column(0, NUMBER, numbers)
    if samples == 1:
        return predictions
    rows = len(predictions) // samples
    reasons = predictions["error"].to_pylist()
    first = [next(filter(None, reasons[row * samples : (row + 1) * samples]), None) for row in range(rows)]
    lost = np.array([reason is not None for reason in first], bool)
    if settings.generation is not None and settings.generation.structure is not None:
        texts = predictions[f"{settings.prefix}generated_text"].is_null().to_numpy()
        lost &= texts.reshape(rows, samples).all(axis=1)
    known = from_numpy(np.arange(rows), null=lost)
    columns: dict[str, Any] = {}
    for column in predictions.schema:
        each = predictions[column.name].combine_chunks()
        if column.name in ("truncated", *(settings.prefix + name for name in (PROMPT_TOKENS.name, "tokens"))):
            columns[column.name] = each.take(from_numpy(np.arange(rows) * samples))
        elif column.name != "error":
            offsets = from_numpy(np.arange(rows + 1, dtype=np.int32) * samples)
            columns[column.name] = pa.ListArray.from_arrays(offsets, each).take(known)
    return pa.table({**columns, "error": from_strings(first)})


def _listed(column: pa.Field) -> pa.Field:
    return column if column.name == PROMPT_TOKENS.name else column.with_type(pa.list_(column.type))
