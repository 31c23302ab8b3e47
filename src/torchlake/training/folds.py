"""Cross-validation: one run per fold, each validated on the rows that the others train on.

    table -> N folds by train.seed, stratified by class -> N runs in fold_1 ... fold_N -> mean and standard deviation

A fold is an ordinary run whose job has `data.validation: {fold: 2, folds: 5}`, so it resumes, and has its own report.
The same call again trains what is missing. Cost: N trainings, and the table is tokenized for each.
"""

import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchlake import atomic_io, plugins
from torchlake.checkpoints import continuing
from torchlake.config.arguments import check_arguments
from torchlake.config.job import Job, flat, load_job
from torchlake.config.sections.data import DataConfig, Fraction
from torchlake.display import Shown, shown
from torchlake.engines import Engine
from torchlake.errors import ConfigError, FingerprintError, UsageError
from torchlake.metrics import lower_is_better
from torchlake.preparation.checks import check_metric
from torchlake.runs import folder as run_folder
from torchlake.runs.metrics_log import OnStep
from torchlake.runs.tables import SOURCES, load_with_frames, pinned_job
from torchlake.storage import lease
from torchlake.tables.record import local_output
from torchlake.training.run import Run, job_engine, named_engine, store_frame, train_run

log = logging.getLogger(__name__)


@shown
@dataclass(frozen=True, kw_only=True)
class Folds:
    """A finished cross-validation."""

    path: Path
    "The folder of the runs."
    runs: tuple[Run, ...]
    "The runs, in the order of the folds."
    metric: str
    "The metric that selects a fold's best model."
    metrics: dict[str, float]
    "The mean of each metric over the folds' best validations."
    deviations: dict[str, float]
    "The standard deviation of each metric over the folds (of a sample: divided by N - 1)."
    best: Run
    "The fold with the best metric."
    seconds: float
    "The seconds that this call took."

    def _shown(self) -> Shown:
        rows = [(name, mean, self.deviations.get(name)) for name, mean in self.metrics.items()]
        line = f"{len(self.runs)} folds, best {self.metric} in {self.best.path.name} -> {self.path}"
        return line, [[("metric", "mean", "deviation"), *rows]]


def train_folds(
    job: str | Path | Job | None,
    folds: int,
    *,
    run: str | Path | None,
    engine: Engine | str | None,
    overrides: Sequence[str],
    sections: Mapping[str, Any],
    on_step: OnStep | None = None,
) -> Folds:
    """Train `job` once per fold in folders below `run`; arguments and errors are those of `train`."""
    began = time.monotonic()
    check_arguments({"folds": folds}, train_folds.__annotations__)
    folds = int(folds)  # numpy's numbers are not those of JSON
    if folds < 2:
        raise UsageError(f"folds must be 2 or more, not {folds}.")
    if run == run_folder.AUTO:
        raise UsageError("--run auto cannot be used with folds. Name a folder for the runs.")
    folder = local_output(run_folder.find(job, run))
    frames, wanted = load_with_frames(job, overrides, sections, folder, **named_engine(engine))
    _refuse_ignored(wanted)
    check_metric(wanted)
    with lease.acquire(folder / ".folds.staging", name=str(folder)):
        wanted = _claim(folder, wanted, folds)
        for path, frame in frames.items():
            store_frame(frame, path, job_engine(wanted, engine))
        wanted = pinned_job(folder, wanted, begun=(folder / run_folder.FOLDS).exists())
        atomic_io.write_json(
            folder / run_folder.FOLDS, {"job": wanted.model_dump(mode="json"), "folds": folds}, site="folds.settings"
        )
        runs = []
        for fold in range(1, folds + 1):
            log.info("fold %d of %d", fold, folds)
            one = load_job(wanted, data={"validation": {"fold": fold, "folds": folds}})
            path = folder / f"fold_{fold}"
            runs.append(train_run(one, run=path, engine=engine, overrides=(), sections={}, on_step=on_step))
        found = _result(wanted, folder, runs)
        atomic_io.write_json(folder / run_folder.RESULT, found, site="folds.result")
    from torchlake.reporting import report

    report.report(folder)
    return Folds(
        path=folder,
        runs=tuple(runs),
        metric=found["metric"],
        metrics=found["metrics"],
        deviations=found["deviations"],
        best=runs[found["best"] - 1],
        seconds=time.monotonic() - began,
    )


def _refuse_ignored(job: Job) -> None:
    """Raise ConfigError for settings that do not apply to folds."""
    if not isinstance(job.data.validation, Fraction):
        raise ConfigError("data.validation: with folds, each fold is the validation of one run; remove the setting")
    if job.data.validation != DataConfig.model_fields["validation"].default:
        share = job.data.validation.fraction
        log.info("data.validation: the folds replace {fraction: %g}", share)
    if job.train.checkpoint_folder is not None:
        raise ConfigError(
            "train.checkpoint_folder: with folds, checkpoints are kept in each run folder; remove the setting"
        )


def _claim(folder: Path, job: Job, folds: int) -> Job:
    """Return the job, if the folder is empty or holds a cross-validation of it. Raises FingerprintError for other
    contents."""
    path = folder / run_folder.FOLDS
    if not path.exists():
        foreign = sorted(one.name for one in folder.iterdir() if not one.name.startswith(".") and one.name != "input")
        if foreign and foreign != [SOURCES]:
            raise FingerprintError(
                f"{folder}: the folder is not a cross-validation ({run_folder.FOLDS} is missing), and it is not empty "
                f"(it holds {foreign[0]!r}). Name a new folder (--run)."
            )
        return job
    before: dict[str, Any] = atomic_io.read_json(path)
    now = {**job.model_dump(mode="json"), "folds": folds}
    old = {**load_job(None, **before["job"]).model_dump(mode="json"), "folds": before["folds"]}
    old["data"], now["data"] = ({**one["data"], "train": None} for one in (old, now))  # each run compares its table
    differing = continuing.refused_changes(run_folder.differences(old, now), flat(old), flat(now))
    if differing:
        raise FingerprintError(
            f"{folder}: holds another cross-validation. It differs in\n" + "\n".join(differing) + "\nName another "
            "folder (--run), or delete this one to start again."
        )
    return job


def _result(job: Job, folder: Path, runs: Sequence[Run]) -> dict[str, Any]:
    """Return the means and standard deviations of the metrics that all folds have, and the number of the best fold."""
    metric: str = atomic_io.read_json(runs[0].path / run_folder.RESULT)["metric"]
    names = [name for name in runs[0].metrics if all(name in one.metrics for one in runs)]
    values = {name: [one.metrics[name] for one in runs] for name in names}
    sign = -1 if lower_is_better(metric, plugins.load("tasks", job.task).directions) else 1
    ranked = [sign * one.metrics.get(metric, -sign * float("inf")) for one in runs]
    return {
        "metric": metric,
        "metrics": {name: statistics.fmean(each) for name, each in values.items()},
        "deviations": {name: statistics.stdev(each) for name, each in values.items()},
        "best": ranked.index(max(ranked)) + 1,
        "folds": [{"fold": number, **one.metrics} for number, one in enumerate(runs, start=1)],
    }
