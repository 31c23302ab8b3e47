"""`compare`: is model B better than A? Over the same rows, paired.

    evaluations (models with a table are evaluated first; of runs, the validation rows) -> rows aligned by key
    -> difference of each metric with an interval, exact McNemar, rows won and lost

A bootstrap draws rows for both models at once, so what both find hard cancels out. Metrics are functions of sums over
rows; rows that equal one another in all summed values are drawn together (as counts of a multinomial), so the cost of
classes does not grow with the table. p values are Holm-corrected if several models are compared with the first.
"""

import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchlake.config.job import flat, load_job
from torchlake.config.messages import one_of
from torchlake.display import Shown, Table, plain, shown
from torchlake.errors import DataError, FingerprintError, UsageError
from torchlake.evaluation.evaluate import evaluate
from torchlake.evaluation.report import FACTS
from torchlake.evaluation.sections.aligned import FailedRows, aligned, facts_of
from torchlake.evaluation.sections.judged import JudgedRows, listed
from torchlake.evaluation.sections.rows import FILE
from torchlake.evaluation.sections.sums import METRICS, drawn, groups_of
from torchlake.metrics import DIRECTIONS
from torchlake.models.folders import model_hash
from torchlake.reporting.comparison import write_comparison
from torchlake.runs import metrics_log
from torchlake.tables.failures import format_reasons
from torchlake.tables.record import output_path
from torchlake.tables.sources.files import local_path

LISTED = 50
RUN_PAGE = "eval"
"The folder in a run with the evaluation of its validation rows."


@shown
@dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference of a metric between a model and the first one, with its 95 % interval."""

    metric: str
    model: str
    first: float
    "The metric of the first model."
    value: float
    "The metric of this model."
    difference: float
    low: float
    high: float
    better: str
    '"higher" or "lower".'

    def _shown(self) -> Shown:
        return f"{self.metric}: {self.difference:+.4f}, {self.low:+.4f} to {self.high:+.4f}", []

    def is_worse(self, by: float) -> bool:
        """Return whether the whole interval is worse than the first model's value by more than `by`."""
        return (self.high < -by) if self.better == "higher" else (self.low > by)


@shown
@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of `compare`: models over the same rows, each against the first."""

    models: tuple[str, ...]
    kind: str
    rows: int
    "Rows that all models have a prediction for."
    left_out: int
    "Rows that a model has no prediction for, or that have no label."
    differences: tuple[Difference, ...]
    pairs: tuple[Mapping[str, Any], ...]
    "For each further model: agreement, rows won and lost, the p value of McNemar's test and Holm's correction of it."
    failed: tuple[FailedRows, ...] = ()
    "Of each model that failed on rows: these, which are left out."
    report: Path | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    "Of runs: the settings that differ, the seconds and the curves."

    def _shown(self) -> Shown:
        tables: list[Table] = [
            [
                ("metric", "model", "first", "value", "difference", "95 % interval"),
                *(
                    (one.metric, one.model, one.first, one.value, one.difference, f"{one.low:+.4f} to {one.high:+.4f}")
                    for one in self.differences
                ),
            ]
        ]
        if self.pairs:
            names = ("model", "agreement", "won", "lost", "p")
            tables.append([names, *(tuple(pair.get(name) for name in names) for pair in self.pairs)])
        if self.failed:
            rows = [(one.model, one.rows, ", ".join(format_reasons(one.errors))) for one in self.failed]
            tables.append([("model", "rows left out", "because of"), *rows])
        return f"{len(self.models)} models, {self.rows:,} rows, {self.left_out:,} left out", tables

    def worse(self, metric: str, by: float = 0.0) -> list[Difference]:
        """Return the differences of `metric` of which the whole interval is worse by more than `by`.

        Raises UsageError for a metric that was not compared, DataError if it is undefined for a model.
        """
        known = list(dict.fromkeys(one.metric for one in self.differences))
        if metric not in known:
            raise UsageError(f"fail_if_worse: there is no metric {metric!r} here. Metrics: {', '.join(known)}.")
        found = [one for one in self.differences if one.metric == metric]
        for one in found:
            if not np.isfinite((one.first, one.value, one.low, one.high)).all():
                raise DataError(
                    f"fail_if_worse: {metric} is {one.first:.4g} for {self.models[0]} and {one.value:.4g} for "
                    f"{one.model}, {one.low:.4g} to {one.high:.4g}: so it cannot be said whether it is worse."
                )
        return [one for one in found if one.is_worse(by)]

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        value: dict[str, Any] = plain(asdict(self))
        del value["report"]
        return value


def check_compared(metric: str) -> None:
    """Raise UsageError for a metric that is compared of no task, before models are evaluated."""
    if metric not in METRICS:
        raise UsageError(f"fail_if_worse: {one_of(METRICS, metric)}")


def compare(
    *models: str | Path, table: Any = None, report: str | Path | None = None, key: str | None = None
) -> Comparison:
    """Compare two or more evaluations (folders that `evaluate` wrote), runs, or models with a labeled `table`.

    Each is compared with the first, over the same rows. `key` names the rows of `table`; `report` is a folder for
    compare.html and compare.json, and with a table for the evaluations.

    Raises UsageError for fewer than two models or a folder without an evaluation, DataError for different rows.
    """
    if len(models) < 2:
        raise UsageError("compare needs two or more evaluations, runs or models.")
    if key is not None and table is None:
        raise UsageError("key: it names the rows of a table; give one (--table), or leave it out.")
    folder = None if report is None else output_path(report)
    with ExitStack() as stack:
        if table is None:
            folders = [_evaluation_of(Path(os.path.expanduser(local_path(model)))) for model in models]
        else:
            place = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torchlake-compare-")))
            folders = [place / f"{at}-{Path(local_path(model)).name}" for at, model in enumerate(models, start=1)]
            named = {} if key is None else {"key": key}
            for model, one in zip(models, folders, strict=True):
                _evaluated(model, table, one, named)
        names = [str(model) for model in models]
        sides, failed = aligned(folders, names)
        found, lists = _compared(sides, names, folders)
        found = replace(found, report=folder, failed=tuple(failed))
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            write_comparison(folder, found.to_json(), lists, folders[0] / FILE)
    return found


def _evaluated(model: str | Path, table: Any, folder: Path, named: Mapping[str, Any]) -> None:
    """Evaluate a model into a folder. Raises FingerprintError if it has another evaluation."""
    try:
        evaluate(model, table, report=folder, **named)
    except FingerprintError as error:
        found = str(error).partition(" Name another folder")[0]
        raise FingerprintError(f"{found} Name another folder for the report (--report).") from None


def _evaluation_of(model: Path) -> Path:
    """Return the folder of an evaluation: `model` itself, or of a run that of its validation rows."""
    for folder in (model, model / RUN_PAGE):
        if (folder / FACTS).is_file():
            measured, now = facts_of(folder).get("identity", {}).get("model"), model / "model"
            if folder != model and measured and now.is_dir() and model_hash(now) != measured:
                raise DataError(f"{now}: the model was replaced after its evaluation. Give a table (--table).")
            return folder
    if (model / "job.yaml").is_file():
        raise UsageError(
            f"{model}: this run has no evaluation, because it had no validation rows. Give a table (--table)."
        )
    raise UsageError(
        f"{model}: has no {FACTS}. Name a folder of an evaluation (torchlake evaluate MODEL TABLE --report FOLDER), "
        "a run, or give models and a table (--table)."
    )


def _compared(
    sides: Sequence[JudgedRows], names: Sequence[str], folders: Sequence[Path]
) -> tuple[Comparison, list[dict[str, Any]]]:
    """Return the comparison, and for each further model the numbers of the rows that it won and lost."""
    facts = facts_of(folders[0])
    values: dict[str, np.ndarray] = {}
    draws: dict[str, np.ndarray] = {}
    for group in groups_of(sides):
        for metric, (value, some) in drawn(group).items():
            values[metric], draws[metric] = value, some
    differences = []
    for metric, value in values.items():
        for at in range(1, len(sides)):
            low, high = np.quantile(draws[metric][:, at] - draws[metric][:, 0], (0.025, 0.975))
            one, better = float(value[at] - value[0]), DIRECTIONS.get(metric, "higher")
            differences.append(
                Difference(
                    metric=metric,
                    model=names[at],
                    first=float(value[0]),
                    value=float(value[at]),
                    difference=one,
                    low=min(float(low), one),
                    high=max(float(high), one),
                    better=better,
                )
            )
    pairs, lists = [], []
    for side, name in zip(sides[1:], names[1:], strict=True):
        pair, chosen = _pair(sides[0], side, name)
        pairs.append(pair)
        lists.append({"model": name, **chosen})
    if all("p" in pair for pair in pairs):
        for pair, corrected in zip(pairs, holm([pair["p"] for pair in pairs]), strict=True):
            pair |= {"p_holm": corrected} if len(pairs) > 1 else {}
    comparison = Comparison(
        models=tuple(names),
        kind=sides[0].kind,
        rows=len(sides[0].table),
        left_out=facts["rows"] - len(sides[0].table),
        differences=tuple(differences),
        pairs=tuple(pairs),
        about=_about(folders),
    )
    return comparison, lists


def _pair(first: JudgedRows, other: JudgedRows, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return agreement, rows won and lost with McNemar's exact test; and the first rows of both, by loss, with what the
    other model said."""
    same = _same(first.table["prediction"], other.table["prediction"])
    gained = first.numbers("loss") - other.numbers("loss")
    before, after = first.right, other.right
    pair: dict[str, Any] = {"model": name, "agreement": same}
    if before is None or after is None:
        won, lost = gained > 0, gained < 0
    else:
        won, lost = ~before & after, before & ~after
        pair["p"] = mcnemar(int(won.sum()), int(lost.sum()))
    pair |= {"won": int(won.sum()), "lost": int(lost.sum())}
    lists: dict[str, Any] = {"said": {}}
    for word, some, order in (("won", won, -gained), ("lost", lost, gained)):
        chosen = np.flatnonzero(some)
        chosen = chosen[np.argsort(order[chosen], kind="stable")[:LISTED]]
        lists[word] = listed(first, chosen)
        said = other.table["prediction"].take(pa.array(chosen)).to_pylist()
        lists["said"] |= dict(zip(lists[word], said, strict=True))
    return pair, lists


def _same(one: pa.ChunkedArray, other: pa.ChunkedArray) -> float:
    if pa.types.is_nested(one.type):
        pairs = zip(one.to_pylist(), other.to_pylist(), strict=True)
        return float(np.mean([left == right for left, right in pairs]))
    return float(pc.mean(pc.equal(one, other.cast(one.type)).fill_null(False)).as_py())


def mcnemar(won: int, lost: int) -> float:
    """Return the two-sided p value of McNemar's exact test: rows that one model has right and the other wrong."""
    from scipy.stats import binomtest

    return float(binomtest(won, won + lost).pvalue) if won + lost else 1.0


def holm(values: Sequence[float]) -> list[float]:
    """Return p values corrected for their number, by Holm's method."""
    order, found, most = np.argsort(values, kind="stable"), [0.0] * len(values), 0.0
    for rank, at in enumerate(order.tolist()):
        most = max(most, min(1.0, (len(values) - rank) * values[at]))
        found[at] = most
    return found


def _about(folders: Sequence[Path]) -> dict[str, Any]:
    """Return the settings that differ between runs, their seconds and their curves; empty unless all are runs."""
    runs = [folder.parent for folder in folders]
    if not all(
        folder.name == RUN_PAGE and (run / "job.yaml").is_file() for folder, run in zip(folders, runs, strict=True)
    ):
        return {}
    jobs = [flat(load_job(run / "job.yaml").model_dump(mode="json")) for run in runs]
    names = dict.fromkeys(name for job in jobs for name in job)
    settings = {
        name: [job.get(name) for job in jobs] for name in names if len({str(job.get(name)) for job in jobs}) > 1
    }
    seconds, curves = dict[Path, float](), dict[str, dict[str, list[tuple[int, float]]]]()
    for run in dict.fromkeys(runs):
        lines = metrics_log.read_metrics(run / metrics_log.METRICS)
        seconds[run] = round(sum(line.get("seconds", 0.0) for line in lines), 1)
        for line in lines:
            for name in ("validation_loss", "loss"):
                if name in line and math.isfinite(line[name]):
                    curves.setdefault(name, {}).setdefault(str(run), []).append((line["step"], line[name]))
    return {"settings": settings, "seconds": [seconds[run] for run in runs], "curves": curves}
