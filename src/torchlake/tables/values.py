"""JSON values and Arrow types: what type a column has, and whether a value fits it without any silent change.

An int stays an int: in an int64 column 1.0 does not fit, and in a double column an int fits only when the double
equals it. A string with half a surrogate pair (which is also how undecodable bytes arrive here) is not UTF-8.
"""

from typing import Any

import pyarrow as pa

INT64 = range(-(2**63), 2**63)


def infer(value: Any) -> pa.DataType:
    """The Arrow type of one JSON value."""
    if value is None:
        return pa.null()
    if isinstance(value, bool):
        return pa.bool_()
    if isinstance(value, int):
        return pa.int64()
    if isinstance(value, float):
        return pa.float64()
    if isinstance(value, str):
        return pa.string()
    if isinstance(value, list):
        item = pa.null()
        for one in value:
            item = unify(item, infer(one))
        return pa.list_(item)
    return pa.struct([pa.field(name, infer(one)) for name, one in value.items()])


def unify(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """The narrowest type that holds both; raises ValueError in words when there is none."""
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if {one, other} == {pa.int64(), pa.float64()}:
        return pa.float64()
    if pa.types.is_list(one) and pa.types.is_list(other):
        return pa.list_(unify(one.value_type, other.value_type))
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        types = {field.name: field.type for field in one}
        for field in other:
            types[field.name] = unify(types.get(field.name, pa.null()), field.type)
        return pa.struct([pa.field(name, kind) for name, kind in types.items()])
    raise ValueError(f"{other} where {one} was before")


def fit(value: Any, kind: pa.DataType) -> Any:
    """`value` as `kind` takes it. Raises UnicodeEncodeError, or ValueError in words when it does not fit."""
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
            return [fit(one, kind.value_type) for one in value]
    elif pa.types.is_struct(kind):
        types = {field.name: field.type for field in kind}
        unknown = next((name for name in value if name not in types), None)
        if unknown is not None:
            raise ValueError(f"the field {unknown!r} was not there in the first lines")
        return {name: fit(one, types[name]) for name, one in value.items()}
    shown = repr(value)
    raise ValueError(f"{shown[:40]}{'...' if len(shown) > 40 else ''} does not fit {kind}")
