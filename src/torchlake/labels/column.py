"""The label column of a training table: read as the task reads it, and checked for labels that cannot be learned.

Cost: one pass over the column, wherever `spread` runs it. Does not import torch.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import pyarrow as pa

from torchlake.config.sections.data import DataConfig
from torchlake.config.task_spec import Label, LabelColumn, TaskSpec
from torchlake.errors import DataError
from torchlake.labels.values import split_labels
from torchlake.storage.spread import Spread, in_process
from torchlake.tables.chunks import plan_chunks
from torchlake.tables.keys import ITEM_ROWS, READ_BYTES, bundled
from torchlake.tables.plan import Chunk
from torchlake.tables.reading import ChunkReader
from torchlake.tables.sources._options import ReadOptions
from torchlake.tables.table import open_table

SEPARATORS = ("|", ";", ",", "/")
MAX_SINGLETON_CLASSES = 10
"Classes with one row that are accepted in a table of any size."


def read_labels(
    data: DataConfig, spec: TaskSpec, task: Any, options: ReadOptions, *, spread: Spread = in_process
) -> LabelColumn:
    """Return the content of the training table's label column. Raises DataError naming the column."""
    table = open_table(data.train, columns=spec.columns, options=options, spread=spread)
    plan = plan_chunks(table, columns=(data.label,), hashed=False, spread=spread)
    count = partial(task.count_labels, problem=data.problem, drop_bad=data.bad_rows == "drop")
    bundles = bundled(plan.chunks, [chunk.rows for chunk in plan.chunks], ITEM_ROWS)
    try:
        read = partial(_count, data.label, spec.label_separator, count)
        parts = spread(read, bundles, size=plan.rows * READ_BYTES, name="read the labels")
        with closing(parts):
            found: LabelColumn = task.name_labels(task.decide_labels(parts, data.problem), spec)
        check_classes(found)
    except DataError as error:
        raise DataError(f"{table.source}, column {data.label!r}: {error}") from error
    return found


def _count(
    column: str, separator: str | None, count: Callable[[Iterator[pa.ChunkedArray]], Any], chunks: Sequence[Chunk]
) -> Any:
    """Return what `count` finds in these chunks of the column."""
    reader = ChunkReader((column,))
    try:
        return count(split_labels(reader.read(chunk)[0][column], separator) for chunk in chunks)
    finally:
        reader.close()


def check_classes(found: LabelColumn) -> None:
    """Raise DataError if most labels occur once, as in a column of identifiers."""
    single = _single_labels(found)
    if len(single) <= max(MAX_SINGLETON_CLASSES, found.rows // 2):
        return
    number = "" if isinstance(single[0], str) else " If it is a number to predict, set data.problem to regression."
    raise DataError(
        f"{len(single):,} of {found.rows:,} rows have a label that no other row has ({_first(single)}): it identifies "
        f"rows and cannot be learned. Name the column of the classes with data.label.{number}"
    )


def label_warnings(found: LabelColumn) -> list[str]:
    """Return what a user should know about a label column: another way to read it, classes with a single row, several
    labels in one."""
    single = _single_labels(found)
    rare = (
        f"{len(single):,} of {len(found.labels):,} classes have a single row ({_first(single)}): such classes are hard "
        "to learn, and are not in the validation rows taken from the training table"
    )
    mark, several = found_separator(found)
    lists = (
        f"{len(several):,} of {len(found.labels):,} classes seem to be several labels in one ({_first(several)}): "
        f'data.label_separator: "{mark}" reads them as lists'
    )
    return [*([] if found.note is None else [found.note]), *([rare] if single else []), *([lists] if several else [])]


def found_separator(found: LabelColumn) -> tuple[str, list[Label]]:
    """Return what seems to separate labels within the classes, and the classes that it separates; () if nothing does.

    Most of the labels in them occur in other classes, too: "good|bad" beside "good" and "bad", or "a, b" beside "b, c".
    """
    words = [label for label in found.labels if isinstance(label, str)] if found.problem == "single_label" else []
    for mark in SEPARATORS:
        parts = {word: {part.strip() for part in word.split(mark)} - {""} for word in words}
        several: list[Label] = [word for word in words if len(parts[word]) > 1]
        often = Counter(part for each in parts.values() for part in each)
        shared = [often[part] > 1 for word in several for part in parts[str(word)]]
        if 2 * sum(shared) > len(shared):
            return mark, several
    return "", []


def _single_labels(found: LabelColumn) -> list[Label]:
    if found.problem != "single_label":
        return []
    return [label for label, rows in zip(found.labels, found.counts, strict=True) if rows == 1]


def _first(labels: Sequence[Label]) -> str:
    return ", ".join(map(repr, labels[:3])) + (" ..." if len(labels) > 3 else "")
