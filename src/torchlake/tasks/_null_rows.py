"""The values of a task's inputs, and the rows that lack one: a null or blank text is the error row `null_input`.

    TEXT          null or blank in all of its columns is `null_input`
    NUMBER        null is `null_input`; text, NaN and infinity are `bad_number`
    PROMPT, ANY   null is `null_input`; the task finds other blank rows; EXTRA may be null

Several texts are joined by `separator` without the blank ones, or put into `template`, where a null is the empty
string.
"""

from collections.abc import Mapping
from string import Formatter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchlake.config.task_spec import SEPARATOR, TaskSpec
from torchlake.tables.arrays import (
    from_numpy,
    is_blank,
    is_text,
    nulls_as_empty,
    plain_column,
    string_column,
    without_rows,
)
from torchlake.tasks._inputs import EXTRA, NUMBER, PROMPT, TEXT, Inputs, columns_of

NULL_INPUT = "null_input"


def read_inputs(
    table: pa.Table, kinds: Mapping[str, str], spec: TaskSpec, unreadable: Mapping[int, str], *, null: str = "error"
) -> tuple[Inputs, dict[int, str]]:
    """Return the inputs of all rows, and {row: reason} for rows that lack one.

    `unreadable` rows are among these. `null="score"` reads a null text as the empty string.
    """
    inputs: Inputs = {}
    errors = dict(unreadable)
    for name, columns in columns_of(kinds, spec).items():
        if kinds[name] == TEXT or (kinds[name] == PROMPT and len(columns) > 1):
            texts = join_texts(table, columns, spec if name == "text" else None, unreadable)
            missing = is_blank(texts) if null == "error" else None
            inputs[name] = nulls_as_empty(texts)
        elif kinds[name] == NUMBER:
            inputs[name], missing = _numbers(table, columns, errors)
        else:
            inputs[name] = without_rows(plain_column(table[columns[0]]), unreadable)
            missing = None if kinds[name] == EXTRA else inputs[name].is_null()
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
    filled = spec is not None and spec.template is not None and set(columns_in(spec.template)) == set(columns)
    if len(texts) == 1 and not filled:  # a column of texts in the form of the model's template
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
        left_out = blank.copy()
        left_out[0] &= ~blank.all(axis=0)  # Arrow's result lacks a row of which everything is skipped
        known = [pc.if_else(pa.array(~out), each, _scalar(None)) for each, out in zip(values, left_out, strict=True)]
        made = pc.binary_join_element_wise(*known, _scalar(separator), null_handling="skip")
    return pc.if_else(pa.array(blank.all(axis=0)), _scalar(None), made)


def columns_in(template: str) -> tuple[str, ...]:
    """Return the columns in the braces of a template, each once. Raises ValueError for one that cannot be read."""
    return tuple(dict.fromkeys(name for _, name, _, _ in Formatter().parse(template) if name is not None))


def _scalar(text: str | None) -> pa.Scalar:
    return pa.scalar(text, pa.large_string())


def _numbers(table: pa.Table, columns: tuple[str, ...], errors: dict[int, str]) -> tuple[np.ndarray, pa.Array]:
    """Return (N, D) float32, and which rows (N,) lack a number; add rows with a `bad_number` to `errors`."""
    values = np.zeros((len(table), len(columns)), dtype=np.float32)
    missing = np.zeros(len(table), dtype=bool)
    for place, column in enumerate(columns):
        array = plain_column(table[column])
        missing |= np.asarray(is_blank(array) if is_text(array.type) else array.is_null())
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
