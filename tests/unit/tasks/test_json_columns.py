"""Typed columns of JSON texts."""

from datetime import UTC, date, datetime
from typing import Any

import pyarrow as pa
import pytest

from torchlake.errors import UsageError
from torchlake.tasks._json_columns import MOMENT, WORDS, json_columns, json_schema_of

ADDRESS = {"type": "object", "properties": {"city": {"const": "Rome"}, "zip": {"type": "integer"}}}
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["good", "bad", None]},
        "born": {"type": "string", "format": "date"},
        "at": {"type": ["string", "null"], "format": "date-time"},
        "n": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "x": {"type": ["number", "integer"]},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
        "homes": {"type": "array", "items": {"$ref": "#/$defs/address"}},
    },
    "$defs": {"address": ADDRESS},
}


def test_types_and_values() -> None:
    schema = json_schema_of(SCHEMA)
    home = pa.struct({"city": WORDS, "zip": pa.int64()})
    assert schema.types == [WORDS, pa.date32(), MOMENT, pa.int64(), pa.float64(), pa.list_(WORDS), pa.list_(home)]
    texts = [
        '{"kind":"good","born":"2024-02-29","at":"2020-01-01t00:30:00.5+01:00","n":3,"x":1,"tags":["b"],"homes":[{"zip":7}]}',
        '{"kind":null,"tags":[]}',
    ]
    table, errors = json_columns(texts, schema)
    table.validate(full=True)
    nothing = dict.fromkeys(schema.names)
    assert errors == {}
    assert table.to_pylist() == [
        {
            "kind": "good",
            "born": date(2024, 2, 29),
            "at": datetime(2019, 12, 31, 23, 30, 0, 500_000, UTC),
            "n": 3,
            "x": 1.0,
            "tags": ["b"],
            "homes": [{"city": None, "zip": 7}],
        },
        {**nothing, "tags": []},
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"n":99999999999999999999}', "/n: 99999999999999999999 does not fit into int64"),
        ('{"x":1e999}', "/x: Infinity does not fit into double"),
        ('{"born":"0000-01-01"}', '/born: "0000-01-01" does not fit into date32'),
        ('{"homes":[{"zip":9223372036854775808}]}', "/homes/0/zip: 9223372036854775808"),
        ('{"ki', "it is not JSON"),
    ],
)
def test_a_value_that_a_column_cannot_hold_is_an_error_of_its_row(text: str, reason: str) -> None:
    table, errors = json_columns(['{"n":1}', text], json_schema_of(SCHEMA))
    assert errors.keys() == {1}
    assert errors[1].startswith("bad_value: ")
    assert reason in errors[1]
    assert table["n"].to_pylist() == [1, None]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({}, "/properties/a: it has no type"),
        (True, "/properties/a: it allows any value"),
        ({"type": "object"}, "/properties/a: its keys are not known"),
        ({"type": "object", "properties": {}, "additionalProperties": {}}, "/properties/a: its keys are not known"),
        ({"type": ["string", "integer"]}, "/properties/a: it may be string or int64"),
        ({"enum": [1, "a"]}, "/properties/a: it may be"),
        ({"enum": [[1]]}, "/properties/a: .1. is among its values"),
        ({"type": "null"}, "/properties/a: it is always null"),
        ({"type": "array"}, "/properties/a/items: it allows any value"),
        ({"type": "array", "items": {"type": "object"}}, "/properties/a/items: its keys"),
        ({"type": "object", "properties": {"b": {"$ref": "#"}}}, "/properties/a/properties/b: it refers to itself"),
        ({"$ref": "#/properties/a"}, "/properties/a: it refers to itself"),
        ({"allOf": [{"type": "string"}, {"minLength": 2}]}, "/properties/a: it has several schemas in allOf"),
        ({"anyOf": [{"type": "string"}], "minLength": 2}, "/properties/a: it has anyOf beside minLength"),
    ],
)
def test_what_has_no_type_is_refused_with_its_place(part: Any, message: str) -> None:
    with pytest.raises(UsageError, match=f"json_columns: {message}"):
        json_schema_of({"type": "object", "properties": {"a": part}})


def test_columns_are_the_properties_of_an_object() -> None:
    for schema in ({"type": "string"}, {"type": "object", "properties": {}}):
        with pytest.raises(UsageError, match="the whole schema: the whole text is"):
            json_schema_of(schema)
