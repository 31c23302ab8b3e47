"""Rewrite pydantic's errors as sentences: where, what was given, what is allowed, the nearest key."""

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from torchlake.config.redaction import redacted
from torchlake.config.yaml import Location, dotted, quote


def sentence(
    problem: Any, origins: Mapping[Location, str], path: str | Path | None, sections: Mapping[str, type[BaseModel]]
) -> str:
    """Return one of pydantic's errors as a sentence.

    `origins` are the places that the values came from; `path` is the job file, for values without an origin; `sections`
    are the known keys.
    """
    location = tuple(part for part in problem["loc"] if not str(part).startswith("<"))
    known = [location[:length] for length in range(len(location), 0, -1) if location[:length] in origins]
    origin = origins[known[0]] if known else str(path) if path is not None else "job"
    return f"{origin}: {dotted(location)}: {_explanation(problem, location, sections)}"


def nearest_settings(name: str, sections: Mapping[str, type[BaseModel]]) -> list[str]:
    """Return the dotted names of settings called `name`; if there are none, of the one with the nearest name."""
    every = [setting for section, model in sections.items() for setting in _settings(model, section)]
    exact = [setting for setting in every if f".{setting}".endswith(f".{name}")]
    if exact:
        return exact
    by_last = {setting.rpartition(".")[2]: setting for setting in reversed(every)}
    return [by_last[close] for close in get_close_matches(name, by_last, n=1, cutoff=0.8)]


def _settings(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"{prefix}.{name}"
        for nested in _models_in(field.annotation):
            yield from _settings(nested, f"{prefix}.{name}")


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)


def _explanation(problem: Any, location: Location, sections: Mapping[str, type[BaseModel]]) -> str:
    kind, context = problem["type"], problem.get("ctx", {})
    given = redacted(problem["input"], dotted(location))
    shown = quote(given)
    bounds = {"greater_than": "gt", "greater_than_equal": "ge", "less_than": "lt", "less_than_equal": "le"}
    words = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most"}
    if kind == "extra_forbidden":
        return f"unknown key{_nearest(location, sections)}"
    if kind == "missing":
        return "missing; it has no default"
    if kind in bounds:
        bound = bounds[kind]
        return f"must be {words[bound]} {context[bound]}, given {shown}"
    if kind == "literal_error":
        close = get_close_matches(str(given), re.findall(r"'([^']*)'", context["expected"]), n=1)
        return f"must be {context['expected']}, given {shown}{f'; did you mean {close[0]}?' if close else ''}"
    if kind.startswith("int_"):
        return f"a whole number is expected, given {shown}"
    if kind.startswith(("float_", "finite_")):
        return f"a number is expected, given {shown}"
    if kind == "bool_type":
        return f"true or false is expected, given {shown}"
    if kind in ("string_type", "string_too_short"):
        return f"a string is expected, given {shown}{' (put it in quotes)' if isinstance(given, int | float) else ''}"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"a mapping of keys is expected, given {shown}"
    if kind == "too_short":
        return "the list is empty; name at least one"
    if kind == "value_error":
        return str(context["error"])
    return f"{problem['msg']}, given {shown}"


def _nearest(location: Location, sections: Mapping[str, type[BaseModel]]) -> str:
    """Return a hint for an unknown key: the nearest key of its section, else of another section."""
    key = str(location[-1])
    section = sections.get(str(location[0])) if len(location) == 2 else None
    fields = list(section.model_fields) if section else list(sections) if len(location) == 1 else ["fraction"]
    if close := get_close_matches(key, fields, n=1):
        return f"; did you mean {close[0]}?"
    everywhere = {field: f"{name}.{field}" for name, model in sections.items() for field in model.model_fields}
    if close := get_close_matches(key, everywhere, n=1, cutoff=0.8):
        return f"; did you mean {everywhere[close[0]]}?"
    return f"; known are {', '.join(fields)}"
