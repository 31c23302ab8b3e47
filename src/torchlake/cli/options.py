"""The options of the commands: those of jobs over tables from `config/options.py`, and the command line's own.

A command names its options (`app.py`). Each is looked up in the command's own class, then among the shared ones, then
among those of the Python functions. An option that is not given is not passed on, so the defaults are those of the
Python functions.
"""

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
import yaml

from torchlake import plugins
from torchlake.cli.engine import make_engine
from torchlake.config.options import EvaluateOptions, Option, PredictOptions, types_of
from torchlake.config.yaml import read_text
from torchlake.errors import UsageError

if TYPE_CHECKING:
    from torchlake.engines import Engine

_general = partial(Option, "General")
_execution = partial(Option, "Execution")
_job = partial(Option, "Job")
_tracking = partial(Option, "Tracking")
_search = partial(Option, "Search")
_hardware = partial(Option, "Hardware")
_input = partial(Option, "Input")
_output = partial(Option, "Output")
_text = partial(Option, "Text generation")
_selection = partial(Option, "Selection")
_demo = partial(Option, "Demo")
_serving = partial(Option, "Serving")
RUNTIMES = ", ".join(plugins.names("runtimes"))
OF_COMMANDS = {"input", "engine", "processes", "set", "profile", "json", "quiet", "verbose"}
"Options that are not arguments of the Python functions."


class SharedFlags:
    """Options of several commands."""

    # `main.py` reads these three before parsing, because usage errors are JSON too.
    json: Annotated[bool, _general(None, "Print one JSON object to standard output.")]
    quiet: Annotated[bool, _general(None, "Show errors and results only.")]
    verbose: Annotated[bool, _general(None, "Show debug messages and tracebacks.")]
    input: Annotated[Sequence[str], _input("TABLE", "Further table; repeatable.")]
    text: Annotated[
        Sequence[str], _input("COLUMN", "Text column (default: as in training); repeatable: texts are joined.")
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
    engine: Annotated[str, _execution("NAME", f"Where to run: {', '.join(plugins.names('engines'))} (default: local).")]
    processes: Annotated[int, _execution("N", "Number of processes (default: chosen by the engine).", min=1)]
    set: Annotated[
        Sequence[str], _execution("KEY=VALUE", "Set an engine option, such as engine.ray.address=auto; repeatable.")
    ]


class InitFlags:
    """Options of `init`."""

    text: Annotated[str, _input("COLUMN", "Text column (default: guessed).")]
    text_pair: Annotated[str, _input("COLUMN", "Second text of a pair (default: guessed by its name).")]
    label: Annotated[str, _input("COLUMN", "Label column (default: guessed).")]
    model: Annotated[str, _job("MODEL", "Model to fine-tune: a folder, or a name on the Hub (default: roberta-base).")]
    output: Annotated[str, _output("FILE", "Job file to write (default: job.yaml).")]
    force: Annotated[bool, _output(None, "Replace an existing file.")]


class JobFlags:
    """Options of the commands with a job."""

    text: Annotated[Sequence[str], _job("COLUMN", "Text column, in place of data.text; repeatable: texts are joined.")]
    text_pair: Annotated[
        Sequence[str], _job("COLUMN", "Second text of a pair, in place of data.text_pair; repeatable.")
    ]
    inputs: Annotated[Mapping[str, str], _job("NAME=COLUMN", "Column of another input, as in data.inputs; repeatable.")]
    set: Annotated[Sequence[str], _job("KEY=VALUE", "Override a job setting, such as train.epochs=5; repeatable.")]
    processes: Annotated[int, _execution("N", "Number of ranks (default: 1).", min=1)]


class TrainFlags(JobFlags):
    """Options of `train`."""

    run: Annotated[
        str,
        _job("FOLDER", "Run folder (default: runs/ and the name of the job file); auto: a new one for a changed job."),
    ]
    folds: Annotated[
        int,
        _job("N", "Train N times, each time validating on another part of the rows; mean and deviation.", min=2),
    ]
    mlflow: Annotated[str, _tracking("STORE", "Also log to MLflow: sqlite:///FILE or a folder.")]
    wandb: Annotated[str, _tracking("PROJECT", "Also log to Weights & Biases; WANDB_MODE=offline: in the run folder.")]
    tensorboard: Annotated[bool, _tracking(None, "Also write event files to tensorboard/ in the run folder.")]


class TuneFlags(JobFlags):
    """Options of `tune`."""

    space: Annotated[str, _search("FILE", "Search space: a range or a list of choices per setting.")]
    trials: Annotated[int, _search("N", "Total number of trials, with those of earlier calls.", min=1)]
    run: Annotated[str, _job("FOLDER", "Folder of the tuning (default: runs/, the name of the job file, _tuning).")]
    seed: Annotated[int, _search("N", "Random seed of the suggested settings (default: 0).", min=0)]
    no_prune: Annotated[bool, _search(None, "Train every trial to its end, however it compares.")]


class PlanFlags(JobFlags):
    """Options of `plan`."""

    sample_rows: Annotated[int, _input("N", "Rows of the table to sample (default: 2000).", min=1)]
    gpu_memory: Annotated[str, _hardware("SIZE", "Memory of each rank's GPU, such as 80GB or 80GiB.")]
    flops: Annotated[str, _hardware("RATE", "Operations per second of a rank in training, such as 120T.")]
    bandwidth: Annotated[str, _hardware("RATE", "Bytes per second between ranks, such as 12.5GB.")]
    latency: Annotated[float, _hardware("SECONDS", "Latency of a message between ranks.")]
    tokenizer: Annotated[str, _input("MODEL", "Of --runtime http: tokenizer that counts (default: a guess).")]


class EvaluateFlags:
    """Options of `evaluate`."""

    reference: Annotated[
        str, _input("MODEL", "Of pairs of answers: what rewards are relative to (default: as in training).")
    ]


class CompareFlags:
    """Options of `compare`."""

    table: Annotated[str, _input("TABLE", "Evaluate the models on this table first.")]
    key: Annotated[str, _output("COLUMN", "Column of unique, non-null values that identify rows of --table.")]
    report: Annotated[str, _output("FOLDER", "Write the page compare.html and compare.json there.")]
    fail_if_worse: Annotated[
        str, _output("METRIC", "Exit with 1 if this metric is worse than the first model's, with its whole interval.")
    ]
    by: Annotated[float, _output("X", "For --fail-if-worse: worse by more than X (default: 0).", min=0)]


class ReportFlags:
    """Options of `report`."""

    watch: Annotated[bool, _output(None, "Write the page again every 10 seconds until the run is complete.")]
    serve: Annotated[bool, _output(None, "Show the page on 127.0.0.1 until Ctrl-C; implies --watch.")]
    port: Annotated[int, _output("N", "Port of --serve (default: any that is free).", min=1, max=65535)]


class PredictFlags:
    """Options of `predict`."""

    seed: Annotated[int, _text("N", "Random seed for sampling, also of --sample (default: 0).", min=0)]
    profile: Annotated[bool, _execution(None, "Show the seconds of each step since the start.")]


class RankFlags:
    """Options of `rank`."""

    query: Annotated[str, _input("COLUMN", "Column of queries (default: the first text of a pair).")]
    document: Annotated[str, _input("COLUMN", "Column of documents (default: the second text of a pair).")]
    relevant: Annotated[
        str,
        _input("CLASS", "Class whose probability is the score (default: the second of 0 and 1, or of false and true)."),
    ]


class OptimizeFlags:
    """Options of `optimize`."""

    sample: Annotated[str, _input("TABLE", "Table of typical rows; labels are optional.")]
    max_drop: Annotated[float, _selection("SHARE", "Maximum loss of accuracy (default: 0.005).", min=0, max=1)]
    min_agreement: Annotated[
        float,
        _selection("SHARE", "Minimum share of rows with eager's label or text (default: 0.99).", min=0, max=1),
    ]
    budget: Annotated[str, _selection("TIME", "Time for all measurements (default: 5min).")]
    runtimes: Annotated[
        Sequence[str],
        _selection("A,B", f"Runtimes to try: {RUNTIMES} (default: all that can run); repeatable."),
    ]
    rows: Annotated[int, _selection("N", "Rows of the table to measure on (default: 1000; texts: 32).", min=1)]


class LaunchFlags:
    """Options of `launch`."""

    processes: Annotated[int, _execution("N", "Number of ranks (default: 1).", min=1)]
    gpus_per_process: Annotated[int, _execution("N", "GPUs of each rank (default: 0).", min=0)]


class DoctorFlags:
    """Options of `doctor`."""

    runtime: Annotated[str, _execution("NAME", "Check a runtime that has a Python of its own: vllm.")]


class ExportFlags:
    """Options of `export`."""

    format: Annotated[
        Literal["onnx", "openvino", "sentence-transformers", "transformers"],
        _output("FORMAT", "Layout: onnx, openvino, transformers (whole weights) or sentence-transformers."),
    ]
    pooling: Annotated[
        Literal["mean", "cls", "max", "lasttoken"],
        _output("MODE", "From token states to one vector: mean, cls, max or lasttoken (default: the model's own)."),
    ]


class ServeFlags:
    """Options of `serve` and `try`."""

    host: Annotated[str, _serving("ADDRESS", "Address to listen on (default: 127.0.0.1).")]
    port: Annotated[int, _serving("N", "Port; 0: any free one (default: AIP_HTTP_PORT, or 8080).", min=0, max=65535)]
    processes: Annotated[int, _serving("N", "Processes on this port, each with the model (default: 1).", min=1)]
    name: Annotated[str, _serving("NAME", "Name of the model (default: that of its folder or run).")]
    max_body: Annotated[str, _serving("SIZE", "Largest body of a request (default: 2MiB).")]
    max_rows: Annotated[int, _serving("N", "Rows or texts of a request (default: 1024).", min=1)]
    max_requests: Annotated[int, _serving("N", "Requests in flight; more get 429 (default: 512).", min=1)]
    max_queued_tokens: Annotated[
        int, _serving("N", "Tokens in the queue from which on requests get 429 (default: 131072).", min=1)
    ]
    queue_timeout: Annotated[
        float, _serving("SECONDS", "Time in the queue after which a request gets 503 (default: 30).")
    ]
    row_timeout: Annotated[
        float, _serving("SECONDS", "Time of a batch after which the process ends with 70 (default: 600).")
    ]
    read_timeout: Annotated[float, _serving("SECONDS", "Time for headers and body to arrive (default: 10).")]
    drain_delay: Annotated[float, _serving("SECONDS", "After SIGTERM, accept connections this long (default: 0).")]
    drain_timeout: Annotated[float, _serving("SECONDS", "After SIGTERM, answer requests this long (default: 25).")]
    no_truncate: Annotated[bool, _serving(None, "Refuse texts that are too long, instead of truncating them.")]
    reload: Annotated[bool, _serving(None, "Take a new model in the folder or behind the link; kill -HUP: once.")]
    api_key_file: Annotated[
        str, _serving("FILE", "File with the token that requests have to bring (default: TORCHLAKE_API_KEY).")
    ]
    open_metrics: Annotated[bool, _serving(None, "Answer /metrics without the token.")]
    allow_origin: Annotated[
        Sequence[str], _serving("ORIGIN", "Origin of web pages whose scripts may call the server; repeatable.")
    ]
    text_pair: Annotated[str, _input("COLUMN", "Column of the second text, of a cross-encoder of others.")]


class DemoFlags:
    """Options of `demo`."""

    folder: Annotated[str, _demo("FOLDER", "Folder for all files (default: demo).")]
    rows: Annotated[int, _demo("N", "Rows of the generated table (default: 2400).", min=12, max=50_000)]
    task: Annotated[
        Literal["reviews", "chat", "write"],
        _demo("NAME", "Reviews are classified; in chat a model learns to answer, in write it does (default: reviews)."),
    ]


def parameters(names: str, own: type) -> Iterator[inspect.Parameter]:
    """Return a parameter for each of the names, as typer reads it; a name that ends with "!" is required."""
    known = {
        name: kind
        for each in (PredictOptions, EvaluateOptions, SharedFlags, own)
        for name, kind in _declared(each).items()
    }
    for word in names.split():
        name = word.removesuffix("!")
        kind, option = get_args(known[name])
        flag = option.flag or f"--{name.replace('_', '-')}"
        about = typer.Option(
            flag, metavar=option.value, help=option.help, rich_help_panel=option.group, min=option.min, max=option.max
        )
        wanted = _parsed(kind)
        default: Any = False if wanted is bool else inspect.Parameter.empty if word.endswith("!") else None
        if default is None:
            wanted |= None
        yield inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[wanted, about]
        )


@cache
def _declared(group: type) -> dict[str, Any]:
    return {
        name: kind for name, kind in get_type_hints(group, include_extras=True).items() if get_origin(kind) is Annotated
    }


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

    def __getitem__(self, name: str) -> Any:
        """Return the value of an option; None if it was not given."""
        return self.values.get(name)

    def some(self, names: str) -> dict[str, Any]:
        """Return those of the named options that were given."""
        return {name: self.values[name] for name in names.split() if name in self.values}

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of a Python function on tables, besides its engine."""
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
    def engine_name(self) -> str | None:
        """The name of the engine; None if it was not given."""
        name: str | None = self["engine"]
        return name

    @property
    def settings(self) -> list[str]:
        """The overrides of a job: those of --set, and the options that stand for settings."""
        columns = self.some("text text_pair")
        columns |= {f"inputs.{name}": column for name, column in (self["inputs"] or {}).items()}
        sections = {"data": columns | self.some("where sample limit"), "track": self.some("mlflow wandb tensorboard")}
        return [*(self["set"] or ())] + [
            f"{section}.{name}={json.dumps(value)}"
            for section, values in sections.items()
            for name, value in values.items()
        ]

    def tables(self, first: str) -> str | list[str]:
        """Return the table of a command, with those of --input."""
        return [first, *self["input"]] if self["input"] else first


def as_given(parsed: Mapping[str, Any]) -> Given:
    """Return the options that were given, with the values that Python functions take. Raises UsageError."""
    given = {name: value for name, value in parsed.items() if value is not None and value is not False and value != []}
    if "csv" in given:
        given["csv"] = dict(_pair("--csv", text, "delimiter=;") for text in given["csv"])
    if "inputs" in given:
        named = [_pair("--inputs", text, "image=photo") for text in given["inputs"]]
        given["inputs"] = {name: _one_or_all([column for other, column in named if other == name]) for name, _ in named}
    single = ("text", "text_pair", "json_schema")
    given |= {name: _one_or_all(given[name]) for name in single if isinstance(given.get(name), list)}
    for name, flag, example in (
        ("task_options", "--task-option", "candidate_labels=[good,bad]"),
        ("template_options", "--template-option", "enable_thinking=false"),
        ("request_options", "--request-option", "reasoning_effort=low"),
    ):
        if name in given:
            given[name] = dict(_yaml_pair(flag, text, example) for text in given[name])
    given |= {name: _unescaped(given[name]) for name in ("prompt", "system") if name in given}
    given |= {"stop": [_unescaped(text) for text in given["stop"]]} if "stop" in given else {}
    lists = {"columns", "partition_by", "runtimes", "stop_token_ids", "choices"} & given.keys()
    # Written "a, b", or by themselves.
    given |= {name: [word.strip() for text in given[name] for word in text.split(",")] for name in lists}
    if "stop_token_ids" in given:
        given["stop_token_ids"] = [_whole("--stop-token-ids", word) for word in given["stop_token_ids"]]
    return Given(given)


def _whole(option: str, word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise UsageError(f"{option} {word}: expected a whole number.") from None


def _one_or_all(columns: list[str]) -> str | list[str]:
    return columns[0] if len(columns) == 1 else columns


def _pair(option: str, text: str, example: str) -> tuple[str, str]:
    """Return the key and the value of an option."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise UsageError(f"{option} {text}: write it as key=value, such as {example}")
    return key, value


def _unescaped(text: str) -> str:
    """Return text with line breaks and tabs for \\n and \\t, which shells pass on as they are."""
    return re.sub(r"\\([nt\\])", lambda found: {"n": "\n", "t": "\t"}.get(found[1], "\\"), text)


def _yaml_pair(option: str, text: str, example: str) -> tuple[str, Any]:
    """Return the name and the value, written as in YAML, of an option."""
    name, equals, value = text.partition("=")
    try:
        if equals and value.startswith("@"):
            if not Path(value[1:]).is_file():
                raise UsageError(f"{option} {text}: there is no such file.")
            return name, yaml.safe_load(read_text(Path(value[1:])))
        if equals:
            return name, yaml.safe_load(value)
    except yaml.YAMLError:
        pass
    raise UsageError(f"{option} {text}: write it as name=value, such as {example}")
