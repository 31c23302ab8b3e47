"""Metrics: every formula against scikit-learn's or scipy's, every interval around its value."""

import time
import warnings
from typing import Any

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics as oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from torchlake.metrics import Metric, evaluate_metrics, validation_metrics


def draw(problem: str, *, rows: int, classes: int, seed: int, coarse: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities and targets; coarse ones have many ties."""
    generator = np.random.default_rng(seed)
    raw = generator.random((rows, classes))
    if coarse:
        raw = np.round(raw * 8) / 8
    if problem == "single_label":
        raw += 0.01
        return (raw / raw.sum(axis=1, keepdims=True)).astype(np.float32), generator.integers(0, classes, rows)
    if problem == "multi_label":
        return raw.astype(np.float32), (generator.random((rows, classes)) < 0.4).astype(np.float32)
    return raw[:, :1].astype(np.float32), np.round(generator.random(rows) * 8).astype(np.float32)


def expected(problem: str, scores: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    scores = scores.astype(np.float64)
    if problem == "single_label":
        said, names = scores.argmax(axis=1), range(scores.shape[1])
        # A class that does not occur has no AUC: scikit-learn is asked for the others, one against the rest.
        positives = [1] if scores.shape[1] == 2 else names
        curves = [
            oracle.roc_auc_score(targets == name, scores[:, name])
            for name in positives
            if 0 < (targets == name).sum() < len(targets)
        ]
        return {
            "accuracy": oracle.accuracy_score(targets, said),
            "balanced_accuracy": oracle.balanced_accuracy_score(targets, said),
            "macro_f1": oracle.f1_score(targets, said, average="macro", zero_division=0),
            "log_loss": float(-np.log(scores[np.arange(len(targets)), targets]).mean()),
            "ece": ece(scores, targets),
            "auc": float(np.mean(curves)) if curves else float("nan"),
        }
    if problem == "multi_label":
        said, truth = scores >= 0.5, targets.astype(bool)
        occurring = truth.any(axis=0)
        precision = [oracle.average_precision_score(truth[:, k], scores[:, k]) for k in np.flatnonzero(occurring)]
        return {
            "micro_f1": oracle.f1_score(truth, said, average="micro", zero_division=0),
            "macro_f1": oracle.f1_score(truth, said, average="macro", zero_division=0),
            "subset_accuracy": oracle.accuracy_score(truth, said),
            "hamming_loss": oracle.hamming_loss(truth, said),
            "mean_average_precision": float(np.mean(precision)) if precision else float("nan"),
        }
    numbers = scores[:, 0]
    constant = len(set(targets)) == 1
    flat = constant or len(set(numbers)) == 1
    return {
        "rmse": oracle.root_mean_squared_error(targets, numbers),
        "mae": oracle.mean_absolute_error(targets, numbers),
        "r2": float("nan") if constant else oracle.r2_score(targets, numbers),
        "pearson": float("nan") if flat else scipy.stats.pearsonr(numbers, targets).statistic,
        "spearman": float("nan") if flat else scipy.stats.spearmanr(numbers, targets).statistic,
    }


def ece(scores: np.ndarray, targets: np.ndarray) -> float:
    """Written as the definition reads: bins (0, 1/15], (1/15, 2/15], ..."""
    confidence, correct = scores.max(axis=1), scores.argmax(axis=1) == targets
    gap = 0.0
    for low in range(15):
        inside = (confidence > low / 15) & (confidence <= (low + 1) / 15)
        if inside.any():
            gap += abs(correct[inside].mean() - confidence[inside].mean()) * inside.mean()
    return gap


def evaluated(problem: str, scores: np.ndarray, targets: np.ndarray, **options: Any) -> dict[str, Metric]:
    return evaluate_metrics(scores, targets, problem, range(scores.shape[1]), **options)[0]


problems = st.sampled_from(["single_label", "multi_label", "regression"])


@settings(deadline=None)
@given(problem=problems, rows=st.integers(2, 40), classes=st.integers(2, 4), seed=st.integers(0, 10**6))
def test_the_values_are_those_of_scikit_learn(problem: str, rows: int, classes: int, seed: int) -> None:
    scores, targets = draw(problem, rows=rows, classes=classes, seed=seed)
    metrics = evaluated(problem, scores, targets, resamples=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn warns where a metric is undefined
        truth = expected(problem, scores, targets)
    assert {name: metric.value for name, metric in metrics.items()} == pytest.approx(truth, abs=1e-9, nan_ok=True)


@settings(deadline=None, max_examples=30)
@given(problem=problems, rows=st.integers(1, 40), classes=st.integers(2, 4), seed=st.integers(0, 10**6))
def test_intervals_hold_their_values_in_any_order_of_rows(problem: str, rows: int, classes: int, seed: int) -> None:
    scores, targets = draw(problem, rows=rows, classes=classes, seed=seed)
    metrics = evaluated(problem, scores, targets, resamples=30)
    for metric in metrics.values():
        assert np.isnan(metric.value) or metric.low <= metric.value <= metric.high
    shuffled = np.random.default_rng(seed).permutation(rows)
    again = evaluated(problem, scores[shuffled], targets[shuffled], resamples=30)
    for name, metric in metrics.items():
        for field in ("value", "low", "high", "undefined"):
            assert getattr(again[name], field) == pytest.approx(getattr(metric, field), nan_ok=True)


@pytest.mark.parametrize("problem", ["single_label", "multi_label", "regression"])
def test_a_resample_is_a_table_with_rows_repeated(problem: str) -> None:
    """One bootstrap draw, done by hand: repeat the rows, ask scikit-learn."""
    scores, targets = draw(problem, rows=50, classes=3, seed=1)
    order = np.lexsort((*scores.T, *np.atleast_2d(targets.T)))
    rows = order[np.random.default_rng(7).integers(0, 50, 50)]
    drawn = expected(problem, scores[rows], targets[rows])
    values = expected(problem, scores, targets)
    for name, metric in evaluated(problem, scores, targets, resamples=1, seed=7).items():
        low, high = sorted([drawn[name], values[name]])
        assert (metric.low, metric.high) == pytest.approx((low, high), abs=1e-9)


def test_the_interval_of_an_accuracy_is_the_binomial_one() -> None:
    scores = np.tile(np.array([[0.2, 0.8]], np.float32), (1000, 1))
    targets = (np.arange(1000) < 700).astype(np.int64)
    metric = evaluated("single_label", scores, targets)["accuracy"]
    low, high = scipy.stats.binom(1000, 0.7).interval(0.95)
    assert (metric.value, metric.low, metric.high) == pytest.approx((0.7, low / 1000, high / 1000), abs=0.006)
    wider = evaluated("single_label", scores, targets, confidence=0.99)["accuracy"]
    assert wider.low < metric.low < metric.high < wider.high


def test_undefined_resamples_are_left_out_and_counted() -> None:
    scores = np.array([[0.9, 0.1], [0.2, 0.8], [0.3, 0.7], [0.4, 0.6]], np.float32)
    metric = evaluated("single_label", scores, np.array([0, 1, 1, 1]), resamples=500)["auc"]
    # A resample of four rows lacks the one negative with probability (3/4)^4 = 0.316, has nothing else with (1/4)^4.
    assert 120 < metric.undefined < 200
    assert (metric.value, metric.low, metric.high) == (1.0, 1.0, 1.0)
    alone = evaluated("single_label", scores, np.array([1, 1, 1, 1]), resamples=10)["auc"]
    assert np.isnan(alone.value)
    assert alone.undefined == 10


def test_the_confusion_matrix() -> None:
    scores, targets = draw("single_label", rows=100, classes=4, seed=0)
    _, confusion = evaluate_metrics(scores, targets, "single_label", "abcd", resamples=1)
    assert confusion is not None
    np.testing.assert_array_equal(confusion, oracle.confusion_matrix(targets, scores.argmax(axis=1), labels=range(4)))
    assert evaluate_metrics(*draw("regression", rows=5, classes=1, seed=0), "regression", [], resamples=1)[1] is None


@pytest.mark.parametrize("problem", ["single_label", "multi_label", "regression"])
def test_validation_gives_the_same_values_quickly(problem: str) -> None:
    scores, targets = draw(problem, rows=200, classes=3, seed=0)
    quick, full = validation_metrics(scores, targets, problem), evaluated(problem, scores, targets, resamples=1)
    assert quick == pytest.approx({name: full[name].value for name in quick})


def test_a_thousand_resamples_take_seconds() -> None:
    scores, targets = draw("single_label", rows=1066, classes=2, seed=0, coarse=False)
    began = time.process_time()
    evaluated("single_label", scores, targets)
    assert time.process_time() - began < 5
