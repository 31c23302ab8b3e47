"""Write the reference pages in docs/reference from the code: `make reference`.

Everything that the code knows is read from it: job fields from the pydantic models, options from the command line,
columns from the tasks, exit codes from the exceptions, signatures and docstrings from the public names. What the code
does not say, the meaning of a column, an error or a variable, is in `meanings.py`; a meaning that is missing there, or
that the code no longer has, is an error. `tests/unit/test_reference.py` fails when a page differs from the code.
"""

import ast
import dataclasses
import inspect
import itertools
import json
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import meanings
import numpy as np
from pydantic import BaseModel

import torchlake as tl
from torchlake import errors, plugins
from torchlake.cli.app import program
from torchlake.config.job import SECTIONS, Job
from torchlake.config.options import Option, PredictOptions
from torchlake.config.task_spec import TaskSpec
from torchlake.models.generation import MARKS
from torchlake.serving.options import ServeOptions
from torchlake.tasks import ColumnOptions

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
SOURCE = Path(tl.__file__).parent
ENCODERS = Path(__file__).parents[1] / "tests" / "conformance" / "encoders.json"
MODELS = ENCODERS.with_name("models.json")
NOTE = "<!-- Written by tools/reference.py from the code: change the code and run `make reference`. -->"
UNTRIED = "not tried"
ALIASES = {"Runtime": Callable[..., Callable[[np.ndarray, np.ndarray], np.ndarray]]}
"Types that are shown by a name."
BRANCH = re.compile(r"[│├└─ ]*(\w+) +(\d+(?:/\d+)?)  (.+)")
"A line of the tree of exceptions in the docstring of errors.py."


def main() -> None:
    """Write every page."""
    for name, write in PAGES.items():
        (FOLDER / name).write_text(page(name, write), encoding="utf-8")


def page(name: str, write: Callable[[], Iterator[str]]) -> str:
    """The text of a page."""
    return "\n".join([*write(), "", NOTE, ""])


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    """The lines of a Markdown table."""
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(_cell(text) for text in row)} |"


def _cell(text: str) -> str:
    r"""The text of a cell. A bar is written as `&#124;`: the site shows the backslash of `\|` in code."""
    code = re.sub(
        r"`([^`]*\|[^`]*)`", lambda found: f"<code>{escape(found[1], quote=False)}</code>", " ".join(text.split())
    )
    return code.replace("|", "&#124;")


def described(found: set[str], given: Mapping[str, str], what: str) -> list[tuple[str, str]]:
    """Names of the code with their meanings. Raises ValueError where the two differ."""
    if found != given.keys():
        raise ValueError(
            f"tools/meanings.py, {what}: without a meaning {sorted(found - given.keys())}, "
            f"not in the code {sorted(given.keys() - found)}"
        )
    return [(name, given[name]) for name in given]


# job fields


def job_page() -> Iterator[str]:
    """The fields of a job."""
    yield "# Job fields"
    yield ""
    yield 'A job is a YAML file with these sections. `--set train.epochs=5` and `tl.train(..., train={"epochs": 5})`'
    yield "override single fields. Unknown fields are errors. Only `data.train` and `model.base` are required."
    yield "`null` means that the field is not set. The section `train` is on [its own page](job-train.md)."
    for name, model in SECTIONS.items():
        if name != "train":
            yield from _section(name, model)


def job_train_page() -> Iterator[str]:
    """The fields of a job's section train."""
    yield "# Job fields: train"
    yield ""
    yield "The section `train` of a [job](job.md)."
    yield from _section("train", SECTIONS["train"])
    yield from ("", "## Intervals and times", "", meanings.INTERVALS)


def _section(name: str, model: type[BaseModel]) -> Iterator[str]:
    schemas = Job.model_json_schema()["$defs"]
    meaning = _attribute_docstrings(model)
    defaults = _defaults(model)
    nested = []
    rows = []
    for field, info in model.model_fields.items():
        inner = _inner_model(info.annotation)
        if inner is not None:
            nested.append((f"{name}.{field}", inner))
            link = f"fields of [{name}.{field}](#{name}{field})"
            if field in meaning:
                rows.append((f"`{field}`", link, f"`{defaults[field]}`", meaning[field]))
            continue
        kind = meanings.KINDS.get(f"{name}.{field}") or _kind(schemas[model.__name__]["properties"][field], schemas)
        if kind.startswith("plug-ins "):
            kind = ", ".join(f"`{one}`" for one in plugins.names(kind.split()[1]))  # type: ignore[arg-type]
        default = "required" if info.is_required() else f"`{defaults[field]}`"
        rows.append((f"`{field}`", kind, default, meaning[field]))
    yield from ("", f"## {name}", "", f"{inspect.getdoc(model)}", "")
    yield from table(("field", "values", "default", "meaning"), rows)
    for inner_name, inner in nested:
        yield from _section(inner_name, inner)


def _attribute_docstrings(model: type) -> dict[str, str]:
    """The string below each field of the class."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(model)))
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef))
    return {
        field.target.id: below.value.value
        for field, below in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }


def _defaults(model: type[BaseModel]) -> dict[str, str]:
    """The default of each field, as YAML writes it."""
    given = {name: info.default for name, info in model.model_fields.items() if not info.is_required()}
    plain = model.model_construct(**given).model_dump(mode="json", include=set(given), warnings=False)
    return {name: _yaml(value) for name, value in plain.items()}


def _yaml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_yaml(item)}" for key, item in value.items()) + "}"
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


def _inner_model(annotation: Any) -> type[BaseModel] | None:
    for one in (annotation, *getattr(annotation, "__args__", ())):
        if inspect.isclass(one) and issubclass(one, BaseModel) and one.__name__.endswith("Options"):
            return one
    return None


def _kind(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    """The values that a JSON schema allows, in words; null is left out, because it is the default."""
    choices = schema.get("anyOf") or schema.get("oneOf")
    if choices:
        return " or ".join(dict.fromkeys(_kind(one, schemas) for one in choices if one.get("type") != "null"))
    if "enum" in schema:
        return ", ".join(f"`{one}`" for one in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return meanings.TYPES.get(name) or "a mapping"
    kinds = schema.get("type", "value")
    kind = next(one for one in kinds if one != "string") if isinstance(kinds, list) else str(kinds)
    if kind == "array":
        kind = _kind(schema["items"], schemas)
        return "list of strings" if kind == "string" else f"list of {kind}"
    if kind == "object" and schema["additionalProperties"] is True:
        return "mapping of names to values"
    if kind == "object":
        return f"mapping of names to {_kind(schema['additionalProperties'], schemas)}"
    limits = {"minimum": "≥", "ge": "≥", "exclusiveMinimum": ">", "gt": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    shown = [f"{sign} {schema[key]}" for key, sign in limits.items() if key in schema and schema[key] < 2**60]
    if kind == "boolean":
        return "`true`, `false`"
    return " ".join([kind, ", ".join(shown)]).strip()


# the command line


def command_line_page() -> Iterator[str]:
    """The commands and their options."""
    yield "# Command line"
    yield ""
    yield "`torchlake COMMAND --help` shows the same. Every command has `--json` (one JSON object on standard output),"
    yield "`--quiet` and `--verbose`. Results go to standard output, messages to standard error."
    yield "[Exit codes](exit-codes.md). Commands that use a model: [command line: models](command-line-models.md)."
    yield from _commands(lambda name: name not in meanings.OF_MODELS)


def command_line_models_page() -> Iterator[str]:
    """The same, of the commands that use a model."""
    yield "# Command line: models"
    yield ""
    yield "The [commands](command-line.md) that use a finished model."
    yield from _commands(lambda name: name in meanings.OF_MODELS - meanings.OF_TOOLS)


def command_line_tools_page() -> Iterator[str]:
    """The same, of the commands that give a model to clients or other tools."""
    yield "# Command line: servers and other tools"
    yield ""
    yield "The [commands](command-line.md) that give a finished model to clients or to other tools."
    yield from _commands(lambda name: name in meanings.OF_TOOLS)


def command_line_writing_page() -> Iterator[str]:
    """The options of text generation, which several commands have."""
    yield "# Command line: writing"
    yield ""
    yield "Options of [`predict`](command-line-models.md) for models that write (some: `evaluate`, `optimize`); how-to:"
    yield "[write with a language model](../how-to/writing.md)."
    yield ""
    commands = program.commands  # type: ignore[attr-defined]
    options = [param for command in commands.values() for param in command.params if _writes(param)]
    yield from table(("option", "meaning"), dict.fromkeys(_option(param) for param in options))


def _writes(param: Any) -> bool:
    return getattr(param, "rich_help_panel", None) == "Text generation"


def _commands(wanted: Callable[[str], bool]) -> Iterator[str]:
    commands = program.commands  # type: ignore[attr-defined]
    seen: set[tuple[str, ...]] = set()
    for name, command in commands.items():
        if not wanted(name):
            continue
        text, _, example = (command.help or "").partition("\n\n\b\nExample:\n")
        yield from ("", f"## torchlake {name}", "", text.strip(), "", "```text", example.strip(), "```")
        rows = [_option(param) for param in command.params if not (param.hidden or _writes(param))]
        rows = [row for row in rows if row[0] not in {f"`{flag}`" for flag in ("--json", "--quiet", "--verbose")}]
        own, again = [row for row in rows if row not in seen], [row[0] for row in rows if row in seen]
        seen.update(row for row in rows if row[0].startswith("`--"))
        if own:
            yield ""
            yield from table(("argument or option", "meaning"), own)
        if again:
            yield from ("", f"As in the commands above: {', '.join(again)}.")
        if any(map(_writes, command.params)):
            yield from ("", "Its options for text generation: [writing](command-line-writing.md).")
        if command.epilog:
            yield from ("", *command.epilog.split("\n"))


def _option(param: Any) -> tuple[str, str]:
    metavar = str(param.metavar or param.name.upper())
    if param.param_type_name == "argument":
        return f"`{metavar}`", param.help or ""
    names = ", ".join(sorted(param.opts, key=len))
    required = " Required." if param.required else ""
    return f"`{names}`" if param.is_flag else f"`{names} {metavar}`", (param.help or "") + required


# outputs


def output_page() -> Iterator[str]:
    """The columns of a scored table, and the reasons in `error`."""
    yield from ("# Output columns and errors", "", meanings.OUTPUT, "")
    found, rows = set(meanings.ALWAYS), []
    for task, problem, labels, everything in meanings.OUTPUTS:
        label = "label" if plugins.load("tasks", task).has_labels else None
        spec = TaskSpec(task=task, problem=problem, labels=labels, text="text", label=label, max_length=64)
        schema = plugins.load("tasks", task).output_schema(
            spec, ColumnOptions(all_probabilities=everything, marks=MARKS[0], logprobs="tokens")
        )
        for field in schema:
            name = "prob_CLASS" if field.name.startswith("prob_") else field.name
            found.add(name)
            rows.append((f"`{problem}`", f"`{name}`", f"`{field.type}`"))
    columns = dict(described(found, meanings.COLUMNS, "COLUMNS"))
    always = [(f"`{name}`", f"`{kind}`", columns[name]) for name, kind in meanings.ALWAYS.items()]
    yield from ("## In every output", "", *table(("column", "type", "content"), always))
    yield from ("", "## Predictions", "")
    seen = dict.fromkeys(rows)
    yield from table(("problem", "column", "type", "content"), [(*row, columns[row[1].strip("`")]) for row in seen])
    yield from ("", "## Errors", "", meanings.ERRORS, "")
    reasons = described(set(error_reasons()), meanings.REASONS, "REASONS")
    yield from table(("reason", "the row"), [(f"`{name}`", text) for name, text in reasons])


def error_reasons() -> Iterator[str]:
    """The words before the first colon of every error that a row can have: strings assigned to errors of rows."""
    options = PredictOptions.__annotations__  # messages about options begin with their names
    for folder in ("jobs", "runtimes/_foreign", "scoring", "tables", "tasks"):
        for path in sorted((SOURCE / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    match = re.match(r"([a-z]+_[a-z0-9_]+|timeout|length)(: |$)", node.value)
                    if match and match[1] not in options and (match[2] or match[1] in meanings.REASONS):
                        yield match[1]


# exit codes


def exit_codes_page() -> Iterator[str]:
    """The exit status of every exception."""
    yield from ("# Exit codes", "", meanings.EXIT_CODES, "")
    rows = [("0", "", "success")]
    codes = {}
    for line in (errors.__doc__ or "").splitlines():
        match = BRANCH.match(line.strip())
        if match:
            codes[match[1]] = (match[2], match[3])
    classes = {
        name for name, one in vars(errors).items() if inspect.isclass(one) and issubclass(one, errors.TorchlakeError)
    }
    if codes.keys() != classes:
        raise ValueError(f"errors.py: the tree in its docstring and its classes differ: {codes.keys() ^ classes}")
    named = [(code, f"`{name}`", text) for name, (code, text) in codes.items()]
    rows += sorted(named, key=lambda row: int(row[0].partition("/")[0]))
    yield from table(("code", "exception", "meaning"), rows)


# environment variables


def environment_page() -> Iterator[str]:
    """The variables that torchlake reads."""
    yield from ("# Environment variables", "", meanings.ENVIRONMENT, "")
    found = described(set(variables_read()), meanings.VARIABLES, "VARIABLES")
    yield from table(("variable", "meaning"), [(f"`{name}`", text) for name, text in found])


def variables_read() -> Iterator[str]:
    """Names that the code gets from `os.environ`, and torchlake's own."""
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        yield from re.findall(r'environ\.get\(\s*"(\w+)"', text)
        yield from re.findall(r'environ\["(\w+)"\](?! = )', text)
        yield from re.findall(r'"(\w+)" (?:not )?in os\.environ', text)
        yield from re.findall(r'"(TORCHLAKE_\w+)"', text)


# the routes of a server


def routes_page() -> Iterator[str]:
    """The routes of `torchlake serve`, with the fields of their bodies."""
    from torchlake.serving import asgi

    yield from ("# Routes of a server", "", meanings.ROUTES, "")
    found = asgi.routes(page=True)
    about = [(f"`{method} {path}`", _first(handler.__doc__)) for path, method, handler, _ in found]
    yield from table(("route", "answer"), about)
    yield from ("", "Fields of the JSON bodies; those without a default are required:", "")
    rows = []
    for path, _, _, content in found:
        fields = {} if content is None else content["application/json"]["schema"].get("properties", {})
        required = set() if content is None else set(content["application/json"]["schema"].get("required", ()))
        for name, field in fields.items():
            default = "" if name in required or "default" not in field else f"`{json.dumps(field['default'])}`"
            rows.append((f"`{path}`", f"`{name}`", _body_kind(field), default))
    yield from table(("route", "field", "values", "default"), rows)
    yield from ("", "## Options of Python", "", "`tl.serving.ServeOptions`, for `tl.serve` and `tl.serving.app`:", "")
    others = _attribute_docstrings(ServeOptions)
    options: list[tuple[str, ...]] = []
    for name, kind in get_type_hints(ServeOptions, include_extras=True).items():
        written, option = get_args(kind) if get_origin(kind) is Annotated else (kind, None)
        meaning = others[name] if option is None else _without_flags(option)
        options.append((f"`{name}`", f"`{_type(written)}`", f"`{getattr(ServeOptions, name, None)!r}`", meaning))
    yield from table(("option", "type", "default", "meaning"), options)


def _first(text: str | None) -> str:
    return " ".join((text or "").split("\n\n")[0].split())


def _body_kind(field: Mapping[str, Any]) -> str:
    """The values of a field of a JSON body."""
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_body_kind(one) for one in field["anyOf"]))
    if "enum" in field or "const" in field:
        return ", ".join(f"`{json.dumps(one)}`" for one in field.get("enum", [field.get("const")]))
    return {"array": "list", "object": "object", "null": "null"}.get(field.get("type", "any"), field.get("type", "any"))


# the Python API


def python_page() -> Iterator[str]:
    """The public functions: signatures and docstrings."""
    yield from ("# Python API", "", meanings.PYTHON)
    yield from _functions(lambda name: name not in meanings.OF_MODELS)


def python_models_page() -> Iterator[str]:
    """The same, of the functions that use a model or a function over tables."""
    yield from ("# Python API: models and tables", "", meanings.PYTHON_MODELS)
    yield from _functions(lambda name: name in meanings.OF_MODELS - meanings.OF_TOOLS)


def python_tools_page() -> Iterator[str]:
    """The same, of the functions that give a model to other tools."""
    yield from ("# Python API: other tools", "", meanings.PYTHON_TOOLS)
    yield from _functions(lambda name: name in meanings.OF_TOOLS)


def _functions(wanted: Callable[[str], bool]) -> Iterator[str]:
    for name in tl.__all__:
        if inspect.isfunction(getattr(tl, name)) and wanted(name):
            yield from _entry(f"tl.{name}", getattr(tl, name))


def classes_page() -> Iterator[str]:
    """The public classes that people create: engines and jobs. Exceptions are on the page of the exit codes."""
    yield from ("# Python engines and jobs", "", "The classes that the [Python API](python.md) accepts.")
    for name in tl.__all__:
        one = getattr(tl, name)
        if inspect.isclass(one) and not _is_result(one) and one is not errors.TorchlakeError:
            yield from _entry(f"tl.{name}", one)
    yield from _options()


def _options() -> Iterator[str]:
    """The options of `predict`, from their declaration: types for Python, and the help of the command line."""
    yield from ("", "## PredictOptions", "", meanings.OPTIONS, "")
    keywords = {}
    for name in meanings.OF_MODELS - meanings.OF_TOOLS - {"predict"}:
        for parameter in inspect.signature(getattr(tl, name)).parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                keywords[name] = get_type_hints(get_args(parameter.annotation)[0], include_extras=True)
    rows = []
    for name, kind in get_type_hints(PredictOptions, include_extras=True).items():
        others = ", ".join(f"`{other}`" for other in sorted(keywords) if keywords[other].get(name) == kind)
        written, option = get_args(kind)
        rows.append((f"`{name}`", f"`{_type(written)}`", _without_flags(option), others))
    yield from table(("option", "type", "meaning", "also of"), sorted(rows))


def _without_flags(option: Option) -> str:
    """The help of an option for Python, where the others have names."""
    return re.sub("--([a-z]+)", r"`\1`", option.help.replace("; repeatable", ""))


def results_page() -> Iterator[str]:
    """What the functions return."""
    yield from ("# Python results", "", "What the functions of the [Python API](python.md) return.")
    public = [getattr(tl, name) for name in tl.__all__]
    for one in dict.fromkeys([*filter(_is_result, public), *meanings.results()]):
        yield from _result(one)


def _is_result(one: Any) -> bool:
    """Whether a public name is a class of plain fields."""
    return inspect.isclass(one) and (dataclasses.is_dataclass(one) or hasattr(one, "_fields"))


def _entry(name: str, one: Any) -> Iterator[str]:
    yield from ("", f"## {name}", "")
    if not (inspect.isclass(one) and issubclass(one, BaseModel)):
        yield from ("```text", _signature(name, one), "```", "")
    yield _prose(inspect.getdoc(one) or "")


def _result(one: Any) -> Iterator[str]:
    """A class of plain fields: each with the string below it."""
    yield from ("", f"## {one.__name__}", "", _prose(inspect.getdoc(one) or ""), "")
    text = _attribute_docstrings(one)
    kinds = one.__annotations__
    rows = [(f"`{name}`", f"`{_type(kind)}`", text.get(name, "")) for name, kind in kinds.items()]
    yield from table(("field", "type", "meaning"), rows)


def _signature(name: str, one: Any) -> str:
    parameters = []
    signature = inspect.signature(one)
    star = False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parameters.append("*")
            star = True
        star = star or parameter.kind is parameter.VAR_POSITIONAL
        kind = "" if parameter.annotation is parameter.empty else f": {_type(parameter.annotation)}"
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        parameters.append(f"{prefix}{parameter.name}{kind}{default}")
    returned = (
        ""
        if signature.return_annotation is signature.empty or inspect.isclass(one)
        else (f" -> {_type(signature.return_annotation)}")
    )
    lines = "".join(f"    {one},\n" for one in parameters)
    return f"{name}(\n{lines}){returned}" if parameters else f"{name}(){returned}"


def _type(annotation: Any) -> str:
    """An annotation without the modules of its names."""
    if isinstance(annotation, str):
        return annotation
    text = inspect.formatannotation(annotation)
    for alias, written in ALIASES.items():
        text = text.replace(inspect.formatannotation(written), alias)
    text = re.sub(r"\*<class '([\w.]+)'>", r"\1", text)
    return re.sub(r"~|\b(?:\w+\.)+(?=[A-Za-z])", "", text)


def _prose(text: str) -> str:
    """A docstring as Markdown: indented lines are code."""
    lines = []
    for block in re.split(r"\n\n", text):
        lines.append(f"```text\n{inspect.cleandoc(block)}\n```" if block.startswith("    ") else block)
    return "\n\n".join(lines)


# encoders


def encoders_page() -> Iterator[str]:
    """Which runtimes embed texts with which encoders, as the conformance suite found it."""
    found: dict[str, dict[str, str | None]] = json.loads(ENCODERS.read_text(encoding="utf-8"))
    runtimes = list(dict.fromkeys(runtime for family in found.values() for runtime in family))
    yield "# Encoders and runtimes"
    yield ""
    yield "The runtimes that embed texts (`feature_extraction`) with each encoder. The conformance suite compares"
    yield "vectors of a small model of each with those of `eager`: `yes` means that they agree. `optimize` compares"
    yield "those of your model."
    yield ""
    rows = [
        (f"`{name}`", *("yes" if each.get(runtime, "") is None else "no" for runtime in runtimes))
        for name, each in found.items()
    ]
    yield from table(("encoder", *(f"`{runtime}`" for runtime in runtimes)), rows)
    reasons: dict[str, list[str]] = {}
    for family in found.values():
        for runtime, reason in family.items():
            if reason is not None and runtime not in reasons.setdefault(reason, []):
                reasons[reason].append(runtime)
    yield ""
    yield "Why not:"
    yield ""
    for reason, names in reasons.items():
        yield f"- {', '.join(f'`{name}`' for name in names)}: {reason}."


# models


def models_page() -> Iterator[str]:
    """Which architectures of transformers are scored for which tasks, as the conformance suite found it."""
    found: dict[str, dict[str, str | None]] = json.loads(MODELS.read_text(encoding="utf-8"))
    reasons = [reason for names in found.values() for reason in names.values()]
    untried = sum((reason or "").startswith(UNTRIED) for reason in reasons)
    yield "# Architectures and tasks"
    yield ""
    yield "The architectures for which transformers has a class with a head for a task, by `model_type` in config.json."
    yield "The conformance suite builds a small model of each with random weights, and compares what torchlake computes"
    yield "for rows of different lengths in one batch with what transformers computes for each row alone. One of the"
    yield "rows has the model's end token."
    yield ""
    scored = reasons.count(None)
    yield f"Of {len(reasons)} pairs of architecture and task, {scored} are scored as transformers does,"
    yield f"{len(reasons) - scored - untried} are refused and {untried} are not tried."
    yield ""
    counts = [(list(names.values()).count(None), len(names)) for names in found.values()]
    rows = [(f"[`{task}`](#{task})", str(known), str(most)) for task, (known, most) in zip(found, counts, strict=True)]
    yield from table(("task", "scored", "of"), rows)
    for task, names in found.items():
        yield from ("", f"## {task}", "", "Scored as transformers does:", "")
        yield ", ".join(f"`{name}`" for name, reason in names.items() if reason is None)
        others: dict[str, list[str]] = {}
        for name, reason in names.items():
            if reason is not None:
                others.setdefault(reason.replace(f"a model of type '{name}'", "it"), []).append(f"`{name}`")
        yield ""
        yield from (f"- {', '.join(each)}: {reason}." for reason, each in others.items())


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "job.md": job_page,
    "job-train.md": job_train_page,
    "command-line.md": command_line_page,
    "command-line-models.md": command_line_models_page,
    "command-line-tools.md": command_line_tools_page,
    "command-line-writing.md": command_line_writing_page,
    "output.md": output_page,
    "exit-codes.md": exit_codes_page,
    "encoders.md": encoders_page,
    "models.md": models_page,
    "environment.md": environment_page,
    "routes.md": routes_page,
    "python.md": python_page,
    "python-models.md": python_models_page,
    "python-tools.md": python_tools_page,
    "python-classes.md": classes_page,
    "python-results.md": results_page,
}

if __name__ == "__main__":
    main()
