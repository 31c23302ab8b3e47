"""`rank`: scores pairs of a query and a document with a cross-encoder, and numbers the documents of each query.

    predict -> OUTPUT.scores: a score for every pair -> ranks of all pairs, in memory -> OUTPUT: the rows with ranks

Both steps write every row exactly once and continue after a kill, as `predict` does; `OUTPUT.scores` stays, and the
same call again finds both complete. A rank needs the scores of all documents of its query, which may be anywhere in
the table, so the second step waits for the first. Cost: 20 bytes of memory a row, and the distinct queries.
"""

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import pyarrow as pa

from torchlake import plugins
from torchlake.config.options import PredictOptions
from torchlake.config.task_spec import TaskSpec, label_name
from torchlake.engines import Engine
from torchlake.engines.local import Local
from torchlake.errors import DataError, UsageError
from torchlake.jobs.job import Job, open_input, plan_input, run_job
from torchlake.jobs.options import output_options
from torchlake.models import folders
from torchlake.outputs.find import output_of
from torchlake.outputs.parts import Part
from torchlake.outputs.transaction import Transaction
from torchlake.scoring.options import known_spec, refuse_collisions
from torchlake.scoring.predict import Scored, predict
from torchlake.scoring.rows import Runtime
from torchlake.tables.arrays import from_numpy
from torchlake.tables.plan import Chunk
from torchlake.tables.reading import ChunkReader
from torchlake.tables.sources.frames import engine_of, is_frame, to_arrow, to_original_frame

SCORES = ".scores"
"Added to the name of the output: the folder with the scores."
SCORE, RANK = "score", "rank"
WRITTEN = ("truncated", "error")


@dataclass(frozen=True, kw_only=True)
class RankedChunk:
    """A chunk that was written."""

    part: Part
    examples: tuple[str, ...] = ()


def rank(
    model: str | Path,
    table: Any,
    output: str | Path | None = None,
    *,
    query: str | None = None,
    document: str | None = None,
    relevant: Any = None,
    key: str | None = None,
    columns: Sequence[str] = (),
    runtime: Runtime | None = None,
    engine: Engine | str | None = None,
    **options: Unpack[PredictOptions],
) -> Any:
    """Score the pairs of a table with a cross-encoder, and rank the documents of each query.

        tl.rank("runs/reranker/model", "candidates.parquet", "ranked", query="query", document="passage", key="id")

    `query` and `document` are columns of texts (default: those of the training pairs). The output has the key (or
    `row_id`), the query, `columns`, `score` and `rank`: 1 for the query's best document; equal scores are in the order
    of the table. The score of a regression is its number, that of two classes the probability of the class `relevant`
    (default: the second one: 1, "true"). Rows with an `error` have neither. A frame comes back with `score` and `rank`
    added; a stored table is written into `output`, its scores into `output` + ".scores". The other options are those of
    `predict`.

    Raises UsageError for a model that does not score pairs, and the errors of `predict`.
    """
    if options.get("prefix"):
        raise UsageError("rank has no prefix: its columns are score and rank.")
    spec = known_spec(folders.model_folder(model), options.get("task"))
    score = _score_column(spec, relevant, str(model))
    spread: dict[str, Any] = {**options, "all_probabilities": True, "text_pair": document or spec.text_pair}
    query = query or (spec.text if isinstance(spec.text, str) else None)
    if query is None:
        raise UsageError("rank: the model's queries are several columns joined; name one column of queries (query=).")
    scoring = partial(predict, model, text=query, runtime=runtime, engine=engine, **spread)
    if engine_of(table) is not None:
        raise UsageError("rank takes stored tables and frames in memory: save the frame as Parquet first.")
    if is_frame(table) and output is None:
        return _rank_frame(table, scoring, query, score)
    if output is None:
        raise UsageError("rank: a stored table needs an output: rank(model, table, output).")
    if options.get("format", "parquet") != "parquet" or options.get("mode", "create") != "create":
        raise UsageError("rank writes a Parquet folder; append its rows to a table with a query engine.")
    scores = str(output).rstrip("/") + SCORES
    scored: Scored = scoring(table, scores, key=key, columns=list(dict.fromkeys([query, *columns])))
    return _rank_scores(
        scored, output, [query, *columns], query=query, score=score, key=key, overwrite=bool(options.get("overwrite"))
    )


def _score_column(spec: TaskSpec, relevant: Any, model: str) -> str:
    """Return the prediction column with the score. Raises UsageError."""
    if spec.text_pair is None:
        raise UsageError(
            f"{model}: the model was trained on single texts; rank needs a cross-encoder for pairs (data.text_pair)."
        )
    names: list[str] = plugins.load("tasks", spec.task).probability_names(spec)
    if spec.problem == "regression":
        return names[0]
    labels = [label_name(label) for label in spec.labels]
    wanted = None if relevant is None else label_name(relevant)
    if spec.problem != "single_label" or (wanted is None and len(labels) != 2):
        raise UsageError(
            f"{model}: the model has the classes {', '.join(labels)}. Name the one of relevant documents (relevant=)."
        )
    if wanted is not None and wanted not in labels:
        raise UsageError(f"relevant={relevant!r}: {model} has no such class. It has: {', '.join(labels)}.")
    return names[-1 if wanted is None else labels.index(wanted)]


def ranks_of(queries: pa.ChunkedArray, scores: np.ndarray) -> np.ndarray:
    """Return the rank (N,) int32 of each row among those of its query, by score (N,), highest first; NaN: 0."""
    numbers = queries.combine_chunks().dictionary_encode().indices.fill_null(-1).to_numpy(zero_copy_only=False)
    order = np.lexsort((np.arange(len(scores)), -scores, np.isnan(scores), numbers))
    in_order = numbers[order]
    starts = np.flatnonzero(np.diff(in_order, prepend=in_order[:1] - 1)) if len(order) else np.zeros(0, np.int64)
    places = np.arange(len(order)) - np.repeat(starts, np.diff(np.append(starts, len(order))))
    ranks = np.zeros(len(scores), dtype=np.int32)
    ranks[order] = places + 1
    ranks[np.isnan(scores)] = 0
    return ranks


def _scores(column: pa.ChunkedArray) -> np.ndarray:
    return np.asarray(column.to_numpy(), dtype=np.float32)


def _rank_frame(frame: Any, scoring: Any, query: str, score: str) -> Any:
    """Return the frame with `score` and `rank`."""
    table = to_arrow(frame)
    refuse_collisions([*table.column_names, SCORE, RANK], [SCORE, RANK])
    scored = scoring(table)
    ranks = ranks_of(scored[query], _scores(scored[score]))
    made = table.append_column(SCORE, scored[score])
    made = made.append_column(RANK, from_numpy(ranks, null=ranks == 0))
    for name in WRITTEN:
        made = made.append_column(name, scored[name])
    return to_original_frame(frame, made)


def _rank_scores(
    scored: Scored,
    output: str | Path,
    columns: Sequence[str],
    *,
    query: str,
    score: str,
    key: str | None,
    overwrite: bool,
) -> Scored:
    """Write the scored rows with their ranks; return the outcome of the whole job."""
    # The rows were scored within the limit of errors.
    began, options = time.perf_counter(), output_options({"overwrite": overwrite, "max_error_rate": 1.0})
    place = output_of(output, options.sink)
    names = list(dict.fromkeys(["row_id" if key is None else key, *columns, score, *WRITTEN]))
    source = open_input(str(scored.path), place, names, options, Local().spread)
    schema = pa.schema([source.schema.field(name) for name in names])
    at = names.index(score)
    schema = schema.set(at, schema.field(at).with_name(SCORE)).insert(at + 1, pa.field(RANK, pa.int32()))
    plan = plan_input(source, place, names, options, schema=schema, key=None, engine=Local())
    job = Job(
        name="rank",
        output=place,
        source=source,
        plan=plan,
        schema=schema,
        fingerprint={"format": 1, "job": "rank", "query": query, "score": score, "columns": names},
        key=None,
        environment={},
        options=options,
        spread=Local().spread,
    )

    def start(out: Transaction, items: list[tuple[Chunk, str]]) -> Generator[RankedChunk, None, None]:
        return _write(out, items, names, query=query, score=score, schema=schema)

    def provenance(made: list[RankedChunk], rows: int, seconds: float) -> dict[str, Any]:
        return {"scores": str(scored.path), "rows_ranked": rows, "seconds": round(seconds, 3)}

    finished = run_job(job, start, provenance, began=began)
    outcome = finished.outcome._asdict()
    outcome["seconds"] += scored.seconds
    return Scored(**outcome, profile={**scored.profile, "rank": time.perf_counter() - began})


def _write(
    out: Transaction,
    items: Sequence[tuple[Chunk, str]],
    names: Sequence[str],
    *,
    query: str,
    score: str,
    schema: pa.Schema,
) -> Generator[RankedChunk, None, None]:
    """Rank all rows, then write the pending chunks, in this process."""
    chunks = out.plan.chunks
    tables = list(_read(chunks, (query, score)))
    if not tables:
        return
    whole = pa.concat_tables(tables)
    ranks = ranks_of(whole[query], _scores(whole[score]))
    first = {chunk.index: start for chunk, start in zip(chunks, np.cumsum([0, *map(len, tables)]), strict=False)}
    for (chunk, name), table in zip(items, _read([chunk for chunk, _ in items], tuple(names)), strict=True):
        mine = ranks[first[chunk.index] : first[chunk.index] + len(table)]
        table = table.select(names)
        made = table.add_column(names.index(score) + 1, RANK, from_numpy(mine, null=mine == 0))
        yield RankedChunk(part=out.parts.write(name, made.rename_columns(schema.names), chunk=chunk.index))


def _read(chunks: Sequence[Chunk], columns: tuple[str, ...]) -> Iterator[pa.Table]:
    reader = ChunkReader(columns)
    try:
        for chunk in chunks:
            table, unreadable = reader.read(chunk)
            if unreadable:
                raise DataError(f"{chunk.file}: {len(unreadable):,} rows of the scores cannot be read; score again.")
            yield table
    finally:
        reader.close()
