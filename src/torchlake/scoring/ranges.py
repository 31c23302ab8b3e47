"""The ranges of vectors in 8 bits (`embedding="int8"`): each number's lowest and highest value, found once per output.

    sample of the input, 1,000 rows -> vectors (N, D) -> ranges (2, D), in the fingerprint of the job

If the ranges came from the vectors of a chunk, a row's numbers would depend on other rows. An interrupted job, and one
that adds to a table, use the ranges that are recorded there, if they are from the same model. Cost: scoring the sample.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from torchlake.engines import Engine, Resources
from torchlake.errors import DataError
from torchlake.scoring.rows import ScoringSettings
from torchlake.scoring.scorer import Scorer, worker_memory
from torchlake.tables.chunks import evenly_spaced, sample_rows
from torchlake.tables.table import Table

SAMPLE_ROWS = 1_000


def with_ranges(
    settings: ScoringSettings, source: Table, earlier: Mapping[str, Any], engine: Engine
) -> ScoringSettings:
    """Return the settings with ranges, if vectors are requested in 8 bits; `earlier` is the output's fingerprint.

    Raises DataError if no row of the sample has a vector.
    """
    if settings.embedding != "int8":
        return settings
    recorded = earlier.get("ranges")
    if recorded is not None and earlier.get("model") == settings.model_hash:
        return replace(settings, ranges=(tuple(recorded[0]), tuple(recorded[1])))
    rows, _ = sample_rows(source, settings.spec.input_columns)
    rows = rows.take(pa.array(evenly_spaced(len(rows), min(len(rows), SAMPLE_ROWS))))
    worker = partial(_make_worker, replace(settings, embedding="float32"))
    memory = worker_memory(settings.model)
    (ranges,) = engine.run_chunks(worker, [rows], resources=Resources(processes=1, memory=memory))
    if ranges is None:
        raise DataError(f"{source.source}: no row of the sample has a vector, from which the 8-bit ranges are computed")
    return replace(settings, ranges=ranges)


def _make_worker(settings: ScoringSettings) -> Callable[[Iterator[pa.Table]], Iterator[Any]]:
    scorer = Scorer(settings=settings)

    def worker(tables: Iterator[pa.Table]) -> Iterator[Any]:
        for table in tables:
            vectors = scorer.task.read_answers(scorer.score(scorer.read(table, {})), scorer.spec)
            vectors = vectors[np.isfinite(vectors).all(axis=1)]
            yield (tuple(vectors.min(axis=0).tolist()), tuple(vectors.max(axis=0).tolist())) if len(vectors) else None

    return worker
