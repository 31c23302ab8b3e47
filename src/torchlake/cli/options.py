"""The options of the commands: how they are declared, and the values that Python functions get.

A command names the classes that declare its options: those of the Python functions (`config/options.py`,
`config/measuring.py`), those below, and its own. An option that is not given is not passed on, so the defaults are
those of the Python functions.
"""

import inspect
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from torchlake import plugins
from torchlake.cli.engine import make_engine
from torchlake.config.arguments import types_of
from torchlake.config.measuring import EvaluateOptions
from torchlake.config.messages import expected
from torchlake.config.options import Option, PredictOptions
from torchlake.config.yaml import read_text, read_yaml
from torchlake.errors import UsageError

if TYPE_CHECKING:
    from torchlake.engines import Engine

_general = partial(Option, "General")
_execution = partial(Option, "Execution")
_job = partial(Option, "Job")
_input = partial(Option, "Input")
_output = partial(Option, "Output")
RUNTIMES = ", ".join(plugins.names("runtimes"))
OF_COMMANDS = {"input", "engine", "processes", "set", "profile", "json", "quiet", "verbose"}
"Options that are not arguments of the Python functions."
EXAMPLES = {
    "csv": "delimiter=;",
    "inputs": "image=photo",
    "task_options": "candidate_labels=[good,bad]",
    "template_options": "enable_thinking=false",
    "request_options": "reasoning_effort=low",
}
"Values of options that are a name and a value."
POWER = re.compile(r"[+-]?(0|[1-9][0-9]*)[eE][+-]?[0-9]+")
"Numbers without a point, such as 1e-4, which YAML 1.1 reads as strings."
ESCAPED = ("prompt", "system", "stop")
"Texts in which \\n and \\t are line breaks and tabs: shells pass them on as they are."


class General:
    """Options of every command; `main.py` reads them before parsing, because usage errors are JSON too."""

    json: Annotated[bool, _general(None, "Print one JSON object to standard output.")]
    quiet: Annotated[bool, _general(None, "Show errors and results only.")]
    verbose: Annotated[bool, _general(None, "Show debug messages and tracebacks.")]


class EngineFlags:
    """Where a command runs."""

    engine: Annotated[str, _execution("NAME", f"Where to run: {', '.join(plugins.names('engines'))} (default: local).")]
    processes: Annotated[int, _execution("N", "Number of processes (default: chosen by the engine).", min=1)]
    set: Annotated[
        Sequence[str], _execution("KEY=VALUE", "Set an engine option, such as engine.ray.address=auto; repeatable.")
    ]


class SharedFlags(EngineFlags):
    """Options of several commands on tables."""

    input: Annotated[Sequence[str], _input("TABLE", "Further table; repeatable.")]
    text: Annotated[
        str | Sequence[str], _input("COLUMN", "Text column (default: as in training); repeatable: texts are joined.")
    ]
    label: Annotated[str, _input("COLUMN", "Label column (default: as in training).")]
    key: Annotated[str, _output("COLUMN", "Column of unique, non-null values that identify rows.")]
    columns: Annotated[Sequence[str], _output("A,B", "Additional input columns to copy to the output; repeatable.")]
    runtime: Annotated[
        str,
        _execution(
            "NAME", f"Inference runtime: {RUNTIMES} (default: varlen, fused or eager, or the choice of optimize)."
        ),
    ]


class JobFlags:
    """Options of the commands with a job."""

    set: Annotated[Sequence[str], _job("KEY=VALUE", "Override a job setting, such as train.epochs=5; repeatable.")]
    processes: Annotated[
        int, _execution("N", "Number of ranks (default: one per GPU of this machine; with Spark and Ray, 1).", min=1)
    ]


def declared(*groups: str | type) -> dict[str, tuple[Any, Option]]:
    """Return the type of each option and how it is shown: those of classes, and names among the options of several
    commands. A later class replaces what an earlier one says of the same option; a default in a class is shown.
    """
    known = {name: one for group in (PredictOptions, EvaluateOptions, SharedFlags) for name, one in _of(group).items()}
    found: dict[str, tuple[Any, Option]] = {}
    for group in groups:
        found |= {name: known[name] for name in group.split()} if isinstance(group, str) else _of(group)
    return found


@cache
def _of(group: type) -> dict[str, tuple[Any, Option]]:
    found = {}
    for name, kind in get_type_hints(group, include_extras=True).items():
        if get_origin(kind) is Annotated:
            inner, option = get_args(kind)
            default = getattr(group, name, None)
            if default is not None and default is not False and default != () and "(default:" not in option.help:
                shown = f"{default:g}" if isinstance(default, float) else default
                option = replace(option, help=f"{option.help.removesuffix('.')} (default: {shown}).")
            found[name] = (inner, option)
    return found


def parameters(options: Mapping[str, tuple[Any, Option]]) -> Iterator[inspect.Parameter]:
    """Yield a parameter for each of the declared options, as typer reads it."""
    for name, (kind, option) in options.items():
        about = typer.Option(
            _flag(name, option),
            metavar=option.value,
            help=option.help,
            rich_help_panel=option.group,
            min=option.min,
            max=option.max,
        )
        wanted = _parsed(kind)
        default: Any = False if wanted is bool else inspect.Parameter.empty if option.required else None
        if default is None:
            wanted |= None
        yield inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[wanted, about]
        )


def _flag(name: str, option: Option) -> str:
    return option.flag or f"--{name.replace('_', '-')}"


def _parsed(kind: Any) -> Any:
    """Return the type that typer parses for a Python type: a list for several values or pairs, else one value."""
    kinds = [one for one in types_of(kind) if one is not NoneType]
    if any(get_origin(one) not in (None, Literal) for one in kinds):
        return list[str]
    return str if len(kinds) > 1 or kinds[0] is Any else kinds[0]


@dataclass(frozen=True)
class Given:
    """The options of a command that were given, by name; for the others the defaults of the Python function apply."""

    values: Mapping[str, Any]
    flags: Mapping[str, str]
    "How each option is written, such as --row-timeout."

    def __getitem__(self, name: str) -> Any:
        """Return the value of an option; None if it was not given."""
        return self.values.get(name)

    def some(self, *groups: str | type) -> dict[str, Any]:
        """Return those of the declared options that were given."""
        return {name: self.values[name] for name in declared(*groups) if name in self.values}

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of a Python function, besides its engine."""
        return {name: value for name, value in self.values.items() if name not in OF_COMMANDS}

    @property
    def as_json(self) -> bool:
        """Whether the result is printed as JSON."""
        return "json" in self.values

    @property
    def engine(self) -> "Engine | None":
        """The engine of --engine, --processes and --set; None: the default of the Python function."""
        return make_engine(self["engine"], self["processes"], self["set"], as_json=self.as_json)

    @property
    def settings(self) -> list[str]:
        """The overrides of a job: those of --set, and the options that stand for settings."""
        values = {name: self.values.get(name) for name in ("text", "text_pair", "where", "sample", "limit")}
        values |= {f"inputs.{name}": column for name, column in (self["inputs"] or {}).items()}
        settings = {f"data.{name}": value for name, value in values.items()}
        settings |= {f"track.{name}": self.values.get(name) for name in ("mlflow", "wandb", "tensorboard")}
        given = [f"{name}={json.dumps(value)}" for name, value in settings.items() if value is not None]
        return [*(self["set"] or ()), *given]

    def tables(self, first: str) -> str | list[str]:
        """Return the table of a command, with those of --input."""
        return [first, *self["input"]] if self["input"] else first


def as_given(parsed: Mapping[str, Any], options: Mapping[str, tuple[Any, Option]]) -> Given:
    """Return the options that were given, with the values that Python functions take. Raises UsageError."""
    given = {name: value for name, value in parsed.items() if value is not None and value is not False and value != []}
    flags = {name: _flag(name, option) for name, (_, option) in options.items()}
    return Given({name: _value(name, *options[name], value) for name, value in given.items()}, flags)


def _value(name: str, kind: Any, option: Option, value: Any) -> Any:
    """Return the value of an option as its type says: a list of words, pairs, one value of several, or the string."""
    flag, kinds = _flag(name, option), types_of(kind)
    if option.value != "TEXT" and "" in (value if isinstance(value, list) else [value]):
        raise UsageError(f"{flag}: is empty. Give {option.value}, or leave it out.")
    if name in ESCAPED:
        return [_unescaped(text) for text in value] if isinstance(value, list) else _unescaped(value)
    if not isinstance(value, list):
        return value
    if option.value == "A,B":  # written "a, b", or by themselves
        words = [word.strip() for text in value for word in text.split(",")]
        return [_whole(flag, word) for word in words] if Sequence[int] in kinds else words
    if name in EXAMPLES:
        pairs = [_pair(flag, text, EXAMPLES[name], plain=Mapping[str, Any] not in kinds) for text in value]
        if name == "inputs":
            return {one: _one_or_all([column for other, column in pairs if other == one]) for one, _ in pairs}
        return dict(pairs)
    return _one_or_all(value) if str in kinds else value


def _whole(option: str, word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise UsageError(f"{option}: {expected('a whole number', word)}") from None


def _one_or_all(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


def _unescaped(text: str) -> str:
    return re.sub(r"\\([nt\\])", lambda found: {"n": "\n", "t": "\t"}.get(found[1], "\\"), text)


def _pair(option: str, text: str, example: str, *, plain: bool) -> tuple[str, Any]:
    """Return the name and the value of an option; unless `plain`, the value is as in YAML, or that of @FILE."""
    name, equals, value = text.partition("=")
    if plain:
        if name and equals:
            return name, value
        raise UsageError(f"{option} {text}: write it as key=value, such as {example}")
    if not (name and equals):
        raise UsageError(f"{option} {text}: write it as name=value, such as {example}")
    if value.startswith("@") and not Path(value[1:]).is_file():
        raise UsageError(f"{option} {text}: there is no such file.")
    written, where = (read_text(Path(value[1:])), value[1:]) if value.startswith("@") else (value, f"{option} {text}")
    found = read_yaml(written, where)[0]
    if isinstance(found, str) and POWER.fullmatch(written) and math.isfinite(float(written)):
        return name, float(written)
    return name, found
