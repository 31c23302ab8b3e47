"""JSON schemas: their parts, the place of a problem, and objects without unnamed keys."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import quote, unquote

ANNOTATIONS = frozenset(
    [
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
        "$schema",
        "$id",
        "$defs",
        "definitions",
        "x-guidance",
        "nullable",
    ]
)
"Keys that do not restrict a value."
OPENS = frozenset(
    [
        "additionalProperties",
        "patternProperties",
        "unevaluatedProperties",
        "minProperties",
        "maxProperties",
        "propertyNames",
        "not",
        "if",
        "allOf",
        "anyOf",
        "oneOf",
        "$ref",
    ]
)
"Keys beside which an object without `additionalProperties` stays open."
NAMED = ("properties", "patternProperties", "$defs", "definitions")
LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
"Keys whose values are schemas: by name, in a list, or one."
ROOT = "x-root"

Place = tuple[str | int, ...]


def pointer(place: Place) -> str:
    """Return a place as a JSON pointer; empty for the whole schema."""
    return "".join("/" + str(one).replace("~", "~0").replace("/", "~1") for one in place)


def parts(schema: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Yield the schemas directly inside a schema, with their places."""
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            yield from (((*place, key, name), one) for name, one in value.items())
        elif key in LISTED and isinstance(value, list):
            yield from (((*place, key, number), one) for number, one in enumerate(value))
        elif key in SINGLE:
            yield (*place, key), value


def at(root: Any, reference: str) -> Any:
    """Return the part of a schema that a local reference names. Raises KeyError if there is none."""
    found = root
    for name in map(unquote, _words(reference)):
        try:
            found = found[int(name)] if isinstance(found, list) else found[name]
        except (IndexError, ValueError, TypeError):
            raise KeyError(reference) from None
    return found


def _words(reference: str) -> list[str]:
    return [one.replace("~1", "/").replace("~0", "~") for one in reference.removeprefix("#").split("/")[1:]]


def closed(schema: Any) -> Any:
    """Return a schema whose objects have no keys besides their `properties`, unless it speaks of such keys.

    Every text that fits it fits the given schema, too. Without it a model may write keys that were not asked for, and a
    small one does not stop. A schema that describes an object in several parts is returned as it is.
    """
    return schema if any(map(_joins, _all(schema))) else _closed(schema)


def _all(schema: Any) -> Iterator[Any]:
    """Yield a schema and all schemas inside it."""
    yield schema
    for _, part in parts(schema):
        yield from _all(part)


def _joins(schema: Any) -> bool:
    """Return whether a schema restricts a value by another one and by keys of its own."""
    if not isinstance(schema, dict):
        return False
    restricts = schema.keys() - ANNOTATIONS
    several = isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1
    return several or (len(restricts) > 1 and bool(restricts & {"allOf", "anyOf", "oneOf", "$ref"}))


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            made[key] = {name: _closed(one) for name, one in value.items()}
        elif key in LISTED and isinstance(value, list):
            made[key] = [_closed(one) for one in value]
        elif key in SINGLE:
            made[key] = _closed(value)
    named, required = schema.get("properties"), schema.get("required", [])
    if isinstance(named, dict) and not OPENS & schema.keys() and all(name in named for name in required):
        made["additionalProperties"] = False
        if not {"type", "enum", "const"} & schema.keys():
            made["type"] = "object"
    return made


def place_of(schema: Any, problem: Callable[[Any], str | None]) -> tuple[str, str | None]:
    """Return the pointer to the innermost part that cannot be compiled, and the message about it.

    Each part is compiled alone, with its references. An optional property that no value fits is left out of texts, so
    only required ones are looked at where a schema fits no text.
    """
    root = _rooted(schema)

    def alone(place: Place) -> str | None:
        reference = f"#/{ROOT}{quote(pointer(place))}"
        return problem({ROOT: root, "$ref": reference})

    place: Place = ()
    part = schema
    message, seen = problem(schema), {place}
    while message is not None:
        for inner, one in (*parts(part, place), *_referred(schema, part)):
            found = alone(inner)
            around = isinstance(one, dict) and one.get("$ref") in {f"#{pointer(each)}" for each in seen}
            if found is not None and inner not in seen and not around and _counts(part, inner, found):
                place, part, message = inner, one, found
                seen.add(inner)
                break
        else:
            break
    return pointer(place), message


def _referred(root: Any, schema: Any) -> Iterator[tuple[Place, Any]]:
    """Yield the part of the root that a schema refers to, with its place."""
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    if isinstance(reference, str) and reference.startswith("#/"):
        with suppress(KeyError):
            yield tuple(unquote(one) for one in _words(reference)), at(root, reference)


def _counts(part: Mapping[str, Any], place: Place, message: str) -> bool:
    """Return whether a part that cannot be compiled is why the schema around it cannot."""
    if not message.startswith("Unsatisfiable"):
        return True
    if "$ref" in part:
        return True
    if place[-2] == "properties":
        return place[-1] in part.get("required", [])
    return place[-1] != "additionalProperties" and place[-2] not in ("$defs", "definitions", "patternProperties")


def _rooted(schema: Any) -> Any:
    """Return a schema as a part of another one: its references name the same parts there."""
    if isinstance(schema, list):
        return [_rooted(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _rooted(value) for key, value in schema.items() if key not in ("$id", "$schema")}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        made["$ref"] = f"#/{ROOT}{reference[1:]}"
    return made
