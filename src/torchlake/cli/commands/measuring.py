"""Commands that measure models: evaluate, compare, optimize."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated

from torchlake.cli.command import ModelFolder, argument, command
from torchlake.cli.display import Outcome, candidate_lines, fact_lines, metric_lines, metric_values
from torchlake.cli.options import RUNTIMES, EngineFlags, Given
from torchlake.config.measuring import EvaluateOptions, OptimizeOptions
from torchlake.config.options import Option
from torchlake.display import grid
from torchlake.errors import UsageError

_input = partial(Option, "Input")
_output = partial(Option, "Output")
_selection = partial(Option, "Selection")


class EvaluateFlags:
    """Options of `evaluate`."""

    reference: Annotated[
        str, _input("MODEL", "Of pairs of answers: what rewards are relative to (default: as in training).")
    ]


@command(
    "evaluate runs/reviews/model test.parquet",
    "input csv text text_pair inputs label where sample limit",
    EvaluateOptions,
    "task runtime",
    EngineFlags,
    EvaluateFlags,
    "chat",
)
def evaluate(
    model: ModelFolder,
    table: Annotated[str, argument("TABLE", "Table with labels: a file, folder, glob or URL.")],
    given: Given,
) -> Outcome:
    """Measure a model on a labeled table. Each headline metric has a 95 % bootstrap interval."""
    engine = given.engine
    from torchlake.evaluation.evaluate import evaluate
    from torchlake.tables.failures import format_reasons

    done = evaluate(model, given.tables(table), engine=engine, **given.options)
    values = {name: getattr(done, name) for name in ("rows", "failed", "errors", "labels", "confusion", "tokens")}
    values["metrics"] = metric_values(done.metrics)
    reasons = ", ".join(format_reasons(done.errors))
    rows = f"{done.rows:,}, of which {done.failed:,} are left out ({reasons})" if done.failed else f"{done.rows:,}"
    counts = {"rows": rows, **({} if done.tokens is None else {"tokens": f"{done.tokens:,}"})}
    lines = [*fact_lines(counts), "", *metric_lines(done.metrics)]
    for matrix in done.matrices():
        lines += ["", *grid(matrix)]
    if done.report is not None:
        values["report"] = done.report
        lines += ["", str(done.report / "eval.html")]
    return Outcome(values=values, lines=lines)


class CompareFlags:
    """Options of `compare`."""

    table: Annotated[str, _input("TABLE", "Evaluate the models on this table first.")]
    key: Annotated[str, _output("COLUMN", "Column of unique, non-null values that identify rows of --table.")]
    report: Annotated[str, _output("FOLDER", "Write the page compare.html and compare.json there.")]
    fail_if_worse: Annotated[
        str, _output("METRIC", "Exit with 1 if this metric is worse than the first model's, with its whole interval.")
    ]
    by: Annotated[float, _output("X", "For --fail-if-worse: worse by more than X (default: 0).", min=0)]


@command("compare eval_a/ eval_b/", CompareFlags)
def compare(
    models: Annotated[list[str], argument("A B", "Evaluations (evaluate --report), runs, or models with --table.")],
    given: Given,
) -> Outcome:
    """Compare models over the same rows. Differences have intervals; rows won and lost are listed."""
    options = given.options
    metric, by = options.pop("fail_if_worse", None), options.pop("by", None)
    if metric is None and by is not None:
        raise UsageError("--by is for --fail-if-worse: name a metric.")
    from torchlake.evaluation.compare import check_compared, compare
    from torchlake.tables.failures import format_reasons

    if metric is not None:
        check_compared(metric)
    done = compare(*models, **options)
    worse = [] if metric is None else done.worse(metric, by or 0.0)
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
        f"{one.model}: {one.rows:,} rows left out ({', '.join(format_reasons(one.errors))})" for one in done.failed
    ]
    lines += [f"worse: {one.metric} of {one.model} by {abs(one.difference):.4f}" for one in worse]
    page = None if done.report is None else done.report / "compare.html"
    values = {**done.to_json(), "page": page, "worse": [one.model for one in worse]}
    return Outcome(values=values, lines=[*lines, *([] if page is None else [str(page)])], exit_code=1 if worse else 0)


class OptimizeFlags:
    """Options of `optimize`."""

    sample: Annotated[str, _input("TABLE", "Table of typical rows; labels are optional.", required=True)]
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


@command(
    "optimize runs/reviews/model --sample reviews.parquet",
    OptimizeFlags,
    "input csv text text_pair inputs label where limit task",
    OptimizeOptions,
    EngineFlags,
)
def optimize(model: ModelFolder, given: Given) -> Outcome:
    """Choose the fastest runtime that agrees with the model. Measures on your rows; predict then uses it."""
    engine, options = given.engine, given.options
    from torchlake.optimization.optimize import optimize

    done = optimize(model, given.tables(options.pop("sample")), engine=engine, **options)
    lines = candidate_lines(done.candidates)
    choice = (
        f"predict will use {done.runtime} for {model}, with batches of {done.batch_tokens:,} tokens and "
        f"{done.threads} thread{'s' if done.threads > 1 else ''} a process: {done.speed}, "
        f"{done.ratio:.2f} times eager's."
    )
    return Outcome(values=done.to_json(), lines=[*lines, "", choice])
