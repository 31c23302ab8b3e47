"""Arrow types: what is inside them, which one holds the values of others, and converting columns without a change."""

from collections.abc import Callable, Sequence

import pyarrow as pa

from torchlake.tables.formats.layout import storage_type

_WIDENING = (
    (pa.string(), pa.large_string()),
    (pa.binary(), pa.large_binary()),
    (pa.int8(), pa.int16(), pa.int32(), pa.int64()),
    (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
    (pa.float16(), pa.float32(), pa.float64()),
    # Spark's INT96 timestamps have no time zone and mean UTC.
    (pa.timestamp("us"), pa.timestamp("us", "UTC")),
)
_DIGITS = {pa.int8(): 3, pa.int16(): 5, pa.int32(): 10, pa.int64(): 19}
_BYTES = (pa.string(), pa.binary())


def children(kind: pa.DataType) -> list[pa.Field]:
    """Return the fields inside a type: of a struct, the items of a list, the key and the value of a map."""
    if pa.types.is_map(kind):
        return [kind.key_field, kind.item_field]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return [kind.value_field]
    return [kind.field(place) for place in range(kind.num_fields)] if pa.types.is_struct(kind) else []


def common_type(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return the type of a column that has these types in its files, so that no value changes; None if no type fits.

    Null gives way to any type, int32 to int64, float to double, a decimal to one with more digits, and a string to one
    with 64-bit offsets.
    """
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    for kinds in _WIDENING:
        if one in kinds and other in kinds:
            return max(one, other, key=kinds.index)
    if pa.types.is_decimal128(one) and pa.types.is_decimal128(other) and one.scale == other.scale:
        return max(one, other, key=lambda kind: kind.precision)
    return None


def rebuilt(kind: pa.DataType, change: Callable[[pa.Field], pa.Field]) -> pa.DataType:
    """Return a type with the fields inside it changed; large lists and those of fixed size become lists."""
    inner = [change(one) for one in children(kind)]
    if pa.types.is_map(kind):
        return pa.map_(inner[0].with_nullable(False), inner[1])
    if pa.types.is_struct(kind):
        return pa.struct(inner)
    return pa.list_(*inner) if inner else kind


def without_size(kind: pa.DataType) -> pa.DataType:
    """Return a type of strings or bytes with 32-bit offsets; others as they are."""
    if pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind) or pa.types.is_binary_view(kind):
        return pa.binary()
    return pa.string() if pa.types.is_large_string(kind) or pa.types.is_string_view(kind) else kind


def short(field: pa.Field) -> pa.Field:
    """Return the field with strings, binary values and lists of 32-bit offsets, as they are in parts."""
    kind = field.type if pa.types.is_fixed_size_binary(field.type) else without_size(field.type)
    return field.with_type(rebuilt(kind, short))


def shortened(schema: pa.Schema) -> pa.Schema:
    """Return the schema with `short` fields: the same for the same values, whatever library wrote them."""
    return pa.schema([short(field) for field in schema])


def same_name(name: str, names: Sequence[str]) -> str | None:
    """Return which of the names means the same: the name itself, else the only one that differs by case."""
    if name in names:
        return name
    found = [one for one in names if one.casefold() == name.casefold()]
    return found[0] if len(found) == 1 else None


def fits(stored: pa.DataType, kind: pa.DataType) -> bool:
    """Return whether a table with a log reads a column of its files as `kind`: widened since, at any depth.

    Fields of a struct are found by name, in any case; one that a file lacks is null.
    """
    stored = storage_type(stored)
    if common_type(stored, kind) == kind or _is_widened(stored, kind):
        return True
    inner = [
        there.nullable if own is None else fits(without_size(own.type), there.type)
        for own, there in pairs(stored, kind)
    ]
    return bool(inner) and all(inner)


def pairs(stored: pa.DataType, kind: pa.DataType) -> list[tuple[pa.Field | None, pa.Field]]:
    """Return the fields inside a type with those of the stored type; nothing for types of different kinds."""
    own, there = children(stored), children(kind)
    if pa.types.is_struct(stored) and pa.types.is_struct(kind):
        names = {one.name: one for one in own}
        return [(names.get(same_name(one.name, [*names]) or ""), one) for one in there]
    alike = any(is_kind(stored) and is_kind(kind) for is_kind in (pa.types.is_list, pa.types.is_map))
    return list(zip(own, there, strict=True)) if alike else []


def _is_widened(stored: pa.DataType, kind: pa.DataType) -> bool:
    """Return whether Delta's type widening or a finer unit of time leads from a type to another."""
    if stored in _DIGITS and pa.types.is_decimal(kind):
        return bool(_DIGITS[stored] <= kind.precision - kind.scale)
    if pa.types.is_decimal(stored) and pa.types.is_decimal(kind):
        return bool(stored.scale <= kind.scale and stored.precision - stored.scale <= kind.precision - kind.scale)
    if pa.types.is_timestamp(stored) and pa.types.is_timestamp(kind):
        return kind.unit == "us" and stored.tz in (None, kind.tz)  # a conversion that would lose digits fails
    if without_size(stored) in _BYTES and kind in _BYTES:  # old writers do not say which bytes are text
        return stored not in (pa.large_string(), pa.large_binary())
    into_time = pa.types.is_date32(stored) and pa.types.is_timestamp(kind) and kind.tz is None
    return into_time or (stored in (pa.int8(), pa.int16(), pa.int32()) and pa.types.is_float64(kind))


def converted(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """Return a column whose type `fits`. Raises ArrowInvalid for a value that would change."""
    named = _renamed(column.type, kind)
    if named != column.type:  # a cast takes fields of other names for missing ones
        column = pa.chunked_array([one.view(named) for one in column.chunks], named)
    return column.cast(kind)


def _renamed(stored: pa.DataType, kind: pa.DataType) -> pa.DataType:
    """Return the stored type with the names of structs' fields in the case of the table."""
    found = {own.name: there for own, there in pairs(stored, kind) if own is not None}

    def change(one: pa.Field) -> pa.Field:
        there = found.get(one.name)
        return one if there is None else one.with_name(there.name).with_type(_renamed(one.type, there.type))

    return rebuilt(stored, change)
