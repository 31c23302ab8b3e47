"""Rows as values of Python: lists, columns and mappings, as tables of a model's columns."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from torchlake import plugins
from torchlake.config.task_spec import GENERATIVE, TaskSpec
from torchlake.errors import UsageError
from torchlake.tables.arrays import from_strings
from torchlake.tables.sources.frames import engine_of
from torchlake.tasks import ANY


def table_of(values: Any, spec: TaskSpec) -> tuple[pa.Table, dict[int, str]]:
    """Return the rows of a list, column, array, generator or mapping of columns as a table of the task's columns, and
    errors of invalid ones.

    Raises UsageError for rows of another form.
    """
    rows, names = _rows(values), spec.input_columns
    if rows and all(isinstance(row, Mapping) for row in rows):
        missing = next(((at, name) for at, row in enumerate(rows) for name in names if name not in row), None)
        if missing is not None:
            raise UsageError(f"Row {missing[0]} has no {missing[1]!r}; this model reads {', '.join(names)}.")
        columns = {name: _to_array(spec, [_or_none(row[name]) for row in rows]) for name in names}
        errors = {row: reason for _, bad in columns.values() for row, reason in bad.items()}
        return pa.table({name: array for name, (array, _) in columns.items()}), errors
    if len(names) != 1:
        raise UsageError(f"This model reads several columns: pass mappings with the keys {', '.join(names)}.")
    reads_text = ANY not in plugins.load("tasks", spec.task).inputs.values()  # not images or lists of words
    column, errors = (_to_column if reads_text else _to_array)(spec, rows)
    return pa.table({names[0]: column}), errors


def _to_array(spec: TaskSpec, values: Sequence[Any]) -> tuple[pa.Array, dict[int, str]]:
    """Return values of one column as an array, texts like `_to_column`."""
    if all(value is None or isinstance(value, str) for value in values):
        return _to_column(spec, values)
    try:
        return array_of(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        raise UsageError(f"The values of a column are not of one type: {error}") from error


def array_of(values: Sequence[Any]) -> tuple[pa.Array, dict[int, str]]:
    """Return values of any type as an array, and errors of rows with strings that are not Unicode, which are null.

    Whole numbers that int64, or a column of fractions, does not hold exactly become fractions. Raises ArrowInvalid,
    ArrowTypeError and OverflowError.
    """
    try:
        return pa.array(values), {}
    except UnicodeEncodeError:
        bad = {row: "bad_utf8" for row, value in enumerate(values) if not _is_unicode(value)}
        kept = [None if row in bad else value for row, value in enumerate(values)]
        return (pa.array(kept) if len(bad) < len(values) else from_strings(kept)), bad
    except (pa.ArrowInvalid, OverflowError):
        if not all(value is None or type(value) in (int, float) for value in values):
            raise
        return pa.array([None if value is None else float(value) for value in values]), {}


def _to_column(spec: TaskSpec, texts: Sequence[Any]) -> tuple[pa.Array, dict[int, str]]:
    """Return texts as an array, and errors of invalid ones. Raises UsageError for other types."""
    wrong = next((row for row, text in enumerate(texts) if not (text is None or isinstance(text, str))), None)
    if wrong is None:
        bad = {row: "bad_utf8" for row, text in enumerate(texts) if text is not None and not _is_unicode(text)}
        return from_strings([None if row in bad else text for row, text in enumerate(texts)]), bad
    if spec.problem in GENERATIVE and all(text is None or _is_conversation(text) for text in texts):
        plain = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))
        keys = {name for text in texts if text is not None for message in text for name in message}
        return pa.array(texts, plain if keys <= {"role", "content"} else None), {}
    takes = "strings, or conversations" if spec.problem in GENERATIVE else "strings"
    raise UsageError(f"Text {wrong} is a {type(texts[wrong]).__name__}; this model takes a list of {takes}.")


def _rows(values: Any) -> list[Any]:
    """Return the rows of a list, column, array or generator; missing ones are None.

    Raises UsageError for values without rows, or without an order.
    """
    name = type(values).__name__
    if isinstance(values, Mapping):
        return _records(values)
    if engine_of(values) is not None or hasattr(type(values), "columns"):
        raise UsageError(f"A loaded model takes a pandas, polars or pyarrow frame, not this {name}; use predict.")
    convert = next((m for m in ("to_pylist", "to_list", "tolist") if hasattr(values, m)), None)
    values = values if convert is None else getattr(values, convert)()
    if isinstance(values, str | bytes | bytearray | set | frozenset) or not isinstance(values, Iterable):
        raise UsageError(f"A loaded model takes a string, a list of rows or a frame, not {name}.")
    return [_or_none(value) for value in values]


def _records(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of columns by name. Raises UsageError for single values, and for columns of other lengths."""
    single = [name for name, one in columns.items() if isinstance(one, str | Mapping) or not isinstance(one, Iterable)]
    lists = {name: _rows(one) for name, one in columns.items() if not single}
    if single or len({len(one) for one in lists.values()}) != 1:
        found = f"{single[0]!r} is one value" if single else f"they have {sorted(map(len, lists.values()))} values"
        raise UsageError(
            f"A mapping is read as columns with a value for each row, model({{'text': ['great film', 'a bore']}}), but "
            f"{found}. Give one row as a list, model([{{'text': 'great film'}}])."
        )
    return [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]


def _or_none(value: Any) -> Any:
    """Return the value, or None for the missing values of pandas."""
    missing = (isinstance(value, float) and math.isnan(value)) or type(value).__name__ in ("NAType", "NaTType")
    return None if missing else value


def _is_unicode(value: Any) -> bool:
    """Return whether all strings are, also those in lists and mappings."""
    if not isinstance(value, str):
        parts = [*value, *value.values()] if isinstance(value, Mapping) else value
        return not isinstance(parts, Iterable) or all(map(_is_unicode, parts))
    try:
        value.encode()
    except UnicodeEncodeError:  # an unpaired surrogate
        return False
    return True


def _is_conversation(text: Any) -> bool:
    return isinstance(text, Sequence) and not isinstance(text, str) and all(isinstance(m, Mapping) for m in text)
