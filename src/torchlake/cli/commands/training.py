"""Commands that train, and those before a training: init, schema, train, tune, plan."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

from torchlake.cli.command import SETTINGS, argument, command
from torchlake.cli.display import Outcome, fact_lines
from torchlake.cli.engine import engine_of_job, engine_settings
from torchlake.cli.options import Given, JobFlags, declared
from torchlake.config.options import EndpointArguments, Option
from torchlake.display import grid, plain, wrapped
from torchlake.errors import UsageError
from torchlake.redaction import redacted

if TYPE_CHECKING:
    from torchlake.training.folds import Folds

JobFile = Annotated[str, argument("JOB.yaml", "Job file.")]
OptionalJob = Annotated[str | None, argument("JOB.yaml", "Job file; optional if --set gives the required settings.")]
ROWS = "where sample limit"
LABELS_SHOWN = 10
_input = partial(Option, "Input")
_output = partial(Option, "Output")
_job = partial(Option, "Job")
_tracking = partial(Option, "Tracking")
_search = partial(Option, "Search")
_hardware = partial(Option, "Hardware")


class InitFlags:
    """Options of `init`."""

    text: Annotated[str, _input("COLUMN", "Text column (default: guessed).")]
    text_pair: Annotated[str, _input("COLUMN", "Second text of a pair (default: guessed by its name).")]
    label: Annotated[str, _input("COLUMN", "Label column (default: guessed).")]
    model: Annotated[str, _job("MODEL", "Model to fine-tune: a folder, or a name on the Hub (default: roberta-base).")]
    output: Annotated[str, _output("FILE", "Job file to write (default: job.yaml).")]
    force: Annotated[bool, _output(None, "Replace an existing file.")]


@command("init reviews.parquet --label stars", "input csv", InitFlags, ROWS)
def init(
    table: Annotated[str, argument("TABLE", "Training table: a file, folder, glob or URL.")], given: Given
) -> Outcome:
    """Write a job file for a table. Guesses the columns, and shows classes, lengths and problems."""
    from torchlake.preparation.first_job import write_first_job

    done = write_first_job(given.tables(table), **given.options)
    lengths = done.characters
    facts = {
        "rows": f"{done.rows:,}" + ("" if done.sampled == done.rows else f"; {done.sampled:,} of them were looked at"),
        "text": done.text if done.text_pair is None else f"pairs of {done.text} and {done.text_pair}",
        "length": f"median {lengths['median']:,} characters, 95 % at most {lengths['p95']:,}, longest "
        f"{lengths['longest']:,}",
        "label": f"{done.label}: {done.kind}",
    }
    total = max(1, sum(done.classes.values()))
    shown = list(done.classes.items())[:LABELS_SHOWN]
    lines = [*fact_lines(facts)]
    if shown:
        lines += [
            "",
            *grid([["class", "rows", "share"], *([_visible(name), f"{n:,}", f"{n / total:.1%}"] for name, n in shown)]),
        ]
    if len(done.classes) > len(shown):
        lines.append(f"and {len(done.classes) - len(shown):,} more classes")
    lines += ["", *(f"warning: {warning}" for warning in done.warnings), *[""][: len(done.warnings)]]
    lines += [f"wrote {done.path}, and {done.schema.name} for editors", f"next: torchlake train {done.path}"]
    return Outcome(values=plain(done), lines=wrapped(lines))


def _visible(name: str) -> str:
    """Return a name in quotes if blanks at its ends could not be seen without them."""
    return name if name == name.strip() else repr(name)


@command("schema > torchlake.schema.json")
def schema() -> Outcome:
    """Print the JSON Schema of a job file. Editors check and complete job files with it."""
    from torchlake.config.schema import job_schema

    found = job_schema()
    return Outcome(values=found, lines=json.dumps(found, indent=2, ensure_ascii=False).splitlines())


class TrainFlags(JobFlags):
    """Options of `train`."""

    text: Annotated[
        str | Sequence[str], _job("COLUMN", "Text column, in place of data.text; repeatable: texts are joined.")
    ]
    text_pair: Annotated[
        str | Sequence[str], _job("COLUMN", "Second text of a pair, in place of data.text_pair; repeatable.")
    ]
    inputs: Annotated[Mapping[str, str], _job("NAME=COLUMN", "Column of another input, as in data.inputs; repeatable.")]
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


@command("train job.yaml --processes 2", TrainFlags, ROWS, "engine", epilog=SETTINGS)
def train(given: Given, job: OptionalJob = None) -> Outcome:
    """Fine-tune a model on a table. Run the same command again to continue from the last checkpoint."""
    overrides = _overrides(given)
    _check_job(job, overrides, "train")
    from torchlake.training.train import train

    engine = engine_of_job(job, overrides, as_json=given.as_json)
    if given["folds"] is not None:
        return folds_outcome(train(job, run=given["run"], engine=engine, overrides=overrides, folds=given["folds"]))
    done = train(job, run=given["run"], engine=engine, overrides=overrides)
    values = {name: getattr(done, name) for name in ("path", "model", "steps", "seconds", "metrics", "complete")}
    head = (
        f"{done.path}: already complete, nothing was trained" if done.complete else f"trained in {done.seconds:,.1f} s"
    )
    lines = [head, *fact_lines({"run": done.path, "model": done.model, "steps": f"{done.steps:,}", **done.metrics})]
    return Outcome(values={**values, "run": done.path, "findings": plain(done.findings)}, lines=lines)


def folds_outcome(done: "Folds") -> Outcome:
    """Return the outcome of a cross-validation: the metrics of each fold, their means and standard deviations."""
    names = [done.metric, *(name for name in done.metrics if name != done.metric)]
    rows = [[f"fold {number}", *(one.metrics[name] for name in names)] for number, one in enumerate(done.runs, start=1)]
    rows += [
        ["mean", *(done.metrics[name] for name in names)],
        ["deviation", *(done.deviations[name] for name in names)],
    ]
    shown = [[row[0], *(f"{value:.4f}" for value in row[1:])] for row in rows]
    facts = {"run": done.path, "best model": done.best.model}
    values = {
        **{name: getattr(done, name) for name in ("path", "metric", "metrics", "deviations", "seconds")},
        "run": done.path,
        "model": done.best.model,
        "folds": [{"path": one.path, "steps": one.steps, "metrics": one.metrics} for one in done.runs],
    }
    lines = [f"trained {len(done.runs)} folds in {done.seconds:,.1f} s", *grid([["", *names], *shown]), ""]
    return Outcome(values=values, lines=[*lines, *fact_lines(facts)])


class TunedFlags:
    """Options of `tune` besides those of a job."""

    space: Annotated[str, _search("FILE", "Search space: a range or a list of choices per setting.", required=True)]
    trials: Annotated[int, _search("N", "Total number of trials, with those of earlier calls.", min=1, required=True)]
    run: Annotated[str, _job("FOLDER", "Folder of the tuning (default: runs/, the name of the job file, _tuning).")]
    seed: Annotated[int, _search("N", "Random seed of the suggested settings (default: 0).", min=0)]


class TuneFlags(JobFlags, TunedFlags):
    """Options of `tune`."""

    no_prune: Annotated[bool, _search(None, "Train every trial to its end, however it compares.")]


@command("tune job.yaml --space space.yaml --trials 20", TuneFlags, ROWS, "engine", epilog=SETTINGS)
def tune(job: JobFile, given: Given) -> Outcome:
    """Search for the settings that train the best model. Run the same command again to continue."""
    from torchlake.tuning.tune import shown, tune

    overrides, options = _overrides(given), given.some(TunedFlags)
    engine = engine_of_job(job, overrides, as_json=given.as_json)
    done = tune(job, engine=engine, overrides=overrides, prune=not given["no_prune"], **options)
    searched = list(done.best.settings)
    rows = [
        [
            one.number,
            "best" if one is done.best else one.state,
            "-" if one.value is None else f"{one.value:.4f}",
            f"{one.steps:,}",
            *(shown(one.settings.get(name, "-")) for name in searched),
            one.why,
        ]
        for one in done.trials
    ]
    lines = grid([["trial", "", done.metric, "steps", *searched, ""], *rows], left=(1, len(searched) + 4))
    facts = {"best run": done.best.path, "model": done.model, "its job": done.path / "job.yaml"}
    values = {name: getattr(done, name) for name in ("path", "model", "metric", "best", "trials")}
    return Outcome(
        values={**values, "folder": done.path, "job": redacted(done.job.model_dump(mode="json"))},
        lines=[*lines, "", *fact_lines(facts)],
    )


class PlannedFlags:
    """Options of `plan` besides those of a job."""

    sample_rows: Annotated[int, _input("N", "Rows of the table to sample (default: 2000).", min=1)]
    gpu_memory: Annotated[str, _hardware("SIZE", "Memory of each rank's GPU, such as 80GB or 80GiB.")]
    flops: Annotated[str, _hardware("RATE", "Operations per second of a rank in training, such as 120T.")]
    bandwidth: Annotated[str, _hardware("RATE", "Bytes per second between ranks, such as 12.5GB.")]
    latency: Annotated[float, _hardware("SECONDS", "Latency of a message between ranks.")]


class PlanFlags(JobFlags, PlannedFlags):
    """Options of `plan` with a job, and of a plan of requests those that it has differently."""

    text: Annotated[
        str | Sequence[str], _input("COLUMN", "Text column, in place of data.text; repeatable: texts are joined.")
    ]
    tokenizer: Annotated[str, _input("MODEL", "Of --runtime http: tokenizer that counts (default: a guess).")]


@command(
    "plan job.yaml --gpu-memory 80GiB",
    PlanFlags,
    ROWS,
    "runtime prompt system chat max_new_tokens",
    EndpointArguments,
    epilog=SETTINGS,
)
def plan(
    given: Given,
    job: OptionalJob = None,
    table: Annotated[str | None, argument("TABLE", "Table to write for, after a model folder that writes.")] = None,
) -> Outcome:
    """Estimate memory and time before training. Shows tokens, padding, memory and time of each strategy.

    Of a model folder and a table: the tokens of prompts and texts, and the hours by the speed that optimize measured.
    """
    if job is not None and table is not None:
        return _plan_writing(job, table, given)
    if given["runtime"] == "http" or given["endpoint"]:
        return _plan_endpoint(job, given)
    if unused := sorted(given.options.keys() - declared(PlannedFlags, ROWS, "text").keys()):
        raise UsageError(f"{given.flags[unused[0]]}: for the plan of requests (--runtime http); leave it out.")
    _check_job(job, given.settings, "plan")
    from torchlake.planning.display import facts, memory_rows, scaling_rows
    from torchlake.planning.plan import plan

    done = plan(job, overrides=given.settings, **given.some("processes", PlannedFlags))
    ranks = f"{done.processes} rank{'s' * (done.processes > 1)}"
    lines = [*fact_lines(facts(done)), "", f"memory per rank on {ranks}, and data sent per step"]
    lines += grid(memory_rows(done), left=(0, len(memory_rows(done)[0]) - 1))
    lines += ["", "the fastest strategy that fits, by number of ranks; the batch size stays the same"]
    lines += grid(scaling_rows(done), left=(1, len(scaling_rows(done)[0]) - 1))
    lines += ["", *(f"estimated with {line}" for line in done.assumptions), "", done.reason]
    return Outcome(values=plain(done), lines=[*lines, *(f"  {remedy}" for remedy in done.remedies)])


def _plan_endpoint(table: str | None, given: Given) -> Outcome:
    """Estimate requests, tokens, cost and time of a job by an endpoint."""
    from torchlake.planning.spending import facts_of, plan_endpoint

    if table is None:
        raise UsageError("plan --runtime http: name the table, torchlake plan TABLE --runtime http ...")
    if unused := sorted(given.some("set processes", PlannedFlags).keys() - {"sample_rows"}):
        raise UsageError(f"{given.flags[unused[0]]}: for the plan of a training; leave it out.")
    options = {name: value for name, value in given.options.items() if name != "runtime"}
    done = plan_endpoint(table, **options)
    lines = [*fact_lines(facts_of(done)), "", *(f"estimated with {line}" for line in done.assumptions)]
    return Outcome(values=plain(done), lines=lines)


def _plan_writing(model: str, table: str, given: Given) -> Outcome:
    """Estimate the tokens and the time of a model that writes for a table."""
    from torchlake.planning.spending import facts_of_texts, plan_writing

    unused = given.some("set processes", PlanFlags).keys() - {"sample_rows", *declared(ROWS, "text")}
    if unused:
        raise UsageError(f"{given.flags[min(unused)]}: not for the plan of texts; leave it out.")
    done = plan_writing(model, table, **given.options)
    return Outcome(values=plain(done), lines=fact_lines(facts_of_texts(done, model, table)))


def _overrides(given: Given) -> list[str]:
    """Return the overrides of a job that also runs it; --processes and --engine come last."""
    return given.settings + engine_settings(given["engine"], given["processes"])


def _check_job(job: str | None, overrides: Sequence[str], command: str) -> None:
    """Raise UsageError where neither a job file nor settings are given."""
    if job is None and not overrides:
        raise UsageError(f"Name a job file (torchlake {command} job.yaml), or give every setting with --set a.b=c.")
