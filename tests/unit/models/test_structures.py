"""What written texts have to fit: read from the options, and refused before a model is loaded."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torchlake.errors import MissingExtra, UsageError
from torchlake.models.load import load_tokenizer
from torchlake.models.structured import structure as structures
from torchlake.models.structured.schemas import closed
from torchlake.models.structured.shortest import shortest_text
from torchlake.models.structured.structure import Structure, compiled, read_structure
from torchlake.models.structured.tokens import check_structure, fewest_tokens, token_bytes

PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


def of(**given: Any) -> Structure:
    found = read_structure(given)
    assert found is not None
    return found


def test_a_file_is_the_same_structure_as_its_content(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(PERSON, indent=4), encoding="utf-8")
    assert of(json_schema=tmp_path / "schema.json") == of(json_schema=PERSON)
    (tmp_path / "dates.lark").write_text('start: "a"', encoding="utf-8")
    assert of(grammar=str(tmp_path / "dates.lark")).text == 'start: "a"'
    assert of(choices="good, bad").choices == of(choices=["good", "bad"]).choices == ("good", "bad")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"regex": "a", "choices": "b"}, "regex, choices: an answer has one structure"),
        ({"json_columns": True}, "Give json_schema as well"),
        ({"json_columns": True, "regex": "a"}, "Give json_schema as well"),
        ({"choices": "good,,bad"}, "choices: number 2 is blank"),
        ({"choices": []}, "is blank"),
        ({"choices": ["a", 3]}, "3 is not a string"),
        ({"choices": "a,b,a"}, "'a' is there twice"),
        ({"json_schema": 3}, "expected one file"),
        ({"json_schema": {"maximum": float("nan")}}, "json_schema: a value in it is not one of JSON: Out of range"),
        ({"json_schema": {"const": date(2026, 1, 1)}}, "Object of type date is not JSON"),
        ({"json_schema": {"maximum": np.int64(3)}}, "Object of type int64 is not JSON"),
        ({"regex": ""}, "regex: is empty, and so would all texts be"),
        ({"grammar": "missing.lark"}, "missing.lark: cannot be read: No such file"),
    ],
)
def test_options_that_are_no_structure(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_structure(given)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (
            {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)y"}}},
            "json_schema: /properties/a: .*look-ahead",
        ),
        (
            {
                "type": "object",
                "properties": {"b": {"minimum": 9, "maximum": 3, "type": "integer"}, "a b/c": {"enum": []}},
                "required": ["a b/c"],
            },
            "json_schema: /properties/a b~1c: Unsatisfiable",
        ),
        ({"properties": {"a": {"items": {"anyOf": [{"type": "null"}, {"not": {}}]}}}}, "/properties/a/items/anyOf/1: "),
        ({"properties": {"a": {"$ref": "#/$defs/q"}}, "$defs": {"q": {"type": "strin"}}}, "/\\$defs/q: Invalid type"),
        ({"properties": {"a": {"$ref": "#/$defs/q"}}}, "/properties/a: .*does not exist"),
        ({"properties": {"a": {"$ref": "#"}, "b": {"format": "x"}}}, "/properties/b: Unknown format"),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "the whole schema: .*uniqueItems"),
        (False, "the whole schema: Unsatisfiable"),
        ([1], "a schema is a mapping"),
    ],
)
def test_a_schema_that_cannot_be_compiled_is_refused_with_the_place(schema: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(schema), encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        compiled(of(json_schema=tmp_path / "schema.json"))


def test_expressions_and_grammars_that_cannot_be_compiled(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"regex: a\(\?!b\): look-around.* is not supported"):
        compiled(of(regex="a(?!b)"))
    with pytest.raises(UsageError, match="no text fits"):
        compiled(of(regex="[^\\s\\S]"))
    (tmp_path / "g.lark").write_text("start: foo", encoding="utf-8")
    with pytest.raises(UsageError, match='unknown name: "foo"'):
        compiled(of(grammar=tmp_path / "g.lark"))


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (
            {"type": "object", "properties": {"a": {"type": "string", "minLength": 4}}, "required": ["a"]},
            '{"a":"aaaa"}',
        ),
        ({"properties": {"a": {"type": "null"}}}, "{}"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.7}, "0.1"),
        ({"type": "integer", "minimum": 101, "multipleOf": 7}, "105"),
        ({"type": "string", "pattern": "^[A-Z]{3}-\\d{2}(x|yz)?$"}, '"AAA-00"'),
        ({"type": "string", "format": "date"}, '"2000-01-01"'),
        ({"type": "array", "items": {"enum": ["aaa", "b"]}, "minItems": 2}, '["b","b"]'),
        ({"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 22}, "minItems": 2}, "[1,22]"),
        ({"anyOf": [{"type": "string", "minLength": 9}, {"type": "boolean"}]}, "true"),
        ({"properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]}, '{"next":null}'),
        ({}, "0"),
        ({"allOf": [{"type": "integer"}, {"minimum": 5}]}, None),
    ],
)
def test_the_shortest_text(schema: Any, text: str | None) -> None:
    found = shortest_text(of(json_schema=schema))
    assert (None if found is None else found[0].decode()) == text


def test_a_schema_without_an_end_fits_no_text() -> None:
    with pytest.raises(UsageError, match="#/\\$defs/n: no text fits: it always contains itself"):
        shortest_text(
            of(
                json_schema={
                    "$ref": "#/$defs/n",
                    "$defs": {"n": {"properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}},
                }
            )
        )


def test_a_text_has_to_fit_into_max_new_tokens(tiny_gpt2: Path) -> None:
    structure, ends = of(regex="(?:film){3}"), [2]
    tokens = token_bytes(load_tokenizer(tiny_gpt2), ends=ends)
    least = fewest_tokens(tokens, b"filmfilmfilm")
    assert least is not None
    assert least < 12  # as tokens, not as letters
    check_structure(structure, tiny_gpt2, ends=ends, new_tokens=least)
    with pytest.raises(UsageError, match=f"has {least} tokens, and max_new_tokens is {least - 1}"):
        check_structure(structure, tiny_gpt2, ends=ends, new_tokens=least - 1)
    with pytest.raises(UsageError, match="has 2 tokens, and max_new_tokens is 1"):  # a number needs an end token
        check_structure(of(json_schema={"type": "integer", "minimum": 1}), tiny_gpt2, ends=ends, new_tokens=1)
    with pytest.raises(UsageError, match="3 choices, of which 'bad' has 2 tokens, need max_new_tokens=4"):
        check_structure(of(choices="a,bad,c"), tiny_gpt2, ends=ends, new_tokens=3)


def test_tokenizers_that_do_not_spell_every_text_are_refused(tiny_bert: Path) -> None:
    with pytest.raises(UsageError, match="byte-level or SentencePiece; this one is WordPiece"):
        token_bytes(load_tokenizer(tiny_bert), ends=[0])


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structures, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"regex needs the library 'llguidance'.*torchlake\[structured\]"):
        structures.check_installed(of(regex="a"))


def test_only_objects_that_say_nothing_about_other_keys_are_closed() -> None:
    assert closed(PERSON)["additionalProperties"] is False
    assert closed({"properties": {}})["type"] == "object"
    for kept in ({**PERSON, "additionalProperties": True}, {"allOf": [PERSON, PERSON]}, {**PERSON, "required": ["x"]}):
        assert closed(kept) == kept
