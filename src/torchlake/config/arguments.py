"""Check the arguments of Python functions, in the words in which a job file's values are checked."""

import json
import numbers
import os
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from torchlake.config.messages import TEXT, expected, one_of
from torchlake.config.options import Option
from torchlake.errors import UsageError

WORDS: dict[type, tuple[str, type]] = {
    bool: ("true or false", bool),
    int: ("a whole number", numbers.Integral),
    float: ("a number", numbers.Real),
    str: (TEXT, str),
    Path: ("a path", os.PathLike),
}
"What an argument of a type is called, and what it has to be an instance of: numpy's numbers are numbers, too."


def check_arguments(given: Mapping[str, Any], annotations: Mapping[str, Any]) -> None:
    """Raise UsageError for an argument that is not of its type (a number, a string, a switch, a path, one of some
    words, a mapping, or several of these), or out of the range of its `Option`.

    `annotations`: those of the function or of a TypedDict. Arguments with other types are not looked at.
    """
    for name, value in given.items():
        problem = _problem(value, annotations.get(name, Any)) or _out_of_range(value, annotations.get(name))
        if problem is not None:
            raise UsageError(f"{name}: {problem}")


def plain_numbers(value: Any) -> Any:
    """Return arguments with Python's numbers in place of numpy's, which JSON does not have, also in mappings and
    lists."""
    if isinstance(value, Mapping):
        return {name: plain_numbers(one) for name, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain_numbers(one) for one in value)
    return value.item() if isinstance(value, numbers.Number) and hasattr(value, "item") else value


def column_names(option: str, given: Any) -> tuple[str, ...]:
    """Return the columns that an argument names, one or several. Raises UsageError for anything else."""
    names = (given,) if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
    if not all(isinstance(name, str) and name for name in names):
        raise UsageError(f"{option}: {expected('names of columns', given)}")
    return names


def refuse_unknown(function: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raise TypeError, as a function does, for an argument that is not `known`, and UsageError for a wrong type."""
    unknown = sorted(given.keys() - known.keys())
    if unknown:
        close = get_close_matches(unknown[0], known, n=1)
        hint = f". Did you mean {close[0]!r}?" if close else ""
        raise TypeError(f"{function}() got an unexpected keyword argument {unknown[0]!r}{hint}")
    check_arguments(given, known)


def read_named(option: str, path: str | os.PathLike[str]) -> str:
    """Return the text of a file that an option names. Raises UsageError."""
    if "\0" in os.fspath(path):
        raise UsageError(f"{option}: a name of a file has no null character.")
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"{option}: {path}: cannot be read: {reason}") from None


def read_named_json(option: str, path: str | os.PathLike[str]) -> Any:
    """Return the value in a JSON file that an option names. Raises UsageError."""
    text = read_named(option, path)
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError(f"{option}: {path}: is not JSON: {error}") from None


def types_of(annotation: Any) -> tuple[Any, ...]:
    """Return the types that a value may have: the members of a union, without metadata."""
    if get_origin(annotation) is Annotated:
        return types_of(get_args(annotation)[0])
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _problem(value: Any, annotation: Any) -> str | None:
    kinds = types_of(annotation)
    if value is None and NoneType in kinds:
        return None
    wanted = [kind for kind in kinds if kind is not NoneType]
    if all(get_origin(kind) is Literal for kind in wanted):
        choices = [choice for kind in wanted for choice in get_args(kind)]
        return None if value in choices else one_of(choices, value)
    if all(get_origin(kind) is Mapping for kind in wanted):
        return None if isinstance(value, Mapping | None) else expected("a mapping", value)
    listed = [get_args(kind)[0] for kind in wanted if get_origin(kind) is Sequence]
    if value is None and (listed or Path in wanted):  # left out
        return None
    if listed and all(kind in listed or get_origin(kind) is Sequence for kind in wanted):
        return _problem_of_several(value, listed[0])
    if not all(kind in WORDS for kind in wanted):
        return None
    found = any(isinstance(value, WORDS[kind][1]) and (kind is bool or not isinstance(value, bool)) for kind in wanted)
    return None if found else expected(" or ".join(WORDS[kind][0] for kind in wanted), value)


def _problem_of_several(value: Any, kind: Any) -> str | None:
    """Return what is wrong with one or several values of a kind; of iterators, which are read once, nothing is."""
    words, wanted = WORDS[kind]
    several = value if isinstance(value, list | tuple) else [value]
    if not isinstance(value, list | tuple | str | bytes | Mapping) and isinstance(value, Iterable):
        return None
    found = all(isinstance(one, wanted) and not isinstance(one, bool) for one in several)
    return None if found else expected(f"{words}, or several", value)


def _out_of_range(value: Any, annotation: Any) -> str | None:
    option = next((one for one in getattr(annotation, "__metadata__", ()) if isinstance(one, Option)), None)
    if option is None or not isinstance(value, numbers.Real):
        return None
    number: Any = value
    if option.min is not None and not number >= option.min:
        return f"must be at least {option.min:.15g}, got {value}"
    return None if option.max is None or number <= option.max else f"must be at most {option.max:.15g}, got {value}"
