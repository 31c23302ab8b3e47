"""tune: the space and its mistakes, trials, pruning, kills, two tuners; with real training of a tiny encoder."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import pyarrow.parquet as pq
import pytest

import forked
import tiny
import torchlake as tl
import training_runs as runs
import tuning_runs
from pids import wait_for
from torchlake.config.job import job_to_yaml, load_job
from torchlake.errors import (
    ConfigError,
    DataError,
    FingerprintError,
    Locked,
    MissingExtra,
    StopAsked,
    TorchlakeError,
    UnsafeError,
    UsageError,
)
from torchlake.models.spec import load_spec
from torchlake.runs import follow
from torchlake.storage import lease
from torchlake.training import step
from torchlake.tuning import study
from torchlake.tuning.search_space import Range, read_space

SPACE: dict[str, Any] = {
    "train.learning_rate": {"low": 1e-4, "high": 1e-2, "log": True},
    "train.batch_size": {"choices": [8, 16]},
    "train.epochs": {"low": 1, "high": 2},
}
HERE = runs.Inline()


@pytest.fixture
def sections(tmp_path: Path, tiny_bert: Path) -> dict[str, Any]:
    return runs.job(tmp_path, tiny_bert)


def tune(run: Path, sections: dict[str, Any], **options: Any) -> Any:
    settings = {"space": SPACE, "trials": 3, "engine": HERE, **options}
    return tl.tune(load_job(None, **sections), run=run, **settings)


def stored(run: Path) -> list[optuna.trial.FrozenTrial]:
    storage = optuna.storages.RDBStorage(f"sqlite:///{run / 'study.db'}")
    try:
        return optuna.load_study(study_name="torchlake", storage=storage).get_trials()
    finally:
        storage.remove_session()
        storage.engine.dispose()


# the space


def complaint(folder: Path, text: str) -> str:
    path = folder / "space.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        read_space(path, load_job(None, data={"train": "t"}, model={"base": "b"}))
    return str(error.value).replace(f"{folder}/", "")


def test_a_space_is_read_in_the_types_of_the_job(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(
        "train.learning_rate: {low: 1.0e-5, high: 1, log: true}\n"
        "train.epochs: {low: 2, high: 5}\n"
        "train.schedule: {choices: [linear, cosine]}\n"
        "train.clip_norm: {choices: [null, 1.0]}\n"
    )
    space = read_space(path, load_job(None, data={"train": "t"}, model={"base": "b"}))
    assert space == {
        "train.learning_rate": Range(1e-5, 1.0, True),
        "train.epochs": Range(2, 5, False),
        "train.schedule": ("linear", "cosine"),
        "train.clip_norm": (None, 1.0),
    }
    assert isinstance(space["train.epochs"], Range)
    assert [type(end) for end in (space["train.epochs"].low, space["train.epochs"].high)] == [int, int]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "space.yaml:1: a search space is a mapping of settings"),
        ("- a", "not a list"),
        ("train.epochs: 3", "space.yaml:1: train.epochs: expected {low:"),
        ("\ntrain.epohcs: {low: 1, high: 2}", "space.yaml:2: train.epohcs: unknown key; did you mean epochs?"),
        ("epochs: {low: 1, high: 2}", "space.yaml:1: epochs: unknown key; did you mean train.epochs?"),
        ("train.epochs: {low: 1, hihg: 2}", "space.yaml:1: train.epochs.hihg: unknown key; did you mean high?"),
        ("train.epochs: {low: 1}", "space.yaml:1: train.epochs: set low and high, or choices"),
        ("train.epochs: {low: 5, high: 2}", "low must be less than high, but they are 5 and 2"),
        ("train.epochs:\n  low: 0\n  high: 2", "space.yaml:2: train.epochs: must be at least 1, got 0.0"),
        ("train.epochs: {low: 1.5, high: 3}", "space.yaml:1: train.epochs: expected a whole number, got 1.5"),
        ("train.epochs: {low: one, high: 3}", "space.yaml:1: train.epochs.low: expected a number, got 'one'"),
        ("train.warmup: {low: 0, high: 0.5, log: true}", "low must be above 0 in a logarithmic range"),
        ("train.warmup: {choices: []}", "space.yaml:1: train.warmup.choices: the list is empty"),
        ("train.warmup: {choices: [0.1, 0.1]}", "the choices contain a value twice"),
        ("train.warmup: {choices: [[0.1]]}", "a choice must be a single value"),
        ("train.warmup: {choices: [0.1], low: 0.2}", "either a range (low, high, log) or choices"),
        ("train.schedule:\n  choices:\n    - linear\n    - cosin", "space.yaml:4: train.schedule: expected 'linear'"),
        ("train.validate_every: {low: 1, high: 2}", "train.validate_every: expected an interval"),
        ("train.metric: {choices: [loss, accuracy]}", "train.metric: cannot be searched"),
        ("data.learn: {choices: [all, assistant]}", "data.learn: cannot be searched"),
        ("engine.processes: {low: 1, high: 2}", "engine.processes: cannot be searched"),
        ("data.where: {choices: [a > 1, a > 2]}", "data.where: cannot be searched"),
        ("train.seed: {low: 0, high: 9}", "train.seed: cannot be searched: it chooses the validation rows, too"),
        ("data.train: {choices: [a, b]}", "data.train: cannot be searched: it chooses the validation rows, too"),
        ("train.validate_writing.rows: {low: 1, high: 2}", "train.validate_writing.rows: cannot be searched"),
        ("data.too_long: {choices: [drop, cut_end]}", "data.too_long: cannot be searched"),
        ("data.limit: {low: 10, high: 20}", "data.limit: cannot be searched: it chooses the validation rows, too"),
        ("train.epochs: {low: 0, high: 2}\ntrain.x: {choices: [1]}", "\nspace.yaml:2: train.x: unknown key"),
    ],
)
def test_a_mistake_in_a_space_is_named_by_its_line(tmp_path: Path, text: str, said: str) -> None:
    assert said in complaint(tmp_path, text)


def test_rows_of_another_table_do_not_depend_on_the_searched_ones() -> None:
    job = load_job(None, data={"train": "t", "validation": "v"}, model={"base": "b"})
    assert read_space({"train.seed": {"low": 0, "high": 9}, "data.limit": {"choices": [10, 20]}}, job)


@pytest.mark.parametrize(
    ("name", "metric", "preference"),
    [
        ("train.label_smoothing", "loss", False),
        ("train.preference.beta", None, True),
        ("train.preference.beta", "reward_margin", True),
    ],
)
def test_settings_of_the_metric_itself_are_not_searched(name: str, metric: str | None, preference: bool) -> None:
    data = {"train": "t", **({"chosen": "c", "rejected": "r"} if preference else {})}
    model = {"base": "b", **({"task": "text_generation"} if preference else {})}
    space = {name: {"low": 0.01, "high": 0.2}}
    with pytest.raises(ConfigError, match=rf"{name}: cannot be searched by the metric"):
        read_space(space, load_job(None, data=data, model=model, train={"metric": metric}))
    other = "reward_accuracy" if preference else "log_loss"
    assert read_space(space, load_job(None, data=data, model=model, train={"metric": other}))


def test_a_space_builds_no_objects_and_has_to_be_there(tmp_path: Path) -> None:
    job = load_job(None, data={"train": "t"}, model={"base": "b"})
    (tmp_path / "space.yaml").write_text("train.epochs: !!python/name:os.system x")
    with pytest.raises(UnsafeError, match=r"space.yaml:1"):
        read_space(tmp_path / "space.yaml", job)
    with pytest.raises(ConfigError, match="no such space file"):
        read_space(tmp_path / "nowhere.yaml", job)


# the verb


def test_the_best_of_the_trials_is_kept_and_more_may_be_added(tmp_path: Path, sections: dict[str, Any]) -> None:
    run = tmp_path / "tuning"
    done = tune(run, sections, trials=2)
    assert [one.state for one in done.trials] == ["complete"] * 2
    assert done.metric == "macro_f1"
    assert done.best.value == max(one.value for one in done.trials)
    assert done.model == run / "trials" / f"{done.best.number:04d}" / "model"
    assert load_spec(done.model).labels == ("bad", "good")
    assert load_job(run / "job.yaml") == done.job
    for one in done.trials:
        searched = one.settings
        assert searched.keys() == SPACE.keys()
        job = load_job(one.path / "job.yaml").train
        assert (job.learning_rate, job.batch_size, job.epochs) == tuple(searched.values())
        assert one.steps == job.epochs * -(-72 // job.batch_size)
        assert (one.path / "metrics.jsonl").is_file()
        assert (one.path / "model").exists() == (one.path / "checkpoints").exists() == (one is done.best)
    again = tune(run, sections, trials=2)
    assert again == done, "nothing was left to do"
    more = tune(run, sections, trials=3)
    assert more.trials[:2] == done.trials
    assert len(more.trials) == 3


@pytest.mark.slow
def test_less_is_more_for_a_loss(tmp_path: Path, sections: dict[str, Any]) -> None:
    sections["train"]["metric"] = "log_loss"
    space = {"train.learning_rate": {"choices": [1e-3, 1e-12]}}
    done = tune(tmp_path / "tuning", sections, space=space, trials=2, seed=3)
    values = [one.value for one in done.trials]
    assert len(set(values)) == 2, "each of the two was tried"
    assert done.best.value == min(values)
    assert done.best.settings == {"train.learning_rate": 1e-3}


@pytest.mark.slow
def test_a_bad_trial_is_stopped_early_and_loses_its_checkpoints(
    tmp_path: Path, sections: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "STARTUP_TRIALS", 1)
    monkeypatch.setattr(follow, "POLL_INTERVAL_S", 0.02)
    sections["train"] |= {"metric": "loss", "epochs": 8, "checkpoint_every": "10min"}
    space = {"train.learning_rate": {"choices": [1e-3, 1e-12]}}
    good, bad = tune(tmp_path / "tuning", sections, space=space, trials=2, seed=3).trials
    assert [good.settings, bad.settings] == [{"train.learning_rate": 1e-3}, {"train.learning_rate": 1e-12}]
    assert (good.state, good.steps) == ("complete", 72)
    assert bad.state == "pruned"
    assert 9 <= bad.steps < 72
    assert (bad.path / "job.yaml").is_file()
    assert not (bad.path / "checkpoints").exists()
    assert (good.path / "checkpoints").exists()


@pytest.mark.slow
def test_what_diverges_is_recorded_and_the_tuning_goes_on(tmp_path: Path, sections: dict[str, Any]) -> None:
    space = {"train.learning_rate": {"choices": [1e-3, 1e30]}}
    done = tune(tmp_path / "tuning", sections, space=space, trials=2, seed=3)
    assert {one.state for one in done.trials} == {"complete", "failed"}
    assert all("not finite" in one.why for one in done.trials if one.state == "failed")
    assert done.best.settings == {"train.learning_rate": 1e-3}
    longer = {"model.max_length": {"choices": [16, 4096]}}
    lengths = tune(tmp_path / "lengths", sections, space=longer, trials=2, seed=3, overrides=("train.max_steps=1",))
    assert {one.why for one in lengths.trials} == {
        "",
        f"model.max_length is 4096, but {sections['model']['base']} has positions for 128 tokens only",
    }
    with pytest.raises(TorchlakeError, match="no trial succeeded:\n  trial 0: step 4"):
        tune(tmp_path / "hopeless", sections, space={"train.learning_rate": {"choices": [1e30]}}, trials=1)


def test_another_tuning_in_the_folder_is_refused(tmp_path: Path, sections: dict[str, Any]) -> None:
    run = tmp_path / "tuning"
    tune(run, sections, trials=1)
    with pytest.raises(FingerprintError, match=r"space\.train\.epochs\.high: 2 -> 3"):
        tune(run, sections, space={**SPACE, "train.epochs": {"low": 1, "high": 3}})
    with pytest.raises(FingerprintError, match=r"train\.weight_decay: 0\.01 -> 0\.5"):
        tune(run, sections, overrides=("train.weight_decay=0.5",))
    with pytest.raises(FingerprintError, match="seed: 0 -> 1"):
        tune(run, sections, seed=1)
    pq.write_table(tiny.reviews(97), tmp_path / "reviews.parquet")
    with pytest.raises(FingerprintError, match=r"rows\.train\."):
        tune(run, sections)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    with pytest.raises(FingerprintError, match=r"not a tuning folder .*letter\.txt"):
        tune(tmp_path / "home", sections)


def test_two_tuners_in_one_folder_are_fenced(tmp_path: Path, sections: dict[str, Any]) -> None:
    other = lease.acquire(tmp_path / "tuning" / ".tuning.staging", 60.0, name="tuning")
    try:
        with pytest.raises(Locked, match=f"tuning: being written by pid {os.getpid()}"):
            tune(tmp_path / "tuning", sections)
    finally:
        other.release()


def test_what_cannot_be_tuned_is_said_at_once(
    tmp_path: Path, sections: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="1 or more"):
        tune(tmp_path / "tuning", sections, trials=0)
    with pytest.raises(ConfigError, match=r"data\.validation is null"):
        tune(tmp_path / "tuning", sections, overrides=("data.validation=null",))
    with pytest.raises(ConfigError, match=r"train\.checkpoint_folder"):
        tune(tmp_path / "tuning", sections, overrides=("train.checkpoint_folder=s3://bucket/all",))
    for name, choice, said in (
        ("model.base", str(tmp_path / "gone"), "there is no such model folder"),
        ("data.text", "review", "data.train: .*no column 'review'"),
    ):
        with pytest.raises(DataError, match=said):
            tune(tmp_path / "tuning", sections, space={name: {"choices": [choice]}})
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingExtra, match=r"pip install 'torchlake\[tune\]'"):
        tune(tmp_path / "tuning", sections)
    assert not (tmp_path / "tuning").exists()


@pytest.mark.slow
def test_a_stop_file_ends_a_training_which_then_continues(
    tmp_path: Path, sections: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, steps = tmp_path / "run", []

    def failpoint(site: str) -> None:
        steps.append(site)
        if steps.count("rank0.step") == 5:
            (run / "stop").touch()

    monkeypatch.setattr(step, "failpoint", failpoint)
    with pytest.raises(StopAsked, match=r"stopped after step [56] of 18; saved"):
        tl.train(run=run, engine=HERE, **sections)
    monkeypatch.undo()
    assert tl.train(run=run, engine=HERE, **sections).steps in (12, 13)
    assert len(runs.losses(run)) == 18
    assert not (run / "stop").exists()


# kills


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> tuple[Path, dict[str, Any]]:
    """A tuning that nothing happened to, and its job."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    sections = runs.job(folder, tiny_bert)
    assert tuning_runs.attempt(folder / "tuning", sections, SPACE, failpoint=None, trials=2, prune=False) == 0
    return folder / "tuning", sections


@pytest.mark.parametrize(
    "site",
    [
        pytest.param("tuning.trial:2", marks=pytest.mark.slow),
        "rank0.step:14",
        pytest.param("model.rename:1", marks=pytest.mark.slow),
        pytest.param("tuning.job.rename:1", marks=pytest.mark.slow),
    ],
)
def test_a_killed_tuning_continues_where_it_was(
    tmp_path: Path, uninterrupted: tuple[Path, dict[str, Any]], site: str
) -> None:
    """Before a trial's first step, in the middle of one, while it ends, at the very end."""
    whole, sections = uninterrupted
    run = tmp_path / "tuning"
    options = {"trials": 2, "prune": False}
    assert tuning_runs.attempt(run, sections, SPACE, failpoint=f"{site}:kill9", **options) == -signal.SIGKILL
    assert tuning_runs.attempt(run, sections, SPACE, failpoint=None, **options) == 0
    assert [(one.number, one.params, one.value) for one in stored(run)] == [
        (one.number, one.params, one.value) for one in stored(whole)
    ]
    for number in range(2):
        runs.losses(run / "trials" / f"{number:04d}")  # each step is told once
    assert (run / "job.yaml").read_bytes() == (whole / "job.yaml").read_bytes()
    assert [path.parent.name for path in run.glob("trials/*/model")] == [
        path.parent.name for path in whole.glob("trials/*/model")
    ]


@pytest.mark.slow
def test_a_decision_to_prune_outlives_the_tuner(tmp_path: Path, sections: dict[str, Any]) -> None:
    run = tmp_path / "tuning"
    killed = tuning_runs.attempt(run, sections, SPACE, failpoint="rank0.step:14:kill9", trials=3, prune=False)
    assert killed == -signal.SIGKILL
    (running,) = (one for one in stored(run) if not one.state.is_finished())
    (run / "trials" / f"{running.number:04d}" / "stop").touch()
    done = tune(run, sections)
    assert done.trials[running.number].state == "pruned"
    assert done.trials[running.number].settings == running.params


@pytest.mark.slow
def test_the_command_is_killed_and_continues(tmp_path: Path, sections: dict[str, Any]) -> None:
    """`kill -9` of the tuner while a rank of it trains; the same command again, as a program reads it."""
    run = tmp_path / "tuning"
    sections["train"] |= {"epochs": 15, "checkpoint_every": "10steps"}
    (tmp_path / "job.yaml").write_text(job_to_yaml(load_job(None, **sections)))
    (tmp_path / "space.yaml").write_text("train.learning_rate: {low: 1.0e-4, high: 1.0e-2, log: true}\n")
    words = ["tune", tmp_path / "job.yaml", "--space", tmp_path / "space.yaml", "--trials", "1", "--run", run, "--json"]
    command = [sys.executable, "-m", "torchlake", *map(str, words)]
    environment = {**os.environ, **forked.ALONE}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as killed:
        metrics = run / "trials" / "0000" / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > 10, seconds=120)
        killed.kill()
    (running,) = stored(run)
    assert not running.state.is_finished()
    again = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    told = json.loads(again.stdout)
    assert told["best"]["settings"] == running.params
    assert told["best"]["steps"] == 135
    assert told["job"]["train"]["learning_rate"] == running.params["train.learning_rate"]
    assert runs.losses(metrics.parent)[-1] > 0
    assert "continuing after step" in (metrics.parent / "logs" / "rank_0.jsonl").read_text()
