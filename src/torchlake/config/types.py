"""The types of a job's fields: numbers that are not booleans, durations, intervals, names of plug-ins."""

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, PlainSerializer, PlainValidator

from torchlake import plugins

SECONDS = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}


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
    """ "200steps", "10min" or "epoch" as an Every. Raises ValueError with the allowed forms."""
    if isinstance(value, Every):
        return value
    text = str(value).strip().lower()
    if text == "epoch":
        return Every(epochs=1)
    steps = re.fullmatch(r"(\d{1,12})\s*steps?", text)
    if steps and int(steps[1]) > 0:
        return Every(steps=int(steps[1]))
    try:
        return Every(seconds=parse_seconds(text if isinstance(value, str) else None))
    except ValueError:
        raise ValueError(f'{value!r} is no interval; write "30s", "10min", "1h", "200steps" or "epoch"') from None


def parse_seconds(value: Any) -> float:
    """ "30s", "10min", "1h" or a number, in seconds > 0. Raises ValueError with the allowed forms."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf"):
        return float(value)
    text = value.strip().lower() if isinstance(value, str) else ""
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)\s*(s|sec|min|h)", text)
    if match is None or float(match[1]) <= 0:
        raise ValueError(f'{value!r} is no length of time; write "30s", "10min" or "1h"')
    return float(match[1]) * SECONDS[match[2]]


def _number(value: Any) -> Any:
    # YAML reads `yes` as true, and Python counts True as 1.
    if isinstance(value, bool):
        raise ValueError(f"a number is expected, given {str(value).lower()}")
    return value


def _path(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def parse_ranks(value: Any) -> int | tuple[int, int]:
    """A number of processes, or [fewest, most]. Raises ValueError with the allowed forms."""
    numbers = list(value) if isinstance(value, list | tuple) else [value]
    whole = all(isinstance(number, int) and not isinstance(number, bool) for number in numbers)
    if not whole or len(numbers) > 2 or not numbers:
        raise ValueError(f"{value!r} is no number of processes; write 4, or [2, 8] for the fewest and the most")
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


Int = Annotated[int, BeforeValidator(_number)]
Float = Annotated[float, BeforeValidator(_number)]
Ranks = Annotated[int | tuple[int, int], PlainValidator(parse_ranks), PlainSerializer(_plain_ranks)]
Seconds = Annotated[float, BeforeValidator(parse_seconds)]
Interval = Annotated[Every, BeforeValidator(parse_every), PlainSerializer(str)]
Name = Annotated[str, BeforeValidator(_path), Field(min_length=1)]
EngineName = Annotated[Name, AfterValidator(partial(_plugin, "engines", ()))]
TaskName = Annotated[Name, AfterValidator(partial(_plugin, "tasks", ()))]
StrategyName = Annotated[Name, AfterValidator(partial(_plugin, "strategies", ("auto",)))]
STRICT = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, arbitrary_types_allowed=True)
