"""Types of JSON columns, and conversion of values to them without silent changes.

A column of ints becomes double when it has a float; an int then fits only if the double equals it. A string with a lone
surrogate is not UTF-8; undecodable bytes are read as such strings.
"""

from typing import Any, TypeAlias

import pyarrow as pa

INT64 = range(-(2**63), 2**63)
NULL = pa.null()
MAX_DEPTH = 32
MAX_FIELDS = 10_000
Kind: TypeAlias = Any
"The type of the values so far: an Arrow type, [kind] for a list's items, or {name: kind} for an object's fields."
_INT, _DOUBLE = pa.int64(), pa.float64()
_SCALARS: dict[type, pa.DataType] = {bool: pa.bool_(), int: _INT, float: _DOUBLE, str: pa.string()}


def widen(kind: Kind, value: Any, depth: int = 0) -> Kind:
    """Return the narrowest kind that holds the values of `kind` and this one: `kind` itself if it can.

    Raises ValueError, with a reason for users, if no kind does, or the value has too many levels or fields.
    """
    if value is None:
        return kind
    if depth == MAX_DEPTH:
        raise ValueError(f"a value that is nested more than {MAX_DEPTH} deep")
    if isinstance(value, list) and (kind is NULL or isinstance(kind, list)):
        before = item = NULL if kind is NULL else kind[0]
        for one in value:
            item = widen(item, one, depth + 1)
        return kind if item is before and kind is not NULL else [item]
    if isinstance(value, dict) and (kind is NULL or isinstance(kind, dict)):
        return _widen_fields({} if kind is NULL else kind, value, depth + 1)
    scalar = _SCALARS.get(type(value))
    if scalar is not None:
        if kind is scalar or kind is NULL:
            return scalar
        if (kind is _INT and scalar is _DOUBLE) or (kind is _DOUBLE and scalar is _INT):
            return _DOUBLE
    raise ValueError(f"{arrow_type(widen(NULL, value, depth))} where {arrow_type(kind)} was before")


def arrow_type(kind: Kind) -> pa.DataType:
    """Return the Arrow type of a column of that kind."""
    if isinstance(kind, list):
        return pa.list_(arrow_type(kind[0]))
    if isinstance(kind, dict):
        return pa.struct([pa.field(name, arrow_type(one)) for name, one in kind.items()])
    return kind


def strict_cast(value: Any, kind: pa.DataType) -> Any:
    """Return `value` for a column of type `kind`, unchanged or as an equal double.

    Raises UnicodeEncodeError, or ValueError with a reason for users.
    """
    if value is None:
        return None
    if isinstance(value, str):
        if pa.types.is_string(kind):
            if not value.isascii():
                value.encode()
            return value
    elif isinstance(value, bool):
        if pa.types.is_boolean(kind):
            return value
    elif isinstance(value, int):
        if pa.types.is_int64(kind) and value in INT64:
            return value
        if pa.types.is_float64(kind) and abs(value) < 2**1023 and int(float(value)) == value:
            return float(value)
    elif isinstance(value, float):
        if pa.types.is_float64(kind):
            return value
    elif isinstance(value, list):
        if pa.types.is_list(kind):
            return [strict_cast(one, kind.value_type) for one in value]
    elif pa.types.is_struct(kind):
        types = {field.name: field.type for field in kind}
        unknown = next((name for name in value if name not in types), None)
        if unknown is not None:
            unknown.encode()
            raise ValueError(f"the column's type has no field {unknown!r}")
        return {name: strict_cast(one, types[name]) for name, one in value.items()}
    shown = repr(value)
    raise ValueError(f"{shown[:40]}{'...' if len(shown) > 40 else ''} does not fit {kind}")


def is_utf8(text: str) -> bool:
    """Return whether a string can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _widen_fields(fields: dict[str, Kind], value: dict[str, Any], depth: int) -> dict[str, Kind]:
    """Return the fields, widened by those of `value`, without names that are not UTF-8, which Arrow cannot store."""
    wider = {}
    for name, one in value.items():
        before = fields.get(name)
        after = widen(NULL if before is None else before, one, depth)
        if after is not before and (before is not None or is_utf8(name)):
            wider[name] = after
    if not wider:
        return fields
    if len(fields.keys() | wider.keys()) > MAX_FIELDS:
        raise ValueError(f"objects with more than {MAX_FIELDS:,} different fields")
    return fields | wider
