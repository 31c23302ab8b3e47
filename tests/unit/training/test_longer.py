"""A run whose epochs or max_steps are raised continues where it ended, and trains nothing twice."""

import json
from pathlib import Path
from typing import Any

import pytest

import training_runs as runs
from sweeps import sweep
from torchlake.config.sections.train import TrainConfig
from torchlake.optim.schedule import learning_rate


def rates(run: Path) -> list[float]:
    return [line["learning_rate"] for line in runs.metrics(run) if "learning_rate" in line]


def logged(run: Path) -> str:
    lines = (run / "logs" / "rank_0.jsonl").read_text().splitlines()
    return "\n".join(str(json.loads(line)) for line in lines)


@pytest.mark.parametrize("schedule", sweep(["constant", "wsd", "linear"], quick=["wsd"]))
def test_more_epochs_continue_a_finished_run(tmp_path: Path, tiny_bert: Path, schedule: str) -> None:
    sections = runs.job(tmp_path, tiny_bert, rows=48, epochs=1, schedule=schedule, warmup_steps=2)
    warmup = {key: value for key, value in sections["train"].items() if key != "schedule"}
    runs.succeed(tmp_path / "run", sections)
    first = runs.losses(tmp_path / "run")
    again = runs.succeed(tmp_path / "run", sections)
    assert (again.complete, again.steps) == (True, 0)
    more = {**sections, "train": {**warmup, "schedule": schedule, "epochs": 2}}
    done = runs.succeed(tmp_path / "run", more, ranks=2)
    assert (done.complete, done.steps) == (False, 5)
    losses = runs.losses(tmp_path / "run")
    assert losses[:5] == first
    assert len(losses) == 10
    train = TrainConfig.model_validate(more["train"])
    assert rates(tmp_path / "run")[5:] == [learning_rate(step, 10, train) for step in range(5, 10)]
    assert "the run now has 10 steps instead of 5" in logged(tmp_path / "run")
    assert json.loads((tmp_path / "run/result.json").read_text())["steps"] == 10
    if schedule == "constant":  # there it is the same run as a whole one
        whole = runs.succeed(tmp_path / "whole", more)
        assert whole.steps == 10
        assert losses == pytest.approx(runs.losses(tmp_path / "whole"), abs=1e-5)
    validations = [line["step"] for line in runs.metrics(tmp_path / "run") if "validation_loss" in line]
    assert validations == [5, 10]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="better"),
        # The best model stays that of the shorter run.
        pytest.param({"learning_rate": 1e-9}, id="not better"),
        pytest.param({"ema": 0.9}, id="averaged"),
    ],
)
def test_a_finished_run_keeps_what_a_longer_one_needs(tmp_path: Path, tiny_bert: Path, options: dict[str, Any]) -> None:
    """One checkpoint and one best model: the longer run has the same bytes as one that was that long at once."""
    sections = runs.job(tmp_path, tiny_bert, epochs=2, schedule="constant", warmup_steps=2, **options)
    more = {**sections, "train": {**sections["train"], "epochs": 3}}
    runs.succeed(tmp_path / "run", sections)
    assert runs.checkpoints(tmp_path / "run") == ["step_00000018"]
    assert len(list((tmp_path / "run" / "checkpoints" / "best").iterdir())) == 1
    assert runs.succeed(tmp_path / "run", more).steps == 9
    runs.succeed(tmp_path / "whole", more, overrides=("train.keep_checkpoints=2",))
    assert runs.losses(tmp_path / "run") == runs.losses(tmp_path / "whole")
    assert runs.weights_sha256(tmp_path / "run") == runs.weights_sha256(tmp_path / "whole")
    assert len(runs.checkpoints(tmp_path / "whole")) == 2


@pytest.mark.slow
def test_more_steps_continue_a_run_and_fewer_are_another_job(tmp_path: Path, tiny_bert: Path) -> None:
    sections = runs.job(tmp_path, tiny_bert, epochs=2, max_steps=5)
    runs.succeed(tmp_path / "run", sections)
    for changed, words in (
        ({"max_steps": 4}, "train.max_steps: 5 -> 4"),
        ({"epochs": 1}, "train.epochs: 2 -> 1"),
        ({"epochs": 3}, "has reached train.max_steps=5. Raise it as well"),
        ({"epochs": 3, "learning_rate": 1e-5}, "train.learning_rate"),
        ({"epochs": 3, "max_steps": 4}, "train.max_steps: 5 -> 4"),
    ):
        refused = runs.attempt(tmp_path / "run", {**sections, "train": {**sections["train"], **changed}})
        assert "FingerprintError" in refused.error
        assert words in refused.error
        listed = refused.error.partition("differs in")[2].partition("To train")[0]
        assert "train.epochs: 2 -> 3" not in listed, "more epochs alone are not another job"
        assert json.loads((tmp_path / "run/result.json").read_text())["steps"] == 5
    longer = {**sections, "train": {**sections["train"], "max_steps": None}}
    # Killed after its result was removed: it continues with either job.
    assert runs.attempt(tmp_path / "run", longer, failpoint="run.job.rename:1:raise").exit_code
    done = runs.succeed(tmp_path / "run", longer)
    assert done.steps == 13
    assert len(runs.losses(tmp_path / "run")) == 18


def test_a_run_that_lost_its_patience_is_not_longer(tmp_path: Path, tiny_bert: Path) -> None:
    sections = runs.job(tmp_path, tiny_bert, epochs=4, patience=1, validate_every="1steps", learning_rate=1e-9)
    runs.succeed(tmp_path / "run", sections)
    steps = len(runs.losses(tmp_path / "run"))
    assert steps < 36
    refused = runs.attempt(tmp_path / "run", {**sections, "train": {**sections["train"], "epochs": 8}})
    assert "its validations no longer improved (train.patience=1)" in refused.error


@pytest.mark.slow
def test_checkpoints_elsewhere_continue_too(tmp_path: Path, tiny_bert: Path) -> None:
    sections: dict[str, Any] = runs.job(tmp_path, tiny_bert, epochs=1, checkpoint_folder=str(tmp_path / "kept"))
    runs.succeed(tmp_path / "run", sections)
    more = {**sections, "train": {**sections["train"], "epochs": 2}}
    assert runs.succeed(tmp_path / "other", more).steps == 9
    refused = runs.attempt(tmp_path / "third", sections)
    assert "holds the checkpoints of another run" in refused.error
    assert "train.epochs: 2 -> 1" in refused.error
