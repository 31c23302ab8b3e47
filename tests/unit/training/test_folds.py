"""`train` with folds: every row is validated on once, in runs that resume; mean and deviation are over the folds."""

import json
import statistics
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiny
import torchlake as tl
import training_runs as runs
from torchlake.cli.commands.training import folds_outcome
from torchlake.data import order
from torchlake.errors import ConfigError, DataError, FingerprintError, UsageError


@given(st.integers(2, 60), st.integers(2, 7), st.integers(0, 9), st.integers(1, 4))
def test_folds_divide_the_rows_and_their_classes_evenly(rows: int, folds: int, seed: int, number: int) -> None:
    classes = np.random.default_rng(seed).integers(0, number, rows)
    if rows < folds:
        with pytest.raises(DataError, match=f"{folds} folds need at least {folds} rows"):
            order.fold(rows, 1, folds, seed, classes)
        return
    held_out = []
    for fold in range(1, folds + 1):
        kept, out = order.fold(rows, fold, folds, seed, classes)
        assert sorted([*kept, *out]) == list(range(rows))
        held_out.append(out)
    assert sorted(np.concatenate(held_out)) == list(range(rows))
    sizes = [len(out) for out in held_out]
    assert max(sizes) - min(sizes) <= 1
    for one in range(number):
        having = [int((classes[out] == one).sum()) for out in held_out]
        assert max(having) - min(having) <= 1
    again = order.fold(rows, 1, folds, seed + 1, classes)[1]
    assert len(again) == sizes[0]


def test_a_cross_validation_resumes_and_reports(tmp_path: Path, tiny_bert: Path) -> None:
    sections = runs.job(tmp_path, tiny_bert, rows=48, epochs=1, checkpoint_every="epoch")
    run = tmp_path / "run"
    # Stopped in the second fold.
    sections["train"]["max_restarts"] = 0
    assert runs.attempt(run, sections, folds=3, failpoint="rank0.step:6:raise").exit_code
    first = (run / "fold_1/result.json").stat().st_mtime_ns
    assert not (run / "fold_2/result.json").exists()
    assert not (run / "result.json").exists()
    done = tl.train(run=run, engine=runs.Inline(1), folds=3, **sections)
    assert (run / "fold_1/result.json").stat().st_mtime_ns == first
    assert [one.path for one in done.runs] == [run / f"fold_{number}" for number in (1, 2, 3)]
    assert done.runs[0].complete
    for name, mean in done.metrics.items():
        values = [one.metrics[name] for one in done.runs]
        assert mean == pytest.approx(statistics.fmean(values))
        assert done.deviations[name] == pytest.approx(float(np.std(values, ddof=1)))
    assert done.best.metrics[done.metric] == max(one.metrics[done.metric] for one in done.runs)
    report = json.loads((run / "report.json").read_text())
    assert report["metrics"] == pytest.approx(done.metrics)
    assert f"{done.metrics['macro_f1']:.4f} ± " in (run / "report.html").read_text()
    assert len(report["folds"]) == 3
    facts = [json.loads((run / f"fold_{number}/data.json").read_text())["rows"] for number in (1, 2, 3)]
    assert facts == [{"training": 32, "validation": 16}] * 3

    outcome = folds_outcome(done)
    assert outcome.values["metrics"] == done.metrics
    shown = [line.split()[0] for line in outcome.lines if line.strip()]
    assert shown[2:7] == ["fold", "fold", "fold", "mean", "deviation"]
    again = tl.train(run=run, engine=runs.Inline(1), folds=3, **sections)
    assert all(one.complete for one in again.runs)
    with pytest.raises(FingerprintError, match=r"holds another cross-validation(.|\n)*folds: 3 -> 4"):
        tl.train(run=run, engine=runs.Inline(1), folds=4, **sections)
    with pytest.raises(FingerprintError, match=r"is not a run folder"):
        tl.train(run=run, engine=runs.Inline(1), **sections)


def test_what_folds_would_ignore_is_refused(tmp_path: Path, tiny_bert: Path) -> None:
    pq.write_table(tiny.reviews(8), tmp_path / "reviews.parquet")
    data = {"train": str(tmp_path / "reviews.parquet")}
    model = {"base": str(tiny_bert)}
    for given_data, train, words in (
        ({**data, "validation": None}, {}, "data.validation: with folds"),
        ({**data, "validation": data["train"]}, {}, "data.validation: with folds"),
        (data, {"checkpoint_folder": "elsewhere"}, "train.checkpoint_folder: with folds"),
    ):
        with pytest.raises(ConfigError, match=words):
            tl.train(data=given_data, model=model, train=train, folds=2, run=tmp_path / "run")
    with pytest.raises(UsageError, match="2 or more"):
        tl.train(data=data, model=model, folds=1, run=tmp_path / "run")
    with pytest.raises(ConfigError, match="must be at most 2, the number of folds, got 3"):
        tl.train(data={**data, "validation": {"fold": 3, "folds": 2}}, model=model, run=tmp_path / "run")
    assert not (tmp_path / "run").exists()
