"""Measures an embedding model on pairs of texts: how well second texts are found, or how cosines follow similarities.

    embeddings of the first texts, of the second ones -> cosines -> with a label column: Spearman, Pearson
                                                      -> without: recall at 1 and 10, mean reciprocal rank at 10

Every second text of the table is a candidate for every first one: N x N products, 1,024 rows at a time, and the vectors
of all rows in memory (3 kB a row of 384 numbers). `limit` or `sample` bounds both.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from torchlake.config.task_spec import as_columns
from torchlake.errors import DataError, UsageError
from torchlake.metrics import Metric, bootstrapped
from torchlake.outputs.staging.spool import spooled
from torchlake.tables.failures import count_reasons
from torchlake.tables.record import committed_files
from torchlake.tables.sources.frames import is_frame, to_arrow
from torchlake.tables.table import missing_column
from torchlake.tasks import _contrastive

PREFIX = "predicted_"
VECTOR = f"{PREFIX}embedding"
RESAMPLES = 200

Predict = Callable[..., Any]
"`predict` with the model and its options, without table and columns."


def measure_pairs(
    predict: Predict, table: Any, folder: Path, *, text: Any, text_pair: Any, label: str | None, read: Mapping[str, Any]
) -> tuple[int, dict[str, int], dict[str, Metric]]:
    """Return the rows of a table of pairs, the failed ones by reason, and the metrics of the others.

    Scores each text of a stored table into `folder`. Raises UsageError without `text_pair`, DataError for a table
    without a usable row or with labels that are not numbers, and the errors of `predict`.
    """
    text_pair = tuple(text_pair) if isinstance(text_pair, list) else text_pair
    if text_pair is None:
        raise UsageError(
            "Embeddings are measured on pairs of texts that belong together: name the column of the second text with "
            "text_pair (--text-pair)."
        )
    keep = [] if label is None else [label]
    if is_frame(table):
        frame = to_arrow(table)
        for name in (*as_columns(text), *as_columns(text_pair), *keep):
            if name not in frame.column_names:
                raise missing_column("the frame", name, frame.schema)
        scored = [predict(frame.select(as_columns(column)), text=column) for column in (text, text_pair)]
        scored = [each.append_column(name, frame[name]) for each in scored for name in keep] if keep else scored
    else:
        scored = []
        with spooled(table, folder) as stored:
            for place, column in (("first", text), ("second", text_pair)):
                predict(stored, folder / place, text=column, columns=keep, **read)
                files = committed_files(folder / place)
                tables = [pq.read_table(file, columns=[VECTOR, "error", *keep]) for file in files]
                if not tables:
                    raise DataError("the table has no rows to evaluate on")
                scored.append(pa.concat_tables(tables))
    first, second = scored
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
    vectors = np.stack([_vectors(each[VECTOR].filter(usable)) for each in scored], axis=1)
    wanted = None if numbers is None else numbers[usable.to_numpy(zero_copy_only=False)]
    return len(first), errors, metrics_of(vectors, wanted)


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
