"""The study of a tuning: its trials and their results, stored by Optuna in one SQLite file, `study.db`.

Each trial's sampler is seeded from the tuning's seed and the trial's number, so a resumed tuning suggests the same
settings. Cost: some tens of milliseconds per trial; importing Optuna takes a second.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from torchlake.display import Shown, shown
from torchlake.errors import need_library
from torchlake.redaction import redacted
from torchlake.runs import metrics_log
from torchlake.tuning.search_space import Range, Space

if TYPE_CHECKING:
    import optuna

FILE = "study.db"
TRIALS = "trials"
STARTUP_TRIALS = 5
"Trials that finish before pruning starts."
SQLITE_TIMEOUT_S = 60.0
"Seconds to wait while another process, such as a dashboard, holds the file."

State = Literal["complete", "pruned", "failed"]
STATES: dict[str, State] = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}
WHY = "why"


@shown
@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training of a tuning."""

    number: int
    state: State
    value: float | None
    "The metric of its best validation; of a pruned trial, of its last one."
    settings: dict[str, Any]
    "The values of the searched settings, by dotted name."
    steps: int
    "The trial's optimizer steps."
    path: Path
    "The trial's run folder."
    why: str
    "Why the trial failed; else empty."

    def _shown(self) -> Shown:
        value = "" if self.value is None else f" {self.value:.4f}"
        return f"{self.number} {self.why or self.state}{value}, {searched(self)} -> {self.path}", []


def searched(trial: Trial) -> str:
    """Return the searched settings as text."""
    return ", ".join(f"{name}={value}" for name, value in redacted(trial.settings).items())


def load_optuna() -> ModuleType:
    """Import Optuna, with only its warnings logged. Raises MissingExtra with the pip command if it is not installed."""
    need_library("optuna", "tune", "tune")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


@contextmanager
def open_study(folder: Path, *, minimize: bool, prune: bool) -> "Iterator[optuna.Study]":
    """Open the study in the folder's SQLite file; create it if missing."""
    package = load_optuna()
    storage = package.storages.RDBStorage(
        f"sqlite:///{(folder / FILE).absolute()}", engine_kwargs={"connect_args": {"timeout": SQLITE_TIMEOUT_S}}
    )
    pruners = package.pruners
    try:
        yield package.create_study(
            storage=storage,
            study_name="torchlake",
            direction="minimize" if minimize else "maximize",
            pruner=pruners.MedianPruner(n_startup_trials=STARTUP_TRIALS) if prune else pruners.NopPruner(),
            load_if_exists=True,
        )
    finally:
        storage.remove_session()
        storage.engine.dispose()


def next_trial(study: "optuna.Study", space: Space, trials: int, seed: int) -> "optuna.trial.Trial | None":
    """Return the trial that a killed tuner left running, else a new one, with all its settings; None when `trials`
    exist."""
    package = load_optuna()
    known = study.get_trials(deepcopy=False)
    left = next((one for one in known if not one.state.is_finished()), None)
    if left is None and len(known) >= trials:
        return None
    number = len(known) if left is None else left.number
    sampler_seed = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
    study.sampler = package.samplers.TPESampler(seed=sampler_seed)
    trial: optuna.trial.Trial = study.ask() if left is None else package.trial.Trial(study, left._trial_id)
    for name, searched in space.items():  # a resumed trial keeps its values
        if not isinstance(searched, Range):
            trial.suggest_categorical(name, searched)
        elif isinstance(searched.low, int) and isinstance(searched.high, int):
            trial.suggest_int(name, searched.low, searched.high, log=searched.log)
        else:
            trial.suggest_float(name, searched.low, searched.high, log=searched.log)
    return trial


def trial_folder(folder: Path, number: int) -> Path:
    """Return the run folder of a tuning's trial."""
    return folder / TRIALS / f"{number:04d}"


def ended_trials(study: "optuna.Study", folder: Path) -> tuple[Trial, ...]:
    """Return the finished trials, in order."""
    table = []
    for one in study.get_trials(deepcopy=False):
        if one.state.is_finished():
            path = trial_folder(folder, one.number)
            steps = [line["step"] for line in metrics_log.read_metrics(path / metrics_log.METRICS)]
            table.append(
                Trial(
                    number=one.number,
                    state=STATES[one.state.name],
                    value=one.value,
                    settings=dict(one.params),
                    steps=max(steps, default=0),
                    path=path,
                    why=one.user_attrs.get(WHY, ""),
                )
            )
    return tuple(table)


def best_trial(trials: tuple[Trial, ...], *, minimize: bool) -> Trial | None:
    """Return the complete trial with the best value, the earliest of equals; None without one."""
    values = {one.number: one.value for one in trials if one.state == "complete" and one.value is not None}
    if not values:
        return None
    best = min(values, key=lambda number: (values[number] * (1 if minimize else -1), number))
    return next(one for one in trials if one.number == best)
