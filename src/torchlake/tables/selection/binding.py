"""Give a condition the types of a table's columns: its values become Arrow scalars that compare exactly.

An integer column is compared with integers and decimals, never through a double; a float column in its own type; dates
and times with ISO 8601 strings, in UTC if the column has a time zone and the string has none. Columns of CSV files are
strings: one that is compared with a number is read as numbers.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from difflib import get_close_matches
from typing import Any

import pyarrow as pa

from torchlake.errors import TableError
from torchlake.tables.selection.conditions import (
    Both,
    Column,
    Compares,
    Condition,
    Either,
    IsNull,
    Like,
    Not,
    OneOf,
    Operator,
)
from torchlake.tables.selection.grammar import mistake

INT64 = range(-(2**63), 2**63)
MAX_DIGITS = 38
NANOSECONDS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}


def bind(
    condition: Condition, schema: pa.Schema, text: str, *, untyped: bool = False, partial: bool = False
) -> Condition:
    """Return the condition for columns of these types.

    `untyped`: string columns hold numbers too, as in CSV files. `partial`: conditions on other columns stay as they
    are. Raises TableError for a missing column, with the nearest names, and for a value that cannot be compared with
    its column; both show the place in `text`.
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
            raise TableError(mistake(text, column.at, f"{column.name!r} is {kind}; 'like' works only on strings."))
        return condition
    values = condition.values if isinstance(condition, OneOf) else (condition.value,)
    column = replace(column, numeric=untyped and _is_text(kind) and all(map(_is_number, values)))
    scalars = tuple(_scalar(column, one, kind, text) for one in values)
    if isinstance(condition, OneOf):
        return OneOf(column=column, values=tuple(one for one in scalars if _is_exact(one, kind)))
    if _is_exact(scalars[0], kind):
        return Compares(column=column, operator=condition.operator, value=scalars[0])
    return _between(column, condition.operator, scalars[0], kind)


def _is_exact(value: pa.Scalar, kind: pa.DataType) -> bool:
    """Return whether a time has the unit of its column; others are finer or out of its range."""
    return not _is_time(kind) or getattr(value.type, "unit", None) == getattr(kind, "unit", None)


def _between(column: Column, operator: Operator, value: pa.Scalar, kind: pa.DataType) -> Condition:
    """Return a comparison with a time that no value of the column equals, as one with the next value above it."""
    if operator in ("=", "!="):
        never = OneOf(column=column, values=())
        return never if operator == "=" else Not(part=never)
    above = value.value * NANOSECONDS[value.type.unit] // NANOSECONDS[kind.unit] + 1
    below = operator in ("<", "<=")
    if above in INT64:
        return Compares(column=column, operator="<" if below else ">=", value=pa.scalar(above, kind))
    if above > 0:
        return Compares(column=column, operator="<=" if below else ">", value=pa.scalar(INT64[-1], kind))
    return Compares(column=column, operator="<" if below else ">=", value=pa.scalar(INT64[0], kind))


def _missing(name: str, names: Sequence[str]) -> str:
    close = get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    return f"there is no column {name!r}.{hint} The table has: {', '.join(names) or 'no columns'}."


def _scalar(column: Column, value: Any, kind: pa.DataType, text: str) -> pa.Scalar:
    """Return the value as a scalar to compare with the column. Raises TableError if that is not possible."""
    try:
        if column.numeric:
            return _number(value, pa.int64())
        if isinstance(value, bool) and pa.types.is_boolean(kind):
            return pa.scalar(value)
        if _is_number(value) and _is_numeric(kind):
            return _number(value, kind)
        if isinstance(value, str) and _is_text(kind):
            return pa.scalar(value, kind)
        if isinstance(value, str) and _is_time(kind) and (time := _time(value, kind)) is not None:
            return time
    except (pa.ArrowException, OverflowError) as error:
        raise TableError(mistake(text, column.at, f"{_incomparable(column, value, kind)}: {error}.")) from error
    raise TableError(mistake(text, column.at, f"{_incomparable(column, value, kind)}.{_advice(value, kind)}"))


def _incomparable(column: Column, value: Any, kind: pa.DataType) -> str:
    return f"{_shown(value)} cannot be compared with the {kind} column {column.name!r}"


def _advice(value: Any, kind: pa.DataType) -> str:
    shown = _shown(value)
    if _is_text(kind):
        return f" Write it in single quotes, '{shown}'."
    if pa.types.is_timestamp(kind):
        return f" Write '2024-01-31' or '2024-01-31 12:00:00'{'' if kind.tz else ', without a time zone'}."
    if _is_time(kind):
        return " Write '12:00:00'." if pa.types.is_time(kind) else " Write '2024-01-31'."
    if pa.types.is_boolean(kind) or _is_numeric(kind):
        return ""
    return " Only 'is null' and 'is not null' work with this column."


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


def _time(value: str, kind: pa.DataType) -> pa.Scalar | None:
    """Return a date or time, in the unit of the column if it can be; None if the string is neither."""
    unit, zone = getattr(kind, "unit", None), getattr(kind, "tz", None)
    if pa.types.is_time(kind):  # Arrow reads no string as one
        found = _time(f"1970-01-01 {value}", pa.timestamp("ns"))
        time = None if found is None else found.cast(pa.time64("ns"))
        return time if time is None or time.value % NANOSECONDS[kind.unit] else time.cast(kind)
    kinds = [kind, *(pa.timestamp(other, zone) for other in NANOSECONDS if unit not in (None, other))]
    # A string without a zone is in UTC if the column has one.
    for one in [*kinds, *(pa.timestamp(other.unit) for other in kinds if zone)]:
        with suppress(pa.ArrowInvalid):
            found = pa.scalar(value).cast(one)
            return found.cast(pa.timestamp(one.unit, zone)) if zone else found
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def _is_numeric(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_time(kind: pa.DataType) -> bool:
    return bool(pa.types.is_date(kind) or pa.types.is_timestamp(kind) or pa.types.is_time(kind))
