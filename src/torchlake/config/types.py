"""The types of a job's fields: numbers that are not booleans, durations, intervals, names of plug-ins.

Each type also has its JSON Schema, for editors. It accepts every value that the type accepts in a job file, so it has
the same patterns; it may accept more, for example a string with a number out of range.
"""

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainSerializer,
    PlainValidator,
    Strict,
    WithJsonSchema,
)
from pydantic_core import CoreSchema

from torchlake import plugins
from torchlake.config.messages import RANKS, expected

SECONDS = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}
# Both Python and ECMAScript read these patterns, without flags: hence no \d (any digit of Unicode) and both cases.
UNIT = "([sS]|[sS][eE][cC]|[mM][iI][nN]|[hH])"
TIME = rf"([0-9]{{1,12}}(?:\.[0-9]{{1,6}})?)\s*{UNIT}"
STEPS = r"([0-9]{1,12})\s*[sS][tT][eE][pP][sS]?"
EPOCH = "[eE][pP][oO][cC][hH]"
NUMBER = r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?"


@dataclass(frozen=True, kw_only=True)
class Every:
    """An interval; exactly one field is set. Written "30s", "10min", "1h", "200steps" or "epoch"."""

    seconds: float | None = None
    steps: int | None = None
    epochs: int | None = None

    def __str__(self) -> str:
        if self.steps is not None:
            return f"{self.steps}steps"
        if self.seconds is None:
            return "epoch"
        return f"{self.seconds:.6f}".rstrip("0").rstrip(".") + "s"


def parse_every(value: Any) -> Every:
    """Parse "200steps", "10min" or "epoch". Raises ValueError with the allowed forms."""
    if isinstance(value, Every):
        return value
    text = value.strip() if isinstance(value, str) else ""
    if re.fullmatch(EPOCH, text):
        return Every(epochs=1)
    steps = re.fullmatch(STEPS, text)
    if steps and int(steps[1]) > 0:
        return Every(steps=int(steps[1]))
    try:
        return Every(seconds=parse_seconds(text))
    except ValueError:
        raise ValueError(expected('an interval ("30s", "10min", "1h", "200steps" or "epoch")', value)) from None


def parse_seconds(value: Any) -> float:
    """Parse "30s", "10min", "1h" or a number, into seconds above 0. Raises ValueError with the allowed forms."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf"):
        return float(value)
    match = re.fullmatch(TIME, value.strip()) if isinstance(value, str) else None
    if match is None or float(match[1]) <= 0:
        raise ValueError(expected('a length of time ("30s", "10min" or "1h")', value))
    return float(match[1]) * SECONDS[match[2].lower()]


def _number(kind: str, value: Any) -> Any:
    # YAML reads `yes` as true, and Python counts True as 1.
    if isinstance(value, bool):
        raise ValueError(expected(kind, value))
    # YAML 1.1 reads 1e-4 as a string.
    if isinstance(value, str) and not re.fullmatch(NUMBER, value.strip()):
        raise ValueError(expected(kind, value))
    return value


def _path(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def parse_ranks(value: Any) -> int | tuple[int, int]:
    """Return a number of processes, or [fewest, most]. Raises ValueError with the allowed forms."""
    numbers = list(value) if isinstance(value, list | tuple) else [value]
    whole = all(isinstance(number, int) and not isinstance(number, bool) for number in numbers)
    if not whole or len(numbers) > 2 or not numbers:
        raise ValueError(expected(RANKS, value))
    fewest, most = numbers[0], numbers[-1]
    if not 1 <= fewest <= most:
        raise ValueError(f"{value!r}: the number of processes is at least 1, and the fewest come first")
    return fewest if fewest == most else (fewest, most)


def _plain_ranks(value: int | tuple[int, int]) -> int | list[int]:
    return value if isinstance(value, int) else list(value)


def _plugin(kind: plugins.Kind, besides: tuple[str, ...], name: str) -> str:
    problem = plugins.explain_unknown(kind, name, besides=besides)
    if problem is not None:
        raise ValueError(problem)
    return name


@dataclass(frozen=True)
class _AlsoText:
    """Adds strings with a pattern to the JSON Schema of a number; `minimum` and the like apply only to numbers."""

    pattern: str

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        found = handler(core)
        return {**found, "type": [found["type"], "string"], "pattern": _whole(self.pattern)}


def _whole(pattern: str) -> str:
    return rf"^\s*({pattern})\s*$"


def _plugin_names(kind: plugins.Kind, *besides: str) -> tuple[AfterValidator, WithJsonSchema]:
    choices = {"type": "string", "enum": [*besides, *plugins.names(kind)]}
    return AfterValidator(partial(_plugin, kind, besides)), WithJsonSchema(choices)


_RANKS = {"type": "integer", "minimum": 1}
_TIMES = {"type": "string", "pattern": _whole(f"{EPOCH}|{STEPS}|{TIME}")}

CHECKED_INT = BeforeValidator(partial(_number, "a whole number"))
Int = Annotated[int, CHECKED_INT, _AlsoText(NUMBER)]
Float = Annotated[float, BeforeValidator(partial(_number, "a number")), _AlsoText(NUMBER)]
Bool = Annotated[bool, Strict()]
Ranks = Annotated[
    int | tuple[int, int],
    PlainValidator(parse_ranks),
    PlainSerializer(_plain_ranks),
    WithJsonSchema({"anyOf": [_RANKS, {"type": "array", "items": _RANKS, "minItems": 1, "maxItems": 2}]}),
]
Seconds = Annotated[float, Field(gt=0), BeforeValidator(parse_seconds), _AlsoText(TIME)]
Interval = Annotated[Every, BeforeValidator(parse_every), PlainSerializer(str), WithJsonSchema(_TIMES)]
Name = Annotated[str, BeforeValidator(_path), Field(min_length=1)]
EngineName = Annotated[Name, *_plugin_names("engines")]
TaskName = Annotated[Name, *_plugin_names("tasks")]
StrategyName = Annotated[Name, *_plugin_names("strategies", "auto")]
STRICT = ConfigDict(
    extra="forbid", frozen=True, allow_inf_nan=False, arbitrary_types_allowed=True, use_attribute_docstrings=True
)
