"""A job reads one version of a table, even if another one is committed while it runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest
import yaml

import tiny
import torchlake as tl
import training_runs as runs
from torchlake.config.job import load_job
from torchlake.errors import DataError, FingerprintError
from torchlake.evaluation import held_out, labeled
from torchlake.jobs import table_job
from torchlake.labels import column
from torchlake.optimization import sample
from torchlake.preparation import first_job
from torchlake.tables import table as tables
from torchlake.tables.sources._find import pinned


def write_reviews(path: Path, rows: int = 96) -> Path:
    deltalake.write_deltalake(path, tiny.reviews(rows))
    return path


def commit(table: Path, *, mode: str = "append") -> None:
    """A version with rows whose label no model knows."""
    rows = pa.table({"id": range(40), "text": ["new"] * 40, "label": ["other"] * 40})
    deltalake.write_deltalake(table, rows, mode=mode)


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    return write_reviews(tmp_path / "reviews")


@pytest.fixture
def commit_after_first_opening(reviews: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A version is committed once the job has opened the table for the first time; the list has what was opened."""
    opened: list[Any] = []
    original: Callable[..., Any] = tables.open_table

    def open_table(source: Any, **options: Any) -> Any:
        found = original(source, **options)
        opened.append(source)
        if len(opened) == 1:
            commit(reviews)
        return found

    for module in (held_out, labeled, table_job, sample, first_job, column):
        monkeypatch.setattr(module, "open_table", open_table)
    return opened


def test_a_pinned_table_has_its_version(reviews: Path, tmp_path: Path) -> None:
    assert pinned(reviews) == f"{reviews}@v0"
    assert pinned([reviews, "a.parquet"]) == [f"{reviews}@v0", "a.parquet"]
    commit(reviews)
    assert pinned(f"{reviews}@v0") == f"{reviews}@v0"
    assert pinned(str(reviews)) == pinned(pinned(reviews)) == f"{reviews}@v1"
    odd = write_reviews(tmp_path / "reviews@v7")
    assert pinned(odd) == f"{odd}@v0"
    assert pinned(pinned(odd)) == f"{odd}@v0"


def test_evaluate_reads_labels_and_texts_of_one_version(
    tiny_model: Path, reviews: Path, commit_after_first_opening: list[Any]
) -> None:
    done = tl.evaluate(tiny_model, reviews, engine=tiny.Here())
    assert (done.rows, done.failed) == (96, 0)
    assert len(commit_after_first_opening) == 2
    with pytest.raises(DataError, match="other"):
        tl.evaluate(tiny_model, reviews, engine=tiny.Here())


def test_optimize_draws_texts_and_labels_of_one_version(reviews: Path, commit_after_first_opening: list[Any]) -> None:
    drawn = sample.draw_sample(reviews, tiny.SPEC, label="label", rows=1000)
    assert "new" not in {*drawn.rows["text"].to_pylist(), *drawn.calibration["text"].to_pylist()}
    assert len(commit_after_first_opening) == 2


def test_init_reads_columns_and_labels_of_one_version(
    reviews: Path, tmp_path: Path, commit_after_first_opening: list[Any]
) -> None:
    done = first_job.write_first_job(str(reviews), output=tmp_path / "job.yaml")
    assert (done.rows, {*done.classes}) == (96, {"good", "bad"})
    assert len(commit_after_first_opening) == 2
    assert yaml.safe_load(done.path.read_text())["data"]["train"] == str(reviews)


def on_delta(folder: Path, encoder: Path, table: Path, **train: Any) -> dict[str, Any]:
    sections = runs.job(folder, encoder, **train)
    return {**sections, "data": {**sections["data"], "train": str(table)}}


@pytest.mark.slow
def test_a_training_that_is_resumed_continues_with_its_version(tmp_path: Path, tiny_bert: Path, reviews: Path) -> None:
    sections = on_delta(tmp_path, tiny_bert, reviews)
    runs.succeed(tmp_path / "whole", sections)
    run = tmp_path / "run"
    assert runs.attempt(run, sections, failpoint="rank0.step:5:kill9").exit_code == -9
    commit(reviews)
    resumed = runs.succeed(run, sections)
    assert 0 < resumed.steps < len(runs.losses(run))
    assert runs.weights_sha256(run) == runs.weights_sha256(tmp_path / "whole")
    assert json.loads((run / "sources.json").read_text()) == {"train": f"{reviews}@v0"}
    assert yaml.safe_load((run / "job.yaml").read_text())["data"]["train"] == str(reviews)
    # The finished run has other rows than the job now asks for.
    with pytest.raises(FingerprintError, match="its train table has changed since"):
        tl.train(run=run, engine=runs.Inline(), **sections)
    assert runs.attempt(run, on_delta(tmp_path, tiny_bert, Path(f"{reviews}@v0"))).error.count("data.train")


def test_a_training_whose_version_was_vacuumed_is_refused(tmp_path: Path, tiny_bert: Path, reviews: Path) -> None:
    sections, run = on_delta(tmp_path, tiny_bert, reviews), tmp_path / "run"
    assert runs.attempt(run, sections, failpoint="rank0.step:5:kill9").exit_code == -9
    commit(reviews, mode="overwrite")
    deltalake.DeltaTable(reviews).vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    refused = runs.attempt(run, sections)
    assert "Version 0 of" in refused.error
    assert "removed, for example by VACUUM" in refused.error
    assert f"continues with {reviews}@v0 only" in refused.error


@pytest.mark.slow
def test_the_trials_of_a_tuning_have_one_version(tmp_path: Path, tiny_bert: Path, reviews: Path) -> None:
    job = load_job(None, **on_delta(tmp_path, tiny_bert, reviews, epochs=1))
    space, run = {"train.learning_rate": {"choices": [1e-3, 2e-3]}}, tmp_path / "tuning"
    tl.tune(job, space=space, trials=1, run=run, engine=runs.Inline(), prune=False)
    commit(reviews)
    done = tl.tune(job, space=space, trials=2, run=run, engine=runs.Inline(), prune=False)
    assert [load_job(trial.path / "job.yaml").data.train for trial in done.trials] == [f"{reviews}@v0"] * 2
