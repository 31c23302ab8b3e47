"""Conditions on rows, as trees. A condition is true, false or null for a row; null if its column is null, as in SQL."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Operator = Literal["=", "!=", "<", "<=", ">", ">="]


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column where the text names it."""

    name: str
    at: int
    "Its position in the text, for messages."
    numeric: bool = False
    "Whether a string column is read as numbers; set by `bind`."


@dataclass(frozen=True, kw_only=True)
class Compares:
    column: Column
    operator: Operator
    value: Any
    "int, Decimal, bool or str; after `bind` an Arrow scalar that can be compared with the column."


@dataclass(frozen=True, kw_only=True)
class OneOf:
    """`column in (...)`."""

    column: Column
    values: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class IsNull:
    column: Column


@dataclass(frozen=True, kw_only=True)
class Like:
    """`%` stands for any characters, `_` for one; a backslash before them, or before a backslash, escapes."""

    column: Column
    pattern: str


@dataclass(frozen=True, kw_only=True)
class Not:
    part: "Condition"


@dataclass(frozen=True, kw_only=True)
class Both:
    """All parts are true; null if none is false and one is null."""

    parts: tuple["Condition", ...]


@dataclass(frozen=True, kw_only=True)
class Either:
    """Some part is true; null if none is true and one is null."""

    parts: tuple["Condition", ...]


Condition: TypeAlias = Compares | OneOf | IsNull | Like | Not | Both | Either


def columns_of(condition: Condition) -> tuple[str, ...]:
    """Return the names of the columns, each once, in the order of the text."""
    return tuple(dict.fromkeys(column.name for column in _columns(condition)))


def _columns(condition: Condition) -> Iterator[Column]:
    if isinstance(condition, Both | Either):
        for part in condition.parts:
            yield from _columns(part)
    elif isinstance(condition, Not):
        yield from _columns(condition.part)
    else:
        yield condition.column
