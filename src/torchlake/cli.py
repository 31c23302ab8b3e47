"""The command line: each command names its options and returns the work, which runs outside the parser.

Results go to standard output, everything else to standard error. With --json, standard output carries exactly one JSON
object, also for errors ({"error": {...}}): whatever else writes to it, child processes included, is sent to standard
error. The exit status of an error is its class's (torchlake.errors); of a fault in torchlake itself 70, with traceback.
An error of the operating system, such as a missing permission, is one of the user's (`system_errors.py`).
The libraries that are slow to load are loaded by the work (`commands.py`), not by the parser: --help takes no second.
"""

import json
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import typer

from torchlake import commands
from torchlake.commands import Outcome, engine_settings, given, make_engine
from torchlake.console import apart, error_outcome, interruptible, log_to_stderr, resume_line
from torchlake.errors import Interrupted, TorchlakeError, UsageError
from torchlake.redaction import redacted
from torchlake.system_errors import in_words

app = typer.Typer(
    name="torchlake",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    help="Fine-tune and score Hugging Face and PyTorch models where your tables live.\n\nExample: torchlake demo",
)

Work = Callable[[], Outcome]

# The flag is declared on every command for the parser and the help; `main` reads it before anything is parsed, because
# a usage error has to come out as JSON too.
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output; all else on stderr.")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="Model folder, as training writes it.")]
TextColumn = Annotated[str | None, typer.Option("--text", help="Text column, where it is not the training table's.")]
RuntimeName = Annotated[
    str | None, typer.Option("--runtime", help="What scores (default: what optimize chose, else eager).")
]
EngineName = Annotated[str | None, typer.Option("--engine", help="Where the job runs (default: local).")]
Processes = Annotated[int | None, typer.Option("--processes", min=1, help="Processes (default: the engine's choice).")]
Ranks = Annotated[int | None, typer.Option("--processes", min=1, help="Ranks to train with (default: 1).")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="Lay one value over the job file; repeatable.")
]

EngineOverrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="ENGINE.B=C", help="Set one of the engine's options; repeatable.")
]


@app.command()
def train(
    job: Annotated[
        str | None, typer.Argument(metavar="[JOB.yaml]", help="Job file; not needed with enough --set.")
    ] = None,
    overrides: Overrides = None,
    processes: Ranks = None,
    engine: EngineName = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="FOLDER", help="Run folder (default: runs/ and the job file's name).")
    ] = None,
    mlflow: Annotated[
        str | None, typer.Option("--mlflow", metavar="STORE", help="Tell MLflow too: sqlite:///FILE or a folder.")
    ] = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write event files to the run folder's tensorboard/ too.")
    ] = False,
    as_json: Json = False,
) -> Work:
    """Fine-tune a model on a table. Run again, it continues from the last checkpoint.

    \b
    Example: torchlake train job.yaml --processes 2 --set train.learning_rate=2e-5
    """
    settings = _settings(overrides, processes, engine)
    if mlflow is not None:
        settings.append(f"track.mlflow={json.dumps(mlflow)}")
    if tensorboard:
        settings.append("track.tensorboard=true")
    return lambda: commands.train(job, settings, run, as_json=as_json)


@app.command()
def tune(
    job: Annotated[str, typer.Argument(metavar="JOB.yaml", help="Job file.")],
    space: Annotated[
        str, typer.Option("--space", metavar="FILE", help="What is searched, a range or choices each (required).")
    ],
    trials: Annotated[int, typer.Option("--trials", min=1, help="Trials in all, earlier ones counted (required).")],
    overrides: Overrides = None,
    processes: Ranks = None,
    engine: EngineName = None,
    run: Annotated[
        str | None,
        typer.Option(
            "--run", metavar="FOLDER", help="The tuning's folder (default: runs/ and the job's name, _tuning)."
        ),
    ] = None,
    as_json: Json = False,
) -> Work:
    """Search the settings that train the best model. Run again, it continues; trials that lag behind are stopped.

    \b
    Example: torchlake tune job.yaml --space space.yaml --trials 20
    """
    settings = _settings(overrides, processes, engine)
    return lambda: commands.tune(job, space, trials, settings, run, as_json=as_json)


@app.command()
def plan(
    job: Annotated[
        str | None, typer.Argument(metavar="[JOB.yaml]", help="Job file; not needed with enough --set.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="Lay one value over the job file; repeatable.")
    ] = None,
    processes: Annotated[int | None, typer.Option("--processes", min=1, help="Ranks to plan for (default: 1).")] = None,
    gpu_memory: Annotated[
        str | None, typer.Option("--gpu-memory", metavar="SIZE", help="Memory of each rank's GPU, as 80GiB.")
    ] = None,
    flops: Annotated[
        str | None,
        typer.Option("--flops", metavar="RATE", help="Operations/s that training reaches on a rank, as 120T."),
    ] = None,
    bandwidth: Annotated[
        str | None, typer.Option("--bandwidth", metavar="RATE", help="Bytes/s that a rank sends, as 12.5GB.")
    ] = None,
    latency: Annotated[
        float | None, typer.Option("--latency", metavar="SECONDS", help="Seconds of a message between ranks.")
    ] = None,
    sample_rows: Annotated[
        int | None, typer.Option("--sample-rows", min=1, help="Rows of the table to look at (default: 2000).")
    ] = None,
    as_json: Json = False,
) -> Work:
    """Tell what training will take. Tokens, padding, memory and time for each strategy, before anything is spent.

    \b
    Example: torchlake plan job.yaml --processes 8 --gpu-memory 80GiB
    """
    options = {
        "processes": processes,
        "gpu_memory": gpu_memory,
        "flops": flops,
        "bandwidth": bandwidth,
        "latency": latency,
        "sample_rows": sample_rows,
    }
    return lambda: commands.plan(job, list(overrides or ()), given(options))


@app.command()
def predict(
    model: Model,
    table: Annotated[str, typer.Argument(metavar="INPUT", help="Table to score: file, folder, glob or URL.")],
    output: Annotated[str, typer.Argument(metavar="OUTPUT", help="Folder of Parquet files to write.")],
    text: TextColumn = None,
    key: Annotated[str | None, typer.Option("--key", help="Column that identifies a row: unique, never null.")] = None,
    columns: Annotated[str | None, typer.Option("--columns", metavar="A,B", help="More columns to carry over.")] = None,
    all_probabilities: Annotated[
        bool, typer.Option("--all-probabilities", help="Write the probability of every class.")
    ] = False,
    prefix: Annotated[
        str | None, typer.Option("--prefix", help="Put this before the predicted columns' names.")
    ] = None,
    runtime: RuntimeName = None,
    engine: EngineName = None,
    processes: Processes = None,
    overrides: EngineOverrides = None,
    max_error_rate: Annotated[
        float | None,
        typer.Option("--max-error-rate", min=0, max=1, help="Stop when a larger share fails (default: 0.5)."),
    ] = None,
    null: Annotated[
        Literal["error", "score"] | None,
        typer.Option("--null", help="Rows without text: error rows, or scored as empty."),
    ] = None,
    row_timeout_s: Annotated[
        float | None,
        typer.Option("--row-timeout", metavar="SECONDS", help="Longest time for a forward pass (default: 600)."),
    ] = None,
    batch_tokens: Annotated[
        int | None, typer.Option("--batch-tokens", min=1, help="Tokens of a batch, padding counted.")
    ] = None,
    chunk_rows: Annotated[
        int | None, typer.Option("--chunk-rows", min=1, help="Rows of a chunk (default: from the table's size).")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an output of another job.")] = False,
    accept_new_input: Annotated[
        bool, typer.Option("--accept-new-input", help="The input has gained rows or files: score those only.")
    ] = False,
    accept_removed_input: Annotated[
        bool, typer.Option("--accept-removed-input", help="Files have left the input: drop their rows.")
    ] = False,
    on_bad_file: Annotated[
        Literal["error", "quarantine"] | None,
        typer.Option("--on-bad-file", help="An unreadable file stops the job, or is listed and left out."),
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", min=1, help="Text generation: longest answer (default: 64).")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0, help="Draw tokens, above 0 (default: 0, the likeliest).")
    ] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", min=1, help="Draw among so many likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option("--top-p", min=0, max=1, help="Draw among the likeliest of this probability.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="A text ends before this; repeatable.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, help="With each row's text decides what is drawn (default: 0).")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="The texts are conversations: JSON lists of {role, content}.")
    ] = False,
    as_json: Json = False,
) -> Work:
    """Score a table, every row exactly once. Run again, nothing is scored twice.

    \b
    Example: torchlake predict runs/reviews/model reviews.parquet scored/ --key id
    """
    options = {
        "text": text,
        "key": key,
        "columns": [name.strip() for name in columns.split(",")] if columns else None,
        "all_probabilities": all_probabilities,
        "prefix": prefix,
        "runtime": runtime,
        "max_error_rate": max_error_rate,
        "null": null,
        "row_timeout_s": row_timeout_s,
        "batch_tokens": batch_tokens,
        "chunk_rows": chunk_rows,
        "overwrite": overwrite,
        "accept_new_input": accept_new_input,
        "accept_removed_input": accept_removed_input,
        "on_bad_file": on_bad_file,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "stop": stop or None,
        "seed": seed,
        "chat": chat,
    }
    return lambda: commands.predict(
        model, table, output, make_engine(engine, processes, overrides, as_json=as_json), given(options)
    )


@app.command()
def evaluate(
    model: Model,
    table: Annotated[str, typer.Argument(metavar="TABLE", help="Table with labels: file, folder, glob or URL.")],
    text: TextColumn = None,
    label: Annotated[
        str | None, typer.Option("--label", help="Label column, where it is not the training table's.")
    ] = None,
    runtime: RuntimeName = None,
    engine: EngineName = None,
    processes: Processes = None,
    overrides: EngineOverrides = None,
    as_json: Json = False,
) -> Work:
    """Measure a model on a labelled table. Every headline metric has a 95 % bootstrap interval.

    \b
    Example: torchlake evaluate runs/reviews/model test.parquet
    """
    options = given({"text": text, "label": label, "runtime": runtime})
    return lambda: commands.evaluate(model, table, make_engine(engine, processes, overrides, as_json=as_json), options)


@app.command()
def optimize(
    model: Model,
    sample: Annotated[
        str, typer.Option("--sample", metavar="TABLE", help="Rows like yours, with labels or without (required).")
    ],
    text: TextColumn = None,
    label: Annotated[
        str | None, typer.Option("--label", help="Label column, where it is not the training table's.")
    ] = None,
    max_drop: Annotated[
        float | None, typer.Option("--max-drop", min=0, max=1, help="Accuracy that may be lost (default: 0.005).")
    ] = None,
    min_agreement: Annotated[
        float | None,
        typer.Option("--min-agreement", min=0, max=1, help="Share of labels that must be eager's (default: 0.99)."),
    ] = None,
    budget: Annotated[
        str | None, typer.Option("--budget", metavar="TIME", help="Time for all candidates (default: 5min).")
    ] = None,
    runtimes: Annotated[
        str | None, typer.Option("--runtimes", metavar="A,B", help="Runtimes to try (default: all that can run).")
    ] = None,
    processes: Processes = None,
    as_json: Json = False,
) -> Work:
    """Choose the fastest runtime that agrees. Measured on your rows, on this machine; predict then uses it.

    \b
    Example: torchlake optimize runs/reviews/model --sample reviews.parquet --max-drop 0.002
    """
    options = {
        "text": text,
        "label": label,
        "max_drop": max_drop,
        "min_agreement": min_agreement,
        "budget": budget,
        "runtimes": [name.strip() for name in runtimes.split(",")] if runtimes else None,
    }
    return lambda: commands.optimize(model, sample, make_engine(None, processes, as_json=as_json), given(options))


@app.command()
def launch(
    target: Annotated[str, typer.Argument(metavar="SCRIPT|MODULE:FUNCTION", help="What every rank runs.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="-- ARGS", help="Its arguments, after --.")] = None,
    processes: Annotated[int | None, typer.Option("--processes", min=1, help="Ranks (default: 1).")] = None,
    gpus_per_process: Annotated[int, typer.Option("--gpus-per-process", min=0, help="GPUs that each rank sees.")] = 0,
    engine: EngineName = None,
    overrides: EngineOverrides = None,
    as_json: Json = False,
) -> Work:
    """Run a script or function as ranks. They have the environment that torchrun gives.

    \b
    Example: torchlake launch train.py --processes 2 -- --lr 0.1
    """
    return lambda: commands.launch(
        target,
        arguments or [],
        make_engine(engine, processes, overrides, as_json=as_json),
        gpus_per_process=gpus_per_process,
        as_json=as_json,
    )


@app.command()
def verify(
    output: Annotated[str, typer.Argument(metavar="OUTPUT", help="Folder that predict wrote.")], as_json: Json = False
) -> Work:
    """Check a scored table against its record. Checksums, pages, rows and keys; exit status 65 when something is off.

    \b
    Example: torchlake verify scored/
    """
    return lambda: commands.verify(output)


@app.command()
def report(run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder.")], as_json: Json = False) -> Work:
    """Write a run's report.html and report.json. Curves, data, metrics, checkpoints, machine.

    \b
    Example: torchlake report runs/reviews
    """
    return lambda: commands.report(run)


@app.command()
def doctor(as_json: Json = False) -> Work:
    """Show what this machine can do. Versions, cores, memory, devices, disk; and what is in the way.

    \b
    Example: torchlake doctor
    """
    return commands.doctor


@app.command()
def demo(
    folder: Annotated[str, typer.Option("--folder", help="Where to write everything.")] = "demo",
    rows: Annotated[int, typer.Option("--rows", min=12, max=50_000, help="Rows of the generated review table.")] = 2400,
    as_json: Json = False,
) -> Work:
    """Run the main job on generated reviews. Train, predict, evaluate, verify, report; needs no network.

    \b
    Example: torchlake demo
    """
    return lambda: commands.demo(folder, rows)


@app.command()
def version(as_json: Json = False) -> Work:
    """Print torchlake's version.

    \b
    Example: torchlake version
    """
    return commands.version


@app.callback()
def _options(
    show_version: Annotated[bool, typer.Option("--version", help="Print torchlake's version and exit.")] = False,
) -> None:
    """The options before the command; --version itself is answered by `main`."""


def _settings(overrides: list[str] | None, processes: int | None, engine: str | None) -> list[str]:
    """The overrides of a job, those with an option of their own after the others."""
    return [*(overrides or ()), *engine_settings(engine, processes)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command (default: the process's arguments) and return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    ours = words[: words.index("--")] if "--" in words else words
    words = ["version" if word == "--version" else word for word in words[:1]] + words[1:]
    as_json = "--json" in ours
    log_to_stderr()
    with interruptible(), apart(as_json) as out:
        outcome = _run(words)
        text = json.dumps(commands.plain(outcome.values)) if as_json else "\n".join(outcome.lines)
        if text:
            print(text, file=out, flush=True)
        return outcome.exit_code


def _run(words: list[str]) -> Outcome:
    """Parse, work, and turn whatever goes wrong into an outcome."""
    try:
        # Not standalone: errors come back as exceptions, --help as an exit status, and a command as its work.
        work = typer.main.get_command(app).main(words, prog_name="torchlake", standalone_mode=False)
        return work() if callable(work) else Outcome(values={}, lines=(), exit_code=int(work or 0))
    except typer.TyperException as error:
        show = getattr(error, "show", None)
        if callable(show):
            show(file=sys.stderr)
        return error_outcome(error, error.format_message(), UsageError.exit_code)
    except Interrupted as error:
        return error_outcome(error, str(error), error.exit_code, shown=f"{error}\n{resume_line(words)}")
    except TorchlakeError as error:
        return error_outcome(error, str(error), error.exit_code, shown=f"error: {error}")
    except KeyboardInterrupt as error:
        message = "Stopped by Ctrl-C."
        return error_outcome(error, message, 128 + signal.SIGINT, shown=f"{message}\n{resume_line(words)}")
    except Exception as error:
        known = in_words(error, words) if isinstance(error, OSError) else None
        if known is not None:
            return error_outcome(known, str(known), known.exit_code, shown=f"error: {known}")
        print(redacted(traceback.format_exc()), file=sys.stderr)
        message = (
            f"{type(error).__name__}: {error}\nThis is a fault in torchlake, not in your input. Please report it with "
            "the traceback above and the output of `torchlake doctor`."
        )
        return error_outcome(error, message, TorchlakeError.exit_code, shown=f"error: {message}")
