"""Typed columns of written JSON: the Arrow type of a schema, and values of texts that fit it.

    object    struct of its properties, null where one is missing    integer   int64; number: float64
    array     list of its items                                      enum      dictionary of strings, or as its values
    string    string; by their formats date32 and timestamp          null      beside another type: it may be null

Each property of the whole schema is a column. What has no type is refused with its place: objects with free keys,
unions of several types, items of several types, and schemas that refer to themselves.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime
from typing import Any

import pyarrow as pa

from torchlake.errors import UsageError
from torchlake.models.structured.schemas import ANNOTATIONS, Place, at, closed, pointer
from torchlake.tables.arrays import without_dictionaries

WORDS = pa.dictionary(pa.int32(), pa.string())
MOMENT = pa.timestamp("us", tz="UTC")
SCALARS = {"string": pa.string(), "integer": pa.int64(), "number": pa.float64(), "boolean": pa.bool_()}
FORMATS = {"date": pa.date32(), "date-time": MOMENT}
OF_VALUES = {str: WORDS, bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
LARGEST = 2**63


class _Misfit(Exception):
    """A value that its column cannot hold; the message says which."""


def json_schema_of(schema: Any) -> pa.Schema:
    """Return the columns of a JSON schema. Raises UsageError for a part without a type, with its place."""
    found = _Types(closed(schema)).of(closed(schema), (), ())
    if not pa.types.is_struct(found) or not found.num_fields:
        raise _refused((), f"the whole text is {found}, and columns are the properties of an object")
    return pa.schema(list(found))


def json_columns(texts: Sequence[str], columns: pa.Schema) -> tuple[pa.Table, dict[int, str]]:
    """Return the columns of JSON texts, and {row: reason} for texts with a value that a column cannot hold.

    A row is among these, too, if its text is not JSON, because it was cut.
    """
    whole, rows, errors = pa.struct(list(columns)), [], {}
    for row, text in enumerate(texts):
        try:
            rows.append(_value(json.loads(text), whole, ()))
        except (_Misfit, ValueError, RecursionError) as error:
            rows.append(None)
            reason = str(error) if isinstance(error, _Misfit) else "it is not JSON"
            errors[row] = f"bad_value: {reason}"
    made = pa.array(rows, without_dictionaries(whole)).flatten()
    arrays = [_encoded(array, field.type) for array, field in zip(made, columns, strict=True)]
    return pa.table(arrays, schema=columns), errors


class _Types:
    """The types of a schema's parts, with the references between them."""

    def __init__(self, root: Any) -> None:
        self.root = root

    def of(self, schema: Any, place: Place, seen: tuple[str, ...]) -> pa.DataType:
        """Return the Arrow type of a part; `seen` are the references around it."""
        if not isinstance(schema, dict):
            raise _refused(place, "it allows any value")
        restricts = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
        combined = [key for key in ("$ref", "anyOf", "oneOf", "allOf") if key in restricts]
        if combined and len(restricts) > 1:
            raise _refused(place, f"it has {combined[0]} beside {next(key for key in restricts if key != combined[0])}")
        if combined:
            return self._combined(combined[0], restricts[combined[0]], place, seen)
        if "const" in restricts or "enum" in restricts:
            return _of_values([restricts["const"]] if "const" in restricts else restricts["enum"], place)
        named = restricts.get("type")
        if named is None:
            raise _refused(place, "it has no type")
        kinds = [named] if isinstance(named, str) else list(named)
        return _united([self._of_kind(kind, restricts, place, seen) for kind in kinds], place)

    def _combined(self, key: str, value: Any, place: Place, seen: tuple[str, ...]) -> pa.DataType:
        if key == "$ref":
            if value in seen or value == "#":
                raise _refused(place, f"it refers to itself ({value})")
            return self.of(at(self.root, value), place, (*seen, value))
        if key == "allOf" and len(value) > 1:
            raise _refused(place, "it has several schemas in allOf")
        return _united([self.of(one, (*place, key, number), seen) for number, one in enumerate(value)], place)

    def _held(self, schema: Any, place: Place, seen: tuple[str, ...]) -> pa.DataType:
        """Return the type of a property or of items."""
        found = self.of(schema, place, seen)
        if pa.types.is_null(found):
            raise _refused(place, "it is always null")
        return found

    def _of_kind(self, kind: str, schema: Mapping[str, Any], place: Place, seen: tuple[str, ...]) -> pa.DataType:
        if kind == "object":
            inner, named = (*place, "properties"), schema.get("properties", {})
            fields = [pa.field(name, self._held(one, (*inner, name), seen)) for name, one in named.items()]
            if "patternProperties" in schema or schema.get("additionalProperties", True) is not False:
                raise _refused(place, "its keys are not known: list them in properties, without additionalProperties")
            missing = [name for name in schema.get("required", []) if name not in named]
            if missing:
                raise _refused(place, f"it requires {missing[0]!r}, which is not in its properties")
            return pa.struct(fields)
        if kind == "array":
            first, rest = schema.get("prefixItems", []), schema.get("items", True)
            items = [self._held(one, (*place, "prefixItems", number), seen) for number, one in enumerate(first)]
            if rest is not False:
                items.append(self._held(rest, (*place, "items"), seen))
            if not items:
                raise _refused(place, "it has no items")
            return pa.list_(_united(items, place))
        if kind == "string":
            return FORMATS.get(schema.get("format", ""), pa.string())
        return SCALARS.get(kind, pa.null())


def _of_values(values: Sequence[Any], place: Place) -> pa.DataType:
    kinds = []
    for value in values:
        if value is not None and type(value) not in OF_VALUES:
            raise _refused(place, f"{json.dumps(value)[:60]} is among its values")
        kinds.append(pa.null() if value is None else OF_VALUES[type(value)])
    return _united(kinds, place)


def _united(kinds: Sequence[pa.DataType], place: Place) -> pa.DataType:
    """Return the type that holds all of some types; null is one beside another."""
    found = list(dict.fromkeys(kind for kind in kinds if not pa.types.is_null(kind)))
    if len(found) < 2:
        return found[0] if found else pa.null()
    for wide, narrow in ((pa.float64(), pa.int64()), (pa.string(), WORDS)):
        if set(found) == {wide, narrow}:
            return wide
    raise _refused(place, f"it may be {' or '.join(map(str, found))}")


def _refused(place: Place, reason: str) -> UsageError:
    return UsageError(
        f"json_columns: {pointer(place) or 'the whole schema'}: {reason}, so it has no column. Change the schema, or "
        "leave json_columns out: generated_text has the JSON."
    )


def _value(value: Any, kind: pa.DataType, place: Place) -> Any:
    """Return a value of JSON as Arrow takes it for the type."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        fields = ((field.name, field.type) for field in kind)
        return {name: _value(value.get(name), inner, (*place, name)) for name, inner in fields}
    if pa.types.is_list(kind):
        return [_value(one, kind.value_type, (*place, number)) for number, one in enumerate(value)]
    convert = CONVERT.get(kind)
    try:
        return value if convert is None else convert(value)
    except (ValueError, OverflowError):
        shown = json.dumps(value)[:60]
        raise _Misfit(f"{pointer(place)}: {shown} does not fit into {kind}; the text is kept") from None


def _whole(value: int) -> int:
    if not -LARGEST <= value < LARGEST:
        raise ValueError
    return value


def _finite(value: float) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text.upper()).astimezone(UTC)


CONVERT: Mapping[pa.DataType, Callable[[Any], Any]] = {
    pa.int64(): _whole,
    pa.float64(): _finite,
    pa.date32(): date.fromisoformat,
    MOMENT: _moment,
}
"For types whose values are not those of JSON. Python has no years before 1 and no 60th second."


def _encoded(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return an array with its strings as dictionaries where the type has them."""
    if pa.types.is_dictionary(kind):
        return array.cast(kind)
    if pa.types.is_struct(kind):
        inner = [_encoded(array.field(number), field.type) for number, field in enumerate(kind)]
        return pa.StructArray.from_arrays(inner, fields=list(kind), mask=array.is_null())
    if pa.types.is_list(kind):
        values = _encoded(array.values, kind.value_type)
        return pa.ListArray.from_arrays(array.offsets, values, type=kind, mask=array.is_null())
    return array
