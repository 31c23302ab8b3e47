"""Guess which columns of a table are the text and the label, from a sample of its rows.

    text     strings of several words; the column `text`, or the one that is much longer than the others
    pair     two columns with names such as premise and hypothesis
    label    what the task's `find_labels` accepts, except identifiers; a column with a usual name, or the only one

The rules for labels are those of training. A guess that is not clear is an error that lists the choices.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchlake.config.sections.data import DataConfig
from torchlake.config.task_spec import LabelColumn
from torchlake.errors import DataError, UsageError
from torchlake.labels.column import check_classes
from torchlake.tables.arrays import is_blank, is_text, string_column
from torchlake.tables.chunks import sample_rows, sampled_chunks
from torchlake.tables.plan import Chunk
from torchlake.tables.table import Table, missing_column

TEXT, LABEL = (DataConfig.model_fields[name].default for name in ("text", "label"))
LABEL_NAMES = (LABEL, "labels", "class", "category", "target", "sentiment", "stars", "rating")
"Usual names of label columns; the first of them that a table has is used."
PAIRS = (
    ("premise", "hypothesis"),
    ("sentence1", "sentence2"),
    ("sentence_1", "sentence_2"),
    ("sentence_A", "sentence_B"),
    ("question1", "question2"),
    ("question", "answer"),
    ("question", "sentence"),
    ("question", "passage"),
    ("query", "document"),
    ("query", "passage"),
    ("text1", "text2"),
    ("text_a", "text_b"),
)
"Usual names of the two columns of pairs of texts. Other columns are never guessed to be a pair."
KEY_NAME = re.compile(r"(?:^|[^A-Za-z])(?i:id|key|uuid|guid)$|[a-z](?:Id|ID|Key|Uuid|UUID)$")
KEY_SHARE, UNNAMED_KEY_SHARE = 0.5, 0.95
"The least share of values that differ in a column that seems to identify rows, with and without such a name."
MUCH_LONGER = 2.0
"A text column without the usual name must be this many times as long as the others."
# A letter, a space and more; or a letter of a script without spaces: Thai, kana, Chinese.
WORDS = r"\pL\s+\S|[\x{0E00}-\x{0E7F}\x{3040}-\x{30FF}\x{3400}-\x{9FFF}]"


@dataclass(frozen=True, kw_only=True)
class Surveyed:
    """What a sample of a column holds."""

    name: str
    type: pa.DataType
    lengths: np.ndarray | None
    "(N,) characters of each string that is not blank; None for other types."
    has_words: bool
    "Whether most of the strings have several words."
    empty: int
    "Rows that are null or blank."
    distinct: int
    "Its number of values that are not null; 0 for lists."
    repeated: Mapping[Any, int]
    "If it seems to identify rows, the values that several rows have, with their number."
    is_key: bool
    "Whether each row has another value: a whole number, or a string of one word."
    label: LabelColumn | None
    "What it holds as a label; None if it cannot be one."
    refusal: str
    "Why it cannot be a label; else empty."

    @property
    def mean_length(self) -> float:
        """The mean of `lengths`; 0 without any."""
        return 0.0 if self.lengths is None or not len(self.lengths) else float(self.lengths.mean())


class SampledRows(NamedTuple):
    """The rows of a table that are looked at."""

    columns: list[Surveyed]
    "Those that can be text or label."
    rows: int
    "The rows of the table."
    values: pa.Table
    "The columns of the rows in the sample."
    chunks: list[Chunk]

    def names(self, rows: Sequence[int]) -> list[str]:
        """Return the row ids of some rows of the sample."""
        ends = np.cumsum([chunk.rows for chunk in self.chunks])
        found = [
            (self.chunks[at], row - int(ends[at]))
            for row, at in zip(rows, np.searchsorted(ends, rows, "right"), strict=True)
        ]
        return [f"{chunk.name}:{chunk.number(row + chunk.rows)}" for chunk, row in found]


def survey_columns(table: Table, task: Any) -> SampledRows:
    """Return a sample of the table, and what its columns hold."""
    names = [field.name for field in table.schema if _is_plain(field.type)]
    values, _, plan = sample_rows(table, names)
    return SampledRows([_survey(name, values[name], task) for name in names], plan.rows, values, sampled_chunks(plan))


def choose_text(table: Table, columns: Sequence[Surveyed], given: str | None) -> Surveyed:
    """Return the text column. Raises UsageError listing the choices if it is not clear, or if `given` has no text."""
    if given is not None:
        column = _named(table, columns, given)
        if column is None or column.lengths is None:
            raise UsageError(f"--text {given}: the column holds {table.schema.field(given).type}, not text.")
        return column
    texts = sorted((one for one in columns if one.has_words), key=lambda one: -one.mean_length)
    usual = [one for one in texts if one.name.lower() == TEXT]
    if usual or texts:
        best = (usual or texts)[0]
        if usual or len(texts) == 1 or best.mean_length >= MUCH_LONGER * texts[1].mean_length:
            return best
        found = "\n".join(f"  {one.name}: {one.mean_length:.0f} characters on average" for one in texts)
        raise UsageError(
            f"{table.source}: several columns hold texts. Name one of them, for example --text {best.name}\n{found}"
        )
    raise UsageError(
        f"{table.source}: no column holds texts of several words. Name the column of the texts with --text. "
        f"It has: {_listed(table)}."
    )


def choose_texts(
    table: Table, columns: Sequence[Surveyed], text: str | None, pair: str | None
) -> tuple[Surveyed, Surveyed | None]:
    """Return the text column, and that of the second text if the rows are pairs.

    Only two columns of texts with the names of `PAIRS`, of which `text` is the first if given, are guessed to be a
    pair. Raises the errors of `choose_text`.
    """
    if pair is not None:
        first = choose_text(table, [one for one in columns if text is not None or one.name != pair], text)
        second = _named(table, columns, pair)
        if second is None or second.lengths is None:
            raise UsageError(f"--text-pair {pair}: the column holds {table.schema.field(pair).type}, not text.")
        if second.name == first.name:
            raise UsageError(f"{pair!r} cannot be both texts of a pair. Name them with --text and --text-pair.")
        return first, second
    by_name = {one.name.lower(): one for one in columns if one.lengths is not None}
    if text is None and TEXT not in by_name:
        for names in PAIRS:
            found = [by_name.get(name.lower()) for name in names]
            if found[0] is not None and found[1] is not None and (found[0].has_words or found[1].has_words):
                return found[0], found[1]
    return choose_text(table, columns, text), None


def choose_label(table: Table, columns: Sequence[Surveyed], texts: Collection[str], given: str | None) -> Surveyed:
    """Return the label column. Raises UsageError listing the choices if it is not clear, or if `given` has text."""
    if given is not None:
        column = _named(table, columns, given)
        if column is None:
            raise UsageError(
                f"--label {given}: the column holds {table.schema.field(given).type}, which cannot be a label."
            )
        if given in texts:
            raise UsageError(f"{given!r} cannot be both the text and the label. Name them with --text and --label.")
        return column
    others = [one for one in columns if one.name not in texts]
    labels = [one for one in others if one.label is not None]
    usual = sorted(
        (one for one in labels if one.name.lower() in LABEL_NAMES), key=lambda one: LABEL_NAMES.index(one.name.lower())
    )
    if usual or len(labels) == 1:
        return (usual or labels)[0]
    if labels:
        found = "\n".join(f"  {one.name}: {describe_label(one.label)}" for one in labels if one.label is not None)
        raise UsageError(
            f"{table.source}: several columns can be the label. Name one of them, for example --label "
            f"{labels[0].name}\n{found}"
        )
    why = "".join(f"\n  {one.name}: {one.refusal}" for one in others)
    raise UsageError(
        f"{table.source}: no column can be the label. Name one with --label, or add one to the table.{why}"
    )


def describe_label(found: LabelColumn) -> str:
    """Return a label column in a few words."""
    if found.problem == "regression":
        return f"regression, mean {found.mean:.4g}, standard deviation {found.deviation:.4g}"
    return f"{found.problem}, {len(found.labels):,} class{'es' * (len(found.labels) != 1)}"


def _survey(name: str, values: pa.ChunkedArray, task: Any) -> Surveyed:
    lengths, has_words, empty, label, refusal = None, False, values.null_count, None, ""
    is_text = _is_text(values.type)
    if is_text:
        texts = string_column(values)
        texts = texts.filter(pc.invert(is_blank(texts)))
        lengths, empty = pc.utf8_length(texts).to_numpy(zero_copy_only=False), len(values) - len(texts)
        has_words = 2 * (pc.sum(pc.match_substring_regex(texts, WORDS)).as_py() or 0) > len(texts)
    try:
        label = task.find_labels(iter([values]), drop_bad=True)
        check_classes(label)
    except DataError as error:
        label, refusal = None, str(error)
    distinct = 0 if pa.types.is_nested(values.type) else pc.count_distinct(values).as_py()
    may_be_key = not has_words and (is_text or pa.types.is_integer(values.type))
    is_key = may_be_key and not empty and 1 < distinct == len(values)
    least, known = KEY_SHARE if KEY_NAME.search(name) else UNNAMED_KEY_SHARE if is_text else 1.0, values.drop_null()
    repeated: dict[Any, int] = {}
    if may_be_key and least * len(known) <= distinct < len(known):
        counts = pc.value_counts(known)
        often = counts.filter(pc.greater(counts.field("counts"), 1))
        repeated = dict(zip(often.field("values").to_pylist(), often.field("counts").to_pylist(), strict=True))
    return Surveyed(
        name=name,
        type=values.type,
        lengths=lengths,
        has_words=has_words,
        empty=empty,
        distinct=distinct,
        repeated=repeated,
        is_key=is_key,
        label=label,
        refusal=refusal,
    )


def _named(table: Table, columns: Sequence[Surveyed], name: str) -> Surveyed | None:
    """Return the column of that name; None if its type was not read. Raises TableError if the table has no such
    column."""
    if name not in table.schema.names:
        raise missing_column(table.source, name, table.schema)
    return next((one for one in columns if one.name == name), None)


def _is_text(kind: pa.DataType) -> bool:
    return is_text(kind.value_type if pa.types.is_dictionary(kind) else kind)


def _is_plain(kind: pa.DataType) -> bool:
    """Return whether values of the type may be texts or labels. Images and other large values are not worth reading."""
    types = pa.types
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _is_text(kind.value_type)
    number = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
    return number or types.is_boolean(kind) or types.is_null(kind) or _is_text(kind)


def _listed(table: Table) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in table.schema)
