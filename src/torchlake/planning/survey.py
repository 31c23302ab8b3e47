"""What `plan` reads: a sample of the table, tokenized as in training, and the model's shape without its weights.

    chunks spread evenly over the table -> every k-th row of each -> the task's `tokenize` -> lengths
    config.json -> the model on torch's meta device (shapes without memory) -> Shape, Parameters

Nothing is random, so the same table gives the same sample. Cost: at most 32,768 rows in memory, the footers (Parquet,
Arrow) or one pass (CSV, JSON lines) of the table, and importing transformers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from torchlake import plugins
from torchlake.config.job import Job
from torchlake.config.task_spec import LabelColumn, TaskSpec
from torchlake.data.batching import Ragged
from torchlake.data.bins import Bins, pack_whole, sequences_of
from torchlake.data.features import INPUT_IDS, Features
from torchlake.data.packing import Blocks, pack
from torchlake.errors import DataError
from torchlake.labels.values import is_missing, split_labels
from torchlake.models.config import image_tokens
from torchlake.preparation.conversations import check_training_columns, with_table
from torchlake.preparation.problem import complete_spec, draft_spec
from torchlake.preparation.row_checks import make_examples
from torchlake.runs.tables import read_options_of
from torchlake.tables.chunks import evenly_spaced, sample_rows
from torchlake.tables.plan import Chunk
from torchlake.tables.reading import ChunkReader
from torchlake.tables.table import open_table
from torchlake.tasks._null_rows import read_inputs

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, kw_only=True)
class TableSurvey:
    """A sample of the training table."""

    rows: int
    "The number of rows of the table."
    sampled: int
    "The number of rows read; all of them in a small table."
    unusable: int
    "The number of these rows that lack text or label."
    truncated: int
    "The number of these rows that are longer than `spec.max_length` tokens."
    cut: int
    "The number of tokens that these rows lose."
    lengths: np.ndarray
    "(N,) int64, the number of tokens of each usable row with special tokens, in the table's order."
    blocks: np.ndarray | None
    "(M,) int64, the number of tokens of each block of packed rows; None for a task that does not pack."
    spec: TaskSpec

    @property
    def whole(self) -> bool:
        """Whether the sample is the table."""
        return self.sampled == self.rows


def survey_table(job: Job, base: Path | None, rows: int) -> TableSurvey:
    """Tokenize at most `rows` rows of `job.data.train` with the tokenizer of the model folder `base`.

    Raises TableError for a missing column, UsageError for conversations that the tokenizer cannot render, DataError for
    unusable labels and for a table without a usable row.
    """
    task, options = plugins.load("tasks", job.task), read_options_of(job, "train")
    drafted = with_table(draft_spec(job), job.data.train, options)
    table = open_table(job.data.train, columns=drafted.columns, options=options)
    check_training_columns(table.schema, task, drafted, table.source, base)
    pool, _, plan = sample_rows(table, drafted.columns)
    pool = pool.take(pa.array(evenly_spaced(len(pool), min(len(pool), rows))))
    found = None
    if drafted.label is not None:
        if not _has_usable_row(pool, task, drafted):
            raise _no_usable_row(table.source, len(pool), drafted)
        found = _find_labels(job, pool, plan.chunks, whole=len(pool) == plan.rows, source=table.source)
        found = task.name_labels(found, drafted)
    spec = complete_spec(drafted, found, max_length=task.max_length(base, job.model.max_length))
    spec = task.complete(spec, base)
    processor = task.load_processor(base, spec, scoring=False)
    made = make_examples(task, processor, pool, {}, replace(spec, label=None), bad_rows="drop")
    labeled = np.ones(len(pool), bool) if spec.label is None else _labeled(pool[spec.label])
    features = made.features.take(np.flatnonzero(labeled[made.rows]))
    if not len(features):
        raise _no_usable_row(table.source, len(pool), drafted)
    tokens = features.arrays.get(INPUT_IDS)
    patches = None if base is None or spec.max_length else image_tokens(base)
    return TableSurvey(
        rows=plan.rows,
        sampled=len(pool),
        unusable=len(pool) - len(features),
        truncated=int((features.cut > 0).sum()),
        cut=int(features.cut.sum()),
        lengths=features.lengths if patches is None else np.full(len(features), patches, np.int64),
        blocks=_block_lengths(features, tokens, spec) if task.packs and isinstance(tokens, Ragged) else None,
        spec=spec,
    )


def _has_usable_row(pool: pa.Table, task: Any, spec: TaskSpec) -> bool:
    """Return whether any row has all inputs and a label."""
    assert spec.label is not None, "the task has labels"
    _, errors = read_inputs(pool, task.inputs, spec, {})
    usable = _labeled(pool[spec.label])
    usable[list(errors)] = False
    return bool(usable.any())


def _no_usable_row(source: str, rows: int, spec: TaskSpec) -> DataError:
    needed = " and ".join(map(repr, spec.input_columns))
    labeled = "" if spec.label is None else f" and a label in {spec.label!r}"
    what = "text" if spec.text else "a value"
    return DataError(
        f"{source}: none of {rows:,} sampled rows has {'both ' * bool(labeled)}{what} in {needed}{labeled}."
    )


def _block_lengths(features: Features, tokens: Ragged, spec: TaskSpec) -> np.ndarray:
    """Return the number of tokens of the blocks into which training packs the rows, (M,) int64."""
    numbers = np.arange(len(tokens))
    if spec.whole:
        blocks: Bins | Blocks = pack_whole(*sequences_of(tokens, features.arrays, numbers), spec.max_length)
    else:
        blocks = pack(tokens, numbers, spec.max_length)
    return blocks.lengths_of(np.arange(len(blocks)))


def _find_labels(job: Job, pool: pa.Table, chunks: Sequence[Chunk], *, whole: bool, source: str) -> LabelColumn:
    """Read the label column from the sample or, if that does not suffice, from the whole table as training does."""
    column, separator = job.data.label, job.data.label_separator
    find = partial(
        plugins.load("tasks", job.task).find_labels,
        problem=job.data.problem,
        drop_bad=job.data.bad_rows == "drop",
    )
    try:
        found: LabelColumn = find(iter([split_labels(pool[column], separator)]))
    except DataError as error:
        if whole:
            raise DataError(f"{source}, column {column!r}: {error}") from error
        reader = ChunkReader((column,))
        try:
            found = find(split_labels(reader.read(chunk)[0][column], separator) for chunk in chunks)
        except DataError as of_all:
            raise DataError(f"{source}, column {column!r}: {of_all}") from of_all
        finally:
            reader.close()
    return found


def _labeled(labels: pa.ChunkedArray) -> np.ndarray:
    return ~np.asarray(is_missing(labels.combine_chunks()))
