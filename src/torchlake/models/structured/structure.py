"""A structure for texts: read from the options, compiled by llguidance, and checked before any work.

    json_schema   a schema, as a file or a mapping; keys in its order, at most one space after ":" and ","
    regex         the whole text matches it (syntax of Rust's regex: no look-around, no back references)
    choices       the text is one of them
    grammar       a file in llguidance's variant of Lark

A structure travels as plain values, so every engine can send it and it is part of a job's fingerprint by its content.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torchlake.config.arguments import read_named, read_named_json
from torchlake.errors import MissingExtra, UsageError, pip_install
from torchlake.models.structured.schemas import closed, place_of

if TYPE_CHECKING:
    from llguidance import LLTokenizer

KINDS = ("json_schema", "regex", "choices", "grammar")
STRUCTURE_OPTIONS = (*KINDS, "json_columns")
FORM: Any = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"A random model would write spaces until the limit if any number of them were allowed."


@dataclass(frozen=True, kw_only=True)
class Structure:
    """What an answer has to fit."""

    kind: str
    "One of `KINDS`."
    text: str
    "The schema or the choices as JSON, the expression, or the grammar."
    columns: bool = False
    "Whether the fields of a schema become columns."

    @property
    def schema(self) -> Any:
        """The JSON schema as it was given."""
        return json.loads(self.text)

    @property
    def choices(self) -> tuple[str, ...]:
        """The choices; none for another kind."""
        return tuple(json.loads(self.text)) if self.kind == "choices" else ()


def read_structure(given: Mapping[str, Any]) -> Structure | None:
    """Return the structure that the options ask for, or None. Raises UsageError for a value that cannot be one."""
    asked = [name for name in KINDS if given.get(name) is not None]
    if len(asked) > 1:
        raise UsageError(f"{', '.join(asked)}: an answer has one structure. Give one of these.")
    if given.get("json_columns") and asked != ["json_schema"]:
        raise UsageError("json_columns: it makes columns of a schema's fields. Give json_schema as well.")
    if not asked:
        return None
    (kind,), value = asked, given[asked[0]]
    if kind == "json_schema":
        if not isinstance(value, Mapping | bool | str | os.PathLike):
            raise UsageError(f"json_schema: expected one file, or a schema as a mapping, not {value!r}.")
        schema = value if isinstance(value, Mapping | bool) else read_named_json("json_schema", value)
        try:
            text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UsageError(f"json_schema: a value in it is not one of JSON: {error}.") from None
    elif kind == "choices":
        text = json.dumps(_choices(value), ensure_ascii=False)
    else:
        text = value if kind == "regex" else read_named("grammar", value)
    if not text:
        raise UsageError(f"{kind}: is empty, and so would all texts be. Leave it out, or write one.")
    return Structure(kind=kind, text=text, columns=bool(given.get("json_columns")))


def check_installed(structure: Structure) -> None:
    """Raise MissingExtra with the pip command when llguidance is not installed."""
    if find_spec("llguidance") is None:
        raise MissingExtra(
            f"{structure.kind} needs the library 'llguidance', which is not installed: "
            f"{pip_install('torchlake[structured]')}"
        )


def compiled(structure: Structure, *, space: bool = False) -> str:
    """Return the grammar as llguidance reads it; `space`: an answer may begin with one more space, which is removed.

    Raises UsageError if no text fits, or for what llguidance does not support, with the place in a schema.
    """
    from llguidance import LLMatcher, LLTokenizer

    grammar = _grammar(structure, space=space)
    wrong, found = LLMatcher.validate_grammar_with_warnings(grammar)
    if wrong and structure.kind == "json_schema":
        place, message = place_of(structure.schema, json_problem)
        raise UsageError(f"json_schema: {place or 'the whole schema'}: {message or _line(found[0])}")
    if wrong:
        # The messages about expressions are those of a grammar of one line; those of grammars name line and column.
        about = structure.text if structure.kind == "regex" else "llguidance cannot compile it"
        reason = found[0].split("error: ")[-1].split("\n")[0] if structure.kind == "regex" else found[0]
        raise UsageError(f"{structure.kind}: {about}: {_line(reason)}")
    start = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    start.compute_bitmask()
    if start.is_error():
        raise UsageError(f"{structure.kind}: no text fits {structure.text!r}.")
    return grammar


def json_problem(schema: Any) -> str | None:
    """Return why llguidance cannot compile a JSON schema, or None."""
    from llguidance import LLMatcher

    found: str = LLMatcher.validate_grammar(_json_grammar(schema))
    return _line(found) or None


def matches(tokenizer: "LLTokenizer", grammar: str, text: bytes) -> "tuple[bool, bool]":
    """Return whether `text` fits the grammar, and whether nothing can follow it; `tokenizer` has a token per byte."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    fits = matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()
    return fits, fits and matcher.is_stopped()


def _grammar(structure: Structure, *, space: bool) -> str:
    from llguidance import LLMatcher

    if structure.kind == "json_schema":
        if not space:
            return _json_grammar(structure.schema)
        schema = {"x-guidance": FORM, **_mapping(closed(structure.schema))}
        return LLMatcher.grammar_from_lark(f'start: " "? json\njson: %json {json.dumps(schema)}')
    if structure.kind == "regex":
        return LLMatcher.grammar_from_regex(f" ?(?:{structure.text})" if space else structure.text)
    return LLMatcher.grammar_from_lark(structure.text)


def _json_grammar(schema: Any) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(json.dumps(_mapping(closed(schema))), defaults=FORM)


def _mapping(schema: Any) -> dict[str, Any]:
    """Return a schema as a mapping; true and false are schemas, too."""
    if isinstance(schema, bool):
        return {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise UsageError(f"json_schema: a schema is a mapping, and this one is {json.dumps(schema)[:100]}.")
    return schema


def _choices(value: str | Sequence[str]) -> list[str]:
    choices = [each.strip() for each in value.split(",")] if isinstance(value, str) else list(value)
    wrong = next((one for one in choices if not isinstance(one, str)), None)
    if wrong is not None:
        raise UsageError(f"choices: {wrong!r} is not a string.")
    blank = next((place for place, one in enumerate(choices, start=1) if not one.strip()), None)
    if blank is not None or not choices:
        raise UsageError(f"choices: number {blank or 1} is blank. Write them as good,bad,unsure.")
    twice = next((one for one in choices if choices.count(one) > 1), None)
    if twice is not None:
        raise UsageError(f"choices: {twice!r} is there twice.")
    return choices


def _line(message: str) -> str:
    """Return a message of llguidance in one line."""
    return re.sub(r"\s+", " ", message).strip()
