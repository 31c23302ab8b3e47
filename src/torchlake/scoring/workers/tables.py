"""Workers of frames, and of what a job needs before it starts.

tables   score -> the same table with the prediction columns added
stages   add tokens to a table in one process, predictions in another
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from torchlake import plugins
from torchlake.data.batching import Ragged
from torchlake.data.features import INPUT_IDS, Features, from_arrow, to_arrow
from torchlake.engines import Engine, Resources
from torchlake.errors import DataError
from torchlake.models import folders
from torchlake.scoring.rows import ReadyRows, RowReader, ScoringSettings
from torchlake.scoring.runtime_choice import foreign_python, worker_memory
from torchlake.scoring.scorer import Scorer, prepare_runtime
from torchlake.scoring.workers.output import folded, with_errors
from torchlake.tables.arrays import from_numpy, without_dictionaries
from torchlake.tables.chunks import evenly_spaced, sample_rows
from torchlake.tables.reading import isolate_bad_text
from torchlake.tables.table import Table

LENGTH = "length"
"The column with a row's cost in a batch, if that is not its number of tokens."
RANGE_ROWS = 1_000
"The rows of the input from whose vectors the ranges of 8 bits are computed."


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
        for name, kind in types.items():
            table = table.append_column(name, to_arrow(made[name], kind).take(place))
        return with_errors(table, work, work.errors)

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
    rows, _, _ = sample_rows(source, settings.spec.input_columns)
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
