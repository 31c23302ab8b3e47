"""The commands of the command line. Each declares its options and returns its work, which `main.py` runs.

Libraries that are slow to load are imported by the work (`commands.py`), so --help takes a tenth of a second.
"""

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer
import yaml

from torchlake import plugins
from torchlake.cli import commands
from torchlake.cli import options as o
from torchlake.cli.display import Outcome
from torchlake.cli.engine import engine_settings, make_engine
from torchlake.cli.help import Command, Group
from torchlake.errors import UsageError

Work = Callable[[], Outcome]

app = typer.Typer(
    name="torchlake",
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Fine-tune and score Hugging Face and PyTorch models where your tables live.\n\nExample: torchlake demo",
)
SETTINGS = (
    f"Values of model.task: {', '.join(plugins.names('tasks'))}.\n\n"
    f"Values of train.strategy: auto, {', '.join(plugins.names('strategies'))}."
)


def _command(example: str, **options: Any) -> Callable[[Callable[..., Work]], None]:
    """Register a command with an example in its help. General options that it does not declare are dropped."""

    def register(declared: Callable[..., Work]) -> None:
        signature = inspect.signature(declared)

        def command(**values: Any) -> Work:
            return declared(**{name: values[name] for name in signature.parameters})

        general = {"as_json": o.Json, "quiet": o.Quiet, "verbose": o.Verbose}
        added = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=False, annotation=annotation)
            for name, annotation in general.items()
        ]
        kept = [parameter for name, parameter in signature.parameters.items() if name not in general]
        command.__signature__ = signature.replace(parameters=[*kept, *added])  # type: ignore[attr-defined]
        text = f"{declared.__doc__}\n\n\b\nExample:\n  torchlake {example}"
        app.command(declared.__name__, cls=Command, help=text, **options)(command)

    return register


@_command("init reviews.parquet --label stars")
def init(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="Training table: a file, folder, glob or URL.")],
    more: o.MoreInput = None,
    csv: o.Csv = None,
    text: o.InitText = None,
    text_pair: o.InitPair = None,
    label: o.InitLabel = None,
    model: o.InitModel = None,
    where: o.Where = None,
    sample: o.SampleShare = None,
    limit: o.Limit = None,
    output: o.JobOutput = "job.yaml",
    force: o.Force = False,
) -> Work:
    """Write a job file for a table. Guesses the columns, and shows classes, lengths and problems."""
    options = _given(locals(), "table", "more")
    return lambda: commands.init(_tables(table, more), options)


@_command("train job.yaml --processes 2", epilog=SETTINGS)
def train(
    job: o.OptionalJob = None,
    overrides: o.Settings = None,
    text: o.JobText = None,
    text_pair: o.JobPair = None,
    inputs: o.JobInputs = None,
    where: o.Where = None,
    sample: o.SampleShare = None,
    limit: o.Limit = None,
    run: o.RunFolder = None,
    folds: o.FoldsNumber = None,
    processes: o.Ranks = None,
    engine: o.EngineName = None,
    mlflow: o.Mlflow = None,
    wandb: o.Wandb = None,
    tensorboard: o.TensorBoard = False,
    as_json: o.Json = False,
) -> Work:
    """Fine-tune a model on a table. Run the same command again to continue from the last checkpoint."""
    settings = _settings(overrides, processes, engine) + _columns(text, text_pair, inputs) + _rows(where, sample, limit)
    if mlflow is not None:
        settings.append(f"track.mlflow={json.dumps(mlflow)}")
    if wandb is not None:
        settings.append(f"track.wandb={json.dumps(wandb)}")
    if tensorboard:
        settings.append("track.tensorboard=true")
    return lambda: commands.train(job, settings, run, folds, as_json=as_json)


@_command("tune job.yaml --space space.yaml --trials 20", epilog=SETTINGS)
def tune(
    job: o.Job,
    space: o.Space,
    trials: o.Trials,
    overrides: o.Settings = None,
    where: o.Where = None,
    sample: o.SampleShare = None,
    limit: o.Limit = None,
    run: o.TuningFolder = None,
    processes: o.Ranks = None,
    engine: o.EngineName = None,
    seed: o.TuningSeed = 0,
    no_prune: o.NoPrune = False,
    as_json: o.Json = False,
) -> Work:
    """Search for the settings that train the best model. Run the same command again to continue."""
    settings = _settings(overrides, processes, engine) + _rows(where, sample, limit)
    options = {"trials": trials, "run": run, "seed": seed, "prune": not no_prune}
    return lambda: commands.tune(job, space, settings, options, as_json=as_json)


@_command("plan job.yaml --gpu-memory 80GiB", epilog=SETTINGS)
def plan(
    job: o.OptionalJob = None,
    overrides: o.Settings = None,
    where: o.Where = None,
    sample: o.SampleShare = None,
    limit: o.Limit = None,
    sample_rows: o.SampleRows = None,
    processes: o.Ranks = None,
    gpu_memory: o.GpuMemory = None,
    flops: o.Flops = None,
    bandwidth: o.Bandwidth = None,
    latency: o.Latency = None,
) -> Work:
    """Estimate memory and time before training. Shows tokens, padding, memory and time of each strategy."""
    options = _given(locals(), "job", "overrides", "where", "sample", "limit")
    settings = [*(overrides or ()), *_rows(where, sample, limit)]
    return lambda: commands.plan(job, settings, options)


@_command("predict runs/reviews/model reviews.parquet scored/")
def predict(
    model: o.Model,
    table: o.InputOrLines,
    output: o.OptionalOutput = None,
    more: o.MoreInput = None,
    csv: o.Csv = None,
    text: o.Text = None,
    text_pair: o.TextPair = None,
    inputs: o.Inputs = None,
    where: o.Where = None,
    sample: o.SampleShare = None,
    limit: o.Limit = None,
    null: o.Null = None,
    on_bad_file: o.OnBadFile = None,
    accept_new_input: o.AcceptNewInput = False,
    accept_removed_input: o.AcceptRemovedInput = False,
    key: o.Key = None,
    columns: o.Columns = None,
    all_probabilities: o.AllProbabilities = False,
    embedding: o.Embedding = None,
    prefix: o.Prefix = None,
    max_error_rate: o.MaxErrorRate = None,
    overwrite: o.Overwrite = False,
    format: o.Format = None,
    mode: o.WriteMode = None,
    incremental: o.Incremental = False,
    partition_by: o.PartitionBy = None,
    add_columns: o.AddColumns = False,
    target_file_size: o.TargetFileSize = None,
    task: o.TaskName = None,
    task_options: o.TaskOptions = None,
    runtime: o.RuntimeName = None,
    engine: o.EngineName = None,
    processes: o.Processes = None,
    gpus_per_process: o.ModelGpus = None,
    overrides: o.EngineSettings = None,
    batch_tokens: o.BatchTokens = None,
    chunk_rows: o.ChunkRows = None,
    row_timeout_s: o.RowTimeout = None,
    max_new_tokens: o.MaxNewTokens = None,
    temperature: o.Temperature = None,
    top_k: o.TopK = None,
    top_p: o.TopP = None,
    stop: o.Stop = None,
    seed: o.Seed = None,
    chat: o.Chat = False,
    profile: o.Profile = False,
    as_json: o.Json = False,
) -> Work:
    """Score a table, every row exactly once. Run the same command again to score only what is missing."""
    options = _given(
        locals(), "model", "table", "more", "output", "engine", "processes", "overrides", "profile", "as_json"
    )
    runs_on = make_engine(engine, processes, overrides, as_json=as_json)
    if output is None:
        extra = {"input": more, "engine": runs_on, "profile": profile or None}
        given = options | {name: value for name, value in extra.items() if value is not None}
        return lambda: commands.predict_printed(model, table, given, as_json=as_json)
    return lambda: commands.predict(model, _tables(table, more), output, runs_on, options, profile=profile)


@_command("rank runs/reranker/model candidates.parquet ranked/ --query query --document passage")
def rank(
    model: o.Model,
    table: Annotated[str, typer.Argument(metavar="INPUT", help="Table of pairs: a file, folder, glob or URL.")],
    output: Annotated[str, typer.Argument(metavar="OUTPUT", help="Folder or URL for the ranked rows.")],
    more: o.MoreInput = None,
    csv: o.Csv = None,
    query: o.Query = None,
    document: o.Document = None,
    relevant: o.Relevant = None,
    where: o.Where = None,
    sample: o.SampleShare = None,
    limit: o.Limit = None,
    seed: o.SampleSeed = None,
    key: o.Key = None,
    columns: o.Columns = None,
    max_error_rate: o.MaxErrorRate = None,
    runtime: o.RuntimeName = None,
    engine: o.EngineName = None,
    processes: o.Processes = None,
    overrides: o.EngineSettings = None,
    batch_tokens: o.BatchTokens = None,
    chunk_rows: o.ChunkRows = None,
    as_json: o.Json = False,
) -> Work:
    """Score pairs of query and document, and rank each query's documents. Every row exactly once."""
    options = _given(locals(), "model", "table", "more", "output", "engine", "processes", "overrides", "as_json")
    runs_on = make_engine(engine, processes, overrides, as_json=as_json)
    return lambda: commands.rank(model, _tables(table, more), output, runs_on, options)


@_command("evaluate runs/reviews/model test.parquet")
def evaluate(
    model: o.Model,
    table: Annotated[str, typer.Argument(metavar="TABLE", help="Table with labels: a file, folder, glob or URL.")],
    more: o.MoreInput = None,
    csv: o.Csv = None,
    text: o.Text = None,
    text_pair: o.TextPair = None,
    inputs: o.Inputs = None,
    label: o.Label = None,
    where: o.Where = None,
    sample: o.SampleShare = None,
    limit: o.Limit = None,
    seed: o.SampleSeed = None,
    runtime: o.RuntimeName = None,
    engine: o.EngineName = None,
    processes: o.Processes = None,
    overrides: o.EngineSettings = None,
    as_json: o.Json = False,
) -> Work:
    """Measure a model on a labeled table. Each headline metric has a 95 % bootstrap interval."""
    options = _given(locals(), "model", "table", "more", "engine", "processes", "overrides", "as_json")
    runs_on = make_engine(engine, processes, overrides, as_json=as_json)
    return lambda: commands.evaluate(model, _tables(table, more), runs_on, options)


@_command("optimize runs/reviews/model --sample reviews.parquet")
def optimize(
    model: o.Model,
    sample: o.Sample,
    more: o.MoreInput = None,
    csv: o.Csv = None,
    text: o.Text = None,
    text_pair: o.TextPair = None,
    inputs: o.Inputs = None,
    label: o.Label = None,
    where: o.Where = None,
    limit: o.Limit = None,
    max_drop: o.MaxDrop = None,
    min_agreement: o.MinAgreement = None,
    budget: o.Budget = None,
    runtimes: o.Runtimes = None,
    rows: o.SampleSize = None,
    engine: o.EngineName = None,
    processes: o.Processes = None,
    overrides: o.EngineSettings = None,
    as_json: o.Json = False,
) -> Work:
    """Choose the fastest runtime that agrees with the model. Measures on your rows; predict then uses it."""
    options = _given(locals(), "model", "sample", "more", "engine", "processes", "overrides", "as_json")
    runs_on = make_engine(engine, processes, overrides, as_json=as_json)
    return lambda: commands.optimize(model, _tables(sample, more), runs_on, options)


@_command("launch train.py --processes 2 -- --lr 0.1")
def launch(
    target: Annotated[str, typer.Argument(metavar="SCRIPT|MODULE:FUNCTION", help="What each rank runs.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGS...", help="Arguments for the script, after --.")
    ] = None,
    processes: o.Ranks = None,
    gpus_per_process: o.GpusPerProcess = 0,
    engine: o.EngineName = None,
    overrides: o.EngineSettings = None,
    as_json: o.Json = False,
) -> Work:
    """Run a script or function as ranks. Sets the environment variables that torchrun sets."""
    return lambda: commands.launch(
        target,
        arguments or [],
        make_engine(engine, processes, overrides, as_json=as_json),
        gpus_per_process=gpus_per_process,
        as_json=as_json,
    )


@_command("verify scored/")
def verify(
    output: Annotated[str, typer.Argument(metavar="OUTPUT", help="Folder written by predict.")],
    engine: o.EngineName = None,
    processes: o.Processes = None,
    overrides: o.EngineSettings = None,
    as_json: o.Json = False,
) -> Work:
    """Check an output against its commit record. Checks checksums, rows and keys; exits with 65 on a problem."""
    return lambda: commands.verify(output, make_engine(engine, processes, overrides, as_json=as_json))


@_command("export runs/reviews/model reviews-onnx --format onnx")
def export(
    model: o.Model,
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="New folder, or an earlier export.")],
    format: o.ExportFormat,
    pooling: o.Pooling = None,
) -> Work:
    """Write a model for another tool. Layouts of ONNX Runtime, OpenVINO and sentence-transformers."""
    return lambda: commands.export(model, folder, format, pooling)


@_command("report runs/reviews")
def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder.")],
) -> Work:
    """Write report.html and report.json of a run. Shows curves, data, metrics, checkpoints and machine."""
    return lambda: commands.report(run)


@_command("schema > torchlake.schema.json")
def schema() -> Work:
    """Print the JSON Schema of a job file. Editors check and complete job files with it."""
    return commands.schema


@_command("doctor")
def doctor() -> Work:
    """Show what this machine can run. Lists versions, cores, memory, devices, disk space and problems."""
    return commands.doctor


@_command("demo")
def demo(
    folder: o.Folder = "demo",
    rows: o.Rows = 2400,
) -> Work:
    """Train, predict, evaluate and verify on generated reviews. Needs no network and no data."""
    return lambda: commands.demo(folder, rows)


@_command("version")
def version() -> Work:
    """Print the version."""
    return commands.version


@app.callback()
def _options(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Declare the options before the command; `cli.main` handles --version."""


def _settings(overrides: list[str] | None, processes: int | None, engine: str | None) -> list[str]:
    """Return the overrides of a job; --processes and --engine come last."""
    return [*(overrides or ()), *engine_settings(engine, processes)]


def _tables(first: str, more: list[str] | None) -> str | list[str]:
    return [first, *more] if more else first


def _rows(where: str | None, sample: float | None, limit: int | None) -> list[str]:
    """Return the overrides of a job for the rows to read."""
    given = {"where": where, "sample": sample, "limit": limit}
    return [f"data.{name}={json.dumps(value)}" for name, value in given.items() if value is not None]


def _columns(text: list[str] | None, text_pair: list[str] | None, inputs: list[str] | None) -> list[str]:
    """Return the overrides of a job for its columns."""
    named = _given({"text": text, "text_pair": text_pair, "inputs": inputs})
    given = {name: columns for name, columns in named.items() if name != "inputs"}
    given |= {f"inputs.{name}": columns for name, columns in named.get("inputs", {}).items()}
    return [f"data.{name}={json.dumps(columns)}" for name, columns in given.items()]


def _given(values: Mapping[str, Any], *without: str) -> dict[str, Any]:
    """Return the options that were given, by name; for the others the defaults of the Python function apply."""
    given = {
        name: value
        for name, value in values.items()
        if name not in without and value is not None and value is not False and value != []
    }
    if "csv" in given:
        given["csv"] = dict(_pair("--csv", text, "delimiter=;") for text in given["csv"])
    if "inputs" in given:
        named = [_pair("--inputs", text, "image=photo") for text in given["inputs"]]
        given["inputs"] = {name: _one_or_all([column for other, column in named if other == name]) for name, _ in named}
    given |= {name: _one_or_all(given[name]) for name in ("text", "text_pair") if isinstance(given.get(name), list)}
    if "task_options" in given:
        given["task_options"] = dict(_task_option(text) for text in given["task_options"])
    lists = {"columns", "partition_by", "runtimes"} & given.keys()  # written "a, b", or each by itself
    return given | {name: [word.strip() for text in given[name] for word in text.split(",")] for name in lists}


def _one_or_all(columns: list[str]) -> str | list[str]:
    return columns[0] if len(columns) == 1 else columns


def _pair(option: str, text: str, example: str) -> tuple[str, str]:
    """Return the key and the value of an option."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise UsageError(f"{option} {text}: write it as key=value, such as {example}")
    return key, value


def _task_option(text: str) -> tuple[str, Any]:
    """Return the name and the value, written as in YAML, of `--task-option`."""
    name, equals, value = text.partition("=")
    try:
        if equals:
            return name, yaml.safe_load(value)
    except yaml.YAMLError:
        pass
    raise UsageError(f"--task-option {text}: write it as name=value, such as candidate_labels=[good,bad]")
