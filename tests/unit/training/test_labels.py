"""What training makes of labels: kinds, bad ones, rare ones, weights, scales, and heads that have them already."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import tiny
import torchlake as tl
import training_runs as runs
from cpus import needs_int8
from sweeps import sweep
from torchlake.models import load
from torchlake.models.spec import load_spec

GOOD = set(tiny.GOOD)


def stored(folder: Path, labels: pa.Array, *, name: str = "reviews", rows: int | None = None) -> Path:
    table = tiny.reviews(rows or len(labels)).set_column(2, "label", labels)
    folder.mkdir(exist_ok=True)
    pq.write_table(table, folder / f"{name}.parquet")
    return folder / f"{name}.parquet"


def validations(run: Path, name: str) -> list[float]:
    return [line[f"validation_{name}"] for line in runs.metrics(run) if "validation_loss" in line]


@pytest.mark.slow
def test_the_least_of_a_loss_is_the_best(tmp_path: Path, tiny_bert: Path) -> None:
    metric = "log_loss"
    sections = runs.job(tmp_path, tiny_bert, rows=160, epochs=5, batch_size=16, learning_rate=3e-3, metric=metric)
    done = runs.succeed(tmp_path / "run", sections)
    found = validations(tmp_path / "run", metric)
    assert max(found) > min(found)
    assert done.metrics is not None
    assert done.metrics[metric] == min(found)


def test_patience_counts_what_gets_no_better(tmp_path: Path, tiny_bert: Path) -> None:
    train = {"epochs": 4, "batch_size": 16, "learning_rate": 1e-3, "metric": "log_loss", "patience": 1}
    done = runs.succeed(tmp_path / "run", runs.job(tmp_path, tiny_bert, rows=160, **train))
    found = validations(tmp_path / "run", "log_loss")
    assert found == sorted(found, reverse=True), "the job is one that improves at every validation"
    assert len(found) == 4
    assert done.metrics is not None
    assert done.metrics["log_loss"] == found[-1]


def test_numbers_of_any_size_are_learned_and_come_back_in_their_own(tmp_path: Path, tiny_bert: Path) -> None:
    """Every output is 1000 plus 100 times what a model that was trained on standardized targets says."""
    texts = tiny.reviews(160)["text"].to_pylist()
    score = np.array([sum(word in GOOD for word in text.split()) for text in texts]) + np.arange(160) % 5 / 100
    told = {}
    for name, labels in (("small", score), ("large", 1000 + 100 * score)):
        sections = runs.job(tmp_path, tiny_bert, rows=160, epochs=2, batch_size=16, learning_rate=6e-3)
        sections["data"]["train"] = str(stored(tmp_path, pa.array(labels), name=name))
        done = runs.succeed(tmp_path / f"run_{name}", sections)
        told[name] = done.metrics
        spec = load_spec(tmp_path / f"run_{name}" / "model")
        assert (spec.mean, spec.deviation) == pytest.approx((labels.mean(), labels.std()))
    small, large = told["small"], told["large"]
    assert small is not None
    assert large is not None
    assert small["r2"] > 0
    assert large["r2"] == pytest.approx(small["r2"], abs=0.01)
    assert large["rmse"] == pytest.approx(100 * small["rmse"], rel=0.02)
    assert large["loss"] == pytest.approx(small["loss"], rel=0.02), "the loss is in standard deviations of the target"
    scored = tl.predict(
        tmp_path / "run_large" / "model", tmp_path / "large.parquet", tmp_path / "scored", engine=runs.Inline()
    )
    assert 950 < np.mean(pq.read_table(scored.path)["prediction"]) < 1300


@pytest.mark.parametrize("runtime", ["eager", "varlen", pytest.param("int8", marks=needs_int8)])
def test_every_runtime_predicts_in_the_units_of_the_labels(tmp_path: Path, tiny_bert: Path, runtime: str) -> None:
    """The outputs of transformers times the deviation plus the mean; of a folder without them, the outputs."""
    texts = pa.table({"text": ["a good film", "a bad plot", "the story was cold and empty"]})
    plain = tiny.spec_for("regression", ())
    tokenizer = load.load_tokenizer(tiny_bert)
    for spec in (plain, replace(plain, mean=2000.0, deviation=50.0)):
        folder = tiny.build_model(tmp_path / f"model_{spec.mean}", encoder=tiny_bert, spec=spec)
        model = load.load_model(folder, spec, auto_class="AutoModelForSequenceClassification")
        with torch.inference_mode():
            inputs = [tokenizer(text, return_tensors="pt") for text in texts["text"].to_pylist()]
            outputs = np.array([model(**one).logits.item() for one in inputs])
        found = tl.predict(folder, texts, runtime=runtime, engine=runs.Inline())["prediction"].to_numpy()
        expected = outputs if spec.mean is None else outputs * 50 + 2000
        tolerance = 0.1 if runtime == "int8" else 1e-5
        assert found == pytest.approx(expected, abs=tolerance * (spec.deviation or 1), rel=1e-6)


LABELS = {
    "pandas integers, one of them missing": pd.DataFrame({"label": [0, 1, None] * 20 + [1] * 4}),
    "floats": pa.table({"label": [0.0, 1.0] * 32}),
    "text": pa.table({"label": ["1.0", "2.0"] * 32}),
}


@pytest.mark.parametrize("name", sweep(LABELS, quick={"pandas integers, one of them missing"}))
def test_whole_floats_are_classes(tmp_path: Path, tiny_bert: Path, name: str) -> None:
    """And the same file scores with them; what was guessed is said."""
    table = LABELS[name] if isinstance(LABELS[name], pa.Table) else pa.table(LABELS[name])
    sections = runs.job(tmp_path, tiny_bert, epochs=1)
    sections["data"] |= {"train": str(stored(tmp_path, table["label"], name="floats")), "bad_rows": "drop"}
    runs.succeed(tmp_path / "run", sections)
    spec = load_spec(tmp_path / "run" / "model")
    assert (spec.problem, spec.labels) == ("single_label", (1, 2) if name == "text" else (0, 1))
    assert tl.evaluate(tmp_path / "run" / "model", sections["data"]["train"], engine=runs.Inline()).rows == 64


def test_the_job_says_what_the_labels_are(tmp_path: Path, tiny_bert: Path) -> None:
    sections = runs.job(tmp_path, tiny_bert, epochs=1)
    sections["data"] |= {"train": str(stored(tmp_path, pa.array([1, 2, 3] * 20), name="stars"))}
    runs.succeed(tmp_path / "run", sections, overrides=("data.problem=regression",))
    assert load_spec(tmp_path / "run" / "model").problem == "regression"
    refused = runs.attempt(tmp_path / "other", sections, overrides=("data.problem=multi_label",))
    assert refused.exit_code == 65
    assert (
        "data.problem is multi_label, which needs lists of strings, but the label column holds integers"
        in refused.error
    )
    unknown = runs.attempt(tmp_path / "third", sections, overrides=("data.problem=ordinal",))
    assert "data.problem: expected 'single_label'" in unknown.error


def test_rows_with_bad_labels_are_left_out_as_the_job_says(tmp_path: Path, tiny_bert: Path) -> None:
    labels = tiny.reviews(40, seed=3)["label"].to_pylist()
    labels[5], labels[9] = "mixed", None
    sections = runs.job(tmp_path, tiny_bert, epochs=1)
    table = tiny.reviews(40, seed=3).set_column(2, "label", pa.array(labels))
    pq.write_table(table, tmp_path / "other.parquet")
    sections["data"]["validation"] = str(tmp_path / "other.parquet")
    refused = runs.attempt(tmp_path / "run", sections)
    assert refused.exit_code == 65
    runs.succeed(tmp_path / "run", sections, overrides=("data.bad_rows=drop",))
    told = json.loads((tmp_path / "run" / "data.json").read_text())
    assert told["rows"] == {"training": 96, "validation": 38}
    assert told["left_out"] == {"bad_label": 1, "null_label": 1}


def test_numbers_that_are_none_are_left_out_as_the_job_says(tmp_path: Path, tiny_bert: Path) -> None:
    numbers = [0.5, float("nan"), 1.5, float("inf")] * 16
    sections = runs.job(tmp_path, tiny_bert, epochs=1)
    sections["data"]["train"] = str(stored(tmp_path, pa.array(numbers), name="numbers"))
    refused = runs.attempt(tmp_path / "run", sections)
    assert refused.exit_code == 65
    assert "32 numbers that are NaN, infinite" in refused.error
    assert "data.bad_rows=drop" in refused.error
    runs.succeed(tmp_path / "run", sections, overrides=("data.bad_rows=drop",))
    told = json.loads((tmp_path / "run" / "data.json").read_text())
    assert told["rows"] == {"training": 24, "validation": 8}
    assert (told["mean"], told["deviation"], told["left_out"]) == (1.0, 0.5, {"bad_label": 32})


def test_rare_classes_are_on_both_sides(tmp_path: Path, tiny_bert: Path) -> None:
    labels = ["a"] * 50 + ["b"] * 6 + ["c"] * 2 + ["d"]
    sections = runs.job(tmp_path, tiny_bert, epochs=1)
    sections["data"] |= {"train": str(stored(tmp_path, pa.array(labels), name="rare")), "validation": {"fraction": 0.1}}
    runs.succeed(tmp_path / "run", sections)
    told = json.loads((tmp_path / "run" / "data.json").read_text())
    assert told["rows"] == {"training": 53, "validation": 6}
    assert told["classes"] == {"a": 46, "b": 5, "c": 1, "d": 1}
    log = (tmp_path / "run" / "report.json").read_text()
    assert "53 rows to train on, 6 to validate on" in log


@pytest.mark.parametrize("kind", ["strings", "integers"])
def test_a_column_that_identifies_rows_is_refused(tmp_path: Path, tiny_bert: Path, kind: str) -> None:
    sections = runs.job(tmp_path, tiny_bert, rows=96)
    if kind == "strings":
        sections["data"]["train"] = str(stored(tmp_path, pa.array([f"row-{row}" for row in range(96)]), name="ids"))
    else:
        sections["data"]["label"] = "id"
    refused = runs.attempt(tmp_path / "run", sections)
    assert refused.exit_code == 65
    assert "96 of 96 rows have a label that no other row has" in refused.error
    assert "data.label" in refused.error
    assert ("data.problem to regression" in refused.error) == (kind == "integers")


@pytest.mark.slow
def test_weights_bring_a_rare_class_back(tmp_path: Path, tiny_bert: Path) -> None:
    table = tiny.reviews(1400)
    labels = np.array(table["label"].to_pylist())
    good, bad = np.flatnonzero(labels == "good"), np.flatnonzero(labels == "bad")
    pq.write_table(table.take(np.concatenate([good[:576], bad[:24]])), tmp_path / "rare.parquet")
    pq.write_table(table.take(np.concatenate([good[576:616], bad[24:64]])), tmp_path / "even.parquet")
    sections = runs.job(tmp_path, tiny_bert, epochs=4, batch_size=32, learning_rate=3e-3)
    sections["data"] = {"train": str(tmp_path / "rare.parquet"), "validation": str(tmp_path / "even.parquet")}
    found = []
    for weights in ("null", "balanced"):
        done = runs.succeed(tmp_path / weights, sections, overrides=(f"train.class_weights={weights}",))
        assert done.metrics is not None
        found.append(done.metrics["balanced_accuracy"])
    assert found[0] < 0.6
    assert found[1] > found[0] + 0.2


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 2), ("fsdp", 2)])
def test_weighted_losses_are_the_same_on_any_number_of_ranks(
    tmp_path: Path, tiny_bert: Path, strategy: str, ranks: int
) -> None:
    weighted: dict[str, Any] = {"class_weights": {"bad": 3.0}, "label_smoothing": 0.1, "micro_batch_tokens": 100}
    weighted["epochs"] = 1
    runs.succeed(tmp_path / "one", runs.job(tmp_path, tiny_bert, rows=64, **weighted))
    runs.succeed(tmp_path / "two", runs.job(tmp_path, tiny_bert, **weighted, strategy=strategy), ranks=ranks)
    unweighted = {**weighted, "class_weights": None, "max_steps": 1}
    runs.succeed(tmp_path / "unweighted", runs.job(tmp_path, tiny_bert, **unweighted))
    assert runs.losses(tmp_path / "two") == pytest.approx(runs.losses(tmp_path / "one"), abs=1e-5)
    assert abs(runs.losses(tmp_path / "unweighted")[0] - runs.losses(tmp_path / "one")[0]) > 1e-3


@pytest.mark.parametrize(
    ("labels", "override", "message"),
    [
        (["good", "bad"], "train.class_weights={best: 2}", "there is no class 'best'; the classes are bad, good"),
        ([0.5, 1.25], "train.class_weights=balanced", "the problem is regression; only classes of whole rows"),
        ([0.5, 1.25], "train.label_smoothing=0.1", "the problem is regression"),
        ([["x"], []], "train.label_smoothing=0.1", "the problem is multi_label"),
        (["good", "bad"], "train.label_smoothing=1", "must be less than 1"),
        (["good", "bad"], "train.class_weights={good: 0}", "must be greater than 0"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    tmp_path: Path, tiny_bert: Path, labels: list[Any], override: str, message: str
) -> None:
    sections = runs.job(tmp_path, tiny_bert)
    sections["data"]["train"] = str(stored(tmp_path, pa.array(labels * 20), name="labels"))
    refused = runs.attempt(tmp_path / "run", sections, overrides=(override,))
    assert message in refused.error
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_a_classifier_of_the_same_classes_keeps_its_head(tmp_path: Path, tiny_bert: Path) -> None:
    sections = runs.job(tmp_path, tiny_bert, rows=160, epochs=4, batch_size=16, learning_rate=3e-3)
    first = runs.succeed(tmp_path / "first", sections).metrics
    sections["model"]["base"] = str(tmp_path / "first" / "model")
    sections["train"] |= {"learning_rate": 1e-9, "max_steps": 1}
    second = runs.succeed(tmp_path / "second", sections).metrics
    assert first is not None
    assert second is not None
    assert first["macro_f1"] > 0.6
    assert second["macro_f1"] == pytest.approx(first["macro_f1"], abs=1e-6)
    log = (tmp_path / "second" / "logs" / "rank_0.jsonl").read_text()
    assert "the head is kept" in log
