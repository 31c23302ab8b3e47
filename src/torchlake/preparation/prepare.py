"""`prepare`: a table in, token Parquet out; training reads nothing else.

A chunk job like `predict`, with a tokenizer instead of a model: exactly once, resumable, the same bytes on every
engine. Every input row gives one output row: a row that cannot be trained on has an `error` and no tokens; a row that
kills the process is found by `jobs/worker/poison_rows.py`. Cost: the tokens are stored (about as many bytes as the
compressed text), and the text is never tokenized again.
"""

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from torchlake import atomic_io, plugins
from torchlake.config.task_spec import TaskSpec, spec_to_json
from torchlake.data.batching import Ragged
from torchlake.engines import Engine
from torchlake.errors import DataError
from torchlake.jobs.options import OutputOptions
from torchlake.jobs.table_job import table_job, workspace_of
from torchlake.jobs.worker.poison_rows import Attempt, read_chunk
from torchlake.jobs.worker.read_ahead import Workspace, WrittenChunk
from torchlake.models import folders, load
from torchlake.outputs.find import folder_output
from torchlake.outputs.transaction import Transaction
from torchlake.preparation.conversations import check_training_columns
from torchlake.preparation.reference import Reference, make_reference
from torchlake.preparation.row_checks import check_fields, make_examples
from torchlake.preparation.summary import describe_truncation, truncation_of
from torchlake.scoring.rows import beyond_embeddings, within
from torchlake.tables.chunks import first_rows
from torchlake.tables.failures import reason_hint
from torchlake.tables.keys import row_ids
from torchlake.tables.plan import Chunk, chunk_label
from torchlake.tables.reading import ChunkReader
from torchlake.tables.sources._options import ReadOptions
from torchlake.tables.sources.files import StoredTable
from torchlake.tables.table import Table
from torchlake.tasks._rendering import tell_time, time_of_job
from torchlake.tasks._whole_rows import TOO_LONG

log = logging.getLogger(__name__)

MAX_TRUNCATED_SHARE = 0.05
"Share of truncated rows above which a warning is logged."
STEP_TIMEOUT_S = 600.0
"Seconds that reading or tokenizing a chunk may take."


@dataclass(frozen=True, kw_only=True)
class PrepareSettings:
    """The settings of a worker; plain values."""

    tokenizer: str | None
    "The folder with the tokenizer; None: the job has no base model."
    spec: TaskSpec
    bad_rows: Literal["error", "drop"]
    workspace: Workspace
    reference: Reference | None = None
    "The model whose log-probabilities of answers are stored; None: none are."
    time: str | None = None
    "The time that chat templates get; None: they do not ask."


def prepare(
    table: StoredTable,
    output: Path,
    *,
    tokenizer: Path | None,
    spec: TaskSpec,
    engine: Engine,
    bad_rows: Literal["error", "drop"] = "error",
    overwrite: bool = False,
    options: ReadOptions | None = None,
    reference: Reference | None = None,
) -> dict[str, Any]:
    """Tokenize the rows of `table` that `options` select (None: all) into the Parquet folder `output`.

    Return its commit record, even if the output was complete before.

    Columns: `row_id` string, the task's features (of texts `input_ids` list<int32>, with ~id, below zero, for a token
    that is read but not learned), `length` int32, `cut` int32 (tokens truncated), `target` (the task's encoding of the
    label, if it has labels), those of `row_checks.py` and `error` string, null for rows that can be trained on. The
    record's provenance counts
    `truncated` rows and tokens; above 5 % of rows a warning is logged.

    Raises TableError if the texts of a task that packs are neither strings nor conversations, UsageError for
    conversations without a chat template, or with one that does not mark the turns to learn from; DataError naming the
    first rows without text or label unless `bad_rows="drop"`, which leaves them out of the training and counts them as
    `failed`; FingerprintError if `output` was made from another table or with other settings, unless `overwrite`.
    """
    work = _Preparing(spec=spec, tokenizer=tokenizer, bad_rows=bad_rows, engine=engine, reference=reference)
    own = OutputOptions(
        max_error_rate=1.0,  # `bad_rows` says what happens to rows with errors
        chunk_rows=None if work.task.generates else work.task.chunk_rows,  # its rows are slow when they are written
        overwrite=overwrite,
        read=options or ReadOptions(),
    )
    return table_job(work, table, folder_output(output), own, engine).outcome.record


@dataclass(kw_only=True)
class _Preparing:
    """The work of `prepare`; see `jobs/work.py`."""

    spec: TaskSpec
    tokenizer: Path | None
    bad_rows: Literal["error", "drop"]
    engine: Engine
    reference: Reference | None
    source: str = ""
    fitted: bool = False
    time: str | None = None
    name: str = "prepare"
    key: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def task(self) -> Any:
        return plugins.load("tasks", self.spec.task)

    @property
    def columns(self) -> tuple[str, ...]:
        return self.spec.columns if self.fitted or not self.task.packs else ()

    def fit(self, source: Table) -> pa.Schema:
        self.source = source.source
        found = self.task.find_columns(source.schema, self.spec, lambda column: first_rows(source, [column]))
        self.spec, self.fitted = replace(found, rows=replace(found.rows, pack=self.spec.rows.pack)), True
        check_training_columns(source.schema, self.task, self.spec, source.source, self.tokenizer)
        return token_schema(self.spec)

    def fingerprint(self, source: Table, earlier: Mapping[str, Any]) -> dict[str, Any]:
        made = {
            "format": 3 if self.spec.whole else 2,
            "tokenizer": None if self.tokenizer is None else folders.tokenizer_hash(self.tokenizer),
            "spec": atomic_io.digest(spec_to_json(self.spec)),
            "bad_rows": self.bad_rows,
            **({} if self.reference is None else {"reference": self.reference.identity}),
            **({"json": True} if self.spec.rows.chat else {}),
        }
        renders = self.task.packs or self.task.pairs
        template = folders.chat_template(self.tokenizer) if renders and self.tokenizer is not None else None
        planned = time_of_job(template, made, earlier)
        self.time = planned.get("time")
        return {**made, **planned}

    def start(self, out: Transaction, items: list[tuple[Chunk, str]]) -> Generator[WrittenChunk, None, None]:
        settings = PrepareSettings(
            tokenizer=None if self.tokenizer is None else str(self.tokenizer),
            spec=self.spec,
            bad_rows=self.bad_rows,
            workspace=workspace_of(out),
            reference=self.reference,
            time=self.time,
        )
        return self.engine.run_chunks(
            plugins.carried(self.spec.task, partial(make_token_worker, settings)),
            items,
            name=f"prepare {out.title}",
            label=chunk_label,
            **({} if self.reference is None else {"resources": self.reference.resources}),
        )

    def provenance(self, out: Transaction, made: Sequence[WrittenChunk], seconds: float) -> dict[str, Any]:
        parts = [*out.done, *(chunk.part for chunk in made)]
        cut = truncation_of([Path(out.parts.location, part.name) for part in parts], self.spec)
        if cut["rows"] > MAX_TRUNCATED_SHARE * max(1, cut["of_rows"]):
            log.warning("%s: %s", self.source, describe_truncation(cut))
        return {"tokenizer": str(self.tokenizer), "truncated": cut}


def token_schema(spec: TaskSpec) -> pa.Schema:
    """Return the columns of token Parquet."""
    task = plugins.load("tasks", spec.task)
    return pa.schema(
        [
            pa.field("row_id", pa.string()),
            *(pa.field(name, kind) for name, kind in task.feature_types(spec).items()),
            pa.field("length", pa.int32()),
            pa.field("cut", pa.int32()),
            *([pa.field("target", task.target_type(spec))] if spec.label is not None else []),
            *check_fields(task, spec),
            pa.field("error", pa.string()),
        ]
    )


def make_token_worker(settings: PrepareSettings) -> Callable[[Iterator[tuple[Chunk, str]]], Iterator[WrittenChunk]]:
    """Load the tokenizer once; the worker then writes a part of token Parquet for each (chunk, part name) pair."""
    spec = settings.spec
    task = plugins.load("tasks", spec.task)
    folder = None if settings.tokenizer is None else Path(settings.tokenizer)
    processor = task.load_processor(folder, spec, scoring=False)
    if settings.time is not None:
        tell_time(processor, settings.time)
    reader = ChunkReader(spec.columns)
    schema, embeddings = token_schema(spec), None if folder is None else load.embeddings(folder)
    score = None if settings.reference is None else make_reference(settings.reference, spec, processor)

    def tokenized(chunk: Chunk, table: pa.Table, unreadable: dict[int, str]) -> pa.Table:
        """Return the columns of some of the chunk's rows, except `row_id`."""
        try:
            rows = make_examples(task, processor, table, unreadable, spec, bad_rows=settings.bad_rows)
        except DataError as error:
            raise DataError(f"{chunk.file}, {chunk.where}: {error}") from error
        for name in task.token_arrays:
            ids = rows.features.arrays.get(name)
            if isinstance(ids, Ragged):
                _refuse_unknown_tokens(chunk, ids, embeddings, processor)
        return rows.to_table(len(table), schema.remove(0))

    def prepared(chunk: Chunk, attempt: Attempt) -> pa.Table:
        table, unreadable = read_chunk(reader, chunk, attempt)

        def make(first: int, stop: int) -> pa.Table:
            return tokenized(chunk, table.slice(first, stop - first), within(unreadable, first, stop))

        made = pa.concat_tables(attempt.tokenizing(make)).combine_chunks()
        if settings.bad_rows == "error":
            _refuse_bad_rows(chunk, made["error"], accepted=TOO_LONG if spec.rows.too_long == "drop" else None)
        if score is not None:
            made = score(chunk, made, attempt)
        return pa.table([row_ids(chunk), *made.columns], schema=schema)

    def worker(items: Iterator[tuple[Chunk, str]]) -> Iterator[WrittenChunk]:
        journal, parts = Path(settings.workspace.journal), settings.workspace.parts
        for chunk, name in items:
            part = parts.find(name, chunk.index, chunk.rows)
            if part is None:
                with closing(Attempt(journal, chunk.index, chunk.rows, STEP_TIMEOUT_S)) as attempt:
                    part = parts.write(name, prepared(chunk, attempt), chunk=chunk.index)
            yield WrittenChunk(part=part)

    return worker


def _refuse_bad_rows(chunk: Chunk, errors: pa.ChunkedArray, *, accepted: str | None = None) -> None:
    """Raise DataError if any row cannot be trained on; `accepted` is a reason for which rows are left out."""
    found = [(row, errors[row].as_py()) for row in pc.indices_nonzero(pc.is_valid(errors)).to_pylist()]
    bad = [(row, reason) for row, reason in found if accepted is None or not reason.startswith(f"{accepted}:")]
    if bad:
        first = "; ".join(f"row {chunk.number(row)}: {reason}" for row, reason in bad[:3])
        raise DataError(
            f"{chunk.file}: {len(bad):,} of the {chunk.where} "
            f"cannot be trained on ({first}). Correct them, or leave such rows out with --set data.bad_rows=drop."
            + reason_hint([first]).replace("--csv ", "--set data.csv.")
        )


def _refuse_unknown_tokens(chunk: Chunk, tokens: Ragged, embeddings: int | None, tokenizer: Any) -> None:
    """Raise DataError for a row with a token that the model has no embedding for."""
    unknown = beyond_embeddings(tokens, embeddings, tokenizer)
    if unknown:
        reason = next(iter(unknown.values()))
        raise DataError(
            f"{chunk.file}, {chunk.where}: {reason}, while the "
            f"tokenizer has {len(tokenizer):,} tokens. Use the model's own tokenizer. If you have added tokens to it, "
            "give the model embeddings for them (model.resize_token_embeddings(len(tokenizer)) of transformers), and "
            "save both."
        )
