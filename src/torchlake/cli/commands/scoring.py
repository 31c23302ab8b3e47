"""Commands that score a table, and the check of what they wrote: predict, rank, verify."""

import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from torchlake.cli.command import ModelFolder, argument, command
from torchlake.cli.commands.lines import STDIN, lines_as_table, predict_lines
from torchlake.cli.display import Outcome, fact_lines
from torchlake.cli.options import EngineFlags, Given
from torchlake.config.options import Option, PredictOptions, RankOptions
from torchlake.display import grid
from torchlake.errors import UsageError

if TYPE_CHECKING:
    from torchlake.engines import Engine
    from torchlake.scoring.predict import Scored

_execution = partial(Option, "Execution")
_input = partial(Option, "Input")


class PredictFlags:
    """Options of `predict`."""

    profile: Annotated[bool, _execution(None, "Show the seconds of each step since the start.")]


@command(
    "predict runs/reviews/model reviews.parquet scored/",
    "input csv text text_pair inputs where sample limit",
    PredictOptions,
    "key columns runtime",
    EngineFlags,
    PredictFlags,
)
def predict(
    model: Annotated[str, argument("MODEL", "Model folder; none with --runtime http.")],
    table: Annotated[
        str, argument("INPUT", "Table to score: a file, folder, glob or URL; -: lines of standard input.")
    ],
    given: Given,
    output: Annotated[
        str | None, argument("OUTPUT", "Where the scored rows go: a folder, URL or table (default with -: printed).")
    ] = None,
) -> Outcome:
    """Score a table, every row exactly once. Run the same command again to score only what is missing."""
    engine, by_endpoint = given.engine, given["runtime"] == "http" or given["endpoint"]
    if (table if by_endpoint else output) == STDIN:
        raise UsageError("OUTPUT is a folder, URL or table; answers are printed with torchlake predict MODEL - alone.")
    if by_endpoint:
        return _predict_by_endpoint(model, table, output, engine, given)
    if output is None:
        if table != STDIN:
            raise UsageError(
                f"Name an OUTPUT for the rows of {table}; only those of standard input ({STDIN}) are printed."
            )
        return predict_lines(model, given)
    started = _seconds_running()
    if table == STDIN and given["input"]:
        raise UsageError(f"Standard input ({STDIN}) is scored alone: leave out --input.")
    from torchlake.scoring.predict import predict

    source: Any = lines_as_table(model, given.options) if table == STDIN else given.tables(table)
    done = predict(model, source, output, engine=engine, **given.options)
    outcome = _scored(done)
    if not given["profile"]:
        return outcome
    profile = {"python, torchlake": started, **done.profile}
    lines = ["", "seconds of each step", *grid([[step, f"{seconds:.2f}"] for step, seconds in profile.items()])]
    return Outcome(values={**outcome.values, "profile": profile}, lines=[*outcome.lines, *lines])


def _predict_by_endpoint(table: str, output: str, more: str | None, engine: "Engine | None", given: Given) -> Outcome:
    """Have the rows of a stored table answered by an endpoint: the arguments are those of `predict` without a model."""
    if more is not None:
        raise UsageError("--runtime http reads no model folder: torchlake predict INPUT OUTPUT --runtime http ...")
    if table == STDIN:
        raise UsageError(f"--runtime http reads stored tables, not standard input ({STDIN}).")
    if given["profile"]:
        raise UsageError("--profile: for a model folder; leave it out.")
    from torchlake.scoring.predict import predict

    return _scored(predict(None, given.tables(table), output, engine=engine, **given.options))


class RankFlags:
    """Options of `rank`."""

    query: Annotated[str, _input("COLUMN", "Column of queries (default: the first text of a pair).")]
    document: Annotated[str, _input("COLUMN", "Column of documents (default: the second text of a pair).")]
    relevant: Annotated[
        str,
        _input("CLASS", "Class whose probability is the score (default: the second of 0 and 1, or of false and true)."),
    ]


@command(
    "rank runs/reranker/model candidates.parquet ranked/ --query query --document passage",
    "input csv",
    RankFlags,
    RankOptions,
    "key columns runtime",
    EngineFlags,
)
def rank(
    model: ModelFolder,
    table: Annotated[str, argument("INPUT", "Table of pairs: a file, folder, glob or URL.")],
    output: Annotated[str, argument("OUTPUT", "Folder or URL for the ranked rows.")],
    given: Given,
) -> Outcome:
    """Score pairs of query and document, and rank each query's documents. Every row exactly once."""
    engine = given.engine
    from torchlake.scoring.rank import rank

    return _scored(rank(model, given.tables(table), output, engine=engine, **given.options))


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


@command("verify scored/", EngineFlags)
def verify(output: Annotated[str, argument("OUTPUT", "Folder written by predict.")], given: Given) -> Outcome:
    """Check an output against its commit record. Checks checksums, rows and keys; exits with 65 on a problem."""
    engine = given.engine
    from torchlake.tables.verification.verify import verify

    done = verify(output, spread=None if engine is None else engine.spread)
    shown = {"rows in": f"{done.rows_in:,}", "rows out": f"{done.rows_out:,}", "failed": f"{done.rows_failed:,}"}
    verdict = [f"problem: {problem}" for problem in done.problems] or [f"{output}: complete and unchanged"]
    names = ("rows_in", "rows_out", "rows_failed", "parts", "problems", "notes")
    values = {**{name: getattr(done, name) for name in names}, "ok": not done.problems}
    notes = [f"note: {note}" for note in done.notes]
    return Outcome(values=values, lines=[*fact_lines(shown), *notes, *verdict], exit_code=65 if done.problems else 0)


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
