"""Spark's types and Arrow's, by public names of pyspark only, and DataFrames that cannot pass through Python.

Which types pass through `mapInArrow` was tried with pyspark 3.5, 4.0 and 4.3; others are refused before any work. A
column of an allowed type keeps its values and its type, whatever Arrow calls it.
"""

from typing import Any

import pyarrow as pa

from torchlake.engines._spark_session import reason_of
from torchlake.errors import TableError
from torchlake.tables.sources.frames import check_names

_PLAIN = {
    "NullType": pa.null(),
    "BooleanType": pa.bool_(),
    "ByteType": pa.int8(),
    "ShortType": pa.int16(),
    "IntegerType": pa.int32(),
    "LongType": pa.int64(),
    "FloatType": pa.float32(),
    "DoubleType": pa.float64(),
    "StringType": pa.string(),
    "CharType": pa.string(),
    "VarcharType": pa.string(),
    "BinaryType": pa.binary(),
    "DateType": pa.date32(),
    "TimeType": pa.time64("ns"),
    "TimestampType": pa.timestamp("us", "UTC"),
    "TimestampNTZType": pa.timestamp("us"),
    "DayTimeIntervalType": pa.duration("us"),
    "VariantType": pa.struct({"value": pa.binary(), "metadata": pa.binary()}),
    "GeometryType": pa.struct({"srid": pa.int32(), "wkb": pa.binary()}),
    "GeographyType": pa.struct({"srid": pa.int32(), "wkb": pa.binary()}),
}
"The types without parameters that matter here, by the name of their class."


def arrow_schema(frame: Any) -> pa.Schema:
    """Return the Arrow schema of a DataFrame. Raises TableError for columns that cannot pass through Python."""
    try:
        fields = frame.schema.fields
    except Exception as error:  # pyspark 3.5 cannot read some types; an unresolved view fails here, too
        raise TableError(
            f"the columns of the DataFrame cannot be read: {reason_of(error)}. Cast a column of another type to "
            "string, or drop it."
        ) from error
    check_names([field.name for field in fields], "the DataFrame")
    return pa.schema([(field.name, _arrow_type(field.dataType, field)) for field in fields])


def spark_struct(schema: pa.Schema) -> Any:
    """Return the StructType of an Arrow schema."""
    from pyspark.sql.types import StructField, StructType

    return StructType([StructField(field.name, _spark_type(field.type)) for field in schema])


def _arrow_type(kind: Any, column: Any) -> pa.DataType:
    name = type(kind).__name__
    if hasattr(kind, "sqlType"):  # a user-defined type
        return _arrow_type(kind.sqlType(), column)
    if name in _PLAIN:
        return _PLAIN[name]
    if name == "DecimalType":
        return pa.decimal128(kind.precision, kind.scale)
    if name == "ArrayType":
        return pa.list_(_arrow_type(kind.elementType, column))
    if name == "MapType":
        return pa.map_(_arrow_type(kind.keyType, column), _arrow_type(kind.valueType, column))
    if name != "StructType":
        raise TableError(
            f"the column {column.name!r} has the type {kind.simpleString()}, which Spark cannot pass to Python. Cast "
            "it, for example to string, or drop it."
        )
    names = [field.name for field in kind.fields]
    check_names(names, f"a struct in the column {column.name!r}")
    return pa.struct([(field.name, _arrow_type(field.dataType, column)) for field in kind.fields])


def _spark_type(kind: pa.DataType) -> Any:
    from pyspark.sql import types

    if pa.types.is_decimal(kind):
        return types.DecimalType(kind.precision, kind.scale)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return types.ArrayType(_spark_type(kind.value_type))
    if pa.types.is_struct(kind):
        return types.StructType([types.StructField(field.name, _spark_type(field.type)) for field in kind])
    if pa.types.is_large_string(kind):
        return types.StringType()
    name = next((name for name, plain in _PLAIN.items() if plain == kind), None)
    if name is None:
        raise TableError(f"predictions of the type {kind} have no type in Spark; score a stored table instead.")
    return getattr(types, name)()
