"""Find for which rows a condition is true, false or null. Cost: one pass of an Arrow kernel per comparison."""

from collections.abc import Callable
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from torchlake.errors import DataError
from torchlake.tables.selection.conditions import Both, Column, Compares, Condition, Either, IsNull, Like, OneOf

COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}


def evaluate(condition: Condition, table: pa.Table) -> pa.ChunkedArray:
    """Return (N,) bool, null where SQL gives null. `condition` is bound to the table's types.

    Raises DataError when a string that has to be a number is not one, or a decimal cannot be compared without loss.
    """
    try:
        return _evaluate(condition, table)
    except pa.ArrowException as error:
        raise DataError(f"where: {error}") from error


def _evaluate(condition: Condition, table: pa.Table) -> pa.ChunkedArray:
    if isinstance(condition, Both | Either):
        combine = pc.and_kleene if isinstance(condition, Both) else pc.or_kleene
        return reduce(combine, (_evaluate(part, table) for part in condition.parts))
    if isinstance(condition, IsNull):
        return pc.is_null(table[condition.column.name])
    if isinstance(condition, Like):
        return pc.match_like(table[condition.column.name], condition.pattern)
    if isinstance(condition, Compares):
        return COMPARE[condition.operator](_values(condition.column, table), condition.value)
    if isinstance(condition, OneOf):
        values = _values(condition.column, table)
        if all(one.type == values.type for one in condition.values) and not pa.types.is_floating(values.type):
            found = pc.is_in(values, pa.array(condition.values, values.type))
            return pc.if_else(pc.is_valid(values), found, pa.scalar(None, pa.bool_()))
        return reduce(pc.or_kleene, (pc.equal(values, one) for one in condition.values))
    return pc.invert(_evaluate(condition.part, table))


def _values(column: Column, table: pa.Table) -> pa.ChunkedArray:
    values = table[column.name]
    if pa.types.is_float16(values.type):
        return values.cast(pa.float32())
    return _numbers(column.name, values) if column.numeric else values


def _numbers(name: str, texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """Convert strings to integers, or else to doubles; an empty string becomes null."""
    trimmed = pc.utf8_trim_whitespace(texts)
    filled = pc.if_else(pc.equal(trimmed, ""), pa.scalar(None, trimmed.type), trimmed)
    for kind in (pa.int64(), pa.float64()):
        try:
            return filled.cast(kind)
        except pa.ArrowInvalid as error:
            reason = error
    raise DataError(
        f"where: the column {name!r} is compared with a number, but not all of its strings are numbers ({reason})."
    )
