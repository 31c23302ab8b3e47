"""Measures an embedding model on pairs of texts: how well second texts are found, or how cosines follow similarities.

    embeddings of the first texts, of the second ones -> cosines -> with a label column: Spearman, Pearson
                                                      -> without: recall at 1 and 10, mean reciprocal rank at 10

Every second text of the table is a candidate for every first one: N x N products, 1,024 rows at a time, and the vectors
of all rows in memory (3 kB a row of 384 numbers). `limit` or `sample` bounds both.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from torchlake import plugins
from torchlake.config.job import load_job
from torchlake.config.task_spec import TaskSpec, as_columns
from torchlake.errors import DataError, TorchlakeError, UsageError
from torchlake.evaluation.result import Evaluation
from torchlake.evaluation.sections.rows import among_all, stored_name
from torchlake.evaluation.sections.slices import refuse_slices
from torchlake.metrics import Metric, bootstrapped
from torchlake.models.folders import base_folder, model_hash
from torchlake.outputs.staging.spool import spooled
from torchlake.runs import folder as run_folder
from torchlake.tables.arrays import is_text, string_column
from torchlake.tables.failures import count_reasons
from torchlake.tables.record import committed_files
from torchlake.tables.sources._options import read_options
from torchlake.tables.sources.frames import is_frame, to_arrow
from torchlake.tables.table import missing_column, open_table
from torchlake.tasks import _contrastive

PREFIX = "predicted_"
VECTOR, TOKENS = f"{PREFIX}embedding", f"{PREFIX}tokens"
RESAMPLES = 200
BASELINE_PAIRS = 20_000
"Pairs up to which second texts are searched by words in common, and both are scored by the base model, in memory."
BASELINE_AFTER_TRAINING = 2_000
"The same for the base model after a training."

Predict = Callable[..., Any]
"`predict` with the model and its options, without table and columns."


@dataclass(frozen=True, kw_only=True)
class MeasuredPairs:
    """The vectors of a table of pairs, and how well they follow what is wanted."""

    rows: int
    errors: dict[str, int]
    "Failed rows by reason."
    metrics: dict[str, Metric]
    scored: pa.Table
    "All rows: `row_id` or the key, columns asked for, tokens of both texts, and `truncated` and `error` of either."
    usable: np.ndarray
    "Which rows have two vectors, (rows,) bool."
    vectors: np.ndarray
    "(N, 2, D) of the usable rows."
    targets: np.ndarray | None
    "(N,) the similarities wanted."

    @property
    def evaluation(self) -> Evaluation:
        """The result of `evaluate`."""
        failed = sum(self.errors.values())
        return Evaluation(rows=self.rows, failed=failed, errors=self.errors, metrics=self.metrics, resamples=RESAMPLES)


def measure_pairs(
    predict: Predict,
    table: Any,
    folder: Path,
    *,
    text: Any,
    text_pair: Any,
    label: str | None,
    read: Mapping[str, Any],
    slices: Sequence[str] = (),
    keep: Sequence[str] | None = None,
    key: str | None = None,
) -> MeasuredPairs:
    """Measure the pairs of a table; with `keep`, of a report, these columns, the slices and the key are kept.

    Scores each text of a stored table into `folder`. Raises UsageError without `text_pair`, DataError for a table
    without a usable row or with labels that are not numbers, and the errors of `predict`.
    """
    text_pair = tuple(text_pair) if isinstance(text_pair, list) else text_pair
    if text_pair is None:
        raise UsageError(
            "Embeddings are measured on pairs of texts that belong together: name the column of the second text with "
            "text_pair (--text-pair)."
        )
    wanted = list(dict.fromkeys([*([] if label is None else [label]), *slices, *(keep or ())]))
    if is_frame(table) and keep is None:
        frame = to_arrow(table)
        for name in (*as_columns(text), *as_columns(text_pair), *wanted):
            if name not in frame.column_names:
                raise missing_column("the frame", name, frame.schema)
        scored = [predict(frame.select(as_columns(column)), text=column) for column in (text, text_pair)]
        for name in wanted:
            scored = [each.append_column(name, frame[name]) for each in scored]
    else:
        scored = []
        with spooled(table, folder / "first") as stored:
            if slices:
                refuse_slices(open_table(stored, columns=slices, options=read_options(read)).schema, slices)
            for place, column in (("first", text), ("second", text_pair)):
                more = {"columns": wanted, "key": key, "token_counts": keep is not None}
                predict(stored, folder / place, text=column, **more, **read)
                tables = [pq.read_table(file) for file in committed_files(folder / place)]
                if not tables:
                    raise DataError("the table has no rows to evaluate on")
                scored.append(pa.concat_tables(tables))
    return _measured(scored[0], scored[1], label)


def _measured(first: pa.Table, second: pa.Table, label: str | None) -> MeasuredPairs:
    """Return the measures of a table whose first and second texts are scored."""
    if len(first) != len(second):
        raise DataError(f"the table had {len(first):,} rows, then {len(second):,}: it changed while it was evaluated")
    reasons = pc.coalesce(first["error"].combine_chunks(), second["error"].combine_chunks())
    numbers = None if label is None else _numbers(first[label], label)
    if numbers is not None:
        reasons = pc.coalesce(reasons, pc.if_else(pa.array(np.isnan(numbers)), "null_label", None).cast(pa.string()))
    errors = dict(count_reasons(reasons.drop_null()).most_common())
    usable = reasons.is_null()
    if not usable.true_count:
        raise DataError(f"no row of {len(first):,} can be measured: {errors or 'the table is empty'}")
    vectors = np.stack([_vectors(each[VECTOR].filter(usable)) for each in (first, second)], axis=1)
    mask = np.asarray(usable.to_numpy(zero_copy_only=False))
    targets = None if numbers is None else numbers[mask]
    cut = pc.or_(first["truncated"].combine_chunks(), second["truncated"].combine_chunks())
    rows = first.drop_columns([VECTOR, "truncated", "error"]).append_column("truncated", cut)
    if TOKENS in rows.column_names:
        rows = rows.drop_columns([TOKENS]).append_column(TOKENS, pc.add(first[TOKENS], second[TOKENS]))
    return MeasuredPairs(
        rows=len(first),
        errors=errors,
        metrics=metrics_of(vectors, targets),
        scored=rows.append_column("error", reasons),
        usable=mask,
        vectors=vectors,
        targets=targets,
    )


def pair_rows(found: MeasuredPairs, *, key: str, second: str | None, label: str | None) -> pa.Table:
    """Return the rows of rows.parquet: `score` is the cosine. Without a label `rank` is that of the second text among
    all, `prediction` the nearest one, its key if the texts are left out (`second` None); with a label, `prediction` is
    the straight line through the cosines. `random` is the cosine of the first text with the second one of another row.
    """
    cosines = _contrastive.cosines(found.vectors).astype(np.float64)
    usable, rank = pa.array(found.usable), pa.nulls(found.rows, pa.int64())
    order, random = np.random.default_rng(0).permutation(len(cosines)), pa.nulls(len(cosines), pa.float64())
    if len(order) > 1:
        others = np.empty_like(order)
        others[order] = np.roll(order, 1)
        pairs = np.stack([found.vectors[:, 0], found.vectors[others, 1]], axis=1)
        random = pa.array(_contrastive.cosines(pairs).astype(np.float64))
    if found.targets is not None:
        from scipy.stats import linregress

        level = float(np.mean(found.targets)) if len(found.targets) else 0.0
        line = linregress(cosines, found.targets) if np.ptp(cosines) > 0 else None  # no line through one place
        said = pa.array(np.full(len(cosines), level) if line is None else line.intercept + line.slope * cosines)
        loss, right = np.abs(found.targets - said.to_numpy()), pa.nulls(found.rows, pa.bool_())
    else:
        ranks, nearest = _contrastive.ranks(found.vectors)
        texts = found.scored[second or key].filter(usable).combine_chunks()
        said, loss, rank = texts.take(pa.array(nearest)), ranks.astype(np.float64), among_all(ranks, usable)
        right = among_all(ranks == 1, usable)
    fixed = {
        stored_name(key): found.scored[key],
        "label": found.scored[label].cast(pa.float64()) if label else pa.nulls(found.rows, pa.float64()),
        "prediction": among_all(said, usable),
        "score": among_all(cosines, usable),
        "probability": pa.nulls(found.rows, pa.float64()),
        "loss": among_all(loss, usable),
        "right": right,
        "tokens": found.scored[TOKENS].cast(pa.int32()),
        "truncated": found.scored["truncated"],
        "error": found.scored["error"],
        "rank": rank,
        "random": among_all(random, usable),
    }
    names = [name for name in found.scored.column_names if name not in (key, label, TOKENS, "truncated", "error")]
    return pa.table({**fixed, **{stored_name(name): found.scored[name] for name in names}})


def words_in_common(found: MeasuredPairs, text: Sequence[str], second: Sequence[str]) -> dict[str, Any]:
    """Return the section `baseline`: the metrics of cosines of scikit-learn's TF-IDF, which counts common words.

    Empty if the columns of texts were not kept or hold something else, or for more pairs than `BASELINE_PAIRS`.
    """
    columns, usable = [*text, *second], pa.array(found.usable)
    kinds = [found.scored[name].type for name in columns if name in found.scored.column_names]
    if (
        len(kinds) < len(columns)
        or not all(map(is_text, kinds))
        or (len(found.vectors) > BASELINE_PAIRS and found.targets is None)
    ):
        return {}
    from scipy.sparse import vstack
    from sklearn.feature_extraction.text import HashingVectorizer, TfidfTransformer

    read = HashingVectorizer(alternate_sign=False, norm=None, dtype=np.float32)
    sides = []
    for names in (text, second):
        some = [string_column(found.scored[name].filter(usable)).to_pylist() for name in names]
        sides.append(read.transform(" ".join(one or "" for one in texts) for texts in zip(*some, strict=True)))
    weigh = TfidfTransformer().fit(vstack(sides))
    first, other = (weigh.transform(side) for side in sides)
    if found.targets is None:
        metrics = {name: float(share.mean()) for name, share in _contrastive.found_among(first, other).items()}
    else:
        metrics = _contrastive.similarity_metrics(np.asarray(first.multiply(other).sum(axis=1)).ravel(), found.targets)
    return {"baseline": {"answer": "the words in common (cosine of TF-IDF)", "metrics": metrics}}


def before_training(
    found: MeasuredPairs,
    model: Path,
    spec: TaskSpec,
    score: Predict,
    texts: tuple[Sequence[str], Sequence[str]],
    most: int = BASELINE_PAIRS,
) -> dict[str, Any]:
    """Return the section `untrained`: the metrics of the base of the run that the model is from, or why they are left
    out. Empty for a model in no run. `score` is `predict` with its options."""
    run = model.resolve().parent
    if not all((run / name).is_file() for name in ("job.yaml", run_folder.BASE)):
        return {}
    try:
        base = base_folder(load_job(run / "job.yaml").model.base)
        if base is None or not run_folder.began_with(run, model_hash(base)):
            raise DataError("it has changed since the run began")
        if not all(len(names) == 1 and names[0] in found.scored.column_names for names in texts):
            raise DataError("it reads the text of one column, which the report has to keep")
        if len(found.vectors) > most:
            raise DataError(f"there are more than {most:,} pairs")
        rows, sides = found.scored.filter(pa.array(found.usable)), []
        for (name,) in texts:
            scored = score(base, rows.select([name]), text=name, max_length=spec.max_length)
            if VECTOR not in scored.column_names or scored["error"].null_count < len(scored):
                raise DataError("it gives no vectors of these texts")
            sides.append(_vectors(scored[VECTOR]))
    except TorchlakeError as error:
        return {"untrained": {"left_out": str(error).rstrip(".")}}
    metrics = plugins.load("tasks", spec.task).metrics(np.stack(sides, axis=1), found.targets, spec)
    return {"untrained": {"base": str(base), "metrics": metrics}}


def metrics_of(vectors: np.ndarray, targets: np.ndarray | None) -> dict[str, Metric]:
    """Return the metrics, with bootstrap intervals, of vectors (N, 2, D) and similarities (N,), None without."""
    if targets is None:
        shares = _contrastive.found_shares(vectors)

        def found(rows: np.ndarray) -> dict[str, float]:
            return {name: float(share[rows].mean()) for name, share in shares.items()}

        return bootstrapped(found, len(vectors), resamples=RESAMPLES)
    similar = _contrastive.cosines(vectors)

    def correlated(rows: np.ndarray) -> dict[str, float]:
        return _contrastive.similarity_metrics(similar[rows], targets[rows])

    return bootstrapped(correlated, len(vectors), resamples=RESAMPLES)


def _numbers(column: pa.ChunkedArray, label: str) -> np.ndarray:
    """Return labels as (N,) float64, NaN where one is missing. Raises DataError for a column of another type."""
    try:
        numbers = column.combine_chunks().cast(pa.float64())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(f"the label column {label!r} holds {column.type}, not similarities: {error}") from error
    return np.asarray(numbers.to_numpy(zero_copy_only=False))


def _vectors(column: pa.ChunkedArray) -> np.ndarray:
    """Return vectors (N, D) of a column of lists without nulls."""
    flat = np.asarray(pc.list_flatten(column).to_numpy())
    return flat.reshape(len(column), -1)
