"""A task's inputs: the columns they come from, and the types of columns that each kind of input can have.

    TEXT     one column of strings, or several that are joined
    NUMBER   columns of numbers, booleans or strings that are numbers
    PROMPT   one column of strings or conversations
    ANY      one column of any type
    EXTRA    the same, with nulls

`_null_rows.py` reads them, and has the rows that lack one.
"""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from torchlake.config.task_spec import Columns, TaskSpec, as_columns
from torchlake.errors import TableError
from torchlake.tables.arrays import from_strings, is_text

TEXT, PROMPT, NUMBER, ANY, EXTRA = "text", "prompt", "number", "any", "extra"
PAIR = "text_pair"

Inputs = dict[str, Any]
"A task's inputs by name: an Arrow array, or of NUMBER (N, D) float32."


def columns_of(kinds: Mapping[str, str], spec: TaskSpec) -> dict[str, tuple[str, ...]]:
    """Return the columns of each input that the spec names; a pair's second text and optional inputs may be missing."""
    named: dict[str, Columns | None] = {"text": spec.text, PAIR: spec.text_pair}
    found = {name: as_columns(named.get(name, spec.inputs.get(name)) or "") for name in kinds}
    return {name: columns for name, columns in found.items() if columns}


def check_columns(schema: pa.Schema, kinds: Mapping[str, str], spec: TaskSpec, where: str) -> None:
    """Raise TableError for a column that is missing, or whose values the input cannot have."""
    for name, columns in columns_of(kinds, spec).items():
        for column in columns:
            check_column(schema, name, column, kinds[name], where)


def check_column(schema: pa.Schema, name: str, column: str, kind: str, where: str) -> None:
    """Raise TableError if the table has no such column, or its type does not fit the input's `kind`."""
    argument = f"{name}=" if name in ("text", PAIR) else f"inputs={{{name!r}: ...}}"
    if column not in schema.names:
        raise TableError(
            f"{where}: there is no {name} column {column!r}; the table has: {', '.join(schema.names)}. Name it with "
            f"{argument}."
        )
    held = schema.field(column).type
    held = held.value_type if pa.types.is_dictionary(held) else held
    types = pa.types
    text = is_text(held) or types.is_null(held)
    if kind == TEXT and not text:
        raise TableError(
            f"{where}: the {name} column {column!r} holds {held}, not strings; name another with {argument}."
        )
    number = types.is_integer(held) or types.is_floating(held) or types.is_boolean(held) or types.is_decimal(held)
    if kind == NUMBER and not (number or text):
        raise TableError(
            f"{where}: the column {column!r} of the input {name!r} holds {held}, not numbers; name another with "
            f"{argument}."
        )


def sample_inputs(kinds: Mapping[str, str], spec: TaskSpec, texts: tuple[str, ...]) -> Inputs | None:
    """Return inputs made of `texts` for a task that reads texts only, else None."""
    names = columns_of(kinds, spec)
    return (
        {name: from_strings(texts) for name in names} if all(kinds[name] in (TEXT, PROMPT) for name in names) else None
    )
