"""Find what a condition can be for the rows of a file or row group, from the smallest and largest value of each column.

The result is three flags for each range of rows: some row may make the condition true, false, null. A missing statistic
allows everything, so rows are never left out by mistake. Statistics do not include NaN, which makes != true and all
other comparisons false, so a float column always allows that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from torchlake.tables.selection.conditions import Both, Compares, Condition, Either, IsNull, Like, Not, OneOf
from torchlake.tables.selection.rows import COMPARE

Flags = npt.NDArray[np.bool_]
UNKNOWN = -1
"Stands for an unknown number of nulls or rows."


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Statistics of one column in N ranges of rows."""

    lowest: pa.Array
    "(N,) lower bounds of the values that are neither null nor NaN; null where unknown."
    highest: pa.Array
    "(N,) upper bounds."
    nulls: npt.NDArray[np.int64]
    "(N,) number of nulls; UNKNOWN where unknown."
    rows: npt.NDArray[np.int64]
    "(N,) number of rows; UNKNOWN where unknown."


class Outcomes(NamedTuple):
    """(N,) each: whether the condition may be true, false and null for some row of the range."""

    true: Flags
    false: Flags
    null: Flags


def constant_bounds(values: Sequence[str | None], kind: pa.DataType) -> Bounds:
    """Return the bounds of a column that has one value in all rows of each of N files, given as strings to cast."""
    found = pa.array(values, pa.string()).cast(kind)
    null = np.array([value is None for value in values], dtype=np.int64)
    return Bounds(lowest=found, highest=found, nulls=null, rows=np.ones(len(values), np.int64))


def outcomes(condition: Condition, bounds: Mapping[str, Bounds], count: int) -> Outcomes:
    """Return what the condition, bound to the table's types, may be in each of `count` ranges."""
    if isinstance(condition, Not):
        part = outcomes(condition.part, bounds, count)
        return Outcomes(part.false, part.true, part.null)
    if isinstance(condition, Both):
        return reduce(_both, (outcomes(part, bounds, count) for part in condition.parts))
    if isinstance(condition, Either):
        return reduce(_either, (outcomes(part, bounds, count) for part in condition.parts))
    found = bounds.get(condition.column.name)
    if found is None or condition.column.numeric:
        return Outcomes(*(np.ones(count, bool) for _ in Outcomes._fields))
    some_null = found.nulls != 0
    some_value = (found.nulls == UNKNOWN) | (found.rows == UNKNOWN) | (found.nulls < found.rows)
    if isinstance(condition, IsNull):
        return Outcomes(some_null, some_value, np.zeros(count, bool))
    may = _of_values(condition, found, count)
    return Outcomes(may.true & some_value, may.false & some_value, some_null)


def _of_values(condition: Compares | OneOf | Like, bounds: Bounds, count: int) -> Outcomes:
    """Return what the condition may be for rows that are not null."""
    every, none = np.ones(count, bool), np.zeros(count, bool)
    try:
        if isinstance(condition, Compares):
            return _compared(condition.operator, condition.value, bounds)
        if isinstance(condition, Like):
            return Outcomes(_prefixed(condition.pattern, bounds), every, none)
        return reduce(_either, (_compared("=", one, bounds) for one in condition.values), Outcomes(none, every, none))
    except pa.ArrowException:  # types that cannot be compared
        return Outcomes(every, every, none)


def _compared(operator: str, value: pa.Scalar, bounds: Bounds) -> Outcomes:
    low, high = _not_nan(bounds.lowest), _not_nan(bounds.highest)
    if operator in ("=", "!="):
        may = _allowed(pc.and_kleene(pc.less_equal(low, value), pc.greater_equal(high, value)))
        other = _allowed(pc.invert(pc.and_kleene(pc.equal(low, value), pc.equal(high, value))))
        true, false = (may, other) if operator == "=" else (other, may)
    else:
        begins, ends = (low, high) if operator in ("<", "<=") else (high, low)
        true = _allowed(COMPARE[operator](begins, value))
        false = _allowed(pc.invert(COMPARE[operator](ends, value)))
    if pa.types.is_floating(low.type):
        every = np.ones(len(low), bool)
        true, false = (every, false) if operator == "!=" else (true, every)
    return Outcomes(true, false, np.zeros(len(low), bool))


def _not_nan(bounds: pa.Array) -> pa.Array:
    """Replace NaN, which some writers use as a bound, by null."""
    if not pa.types.is_floating(bounds.type):
        return bounds
    return pc.if_else(pc.is_nan(bounds), pa.scalar(None, bounds.type), bounds)


def _prefixed(pattern: str, bounds: Bounds) -> Flags:
    """Return whether a value may begin with the pattern's characters before its first wildcard."""
    ends = [place for place in map(pattern.find, "%_\\") if place >= 0]
    prefix = pattern[: min(ends, default=len(pattern))]
    starts: Any = pc.or_(pc.less_equal(bounds.lowest, prefix), pc.starts_with(bounds.lowest, prefix))
    return _allowed(starts) & _allowed(pc.greater_equal(bounds.highest, prefix))


def _allowed(found: pa.Array) -> Flags:
    """Return (N,) bool; unknown values are allowed."""
    return np.asarray(pc.fill_null(found, True).to_numpy(zero_copy_only=False), dtype=bool)


def _both(one: Outcomes, other: Outcomes) -> Outcomes:
    return Outcomes(one.true & other.true, one.false | other.false, one.null | other.null)


def _either(one: Outcomes, other: Outcomes) -> Outcomes:
    return Outcomes(one.true | other.true, one.false & other.false, one.null | other.null)
