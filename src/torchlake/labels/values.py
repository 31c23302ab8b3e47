"""The values of a label column of any Arrow type: their kind, several labels in a cell (`label_separator`), their
conversion to numbers, and the moments of numbers."""

import math
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchlake.errors import DataError
from torchlake.tables.arrays import is_text, plain_column, without_dictionaries

LISTS = "lists of strings"


@dataclass
class Moments:
    """Running count, mean and sum of squared deviations."""

    count: float = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, values: np.ndarray, counts: np.ndarray | None = None) -> None:
        """Add `values` (N,) float64, each `counts` (N,) times."""
        if not len(values):
            return
        weights = np.ones(len(values)) if counts is None else counts.astype(np.float64)
        count = float(weights.sum())
        mean = float(values @ weights) / count
        between = mean - self.mean
        self.squares += float((values - mean) ** 2 @ weights) + between**2 * self.count * count / (self.count + count)
        self.count += count
        self.mean += between * count / self.count

    def merge(self, other: "Moments") -> None:
        """Add the values that `other` counted."""
        if not other.count or not self.count:
            found = other if other.count else self
            self.count, self.mean, self.squares = found.count, found.mean, found.squares
            return
        between, count = other.mean - self.mean, self.count + other.count
        self.squares += other.squares + between**2 * self.count * other.count / count
        self.mean += between * other.count / count
        self.count = count

    @property
    def deviation(self) -> float:
        """The standard deviation; 1 if all numbers are equal."""
        return math.sqrt(self.squares / self.count) or 1.0


def to_plain_array(array: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return one array of string or list type, without dictionary encoding."""
    array = plain_column(array)
    kind = array.type
    if pa.types.is_float16(kind):  # Arrow has no value_counts for float16
        return array.cast(pa.float32())
    if is_text(kind):
        array = array.cast(pa.string())
        return pc.if_else(is_missing(array), pa.scalar(None, pa.string()), array)
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):  # Arrow 25 casts them to invalid lists
        ends = np.cumsum(np.append(0, pc.list_value_length(array).fill_null(0))).astype(np.int32)
        missing = array.is_null() if array.null_count else None
        array = pa.ListArray.from_arrays(pa.array(ends), array.flatten(), mask=missing)
    if pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        array = array.cast(pa.list_(kind.value_type))
    if pa.types.is_list(array.type):
        members = without_dictionaries(array.type.value_type)
        if is_text(members) or pa.types.is_null(members):
            return array.cast(pa.list_(pa.string()))
    return array


def split_labels(labels: pa.Array | pa.ChunkedArray, separator: str | None) -> pa.Array | pa.ChunkedArray:
    """Return strings as lists of the labels between separators, without the blanks around them; nulls are kept.

    A string of separators alone is a row without labels. Other types, and all of them without a separator, stay.
    """
    if separator is None or not is_text(labels.type):
        return labels
    plain = to_plain_array(labels)
    lists = pc.split_pattern(plain, separator)
    members = pc.utf8_trim_whitespace(lists.flatten())
    named = np.asarray(pc.not_equal(members, ""))
    ends = np.cumsum(np.asarray(lists.value_lengths().fill_null(0)))
    places = np.concatenate([[0], np.cumsum(named)])[np.concatenate([[0], ends])].astype(np.int32)
    kept = members.filter(pa.array(named))
    return pa.ListArray.from_arrays(pa.array(places), kept, mask=plain.is_null() if plain.null_count else None)


def is_missing(labels: pa.Array) -> pa.BooleanArray:
    """Return (N,) bool: which labels are null, or the empty string, as an empty cell of a CSV file is read."""
    missing = pc.is_null(labels)
    return pc.or_(missing, pc.equal(pc.fill_null(labels, ""), "")) if is_text(labels.type) else missing


def kind_of(kind: pa.DataType) -> str:
    """Return the name of a type's values. Raises DataError for a type that cannot be a label."""
    types = pa.types
    if types.is_boolean(kind):
        return "booleans"
    if types.is_integer(kind):
        return "integers"
    if types.is_floating(kind) or types.is_decimal(kind):
        return "floats"
    if types.is_string(kind):
        return "strings"
    if types.is_list(kind) and is_text(kind.value_type):
        return LISTS
    raise DataError(
        f"the label column holds {kind}; a label is a string, an integer or a boolean (one class per row), "
        "a list of strings (several), or a float (a number to predict)"
    )


def as_numbers(array: pa.Array, *, column: str = "the label column", drop_bad: bool = False) -> pa.Array:
    """Return the labels as float64, nulls kept.

    Raises DataError for values that are not numbers, NaN, infinity and numbers beyond float32; `drop_bad` drops them.
    """
    try:
        numbers = array.cast(pa.float64())
    except pa.ArrowNotImplementedError:
        raise DataError(f"{column} holds {array.type}, but the model predicts numbers") from None
    except pa.ArrowInvalid as error:
        if not drop_bad:
            raise DataError(f"{column} holds a value that is not a number: {error}") from None
        known = pa.array([word for word in pc.unique(array.drop_null()).to_pylist() if _is_number(word)], pa.string())
        numbers = array.filter(pc.is_in(array, known)).cast(pa.float64())
    fine = pc.is_finite(numbers.cast(pa.float32(), safe=False))
    if not pc.all(fine, min_count=0).as_py():
        if not drop_bad:
            wrong = pc.sum(pc.invert(fine)).as_py()
            raise DataError(
                f"{column} holds {wrong:,} numbers that are NaN, infinite or too large. Correct them or "
                "set them to null; data.bad_rows=drop leaves such rows out of a training."
            )
        numbers = numbers.filter(fine)
    return numbers


def _is_number(word: str) -> bool:
    try:
        pa.array([word]).cast(pa.float64())
    except pa.ArrowInvalid:
        return False
    return True
