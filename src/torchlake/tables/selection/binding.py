"""Give a condition the types of a table's columns: its values become Arrow scalars that compare exactly.

An integer column is compared with integers and decimals, never by way of a double; a float column by its own type;
dates and times with ISO 8601 text, in UTC if the column has a time zone and the text has none. Columns of CSV files are
text: one that is compared with a number is read as numbers.
"""

from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from difflib import get_close_matches
from typing import Any

import pyarrow as pa

from torchlake.errors import TableError
from torchlake.tables.selection.conditions import (
    Both,
    Column,
    Comparison,
    Condition,
    Either,
    IsNull,
    Like,
    Not,
    OneOf,
)
from torchlake.tables.selection.grammar import mistake

INT64 = range(-(2**63), 2**63)
MAX_DIGITS = 38


def bind(
    condition: Condition, schema: pa.Schema, text: str, *, untyped: bool = False, partial: bool = False
) -> Condition:
    """The condition for columns of these types. `untyped`: text columns hold numbers too, as in CSV files. `partial`:
    conditions on other columns stay as they are.

    Raises TableError for a missing column, with the nearest names, and for a value that does not compare with its
    column; both show the place in `text`.
    """
    if isinstance(condition, Both | Either):
        parts = (bind(one, schema, text, untyped=untyped, partial=partial) for one in condition.parts)
        return replace(condition, parts=tuple(parts))
    if isinstance(condition, Not):
        return Not(part=bind(condition.part, schema, text, untyped=untyped, partial=partial))
    column = condition.column
    if column.name not in schema.names and partial:
        return condition
    if column.name not in schema.names:
        raise TableError(mistake(text, column.at, _missing(column.name, schema.names)))
    kind = schema.field(column.name).type
    if isinstance(condition, IsNull):
        return condition
    if isinstance(condition, Like):
        if not _is_text(kind):
            raise TableError(mistake(text, column.at, f"{column.name!r} is {kind}; like is for text."))
        return condition
    values = condition.values if isinstance(condition, OneOf) else (condition.value,)
    column = replace(column, numeric=untyped and _is_text(kind) and all(map(_is_number, values)))
    scalars = tuple(_scalar(column, one, kind, text) for one in values)
    if isinstance(condition, OneOf):
        return OneOf(column=column, values=scalars)
    return Comparison(column=column, operator=condition.operator, value=scalars[0])


def _missing(name: str, names: Sequence[str]) -> str:
    close = get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    return f"there is no column {name!r}.{hint} The table has: {', '.join(names) or 'no columns'}."


def _scalar(column: Column, value: Any, kind: pa.DataType, text: str) -> pa.Scalar:
    """The value as a scalar that compares with the column. Raises TableError if there is none."""
    try:
        if column.numeric:
            return _number(value, pa.int64())
        if isinstance(value, bool) and pa.types.is_boolean(kind):
            return pa.scalar(value)
        if _is_number(value) and _is_numeric(kind):
            return _number(value, kind)
        if isinstance(value, str) and _is_text(kind):
            return pa.scalar(value, kind)
        if isinstance(value, str) and _is_time(kind):
            return _time(value, kind)
    except (pa.ArrowException, OverflowError) as error:
        raise TableError(
            mistake(text, column.at, f"{column.name!r} is {kind}, and {_shown(value)} is none ({error}).")
        ) from error
    raise TableError(mistake(text, column.at, f"{column.name!r} is {kind}, {_advice(value, kind)}"))


def _advice(value: Any, kind: pa.DataType) -> str:
    shown = _shown(value)
    if _is_text(kind):
        return f"which does not compare with {shown}; write it in single quotes, '{shown}'."
    if _is_time(kind):
        return f"which does not compare with {shown}; write '2024-01-31' or '2024-01-31 12:00:00'."
    if pa.types.is_boolean(kind) or _is_numeric(kind):
        return f"which does not compare with {shown}."
    return f"which does not compare with {shown}; only 'is null' and 'is not null' apply to it."


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, str) else str(value).lower()


def _number(value: int | Decimal, kind: pa.DataType) -> pa.Scalar:
    if pa.types.is_floating(kind):
        # Arrow computes float16 only after a cast to float32.
        return pa.scalar(float(value), pa.float64() if pa.types.is_float64(kind) else pa.float32())
    if isinstance(value, int) and value in INT64 and not pa.types.is_uint64(kind):
        return pa.scalar(value, pa.int64())
    decimal = Decimal(value)
    _, digits, exponent = decimal.as_tuple()
    assert isinstance(exponent, int), "the grammar has no infinity"
    if max(len(digits), len(digits) + exponent, -exponent) > MAX_DIGITS // 2 + 1 and not isinstance(value, int):
        raise OverflowError("it has too many digits")
    return pa.scalar(Decimal(f"{decimal:f}"))


def _time(value: str, kind: pa.DataType) -> pa.Scalar:
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        try:
            return pa.scalar(value).cast(kind)
        except pa.ArrowInvalid:
            return pa.scalar(value).cast(pa.timestamp(kind.unit)).cast(kind)
    return pa.scalar(value).cast(kind)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def _is_numeric(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_time(kind: pa.DataType) -> bool:
    return bool(pa.types.is_date(kind) or pa.types.is_timestamp(kind) or pa.types.is_time(kind))
