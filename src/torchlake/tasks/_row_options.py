"""Options of single rows: a struct column whose fields take the place of the job's; null: the job's.

    {max_new_tokens: 20, temperature: 0.7, seed: 3, stop: ["."]}

Fields with other names are refused before any work. A row with a bad value is an error row, `bad_options: ...`. With
several answers each, and with seeds by key, every answer of a row has its own seed.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

import pyarrow as pa

from torchlake.errors import UsageError
from torchlake.models.generation import GenerationOptions, check_values

log = logging.getLogger(__name__)

OPTIONS = "options"
"The input, and the column that is found by its name."
KINDS: Mapping[str, tuple[type, ...]] = {
    "max_new_tokens": (int,),
    "temperature": (float, int),
    "seed": (int,),
    "stop": (str, list),
}


def find_options(schema: pa.Schema, named: str | None) -> str | None:
    """Return the column of options: the one that is named, or a struct that has this name. Raises UsageError."""
    column = named or OPTIONS
    if column not in schema.names or not pa.types.is_struct(kind := schema.field(column).type):
        if named is not None:
            held = f"holds {schema.field(column).type}" if column in schema.names else "is not in the table"
            raise UsageError(f"options: the column {column!r} {held}; it is a struct of {', '.join(KINDS)}.")
        return None
    if named is None and not any(get_close_matches(one.name, KINDS, n=1) for one in kind):
        log.warning("options: the column %r has no option of a row, and is not read as such", column)
        return None
    unknown = next((one.name for one in kind if one.name not in KINDS), None)
    if unknown is not None:
        close = get_close_matches(unknown, KINDS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise UsageError(f"options: {column!r} has the field {unknown!r}; a row's are {', '.join(KINDS)}.{hint}")
    return column


def row_options(values: Sequence[Any], job: GenerationOptions) -> tuple[list[GenerationOptions], dict[int, str]]:
    """Return the options of each row, and {row: reason} for rows with bad ones."""
    made, errors = [job] * len(values), dict[int, str]()
    for row, value in enumerate(values):
        given = {name: one for name, one in (value or {}).items() if one is not None}
        if not given:
            continue
        try:
            made[row] = _replaced(job, given)
        except UsageError as error:
            errors[row] = f"bad_options: {error}"
    return made, errors


def _replaced(job: GenerationOptions, given: dict[str, Any]) -> GenerationOptions:
    for name, value in given.items():
        if not isinstance(value, KINDS[name]) or isinstance(value, bool):
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
