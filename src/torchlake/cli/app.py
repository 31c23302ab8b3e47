"""The commands of the command line. Each names its options and returns its work, which `main.py` runs.

Libraries that are slow to load are imported by the work (`commands.py`), so --help takes a tenth of a second.
"""

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from torchlake import plugins
from torchlake.cli import commands
from torchlake.cli import options as o
from torchlake.cli.display import Outcome
from torchlake.cli.engine import engine_settings
from torchlake.cli.help import Command, OptionGroup
from torchlake.cli.options import Given, as_given

Work = Callable[[], Outcome]
ModelFolder = Annotated[str, typer.Argument(metavar="MODEL", help="Model folder written by train.")]
JobFile = Annotated[str, typer.Argument(metavar="JOB.yaml", help="Job file.")]
OptionalJob = Annotated[
    str | None, typer.Argument(metavar="JOB.yaml", help="Job file; optional if --set gives the required settings.")
]
ROWS = "where sample limit"
ENGINE = "engine processes set"
WRITING = (
    "prompt system examples tools chat_template template_options continue_final_message max_new_tokens min_new_tokens "
    "temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty stop stop_token_ids num_beams "
    "language"
)
ENDPOINT = (
    "endpoint model_name key_env api request_options concurrency requests_per_minute tokens_per_minute max_retries "
    "price max_cost max_tokens_total batch_api insecure_endpoint"
)

app = typer.Typer(
    name="torchlake",
    cls=OptionGroup,
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


def _command(
    example: str, names: str = "", own: type = o.SharedFlags, **about: Any
) -> Callable[[Callable[..., Work]], None]:
    """Register a command: `names` are its options, and `own` the class of those that it declares differently.

    The declared function takes the arguments and, if it has options, `given`.
    """

    def register(declared: Callable[..., Work]) -> None:
        signature = inspect.signature(declared)
        arguments = {name: one for name, one in signature.parameters.items() if name != "given"}

        def command(**parsed: Any) -> Work:
            given = as_given({name: value for name, value in parsed.items() if name not in arguments})
            known = {**parsed, "given": given}
            return declared(**{name: known[name] for name in signature.parameters})

        options = o.parameters(f"{names} json quiet verbose", own)
        command.__signature__ = signature.replace(parameters=[*arguments.values(), *options])  # type: ignore[attr-defined]
        text = f"{declared.__doc__}\n\n\b\nExample:\n  torchlake {example}"
        name = about.pop("name", declared.__name__.rstrip("_"))
        app.command(name, cls=Command, help=text, **about)(command)

    return register


@_command(
    "init reviews.parquet --label stars", f"input csv text text_pair label model {ROWS} output force", o.InitFlags
)
def init(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="Training table: a file, folder, glob or URL.")],
    given: Given,
) -> Work:
    """Write a job file for a table. Guesses the columns, and shows classes, lengths and problems."""
    return lambda: commands.init(given.tables(table), given.options)


@_command(
    "train job.yaml --processes 2",
    f"set text text_pair inputs {ROWS} run folds processes engine mlflow wandb tensorboard",
    o.TrainFlags,
    epilog=SETTINGS,
)
def train(given: Given, job: OptionalJob = None) -> Work:
    """Fine-tune a model on a table. Run the same command again to continue from the last checkpoint."""
    return lambda: commands.train(job, _settings(given), given["run"], given["folds"], as_json=given.as_json)


@_command(
    "tune job.yaml --space space.yaml --trials 20",
    f"space! trials! set {ROWS} run processes engine seed no_prune",
    o.TuneFlags,
    epilog=SETTINGS,
)
def tune(job: JobFile, given: Given) -> Work:
    """Search for the settings that train the best model. Run the same command again to continue."""
    options = {**given.some("trials run seed"), "prune": not given["no_prune"]}
    return lambda: commands.tune(job, given["space"], _settings(given), options, as_json=given.as_json)


@_command(
    "plan job.yaml --gpu-memory 80GiB",
    f"set {ROWS} sample_rows processes gpu_memory flops bandwidth latency runtime text tokenizer prompt system chat "
    f"max_new_tokens {ENDPOINT}",
    o.PlanFlags,
    epilog=SETTINGS,
)
def plan(given: Given, job: OptionalJob = None) -> Work:
    """Estimate memory and time before training. Shows tokens, padding, memory and time of each strategy."""
    if given["runtime"] == "http" or given["endpoint"]:
        return lambda: commands.plan_endpoint(job, given)
    options = given.some("sample_rows processes gpu_memory flops bandwidth latency")
    return lambda: commands.plan(job, given.settings, options)


@_command(
    "predict runs/reviews/model reviews.parquet scored/",
    f"input csv text text_pair inputs {ROWS} null max_length on_bad_file accept_new_input accept_removed_input "
    "key columns all_probabilities token_counts embedding prefix max_error_rate overwrite format mode incremental "
    "commit_id partition_by add_columns target_file_size task task_options runtime engine processes gpus_per_process "
    f"set batch_tokens chunk_rows row_timeout_s {WRITING} n explode seed_by seed logprobs json_schema json_columns "
    f"regex choices grammar chat {ENDPOINT} runtime_python profile",
    o.PredictFlags,
)
def predict(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model folder; none with --runtime http.")],
    table: Annotated[
        str,
        typer.Argument(
            metavar="INPUT", help="Table to score: a file, folder, glob or URL; -: lines of standard input."
        ),
    ],
    given: Given,
    output: Annotated[
        str | None,
        typer.Argument(
            metavar="OUTPUT", help="Where the scored rows go: a folder, URL or table (default with -: printed)."
        ),
    ] = None,
) -> Work:
    """Score a table, every row exactly once. Run the same command again to score only what is missing."""
    engine = given.engine
    if given["runtime"] == "http" or given["endpoint"]:
        return lambda: commands.predict_by_endpoint(model, table, output, engine, given)
    if output is None:
        options = given.options | given.some("input profile") | ({} if engine is None else {"engine": engine})
        return lambda: commands.predict_printed(model, table, options, as_json=given.as_json)
    profile = bool(given["profile"])
    return lambda: commands.predict(model, given.tables(table), output, engine, given.options, profile=profile)


@_command(
    "rank runs/reranker/model candidates.parquet ranked/ --query query --document passage",
    f"input csv query document relevant {ROWS} seed key columns max_error_rate runtime {ENGINE} batch_tokens "
    "chunk_rows",
    o.RankFlags,
)
def rank(
    model: ModelFolder,
    table: Annotated[str, typer.Argument(metavar="INPUT", help="Table of pairs: a file, folder, glob or URL.")],
    output: Annotated[str, typer.Argument(metavar="OUTPUT", help="Folder or URL for the ranked rows.")],
    given: Given,
) -> Work:
    """Score pairs of query and document, and rank each query's documents. Every row exactly once."""
    return lambda: commands.rank(model, given.tables(table), output, given.engine, given.options)


@_command(
    "evaluate runs/reviews/model test.parquet",
    f"input csv text text_pair inputs label {ROWS} seed runtime reference report key slices no_texts label_hints "
    f"overwrite {ENGINE} {WRITING} chat",
    o.EvaluateFlags,
)
def evaluate(
    model: ModelFolder,
    table: Annotated[str, typer.Argument(metavar="TABLE", help="Table with labels: a file, folder, glob or URL.")],
    given: Given,
) -> Work:
    """Measure a model on a labeled table. Each headline metric has a 95 % bootstrap interval."""
    return lambda: commands.evaluate(model, given.tables(table), given.engine, given.options)


@_command("compare eval_a/ eval_b/", "table key report fail_if_worse by", o.CompareFlags)
def compare(
    models: Annotated[
        list[str],
        typer.Argument(metavar="A B", help="Evaluations (evaluate --report), runs, or models with --table."),
    ],
    given: Given,
) -> Work:
    """Compare models over the same rows. Differences have intervals; rows won and lost are listed."""
    return lambda: commands.compare(models, given.options)


@_command(
    "optimize runs/reviews/model --sample reviews.parquet",
    f"sample! input csv text text_pair inputs label where limit max_drop min_agreement budget runtimes rows "
    f"max_new_tokens temperature top_k top_p language stop {ENGINE}",
    o.OptimizeFlags,
)
def optimize(model: ModelFolder, given: Given) -> Work:
    """Choose the fastest runtime that agrees with the model. Measures on your rows; predict then uses it."""
    options = {name: value for name, value in given.options.items() if name != "sample"}
    return lambda: commands.optimize(model, given.tables(given["sample"]), given.engine, options)


@_command("launch train.py --processes 2 -- --lr 0.1", "processes gpus_per_process engine set", o.LaunchFlags)
def launch(
    target: Annotated[str, typer.Argument(metavar="SCRIPT|MODULE:FUNCTION", help="What each rank runs.")],
    given: Given,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGS...", help="Arguments for the script, after --.")
    ] = None,
) -> Work:
    """Run a script or function as ranks. Sets the environment variables that torchrun sets."""
    return lambda: commands.launch(
        target,
        arguments or [],
        given.engine,
        gpus_per_process=given["gpus_per_process"] or 0,
        as_json=given.as_json,
    )


SERVING = (
    "host port processes name max_body max_rows max_requests max_queued_tokens queue_timeout row_timeout read_timeout "
    "drain_delay drain_timeout no_truncate reload api_key_file open_metrics allow_origin"
)
LOADING = "text_pair task task_options runtime all_probabilities null max_length batch_tokens"


@_command("serve runs/reviews/model --port 8080", f"{SERVING} {LOADING} engine set", o.ServeFlags)
def serve(model: ModelFolder, given: Given) -> Work:
    """Answer HTTP requests with a model. Rows as MLflow, texts as Text Embeddings Inference and OpenAI take them."""
    return lambda: commands.serve(
        model, given.some(SERVING), given.some(LOADING), given.engine_name, given["set"] or ()
    )


@_command("try runs/reviews/model", f"host port {LOADING}", o.ServeFlags)
def try_(model: ModelFolder, given: Given) -> Work:
    """Try a model: a page in the browser, or a prompt in a terminal."""
    return lambda: commands.try_model(model, given.some("host port"), given.some(LOADING))


@_command("verify scored/", ENGINE)
def verify(
    output: Annotated[str, typer.Argument(metavar="OUTPUT", help="Folder written by predict.")], given: Given
) -> Work:
    """Check an output against its commit record. Checks checksums, rows and keys; exits with 65 on a problem."""
    return lambda: commands.verify(output, given.engine)


@_command("export runs/reviews/model reviews-onnx --format onnx", "format! pooling", o.ExportFlags)
def export(
    model: ModelFolder,
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="New folder, or an earlier export.")],
    given: Given,
) -> Work:
    """Write a model for another tool. Layouts of ONNX Runtime, OpenVINO and sentence-transformers."""
    return lambda: commands.export(model, folder, given["format"], given["pooling"])


@_command("report runs/reviews", "watch serve port", o.ReportFlags)
def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder.")],
    given: Given,
) -> Work:
    """Write report.html and report.json of a run. Shows curves, data, metrics, checkpoints and machine."""
    return lambda: commands.report(run, **given.some("watch serve port"))


@_command("schema > torchlake.schema.json")
def schema() -> Work:
    """Print the JSON Schema of a job file. Editors check and complete job files with it."""
    return commands.schema


@_command("doctor", "runtime runtime_python", o.DoctorFlags)
def doctor(given: Given) -> Work:
    """Show what this machine can run. Lists versions, cores, memory, devices, disk space and problems."""
    return lambda: commands.doctor(given["runtime"], given["runtime_python"])


@_command("runtime-env vllm requirements-vllm.txt", name="runtime-env")
def runtime_env(
    runtime: Annotated[str, typer.Argument(metavar="RUNTIME", help="Runtime with an interpreter of its own: vllm.")],
    path: Annotated[str, typer.Argument(metavar="FILE", help="Requirements file to write.")],
) -> Work:
    """Write the requirements of a runtime's own environment. Prints the commands that install it."""
    return lambda: commands.runtime_env(runtime, path)


@_command("demo", "folder rows task", o.DemoFlags)
def demo(given: Given) -> Work:
    """Train, predict, evaluate and verify on generated tables. Needs no network and no data."""
    return lambda: commands.demo(given["folder"] or "demo", given["rows"] or 2400, given["task"] or "reviews")


@_command("version")
def version() -> Work:
    """Print the version."""
    return commands.version


@app.callback()
def _options(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Declare the options before the command; `cli.main` handles --version."""


def _settings(given: Given) -> list[str]:
    """Return the overrides of a job that also runs it; --processes and --engine come last."""
    return given.settings + engine_settings(given["engine"], given["processes"])
