"""`rank`: scores pairs of a query and a document with a cross-encoder, and numbers the documents of each query.

    predict -> OUTPUT.scores: a score for every pair -> ranks of all pairs, in memory -> OUTPUT: the rows with ranks

Both steps write every row exactly once and continue after a kill, as `predict` does; `OUTPUT.scores` stays, and the
same call again finds both complete. A rank needs the scores of all documents of its query, which may be anywhere in
the table, so the second step waits for the first. Cost: 20 bytes of memory a row, and the distinct queries.
"""

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import pyarrow as pa

from torchlake import plugins
from torchlake.config.arguments import column_names, refuse_unknown
from torchlake.config.options import RankOptions
from torchlake.config.task_spec import TaskSpec, label_name
from torchlake.engines import Engine
from torchlake.engines.local import Local
from torchlake.errors import DataError, UsageError
from torchlake.jobs.options import output_options
from torchlake.jobs.table_job import table_job
from torchlake.jobs.worker.read_ahead import WrittenChunk
from torchlake.models import folders
from torchlake.outputs.find import output_of
from torchlake.outputs.transaction import Transaction
from torchlake.scoring.options.settings import known_spec, with_columns
from torchlake.scoring.predict import Scored, predict
from torchlake.scoring.rows import Runtime
from torchlake.tables.arrays import from_numpy
from torchlake.tables.plan import Chunk
from torchlake.tables.reading import ChunkReader
from torchlake.tables.sources.frames import engine_of, is_frame, to_arrow, to_original_frame
from torchlake.tables.table import Table

SCORES = ".scores"
"Added to the name of the output: the folder with the scores."
SCORE, RANK = "score", "rank"
WRITTEN = ("truncated", "error")
PREFIX = "predicted "
"Of the predictions for a frame, whose own columns may be `label` or `prob_1`."
NEGATIVE = ("0", "false", "LABEL_0")
"Names of the first of two classes with which the second one is that of relevant documents."
FOLDER = "which writes a Parquet folder; append its rows to a table with a query engine"
OWN = {
    **dict.fromkeys(("format", "mode", "incremental", "partition_by", "add_columns"), FOLDER),
    "prefix": "whose columns are score and rank",
    "all_probabilities": "whose score is that of one class (relevant=)",
    "text_pair": "which has document=",
    "commit_id": "which makes two commits",
}
"Options of `predict` that `rank` does not have, and why."
BOTH = ("overwrite", "accept_new_input", "accept_removed_input", "target_file_size", "chunk_rows")
"Options that apply to the output with the ranks as to that with the scores."


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
    **options: Unpack[RankOptions],
) -> Any:
    """Score the pairs of a table with a cross-encoder, and rank the documents of each query.

        tl.rank("runs/reranker/model", "candidates.parquet", "ranked", query="query", document="passage", key="id")

    `query` and `document` are columns of texts (default: those of the training pairs). The output has the key (or
    `row_id`), the query, `columns`, `score` and `rank`: 1 for the query's best document; equal scores are in the order
    of the table. The score of a regression is its number, that of two classes the probability of the class `relevant`
    (default: of 0 and 1, false and true, or classes without names, the second one). Rows with an `error` have neither.
    A frame comes back with `score` and `rank` added; a stored table is written into `output`, its scores into `output`
    + ".scores". The other options are those of `predict`.

    Raises UsageError for a model that does not score pairs, and the errors of `predict`.
    """
    for name, value in options.items():
        if name in OWN and value and value not in ("parquet", "create"):
            raise UsageError(f"{name}: not for rank, {OWN[name]}.")
    refuse_unknown("rank", options, {**RankOptions.__annotations__, **dict.fromkeys(OWN, Any)})
    folder = folders.model_folder(model)
    spec = with_columns(known_spec(folder, options.get("task")), folder, text_pair=document)
    score = score_column(spec, relevant, str(model))
    columns = column_names("columns", columns)
    spread: dict[str, Any] = {**options, "all_probabilities": True, "text_pair": spec.text_pair}
    query = query or (spec.text if isinstance(spec.text, str) else None)
    if query is None:
        raise UsageError("rank: the model's queries are several columns joined; name one column of queries (query=).")
    scoring = partial(predict, model, text=query, runtime=runtime, engine=engine, **spread)
    if engine_of(table) is not None:
        raise UsageError("rank takes stored tables and frames in memory: save the frame as Parquet first.")
    if is_frame(table) and output is None:
        if key is not None or columns:
            raise UsageError("key, columns: for a stored table and its output; a frame comes back with all it had.")
        return _rank_frame(table, scoring, query, score)
    if output is None:
        raise UsageError("rank: a stored table needs an output: rank(model, table, output).")
    _refuse_own([*([] if key is None else [key]), query, *columns])
    scores = str(output).rstrip("/") + SCORES
    scored: Scored = scoring(table, scores, key=key, columns=list(dict.fromkeys([query, *columns])))
    # The rows were scored within the limit of errors.
    own = output_options({name: spread[name] for name in BOTH if name in spread} | {"max_error_rate": 1.0})
    names = dict.fromkeys(["row_id" if key is None else key, query, *columns, score, *WRITTEN])
    work = _Ranking(scores=str(scored.path), query=query, score=score, columns=list(names))
    began = time.perf_counter()
    outcome = table_job(work, work.scores, output_of(output, own.target), own, Local()).outcome
    outcome = outcome._replace(seconds=outcome.seconds + scored.seconds)
    return Scored(**outcome._asdict(), profile={**scored.profile, "rank": time.perf_counter() - began})


def score_column(spec: TaskSpec, relevant: Any, model: str) -> str:
    """Return the prediction column with the score. Raises UsageError."""
    if spec.text_pair is None:
        raise UsageError(
            f"{model}: the model was trained on single texts; rank needs a cross-encoder for pairs (data.text_pair). "
            "If it was not trained by torchlake, name the column of documents (document=)."
        )
    names: list[str] = plugins.load("tasks", spec.task).probability_names(spec)
    if spec.problem == "regression":
        return names[0]
    labels = [label_name(label) for label in spec.labels]
    wanted = None if relevant is None else label_name(relevant)
    if spec.problem != "single_label" or (wanted is None and (len(labels) != 2 or labels[0] not in NEGATIVE)):
        raise UsageError(
            f"{model}: the model has the classes {', '.join(labels)}. Name the one of relevant documents (relevant=)."
        )
    if wanted is not None and wanted not in labels:
        raise UsageError(f"relevant={relevant!r}: {model} has no such class. It has: {', '.join(labels)}.")
    return names[-1 if wanted is None else labels.index(wanted)]


def ranks_of(queries: pa.ChunkedArray, scores: np.ndarray) -> np.ndarray:
    """Return the rank (N,) int32 of each row among those of its query, by score (N,), highest first; NaN: 0."""
    if pa.types.is_dictionary(queries.type):  # it may have a value twice
        queries = queries.cast(queries.type.value_type)
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


def _refuse_own(names: Sequence[str]) -> None:
    """Raise UsageError for a column of the input with a name of a column that rank adds; case does not matter."""
    own = next((name for name in names if name.casefold() in (SCORE, RANK, *WRITTEN)), None)
    if own is not None:
        raise UsageError(
            f"rank adds the columns {', '.join((SCORE, RANK, *WRITTEN))}: rename the input's column {own!r}, or leave "
            "it out."
        )


def _rank_frame(frame: Any, scoring: Any, query: str, score: str) -> Any:
    """Return the frame with `score` and `rank`."""
    table = to_arrow(frame)
    _refuse_own(table.column_names)
    scored = scoring(table, prefix=PREFIX)
    ranks = ranks_of(scored[query], _scores(scored[f"{PREFIX}{score}"]))
    made = table.append_column(SCORE, scored[f"{PREFIX}{score}"])
    made = made.append_column(RANK, from_numpy(ranks, null=ranks == 0))
    for name in WRITTEN:
        made = made.append_column(name, scored[name])
    return to_original_frame(frame, made)


@dataclass(kw_only=True)
class _Ranking:
    """The work of numbering scored rows; see `jobs/work.py`."""

    scores: str
    "The folder with the scored rows."
    query: str
    score: str
    columns: list[str]
    name: str = "rank"
    key: str | None = None  # checked when the rows were scored
    environment: Mapping[str, str] = field(default_factory=dict)

    def fit(self, source: Table) -> pa.Schema:
        schema = pa.schema([source.schema.field(name) for name in self.columns])
        at = self.columns.index(self.score)
        return schema.set(at, schema.field(at).with_name(SCORE)).insert(at + 1, pa.field(RANK, pa.int32()))

    def fingerprint(self, source: Table, earlier: Mapping[str, Any]) -> dict[str, Any]:
        return {"format": 1, "job": "rank", "query": self.query, "score": self.score, "columns": self.columns}

    def start(self, out: Transaction, items: list[tuple[Chunk, str]]) -> Generator[WrittenChunk, None, None]:
        """Rank all rows, then write the pending chunks, in this process."""
        chunks = out.plan.chunks
        tables = list(_read(chunks, (self.query, self.score)))
        if not tables:
            return
        whole = pa.concat_tables(tables)
        ranks = ranks_of(whole[self.query], _scores(whole[self.score]))
        first = {chunk.index: start for chunk, start in zip(chunks, np.cumsum([0, *map(len, tables)]), strict=False)}
        for (chunk, name), table in zip(items, _read([chunk for chunk, _ in items], tuple(self.columns)), strict=True):
            mine = ranks[first[chunk.index] : first[chunk.index] + len(table)]
            table = table.select(self.columns)
            made = table.add_column(self.columns.index(self.score) + 1, RANK, from_numpy(mine, null=mine == 0))
            yield WrittenChunk(
                part=out.parts.write(name, made.rename_columns(out.request.schema.names), chunk=chunk.index)
            )

    def provenance(self, out: Transaction, made: Sequence[WrittenChunk], seconds: float) -> dict[str, Any]:
        rows = sum(chunk.rows for chunk in out.pending)
        return {"scores": self.scores, "rows_ranked": rows, "seconds": round(seconds, 3)}


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
