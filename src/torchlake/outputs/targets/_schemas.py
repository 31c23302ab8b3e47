"""The columns that a table can hold: cast or refuse types that its format lacks, and check that rows fit the table."""

from collections.abc import Callable, Iterator

import pyarrow as pa

from torchlake.errors import OutputError, TableError
from torchlake.tables.formats.types import children, common_type, pairs, rebuilt

_WIDER = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.float16(): pa.float32(),
    pa.large_string(): pa.string(),
    pa.large_binary(): pa.binary(),
    pa.string_view(): pa.string(),
    pa.binary_view(): pa.binary(),
    pa.date64(): pa.date32(),
}


def delta_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema in types of Delta that hold every value. Raises TableError if a column has no such type."""
    return pa.schema([field.with_type(_stored(field.name, field.type)).remove_metadata() for field in schema])


def iceberg_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema in types of Iceberg that hold every value. Raises TableError if a column has no such type."""
    narrow = {pa.int8(): pa.int32(), pa.int16(): pa.int32()}

    def stored(name: str, kind: pa.DataType) -> pa.DataType:
        if pa.types.is_time(kind):
            return pa.time64("us")
        kind = _stored(name, kind, stored)
        return narrow.get(kind, kind)

    return pa.schema([field.with_type(stored(field.name, field.type)).remove_metadata() for field in schema])


def _stored(
    name: str, kind: pa.DataType, inner: Callable[[str, pa.DataType], pa.DataType] | None = None
) -> pa.DataType:
    inner = inner or _stored
    if pa.types.is_dictionary(kind):
        return inner(name, kind.value_type)
    if children(kind):
        return rebuilt(kind, lambda one: one.with_type(inner(name, one.type)).remove_metadata())
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz and "UTC")
    if kind in _WIDER:
        return _WIDER[kind]
    if pa.types.is_uint64(kind):
        return pa.decimal128(20, 0)
    if pa.types.is_decimal256(kind) and kind.precision <= 38:
        return pa.decimal128(kind.precision, kind.scale)
    if pa.types.is_fixed_size_binary(kind):
        return pa.binary()
    refused = (pa.types.is_time, pa.types.is_duration, pa.types.is_interval, pa.types.is_null, pa.types.is_decimal256)
    if any(is_kind(kind) for is_kind in refused):
        raise TableError(
            f"the column {name!r} is {kind}, which tables of this format cannot hold. Leave it out, or convert it."
        )
    return kind


def check_fit(where: str, rows: pa.Schema, table: pa.Schema, *, add_columns: bool) -> None:
    """Raise OutputError unless the rows have the table's columns and types, and values where it needs them.

    `add_columns` allows additional columns.
    """
    problems = []
    names = {name.casefold(): name for name in table.names}
    for field in rows:
        if field.name not in table.names:
            same = names.get(field.name.casefold())
            if same is not None:  # engines that ignore case would find two columns
                problems.append(f"its column {same!r} differs from {field.name!r} only by case")
            elif not add_columns:
                problems.append(f"it has no column {field.name!r} ({field.type})")
        elif not plain(table.field(field.name).type).equals(plain(field.type)):
            problems.append(
                f"its column {field.name!r} is {table.field(field.name).type}, but the rows have {field.type}"
            )
    if problems:
        advice = "; add_columns adds the missing ones" if not add_columns and "no column" in problems[0] else ""
        raise OutputError(
            f"{where}: the rows do not fit the table: {'; '.join(problems)}. Choose columns, prefix or another "
            f"output{advice}."
        )
    check_nulls(where, rows, table)


def check_nulls(where: str, rows: pa.Schema, table: pa.Schema) -> None:
    """Raise OutputError if the rows may have null, or lack the column, where the table allows none, at any depth."""
    shared = [(field, table.field(field.name)) for field in rows if field.name in table.names]
    found = [place for field, there in shared for place in _nulls(field, there, field.name)]
    found += [field.name for field in table if not field.nullable and field.name not in rows.names]
    if found:
        raise OutputError(
            f"{where}: the table needs a value (NOT NULL) in {', '.join(map(repr, found))}, but the rows may have null "
            "there, for example in rows with an error, or lack the column. Let it have nulls (ALTER TABLE ... ALTER "
            "COLUMN ... DROP NOT NULL), or score into another table and insert its rows."
        )


def _nulls(field: pa.Field, there: pa.Field, place: str) -> Iterator[str]:
    if field.nullable and not there.nullable:
        yield place
    for own, inner in pairs(field.type, there.type):
        if own is not None:
            yield from _nulls(own, inner, f"{place}.{inner.name}")


def widened(rows: pa.Schema, table: pa.Schema) -> pa.Schema:
    """Return the rows' schema with the table's types where these hold every value: float to double, int to long."""
    kinds = {one.name: one.type for one in table if not pa.types.is_timestamp(one.type)}
    wider = {one.name: common_type(one.type, kinds.get(one.name, one.type)) for one in rows}
    return pa.schema(
        [one.with_type(kinds[one.name]) if wider[one.name] == kinds.get(one.name) else one for one in rows]
    )


def plain(kind: pa.DataType) -> pa.DataType:
    """Return a type without what differs between readers: names and nullability of list items, large offsets."""
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz and "UTC")
    named = pa.types.is_struct(kind)
    return rebuilt(_WIDER.get(kind, kind), lambda one: pa.field(one.name if named else "value", plain(one.type)))
