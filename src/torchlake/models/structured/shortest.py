"""The shortest text that fits a schema or an expression, to compare it with `max_new_tokens`.

It is found from the structure, not by a search over the grammar, whose states llguidance does not compare: an object
has its required keys, an array as many items as it must, a string its shortest pattern, and a union its shortest
member. Whatever a rule here does not know (`allOf`, `patternProperties`, a pattern beside a minimum length) gives None,
and so does an answer that the compiled grammar does not take. So an answer that is returned does fit, and a job is
refused only for one: it may have a shorter one, in rare cases, if a longer text takes fewer tokens.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

from torchlake.errors import UsageError
from torchlake.models.structured.schemas import ANNOTATIONS, at
from torchlake.models.structured.structure import Structure, compiled, matches

FORMATS = {
    "date": "2000-01-01",
    "time": "00:00:00Z",
    "date-time": "2000-01-01T00:00:00Z",
    "duration": "P1D",
    "email": "a@b",
    "hostname": "a",
    "ipv4": "0.0.0.0",
    "ipv6": "::",
    "uuid": "00000000-0000-0000-0000-000000000000",
    "uri": "a:",
}
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
FAR = 10_000
"Schemas that are visited at most, of which many may name one another."
PRINTABLE = [chr(code) for code in (*range(ord("a"), ord("z") + 1), *range(32, 127))]


class _Unknown(Exception):
    """A rule does not know the shortest text."""


def shortest_text(structure: Structure) -> tuple[bytes, bool] | None:
    """Return the shortest text, and whether it ends by itself, as a number does not; None if it is not known.

    Raises UsageError if no text fits a schema, because it contains itself without an end.
    """
    from llguidance import LLTokenizer

    try:
        if structure.kind == "regex":
            found = [_of_regex(structure.text)]
        elif structure.kind == "json_schema":
            found = [_of_schema(structure.schema)]
        else:
            return None
    except UsageError:
        raise
    except (_Unknown, KeyError, TypeError, ValueError, RecursionError, re.error):
        return None  # llguidance says what is wrong with a schema, or knows what is not known here
    text = found[0].encode()
    fits, ends = matches(LLTokenizer("byte"), compiled(structure), text)
    return (text, ends) if fits else None


def _of_schema(schema: Any) -> str:
    """Return the shortest text of a whole schema. Raises UsageError if none fits."""
    walk = _Walk(schema)
    found = walk.text(schema, ("#",))
    if found is None:
        raise UsageError(f"json_schema: {walk.endless or 'the whole schema'}: no text fits: it always contains itself.")
    return found


class _Walk:
    """A walk through a schema and what it refers to."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.visited = 0
        self.endless = ""
        "The first reference that leads to itself."

    def text(self, schema: Any, seen: tuple[str, ...]) -> str | None:
        """Return the shortest text, None if there is none; `seen` are the references around it.

        A shortest text never contains a value of the reference that it is itself a value of.
        """
        self.visited += 1
        if self.visited > FAR or (isinstance(schema, bool) and not schema):
            raise _Unknown
        if isinstance(schema, bool):
            return "0"
        restricts = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
        others = restricts.keys() & {"$ref", "anyOf", "oneOf", "allOf"}
        if (others and len(restricts) > 1) or "patternProperties" in restricts:
            raise _Unknown
        if "$ref" in restricts:
            reference = restricts["$ref"]
            if reference in seen:
                self.endless = self.endless or reference
                return None
            return self.text(at(self.root, reference), (*seen, reference))
        if others:
            members = next(iter(restricts.values()))
            if "allOf" in restricts and len(members) > 1:
                raise _Unknown
            return _least(self.text(one, seen) for one in members)
        if "const" in restricts or "enum" in restricts:
            values = [restricts["const"]] if "const" in restricts else restricts["enum"]
            return _least(map(_written, values))
        named = restricts["type"] if "type" in restricts else _types_of(restricts)
        kinds = [named] if isinstance(named, str) else named
        return _least(self._of_type(kind, restricts, seen) for kind in kinds)

    def _of_type(self, kind: str, schema: Mapping[str, Any], seen: tuple[str, ...]) -> str | None:
        if kind == "object":
            return self._object(schema, seen)
        if kind == "array":
            least, first = schema.get("minItems", 0), schema.get("prefixItems", [])
            items = [*first, *([schema.get("items", True)] * (least - len(first)))][:least]
            texts = [self.text(one, seen) for one in items]
            return None if None in texts else f"[{','.join(map(str, texts))}]"
        if kind == "string":
            return _written(_string(schema))
        if kind in ("integer", "number"):
            return _number(schema, whole=kind == "integer")
        return {"null": "null", "boolean": "true"}[kind]

    def _object(self, schema: Mapping[str, Any], seen: tuple[str, ...]) -> str | None:
        named, required = schema.get("properties", {}), schema.get("required", [])
        if schema.get("minProperties", 0) > len(required):
            raise _Unknown
        names = [*(name for name in named if name in required), *(name for name in required if name not in named)]
        rest = schema.get("additionalProperties", True)
        texts = [(name, self.text(named.get(name, rest), seen)) for name in names]
        if any(text is None for _, text in texts):
            return None
        return f"{{{','.join(f'{_written(name)}:{text}' for name, text in texts)}}}"


def _least(texts: Iterable[str | None]) -> str | None:
    """Return the shortest of some texts; None stands for no text."""
    return min((text for text in texts if text is not None), key=len, default=None)


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _types_of(schema: Mapping[str, Any]) -> Sequence[str]:
    if "properties" in schema:  # as in `schemas.closed`
        return ("object",)
    if schema:
        raise _Unknown  # keys that restrict values of one type leave all other types free
    return TYPES


def _string(schema: Mapping[str, Any]) -> str:
    least = schema.get("minLength", 0)
    if "format" in schema and "pattern" in schema:
        raise _Unknown
    text = FORMATS.get(schema["format"]) if "format" in schema else None
    if "pattern" in schema:
        text = _of_regex(schema["pattern"])
    if text is None and "format" not in schema:
        text = "a" * least
    if text is None or len(text) < least:
        raise _Unknown
    return text


def _number(schema: Mapping[str, Any], *, whole: bool) -> str:
    """Return the shortest number between the limits, of a multiple if there is one."""
    step = schema.get("multipleOf", 1)
    low = max(schema.get("minimum", -math.inf), schema.get("exclusiveMinimum", -math.inf))
    high = min(schema.get("maximum", math.inf), schema.get("exclusiveMaximum", math.inf))

    def inside(value: float) -> bool:
        open_ended = value in (schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum"))
        return bool(low <= value <= high and not open_ended)

    for digits in range(1 if whole or "multipleOf" in schema else 8):
        unit = step * 10.0**-digits if digits else step
        near = [
            0,
            *(
                turn(limit / unit) + shift
                for limit in (low, high)
                if math.isfinite(limit)
                for turn in (math.floor, math.ceil)
                for shift in (-1, 0, 1)
            ),
        ]
        fits = [round(one * unit, digits) if digits else one * unit for one in near]
        if texts := [_written(int(one) if one == int(one) else one) for one in fits if inside(one)]:
            return min(texts, key=len)
    raise _Unknown


def _of_regex(pattern: str) -> str:
    """Return the shortest text of an expression, which Python's parser reads. It reads most of Rust's syntax."""
    nodes: Any = _parser.parse(pattern)
    return "".join(map(_of_node, nodes))


def _of_node(node: tuple[Any, Any]) -> str:
    kind, value = node
    if kind is _constants.LITERAL:
        return chr(value)
    if kind is _constants.ANY:
        return "a"
    if kind is _constants.NOT_LITERAL:
        return next(one for one in PRINTABLE if ord(one) != value)
    if kind is _constants.IN:
        negated = value[0][0] is _constants.NEGATE
        fitting = (one for one in PRINTABLE if any(map(partial(_in_class, one), value[negated:])) != negated)
        found = next(fitting, None)
        if found is None:
            raise _Unknown
        return found
    if kind is _constants.BRANCH:
        return min(("".join(map(_of_node, nodes)) for nodes in value[1]), key=len)
    if kind is _constants.SUBPATTERN:
        return "".join(map(_of_node, value[3]))
    if kind in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
        return "".join(map(_of_node, value[2])) * int(value[0])
    if kind is _constants.AT:
        return ""
    raise _Unknown


def _in_class(letter: str, item: tuple[Any, Any]) -> bool:
    kind, value = item
    if kind is _constants.LITERAL:
        return bool(ord(letter) == value)
    if kind is _constants.RANGE:
        return bool(value[0] <= ord(letter) <= value[1])
    name = str(value)
    tests = {"DIGIT": letter.isdigit(), "SPACE": letter.isspace(), "WORD": letter.isalnum() or letter == "_"}
    kinds = [known for known in tests if name.endswith(known)]
    if kind is not _constants.CATEGORY or not kinds:
        raise _Unknown
    return tests[kinds[0]] != ("NOT" in name)
