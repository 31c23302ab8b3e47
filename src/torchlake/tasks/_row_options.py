"""Options of single rows: a column of structs or JSON text whose fields take the place of the job's; null: the job's.

    {max_new_tokens: 20, temperature: 0.7, seed: 3, stop: ["."]}

Fields of structs with other names are refused before any work. A row with a bad value is an error row, `bad_options:
...`. With several answers each, and with seeds by key, every answer of a row has its own seed.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

import pyarrow as pa

from torchlake.errors import UsageError
from torchlake.models.generation import GenerationOptions, check_values
from torchlake.tables.arrays import is_text

log = logging.getLogger(__name__)

OPTIONS = "options"
"The input, and the column that is found by its name."
KINDS: Mapping[str, tuple[type, ...]] = {
    "max_new_tokens": (int,),
    "temperature": (float, int),
    "seed": (int,),
    "stop": (str, list),
}


def find_options(schema: pa.Schema, named: str | None, first: Callable[[str], pa.Table] | None = None) -> str | None:
    """Return the column of options: the one that is named, or a struct or JSON text that has this name.

    `first` returns the first rows of a column; None: they are not looked at. Raises UsageError.
    """
    column = named or OPTIONS
    kind = schema.field(column).type if column in schema.names else pa.null()
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    text = is_text(kind)
    if not (text or pa.types.is_struct(kind)):
        if named is not None:
            held = f"holds {kind}" if column in schema.names else "is not in the table"
            raise UsageError(
                f"options: the column {column!r} {held}; it is a struct of {', '.join(KINDS)}, or JSON text of one."
            )
        return None
    if text:
        names = [] if named is not None or first is None else _names_in(first(column)[column].to_pylist())
    else:
        names = [one.name for one in kind]
    if named is None and not any(get_close_matches(name, KINDS, n=1) for name in names):
        also = "; --inputs options=options reads its text as JSON" if text else ""
        log.warning("options: the column %r has no option of a row, and is not read as such%s", column, also)
        return None
    if not text and (unknown := _unknown(names)):
        raise UsageError(f"options: {column!r} has the field {unknown}")
    return column


def _names_in(values: Iterable[Any]) -> list[str]:
    """Return the fields of texts that are JSON objects."""
    found = list[str]()
    for value in values:
        with suppress(UsageError):
            found += _fields(value)
    return found


def _unknown(names: Iterable[str]) -> str:
    """Return the first name that is not an option of a row, with the options; "" if there is none."""
    unknown = next((name for name in names if name not in KINDS), None)
    if unknown is None:
        return ""
    close = get_close_matches(unknown, KINDS, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{unknown!r}; a row's are {', '.join(KINDS)}.{hint}"


def _fields(value: Any) -> dict[str, Any]:
    """Return the options that a row has, from a struct or JSON text. Raises UsageError for other text."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError) as error:
            raise UsageError(f"it is not JSON: {error}") from None
        if not isinstance(value, dict | None):
            raise UsageError(f"it is not a JSON object of {', '.join(KINDS)}")
    return {name: one for name, one in (value or {}).items() if one is not None}


def row_options(values: Sequence[Any], job: GenerationOptions) -> tuple[list[GenerationOptions], dict[int, str]]:
    """Return the options of each row, and {row: reason} for rows with bad ones."""
    made, errors = [job] * len(values), dict[int, str]()
    for row, value in enumerate(values):
        try:
            given = _fields(value)
            if unknown := _unknown(given):
                raise UsageError(f"it has the field {unknown}")
            made[row] = _replaced(job, given) if given else job
        except UsageError as error:
            errors[row] = f"bad_options: {error}"
    return made, errors


def _replaced(job: GenerationOptions, given: dict[str, Any]) -> GenerationOptions:
    for name, value in given.items():
        large = isinstance(value, int) and not -(2**63) <= value < 2**63  # in JSON text
        if not isinstance(value, KINDS[name]) or isinstance(value, bool) or large:
            raise UsageError(f"{name} is {value!r}")
    if "stop" in given and job.structure is not None:
        raise UsageError(f"stop is not for rows whose answer ends as its {job.structure.kind} says")
    if "stop" in given:
        stop = given["stop"]
        given = {**given, "stop": (stop,) if isinstance(stop, str) else tuple(stop)}
        if not all(isinstance(one, str) for one in given["stop"]):
            raise UsageError(f"stop is {stop!r}")
    if "max_new_tokens" in given and job.structure is not None and job.structure.choices:
        raise UsageError("max_new_tokens is not for rows whose answer is a choice")
    options = replace(job, **given)
    check_values(options)
    if "seed" in given and options.temperature == 0:
        raise UsageError("seed is given, and there is no sampling at temperature 0")
    if options.temperature > 0 and options.num_beams > 1:
        raise UsageError(f"temperature is {options.temperature:g}, and the job searches {options.num_beams} beams")
    if options.temperature == 0 and options.n > 1:
        raise UsageError(f"temperature is 0, and the job asks for {options.n} different answers")
    return options


def with_seeds(
    options: Sequence[GenerationOptions], keys: Sequence[Any] | None, samples: int
) -> list[GenerationOptions]:
    """Return the options of each answer, `samples` for each row; `keys` of rows determine the seeds, too.

    The first answer without a key has the row's own seed, so that it is the one that is written alone.
    """
    made = []
    for row, one in enumerate(options):
        for sample in range(samples):
            if sample == 0 and keys is None:
                made.append(one)
                continue
            key = [] if keys is None else [str(keys[row])]
            digest = hashlib.sha256("\0".join([str(one.seed), str(sample), *key]).encode("utf-8", "surrogatepass"))
            made.append(replace(one, seed=int.from_bytes(digest.digest()[:8], "little") >> 1))
    return made
