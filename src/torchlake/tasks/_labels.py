"""Labels: what a column of them asks for, and how they become numbers.

    strings, integers, booleans   single label; the classes, sorted, keep their type through to the output
    lists of strings              multi label; any number of classes per row, also none
    floats                        regression

A column of strings may come from a file without types (CSV). So strings that all read as integers, written as Python
writes them ("7", not "007"), are integers, and strings that all read as finite numbers are floats.
Price: one pass of Arrow's `unique` and at most 10,000 classes in memory.
"""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchlake.errors import DataError
from torchlake.models import Label, Problem, TaskSpec

MAX_INTEGER_CLASSES = 1_000
MAX_CLASSES = 10_000
INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")
NUMBER = re.compile(r"-?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,2})?")


def find_labels(arrays: Iterator[pa.Array]) -> tuple[Problem, tuple[Label, ...]]:
    """The problem and its classes, from all pieces of the label column. Nulls are passed over.

    Raises DataError when there is nothing to tell apart, when there are too many classes, or for a type that is none
    of a label.
    """
    kinds: set[str] = set()
    seen: set[Any] = set()
    many_numbers = False
    for array in arrays:
        array = _plain(array)
        if len(array) == array.null_count:
            continue
        kind = _kind(array.type)
        kinds.add(kind)
        if len(kinds) > 1:
            raise DataError(f"the label column holds {' and '.join(sorted(kinds))}; it must be of one type")
        if kind == "floats":
            _check_finite(array)
            continue
        values = array.flatten() if kind == "lists of strings" else array
        seen.update(pc.unique(values.drop_null()).to_pylist())
        if kind == "integers":
            _check_integers(seen)
        elif len(seen) > MAX_CLASSES:
            _check_words(seen)
            many_numbers, seen = True, _thinned(seen)
    if not kinds:
        raise DataError("the label column is empty, or null in every row")
    if many_numbers:
        _check_words(seen)
    return _problem(kinds.pop(), seen)


def target_type(spec: TaskSpec) -> pa.DataType:
    """The type of encoded labels: int64, list<float32> with one number per class, or float32."""
    if spec.problem == "multi_label":
        return pa.list_(pa.float32())
    return pa.int64() if spec.problem == "single_label" else pa.float32()


def encode_labels(array: pa.Array, spec: TaskSpec) -> pa.Array:
    """Labels as targets: the class's number, 0.0 or 1.0 per class, or the number itself; nulls stay null.

    Raises DataError naming a label that the model does not know and the rows that have it.
    """
    array = _plain(array)
    if len(array) == array.null_count:
        return pa.nulls(len(array), target_type(spec))
    if spec.problem == "regression":
        return _encode_numbers(array)
    if spec.problem == "single_label":
        values = _as_labels(array, spec)
        return _index(values, spec).cast(pa.int64())
    if _kind(array.type) != "lists of strings":
        raise DataError(f"the label column {spec.label!r} holds {array.type}; the model expects lists of strings")
    members = array.flatten()
    if members.null_count:
        raise DataError(f"the label column {spec.label!r} holds lists with a null in them")
    hot = np.zeros((len(array), len(spec.labels)), dtype=np.float32)
    hot[pc.list_parent_indices(array).to_numpy(), _index(members, spec).to_numpy()] = 1.0
    offsets = pa.array(np.arange(len(array) + 1, dtype=np.int32) * len(spec.labels))
    return pa.ListArray.from_arrays(offsets, pa.array(hot.ravel()), mask=array.is_null() if array.null_count else None)


def _plain(array: pa.Array | pa.ChunkedArray) -> pa.Array:
    """One array, not dictionary-encoded, of plain string or list type."""
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    kind = array.type
    if pa.types.is_string_view(kind) or pa.types.is_large_string(kind):
        array = array.cast(pa.string())
    if pa.types.is_string(array.type):
        # An empty cell of a file without types is no label; no class is named by nothing.
        return pc.if_else(pc.equal(array, ""), pa.scalar(None, pa.string()), array)
    if pa.types.is_large_list(kind) or pa.types.is_list_view(kind) or pa.types.is_fixed_size_list(kind):
        return array.cast(pa.list_(kind.value_type))
    return array


def _kind(kind: pa.DataType) -> str:
    types = pa.types
    if types.is_boolean(kind):
        return "booleans"
    if types.is_integer(kind):
        return "integers"
    if types.is_floating(kind) or types.is_decimal(kind):
        return "floats"
    if types.is_string(kind):
        return "strings"
    if types.is_list(kind) and (types.is_string(kind.value_type) or types.is_large_string(kind.value_type)):
        return "lists of strings"
    raise DataError(
        f"the label column holds {kind}; a label is a string, an integer or a boolean (one class per row), "
        "a list of strings (several), or a float (a number to predict)"
    )


def _check_integers(seen: set[Any]) -> None:
    if len(seen) > MAX_INTEGER_CLASSES:
        raise DataError(
            f"the label column holds more than {MAX_INTEGER_CLASSES:,} distinct integers, too many for classes. "
            "Cast it to float to predict a number, or to words if they are classes."
        )


def _check_words(seen: set[Any]) -> None:
    """Too many distinct strings are fine only if they are numbers that a file without types wrote as text."""
    word = next((value for value in seen if not NUMBER.fullmatch(value)), None)
    if word is not None:
        raise DataError(
            f"the label column holds more than {MAX_CLASSES:,} distinct strings, {word[:80]!r} among them. "
            "Is it the right column?"
        )


def _thinned(seen: set[Any]) -> set[Any]:
    """Of very many numbers as text, as few as still show what they are: memory stays constant."""
    integers = sorted(value for value in seen if INTEGER.fullmatch(value))[: MAX_INTEGER_CLASSES + 1]
    return {*integers, *sorted(value for value in seen if not INTEGER.fullmatch(value))[:1]}


def _problem(kind: str, seen: set[Any]) -> tuple[Problem, tuple[Label, ...]]:
    if kind == "floats":
        return "regression", ()
    if kind == "lists of strings" and seen:
        return "multi_label", tuple(sorted(seen))
    if kind == "strings" and all(INTEGER.fullmatch(value) for value in seen):
        seen = {int(value) for value in seen}
        _check_integers(seen)
    elif kind == "strings" and all(NUMBER.fullmatch(value) for value in seen):
        return "regression", ()
    if len(seen) < 2:
        shown = f"only {next(iter(seen))!r}" if seen else "no label at all"
        raise DataError(
            f"the label column holds {shown} in every row; there is nothing to learn. Give 2 classes or more."
        )
    return "single_label", tuple(sorted(seen))


def _check_finite(array: pa.Array) -> None:
    wrong = pc.sum(pc.invert(pc.is_finite(array))).as_py() or 0
    if wrong:
        raise DataError(f"the label column holds {wrong:,} numbers that are NaN or infinite; mend or null them")


def _encode_numbers(array: pa.Array) -> pa.Array:
    try:
        numbers = array.cast(pa.float64())
    except pa.ArrowInvalid as error:
        raise DataError(f"the label column holds something that is no number: {error}") from None
    except pa.ArrowNotImplementedError:
        raise DataError(f"the label column holds {array.type}; the model predicts numbers") from None
    _check_finite(numbers)
    return numbers.cast(pa.float32())


def label_type(spec: TaskSpec) -> pa.DataType:
    """The Arrow type of one of the model's classes."""
    kind = type(spec.labels[0])
    return pa.bool_() if kind is bool else pa.int64() if kind is int else pa.string()


def _as_labels(array: pa.Array, spec: TaskSpec) -> pa.Array:
    """Labels in the type of the model's classes, where the table wrote them in another one."""
    wanted = label_type(spec)
    if array.type == wanted:
        return array
    try:
        # As text first: Arrow would make True of any integer but 0.
        return array.cast(pa.string()).cast(wanted) if pa.types.is_boolean(wanted) else array.cast(wanted)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(
            f"the label column {spec.label!r} holds {array.type} that are not of the model's classes "
            f"({_known(spec)}): {error}"
        ) from None


def _index(values: pa.Array, spec: TaskSpec) -> pa.Array:
    """The number of each label among the model's classes; null for null."""
    index = pc.index_in(values, pa.array(spec.labels, label_type(spec)))
    unknown = pc.filter(values, pc.and_(index.is_null(), values.is_valid()))
    if len(unknown):
        counts = sorted(pc.value_counts(unknown).to_pylist(), key=lambda pair: (-pair["counts"], str(pair["values"])))
        shown = ", ".join(f"{pair['values']!r} ({pair['counts']:,} rows)" for pair in counts[:3])
        more = f" and {len(counts) - 3} more" if len(counts) > 3 else ""
        raise DataError(
            f"the label column {spec.label!r} holds labels that the model does not know: {shown}{more}. "
            f"It knows: {_known(spec)}."
        )
    return index


def _known(spec: TaskSpec) -> str:
    more = f" and {len(spec.labels) - 20} more" if len(spec.labels) > 20 else ""
    return ", ".join(repr(label) for label in spec.labels[:20]) + more
