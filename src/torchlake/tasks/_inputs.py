"""A task's inputs from the columns of a table, and the rows that lack one of them.

    TEXT     one column of strings, or several that are joined: null or blank in all of them is `null_input`
    NUMBER   columns of numbers, booleans or strings that are numbers: null is `null_input`; text, NaN and infinity are
             `bad_number`
    PROMPT   one column of strings or conversations: null is `null_input`; the task finds other blank rows
    ANY      one column of any type: null is `null_input`

Several texts are joined by `separator` without the blank ones, or put into `template`, where a null is the empty
string.
"""

from collections.abc import Mapping
from string import Formatter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchlake.config.task_spec import SEPARATOR, Columns, TaskSpec, as_columns
from torchlake.errors import TableError
from torchlake.tables.arrays import from_numpy, from_strings, is_blank, nulls_as_empty, string_column, without_rows

TEXT, PROMPT, NUMBER, ANY = "text", "prompt", "number", "any"
PAIR = "text_pair"
NULL_INPUT = "null_input"

Inputs = dict[str, Any]
"A task's inputs by name: an Arrow array, or of NUMBER (N, D) float32."


def columns_of(kinds: Mapping[str, str], spec: TaskSpec) -> dict[str, tuple[str, ...]]:
    """Return the columns of each input that the spec names; a pair's second text and optional inputs may be missing."""
    named: dict[str, Columns | None] = {"text": spec.text, PAIR: spec.text_pair}
    found = {name: as_columns(named.get(name, spec.inputs.get(name)) or "") for name in kinds}
    return {name: columns for name, columns in found.items() if columns}


def check_columns(schema: pa.Schema, kinds: Mapping[str, str], spec: TaskSpec, where: str) -> None:
    """Raise TableError for a column that is missing, or whose values the input cannot have."""
    for name, columns in columns_of(kinds, spec).items():
        for column in columns:
            check_column(schema, name, column, kinds[name], where)


def check_column(schema: pa.Schema, name: str, column: str, kind: str, where: str) -> None:
    """Raise TableError if the table has no such column, or its type does not fit the input's `kind`."""
    argument = f"{name}=" if name in ("text", PAIR) else f"inputs={{{name!r}: ...}}"
    if column not in schema.names:
        raise TableError(
            f"{where}: there is no {name} column {column!r}; the table has: {', '.join(schema.names)}. Name it with "
            f"{argument}."
        )
    held = schema.field(column).type
    held = held.value_type if pa.types.is_dictionary(held) else held
    types = pa.types
    text = any(check(held) for check in (types.is_string, types.is_large_string, types.is_string_view, types.is_null))
    if kind == TEXT and not text:
        raise TableError(
            f"{where}: the {name} column {column!r} holds {held}, not strings; name another with {argument}."
        )
    number = types.is_integer(held) or types.is_floating(held) or types.is_boolean(held) or types.is_decimal(held)
    if kind == NUMBER and not (number or text):
        raise TableError(
            f"{where}: the column {column!r} of the input {name!r} holds {held}, not numbers; name another with "
            f"{argument}."
        )


def read_inputs(
    table: pa.Table, kinds: Mapping[str, str], spec: TaskSpec, unreadable: Mapping[int, str], *, null: str = "error"
) -> tuple[Inputs, dict[int, str]]:
    """Return the inputs of all rows, and {row: reason} for rows that lack one.

    `unreadable` rows are among these. `null="score"` reads a null text as the empty string.
    """
    inputs: Inputs = {}
    errors = dict(unreadable)
    for name, columns in columns_of(kinds, spec).items():
        if kinds[name] == TEXT:
            texts = join_texts(table, columns, spec if name == "text" else None, unreadable)
            missing = is_blank(texts) if null == "error" else None
            inputs[name] = nulls_as_empty(texts)
        elif kinds[name] == NUMBER:
            inputs[name], missing = _numbers(table, columns, errors)
        else:
            inputs[name] = without_rows(_plain(table[columns[0]]), unreadable)
            missing = inputs[name].is_null()
        for row in [] if missing is None else pc.indices_nonzero(missing).to_pylist():
            errors.setdefault(row, NULL_INPUT)
    return inputs, errors


def rows_of(inputs: Inputs, rows: np.ndarray) -> Inputs:
    """Return some rows of the inputs."""
    places = from_numpy(rows)
    return {name: each[rows] if isinstance(each, np.ndarray) else each.take(places) for name, each in inputs.items()}


def join_texts(
    table: pa.Table, columns: tuple[str, ...], spec: TaskSpec | None, unreadable: Mapping[int, str]
) -> pa.Array:
    """Return one text per row, null where every column is blank; `spec` has the template or the separator."""
    texts = [without_rows(string_column(table[column]), unreadable) for column in columns]
    if len(texts) == 1:
        return texts[0]
    blank = np.stack([np.asarray(is_blank(each)) for each in texts])
    values = [nulls_as_empty(each).cast(pa.large_string()) for each in texts]
    if spec is not None and spec.template is not None:
        by_name = dict(zip(columns, values, strict=True))
        pieces: list[Any] = []
        for literal, name, _, _ in Formatter().parse(spec.template):
            pieces += [_scalar(literal), *([] if name is None else [by_name[name]])]
        made = pc.binary_join_element_wise(*pieces, _scalar(""))
    else:
        separator = SEPARATOR if spec is None or spec.separator is None else spec.separator
        known = [pc.if_else(pa.array(~empty), each, _scalar(None)) for each, empty in zip(values, blank, strict=True)]
        made = pc.binary_join_element_wise(*known, _scalar(separator), null_handling="skip")
    return pc.if_else(pa.array(blank.all(axis=0)), _scalar(None), made)


def _scalar(text: str | None) -> pa.Scalar:
    return pa.scalar(text, pa.large_string())


def _numbers(table: pa.Table, columns: tuple[str, ...], errors: dict[int, str]) -> tuple[np.ndarray, pa.Array]:
    """Return (N, D) float32, and which rows (N,) lack a number; add rows with a `bad_number` to `errors`."""
    values = np.zeros((len(table), len(columns)), dtype=np.float32)
    missing = np.zeros(len(table), dtype=bool)
    for place, column in enumerate(columns):
        array = _plain(table[column])
        text = pa.types.is_string(array.type) or pa.types.is_large_string(array.type)
        missing |= np.asarray(array.is_null()) | (np.asarray(is_blank(array)) if text else False)
        found = _floats(array)
        for row in np.flatnonzero(~np.isfinite(found) & ~missing):
            errors.setdefault(int(row), f"bad_number: {column!r} is {str(array[row].as_py())[:80]!r}")
        values[:, place] = np.where(np.isfinite(found), found, 0)
    return values, pa.array(missing)


def _floats(array: pa.Array) -> np.ndarray:
    """Return the values as (N,) float32, NaN for nulls and for text that is not a number; infinity beyond float32."""
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.int8())
    try:
        numbers = array.cast(pa.float64())
    except pa.ArrowInvalid:
        numbers = pa.array([_float(word) for word in array.to_pylist()], pa.float64())
    with np.errstate(over="ignore"):
        return np.asarray(numbers.to_numpy(zero_copy_only=False), dtype=np.float64).astype(np.float32)


def _float(word: str | None) -> float | None:
    try:
        return None if word is None else float(word)
    except ValueError:
        return None


def _plain(column: pa.ChunkedArray) -> pa.Array:
    """Return a column as one array, without dictionary encoding and string views."""
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], column.type)
    array = array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
    return array.cast(pa.string()) if pa.types.is_string_view(array.type) else array


def sample_inputs(kinds: Mapping[str, str], spec: TaskSpec, texts: tuple[str, ...]) -> Inputs | None:
    """Return inputs made of `texts` for a task that reads texts only, else None."""
    names = columns_of(kinds, spec)
    return (
        {name: from_strings(texts) for name in names} if all(kinds[name] in (TEXT, PROMPT) for name in names) else None
    )
