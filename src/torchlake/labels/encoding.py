"""Encode labels as numbers: the class index, 0 or 1 per class, or the number itself.

Another table may store the same labels in a type that differs from the training table's (a CSV file has "1" for 1).
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchlake.config.task_spec import TaskSpec
from torchlake.errors import DataError
from torchlake.labels.values import as_numbers, split_labels, to_plain_array
from torchlake.tables.arrays import from_numpy, from_strings, is_text


def target_type(spec: TaskSpec) -> pa.DataType:
    """Return the type of encoded labels: int64, list<float32> with one number per class, or float32."""
    if spec.problem == "multi_label":
        return pa.list_(pa.float32())
    return pa.int64() if spec.problem == "single_label" else pa.float32()


def encode_labels(array: pa.Array, spec: TaskSpec) -> pa.Array:
    """Encode labels as targets: the class index, 0.0 or 1.0 per class, or the number itself; nulls stay null.

    Raises DataError naming unknown labels and their number of rows.
    """
    array = split_labels(to_plain_array(array), spec.label_separator)
    if len(array) == array.null_count:
        return pa.nulls(len(array), target_type(spec))
    if spec.problem == "regression":
        return as_numbers(array, column=f"the label column {spec.label!r}").cast(pa.float32())
    if spec.problem == "single_label":
        values = _as_labels(array, spec)
        return _index(values, spec).cast(pa.int64())
    if not (pa.types.is_list(array.type) and is_text(array.type.value_type)):
        raise DataError(
            f"the label column {spec.label!r} holds {array.type}, but the model expects lists of its classes "
            f"({_known(spec)})"
        )
    members = array.flatten()
    if members.null_count:
        raise DataError(f"the label column {spec.label!r} holds lists that contain a null")
    hot = np.zeros((len(array), len(spec.labels)), dtype=np.float32)
    hot[pc.list_parent_indices(array).to_numpy(), _index(members, spec).to_numpy()] = 1.0
    offsets = pa.array(np.arange(len(array) + 1, dtype=np.int32) * len(spec.labels))
    return pa.ListArray.from_arrays(offsets, pa.array(hot.ravel()), mask=array.is_null() if array.null_count else None)


def bad_labels(array: pa.Array, spec: TaskSpec) -> dict[int, str]:
    """Return the rows whose label `encode_labels` refuses, with reasons.

    Bisects, over distinct labels if they are comparable; one pass if all are valid. Raises DataError for a type that
    cannot hold such labels.
    """
    array = split_labels(to_plain_array(array), spec.label_separator)
    nested = pa.types.is_nested(array.type)
    if nested != (spec.problem == "multi_label") and not pa.types.is_null(array.type):
        encode_labels(array, spec)
    distinct = array if nested else pc.unique(array)
    bad: list[int] = []
    pending = [(0, len(distinct))]
    while pending:
        first, stop = pending.pop()
        try:
            encode_labels(distinct.slice(first, stop - first), spec)
        except DataError:
            middle = (first + stop) // 2
            if stop - first == 1:
                bad.append(first)
            else:
                pending += [(first, middle), (middle, stop)]
    if not bad:
        return {}
    places = pa.array(bad) if nested else pc.indices_nonzero(pc.is_in(array, distinct.take(pa.array(bad))))
    return {row: f"bad_label: {str(array[row].as_py())[:80]}" for row in places.to_pylist()}


def label_type(spec: TaskSpec) -> pa.DataType:
    """Return the Arrow type of the model's classes."""
    kind = type(spec.labels[0])
    return pa.bool_() if kind is bool else pa.int64() if kind is int else pa.string()


def label_array(spec: TaskSpec) -> pa.Array:
    """Return the model's classes as an array."""
    return from_strings(spec.labels) if isinstance(spec.labels[0], str) else from_numpy(np.array(spec.labels))  # type: ignore[arg-type]


def _as_labels(array: pa.Array, spec: TaskSpec) -> pa.Array:
    """Convert labels to the type of the model's classes."""
    wanted = label_type(spec)
    if array.type == wanted:
        return array
    try:
        if not pa.types.is_string(wanted):
            if pa.types.is_temporal(array.type):  # Arrow casts a second after 1970 to 1
                raise pa.ArrowInvalid("times are not classes of this kind")
            if pa.types.is_decimal(array.type):  # not by floats, which change long identifiers
                array = array.cast(pa.decimal128(38, 0)).cast(pa.int64())
        if pa.types.is_string(array.type) and pa.types.is_integer(wanted):
            return _integers(array)
        # As strings first, because Arrow casts every integer but 0 to True.
        return array.cast(pa.string()).cast(wanted) if pa.types.is_boolean(wanted) else array.cast(wanted)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(
            f"the label column {spec.label!r} holds {array.type} that are not among the model's classes "
            f"({_known(spec)}): {error}"
        ) from None


def _integers(words: pa.Array) -> pa.Array:
    """Parse integers, including "1.0" for 1, as CSV files have it for columns with missing values."""
    try:
        return words.cast(pa.int64())
    except pa.ArrowInvalid:
        return words.cast(pa.float64()).cast(pa.int64())


def _index(values: pa.Array, spec: TaskSpec) -> pa.Array:
    """Return the class index of each label; null for null."""
    index = pc.index_in(values, label_array(spec))
    unknown = pc.filter(values, pc.and_(index.is_null(), values.is_valid()))
    if len(unknown):
        counts = sorted(pc.value_counts(unknown).to_pylist(), key=lambda pair: (-pair["counts"], str(pair["values"])))
        shown = ", ".join(f"{pair['values']!r} ({pair['counts']:,} rows)" for pair in counts[:3])
        more = f" and {len(counts) - 3} more" if len(counts) > 3 else ""
        raise DataError(
            f"the label column {spec.label!r} holds labels that the model does not have: {shown}{more}. "
            f"Its classes: {_known(spec)}."
        )
    return index


def _known(spec: TaskSpec) -> str:
    more = f" and {len(spec.labels) - 20} more" if len(spec.labels) > 20 else ""
    return ", ".join(repr(label) for label in spec.labels[:20]) + more
