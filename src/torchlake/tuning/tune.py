"""`tune`: find the settings with the best validation metric, by training repeatedly.

    space -> [suggest -> train in trials/NNNN -> report the result] ... -> the best run

Optuna suggests settings and stores the study (`study.py`). A trial is an ordinary run in its own folder, so it works on
any engine and resumes after a kill.

Pruning happens outside of the ranks. A thread of this process reads the trial's metrics.jsonl, compares each validation
with the median of the earlier trials' at the same point, and creates the file `stop` in the run folder, which the ranks
check. Cost: the trial continues for some steps after the validation. Of all trials but the best, weights and tables are
deleted; logs and metrics stay.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchlake import atomic_io, display, plugins
from torchlake.config.arguments import check_arguments
from torchlake.config.job import Job, load_job, with_values
from torchlake.engines import Engine
from torchlake.errors import ConfigError, Diverged, FingerprintError, RankFailed, StopAsked, TorchlakeError, UsageError
from torchlake.failpoints import failpoint
from torchlake.metrics import lower_is_better
from torchlake.models.folders import base_folder
from torchlake.preparation.checks import check_metric, check_tables, choose_metric
from torchlake.preparation.problem import find_task_spec
from torchlake.runs import metrics_log
from torchlake.runs.folder import JOB_FILE, RESULT, STOP, differences, find, is_trained
from torchlake.runs.follow import follow_metrics
from torchlake.runs.tables import SOURCES, pinned_job, read_options_of, stored_tables
from torchlake.storage import lease
from torchlake.storage.spread import Spread
from torchlake.storage.versions import content_ids, version_of
from torchlake.tables.record import local_output
from torchlake.tables.table import Table, open_table
from torchlake.training.run import job_engine, named_engine
from torchlake.training.train import train
from torchlake.tuning.search_space import Range, Space, read_space
from torchlake.tuning.study import (
    WHY,
    Trial,
    best_trial,
    ended_trials,
    load_optuna,
    next_trial,
    open_study,
    searched,
    trial_folder,
)

if TYPE_CHECKING:
    import optuna

log = logging.getLogger(__name__)

SETTINGS = "tuning.json"
LARGE_FOLDERS = ("checkpoints", "model", "prepared", "cache", "input")
"Deleted from the folders of all trials but the best."


@display.shown
@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The result of `tune`."""

    path: Path
    "The folder of the tuning."
    model: Path
    "The best trial's model folder."
    job: Job
    "The best trial's job; also stored as job.yaml in `path`."
    metric: str
    best: Trial
    trials: tuple[Trial, ...]
    "The trials, in order."

    def _shown(self) -> display.Shown:
        rows = [(one.number, one.why or one.state, one.value, searched(one)) for one in self.trials]
        line = f"{display.count(len(self.trials), 'trial')}, {self.best.number} is the best -> {self.path}"
        return line, [[("trial", "state", self.metric, "settings"), *rows]]


def tune(
    job: str | Path | Job,
    *,
    space: str | Path | Mapping[str, Any],
    trials: int,
    run: str | Path | None = None,
    engine: Engine | str | None = None,
    overrides: Sequence[str] = (),
    seed: int = 0,
    prune: bool = True,
) -> Tuning:
    """Train `job` up to `trials` times with settings from `space`, and keep the best run.

    `space` is a file, or an equivalent mapping: `{"train.epochs": {"low": 2, "high": 5}, "train.batch_size":
    {"choices": [32, 64]}}`. The best run is chosen by the metric that chooses a run's best model (train.metric, else
    the task's default). `run` is the tuning's folder, by default runs/ and the job file's name with _tuning; `engine`
    is as in `train`. The same call again resumes an interrupted tuning and its trial; with more `trials` it continues.
    With `prune`, a trial whose validations are worse than the median of the others' is stopped.

    Raises ConfigError for an invalid job or space, before any training; FingerprintError if the folder holds another
    tuning; Locked if another process tunes in it; MissingExtra without optuna; TorchlakeError if every trial
    failed; Interrupted and the other errors of `train`. A trial that diverges or whose ranks fail is recorded instead.
    """
    load_optuna()
    check_arguments({"trials": trials, "seed": seed, "prune": prune}, tune.__annotations__)
    trials, seed = int(trials), int(seed)  # numpy's numbers are not those of JSON
    if trials < 1:
        raise UsageError(f"trials must be 1 or more, not {trials}.")
    wanted = load_job(job, overrides, **named_engine(engine))
    if wanted.data.validation is None:
        raise ConfigError("data.validation is null, but a tuning compares validations; set it")
    if wanted.train.checkpoint_folder is not None:
        raise ConfigError(
            "train.checkpoint_folder: a tuning keeps each trial's checkpoints in its run folder; remove the setting"
        )
    check_metric(wanted)
    searched = read_space(space, wanted)
    default = find(job, None)
    folder = default.with_name(f"{default.name}_tuning") if run is None else local_output(run)
    spread = job_engine(wanted, engine).spread
    check_tables(wanted, spread=spread)
    if not (folder / SETTINGS).exists():
        _check_choices(searched, wanted, spread)
    with lease.acquire(folder / ".tuning.staging", name=str(folder)) as mine:
        wanted = _claim(folder, wanted, searched, seed, spread)
        base, trained = base_folder(wanted.model.base), is_trained(folder, wanted)
        spec = find_task_spec(wanted, base, folder, trained=trained, spread=spread)
        metric = choose_metric(wanted, spec)
        minimize = lower_is_better(metric, plugins.load("tasks", spec.task).directions)
        with open_study(folder, minimize=minimize, prune=prune) as study:
            while True:
                done = ended_trials(study, folder)
                best = best_trial(done, minimize=minimize)
                for one in done:
                    if one is not best:
                        atomic_io.remove(one.path / name for name in LARGE_FOLDERS)
                trial = next_trial(study, searched, trials, seed)
                if trial is None:
                    break
                failpoint("tuning.trial")
                state, value, why = _train(trial, wanted, folder, metric, engine, prune=prune)
                with mine.exclusive():
                    trial.set_user_attr(WHY, why)
                    study.tell(trial.number, value, state=state)
                _log_trial(ended_trials(study, folder)[-1], metric, trials)
        if best is None:
            reasons = "\n".join(f"  trial {one.number}: {one.why}" for one in done)
            raise TorchlakeError(f"{folder}: no trial succeeded:\n{reasons}")
        path = best.path / JOB_FILE
        atomic_io.write_bytes(folder / JOB_FILE, path.read_bytes(), site="tuning.job")
    return Tuning(path=folder, model=best.path / "model", job=load_job(path), metric=metric, best=best, trials=done)


def _check_choices(space: Space, job: Job, spread: Spread) -> None:
    """Raise the errors of `base_folder` and `check_tables` for a choice of a model, a table or a column."""
    for name, choices in space.items():
        for choice in () if isinstance(choices, Range) else choices:
            if name == "model.base":
                base_folder(choice)
            elif name.startswith("data."):
                check_tables(with_values(job, {name: choice}, {name: "space"}), spread=spread)


def _claim(folder: Path, job: Job, space: Space, seed: int, spread: Spread) -> Job:
    """Store the settings of the tuning in its folder; return the job with the versions of tables that all trials read.

    Raises FingerprintError if the folder holds another tuning, or other files.
    """
    path = folder / SETTINGS
    if not path.exists():
        foreign = sorted(one.name for one in folder.iterdir() if not one.name.startswith(".") and one.name != SOURCES)
        if foreign:
            raise FingerprintError(
                f"{folder}: the folder is not a tuning folder ({SETTINGS} is missing), and it is not empty (it holds "
                f"{foreign[0]!r}). Name a new folder (--run)."
            )
    pinned = pinned_job(folder, job, begun=path.exists())
    stored = stored_tables(pinned).items()
    tables = {name: open_table(table, options=read_options_of(job, name), spread=spread) for name, table in stored}
    now: dict[str, Any] = {
        "job": job.model_dump(mode="json"),
        "space": {name: asdict(one) if isinstance(one, Range) else list(one) for name, one in space.items()},
        "seed": seed,
        # Trials on other rows could not be compared.
        "rows": {name: _contents(one, spread) for name, one in tables.items()},
    }
    if path.exists():
        before: dict[str, Any] = atomic_io.read_json(path)
        before["job"] = load_job(None, **before["job"]).model_dump(mode="json")
        if differing := differences(*({**each.pop("job"), **each} for each in (before, dict(now)))):
            raise FingerprintError(
                f"{folder}: holds another tuning. It differs in\n" + "\n".join(differing) + "\nName another folder "
                "(--run), or delete this one to start again. Only the number of trials may change."
            )
    atomic_io.write_json(path, now, site="tuning.settings")
    return pinned


def _contents(table: Table, spread: Spread) -> dict[str, str | None]:
    """Return what identifies the content of each file, by its name."""
    versions = [version_of(file) for file in table.files]
    return dict(zip(table.names, content_ids(table.files, versions, [None] * len(versions), spread), strict=True))


def _train(
    trial: "optuna.trial.Trial", wanted: Job, folder: Path, metric: str, engine: Engine | str | None, *, prune: bool
) -> "tuple[optuna.trial.TrialState, float | None, str]":
    """Train one trial; return its state, its value, and why it failed."""
    states = load_optuna().trial.TrialState
    path = trial_folder(folder, trial.number)
    stop = path / STOP
    if stop.exists() and not (path / RESULT).exists():
        return states.PRUNED, None, ""  # decided by a tuner that was killed before it recorded it
    known = trial.study.get_trials(deepcopy=False)[trial.number].intermediate_values
    watch = partial(_prune, trial, metric, stop, set(known))
    try:
        job = with_values(wanted, trial.params, dict.fromkeys(trial.params, f"trial {trial.number}"))
        with follow_metrics(path / metrics_log.METRICS, watch, "pruning") if prune else nullcontext():
            done = train(job, run=path, engine=engine)
    except StopAsked:
        return states.PRUNED, None, ""
    except (ConfigError, Diverged, RankFailed) as error:
        log.warning("trial %d failed: %s", trial.number, error)
        return states.FAIL, None, str(error).splitlines()[0]
    if metric not in done.metrics:
        return states.FAIL, None, f"no validation gave a finite {metric}"
    return states.COMPLETE, done.metrics[metric], ""


def _prune(
    trial: "optuna.trial.Trial", metric: str, stop: Path, reported: set[int], batches: Iterator[list[metrics_log.Line]]
) -> None:
    """Report each validation to the study, numbered from 1, and stop the ranks when the study decides so.

    Validations are numbered because steps are not comparable between trials with different batch sizes.
    """
    number = 0
    for lines in batches:
        for line in filter(metrics_log.is_validation, lines):
            number += 1
            if number not in reported:
                trial.report(line[metrics_log.VALIDATION + metric], number)
                if trial.should_prune():
                    stop.touch()


def _log_trial(last: Trial, metric: str, trials: int) -> None:
    """Log the result of a trial."""
    value = "" if last.value is None else f", {metric} {last.value:.4f}"
    settings = ", ".join(f"{name}={shown(setting)}" for name, setting in last.settings.items())
    log.info("trial %d (of %d): %s, %d steps%s; %s", last.number, trials, last.state, last.steps, value, settings)


def shown(setting: Any) -> str:
    """Return a setting for display: floats with four digits."""
    return f"{setting:.4g}" if isinstance(setting, float) else str(setting)
