"""Metrics: tables small enough to compute by hand, what is undefined on them, and every interval around its value."""

import math
import time
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from torchlake.metrics import DIRECTIONS, Metric, evaluate_metrics, lower_is_better, validation_metrics

PROBLEMS = ["single_label", "multi_label", "regression"]
RANKED = {"auc", "mean_average_precision", "spearman"}

Table = tuple[str, np.ndarray, np.ndarray]
"""The problem, the probabilities and the targets."""

THREE_CLASSES: Table = (
    "single_label",
    np.array([[0.82, 0.09, 0.09], [0.28, 0.62, 0.1], [0.2, 0.7, 0.1], [0.5, 0.2, 0.3]]),
    np.array([0, 1, 2, 0]),
)
TWO_LABELS: Table = (
    "multi_label",
    np.array([[0.9, 0.4], [0.6, 0.2], [0.3, 0.8]]),
    np.array([[1, 0], [0, 1], [1, 1]], np.float32),
)
NUMBERS: Table = ("regression", np.array([[1.0], [2.0], [4.0]]), np.array([1, 3, 2], np.float32))


def draw(problem: str, *, rows: int, classes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities with many ties, and targets."""
    generator = np.random.default_rng(seed)
    raw = np.round(generator.random((rows, classes)) * 8) / 8
    if problem == "single_label":
        raw += 0.01
        return (raw / raw.sum(axis=1, keepdims=True)).astype(np.float32), generator.integers(0, classes, rows)
    if problem == "multi_label":
        return raw.astype(np.float32), (generator.random((rows, classes)) < 0.4).astype(np.float32)
    return raw[:, :1].astype(np.float32), np.round(generator.random(rows) * 8).astype(np.float32)


def evaluated(problem: str, scores: np.ndarray, targets: np.ndarray, **options: Any) -> dict[str, Metric]:
    return evaluate_metrics(scores, targets, problem, range(scores.shape[1]), **options)[0]


def values(problem: str, scores: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    return {name: metric.value for name, metric in evaluated(problem, scores, targets, resamples=1).items()}


@pytest.mark.parametrize(
    ("table", "known"),
    [
        pytest.param(
            THREE_CLASSES,
            {
                "accuracy": 3 / 4,
                "balanced_accuracy": (1 + 1 + 0) / 3,
                "macro_f1": (1 + 2 / 3 + 0) / 3,
                "log_loss": -math.log(0.82 * 0.62 * 0.1 * 0.5) / 4,
                "ece": (0.18 + 0.38 + 0.7 + 0.5) / 4,
                "auc": (1 + 2 / 3 + 1.5 / 3) / 3,
            },
            id="single_label",
        ),
        pytest.param(
            TWO_LABELS,
            {
                "micro_f1": 2 * 2 / (2 * 2 + 1 + 2),
                "macro_f1": (1 / 2 + 2 / 3) / 2,
                "subset_accuracy": 1 / 3,
                "hamming_loss": 3 / 6,
                "mean_average_precision": (1 + 2 / 3) / 2,
            },
            id="multi_label",
        ),
        pytest.param(
            NUMBERS,
            {
                "rmse": math.sqrt((0 + 1 + 4) / 3),
                "mae": (0 + 1 + 2) / 3,
                "r2": 1 - 5 / 2,
                "pearson": 1 / math.sqrt(14 / 3 * 2),
                "spearman": 0.5,
            },
            id="regression",
        ),
    ],
)
def test_known_values(table: Table, known: dict[str, float]) -> None:
    assert values(*table) == pytest.approx(known)


def test_of_two_classes_the_second_is_the_positive_one() -> None:
    scores = np.array([[0.9, 0.1], [0.6, 0.4], [0.65, 0.35], [0.2, 0.8]], np.float32)
    assert values("single_label", scores, np.array([0, 0, 1, 1]))["auc"] == 3 / 4


def test_calibration_is_measured_in_bins_of_a_fifteenth() -> None:
    # Three rows share the bin (14/15, 1]: their errors cancel out in part. The fourth is alone.
    confidence = np.array([0.95, 0.97, 0.99, 0.55])
    found = values("single_label", np.column_stack([confidence, 1 - confidence]), np.array([0, 0, 1, 0]))
    assert found["ece"] == pytest.approx((abs(2 - 0.95 - 0.97 - 0.99) + abs(1 - 0.55)) / 4)


def test_one_label_alone_is_not_a_choice_between_two_classes() -> None:
    found = values("multi_label", np.array([[0.9], [0.1], [0.2], [0.8]]), np.array([[1], [0], [0], [0]], np.float32))
    assert found["micro_f1"] == found["macro_f1"] == pytest.approx(2 / 3)
    assert (found["subset_accuracy"], found["hamming_loss"], found["mean_average_precision"]) == (0.75, 0.25, 1.0)


@settings(max_examples=20)
@given(
    problem=st.sampled_from(PROBLEMS), rows=st.integers(1, 40), classes=st.integers(2, 4), seed=st.integers(0, 10**6)
)
def test_intervals_hold_their_values_in_any_order_of_rows(problem: str, rows: int, classes: int, seed: int) -> None:
    scores, targets = draw(problem, rows=rows, classes=classes, seed=seed)
    metrics = evaluated(problem, scores, targets, resamples=5)
    for metric in metrics.values():
        assert np.isnan(metric.value) or metric.low <= metric.value <= metric.high
    shuffled = np.random.default_rng(seed).permutation(rows)
    again = evaluated(problem, scores[shuffled], targets[shuffled], resamples=5)
    for name, metric in metrics.items():
        for field in ("value", "low", "high", "undefined"):
            assert getattr(again[name], field) == pytest.approx(getattr(metric, field), nan_ok=True)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_resample_is_a_table_with_rows_repeated(problem: str) -> None:
    scores, targets = draw(problem, rows=50, classes=3, seed=1)
    order = np.lexsort((*scores.T, *np.atleast_2d(targets.T)))
    rows = order[np.random.default_rng(7).integers(0, 50, 50)]
    whole, drawn = values(problem, scores, targets), values(problem, scores[rows], targets[rows])
    for name, metric in evaluated(problem, scores, targets, resamples=1, seed=7).items():
        assert (metric.low, metric.high) == pytest.approx(sorted([drawn[name], whole[name]]))


def test_the_interval_of_an_accuracy_is_the_binomial_one() -> None:
    scores = np.tile(np.array([[0.2, 0.8]], np.float32), (1000, 1))
    targets = (np.arange(1000) < 700).astype(np.int64)
    metric = evaluated("single_label", scores, targets, resamples=200)["accuracy"]
    low, high = scipy.stats.binom(1000, 0.7).interval(0.95)
    assert (metric.value, metric.low, metric.high) == pytest.approx((0.7, low / 1000, high / 1000), abs=0.006)
    wider = evaluated("single_label", scores, targets, resamples=200, confidence=0.99)["accuracy"]
    assert wider.low < metric.low < metric.high < wider.high


def test_undefined_resamples_are_left_out_and_counted() -> None:
    scores = np.array([[0.9, 0.1], [0.2, 0.8], [0.3, 0.7], [0.4, 0.6]], np.float32)
    metric = evaluated("single_label", scores, np.array([0, 1, 1, 1]), resamples=200)["auc"]
    # A resample of four rows lacks the one negative with probability (3/4)^4 = 0.316, has nothing else with (1/4)^4.
    assert 40 < metric.undefined < 90
    assert (metric.value, metric.low, metric.high) == (1.0, 1.0, 1.0)
    alone = evaluated("single_label", scores, np.array([1, 1, 1, 1]), resamples=10)["auc"]
    assert np.isnan(alone.value)
    assert alone.undefined == 10


def test_a_class_that_does_not_occur_has_no_part_in_the_mean() -> None:
    _, scores, _ = THREE_CLASSES
    found = values("single_label", scores, np.array([0, 1, 1, 0]))
    assert found["auc"] == 1.0
    assert (found["accuracy"], found["balanced_accuracy"], found["macro_f1"]) == (1.0, 1.0, 1.0)
    _, scores, targets = TWO_LABELS
    assert values("multi_label", scores, targets * [1, 0])["mean_average_precision"] == pytest.approx(5 / 6)
    assert np.isnan(values("multi_label", scores, targets * 0)["mean_average_precision"])


@pytest.mark.parametrize(
    ("scores", "targets", "undefined"),
    [
        ([1.0, 2.0], [3.0, 3.0], {"r2", "pearson", "spearman"}),
        ([2.0, 2.0], [1.0, 3.0], {"pearson", "spearman"}),
        ([2.0], [1.0], {"r2", "pearson", "spearman"}),
    ],
    ids=["one target", "one prediction", "one row"],
)
def test_numbers_without_a_spread(scores: list[float], targets: list[float], undefined: set[str]) -> None:
    found = values("regression", np.array(scores)[:, None], np.array(targets))
    assert {name for name, value in found.items() if np.isnan(value)} == undefined


def test_the_confusion_matrix() -> None:
    problem, scores, targets = THREE_CLASSES
    _, confusion = evaluate_metrics(scores, targets, problem, "abc", resamples=1)
    assert confusion is not None
    assert confusion.tolist() == [[2, 0, 0], [0, 1, 0], [0, 1, 0]]
    _, confusion = evaluate_metrics(scores[:1], targets[:1], problem, "abc", resamples=1)
    assert confusion is not None
    assert confusion.tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert evaluate_metrics(*NUMBERS[1:], "regression", [], resamples=1)[1] is None


@pytest.mark.parametrize("table", [THREE_CLASSES, TWO_LABELS, NUMBERS], ids=PROBLEMS)
def test_validation_gives_the_same_values_without_those_that_rank(table: Table) -> None:
    problem, scores, targets = table
    full = values(*table)
    assert validation_metrics(scores, targets, problem) == {
        name: value for name, value in full.items() if name not in RANKED
    }


@pytest.mark.parametrize(
    ("table", "lost"),
    [(THREE_CLASSES, {"log_loss", "ece"}), (TWO_LABELS, set()), (NUMBERS, {"rmse", "mae", "r2", "pearson"})],
    ids=PROBLEMS,
)
def test_a_model_that_diverged_can_be_validated(table: Table, lost: set[str]) -> None:
    problem, scores, targets = table
    found = validation_metrics(np.full_like(scores, np.nan), targets, problem)
    assert {name for name, value in found.items() if np.isnan(value)} == lost


def test_a_thousand_resamples_take_seconds() -> None:
    # A tenth of them, in processor time: about 5 seconds for all, and room for a slow machine.
    scores, targets = draw("single_label", rows=1066, classes=2, seed=0)
    began = time.process_time()
    evaluated("single_label", scores, targets, resamples=100)
    assert time.process_time() - began < 2


SCORERS = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced_accuracy",
    "macro_f1": "f1_macro",
    "micro_f1": "f1_micro",
    "subset_accuracy": "accuracy",
    "log_loss": "neg_log_loss",
    "auc": "roc_auc",
    "mean_average_precision": "average_precision",
    "rmse": "neg_root_mean_squared_error",
    "mae": "neg_mean_absolute_error",
    "r2": "r2",
}
"Our metrics by the scorers of scikit-learn, which are greater for a better model; a name begins with neg_ where the \
metric itself is smaller."


@pytest.mark.parametrize(("metric", "scorer"), SCORERS.items())
def test_directions_are_those_of_scikit_learn(metric: str, scorer: str) -> None:
    import sklearn.metrics

    # The sign by which scikit-learn multiplies a metric to make a score of it.
    assert lower_is_better(metric) == (sklearn.metrics.get_scorer(scorer)._sign == -1)


def test_every_metric_of_ours_that_scikit_learn_scores_is_held_against_it() -> None:
    import sklearn.metrics

    scored = {name.removeprefix("neg_") for name in sklearn.metrics.get_scorer_names()}
    ours = {**{name: name for name in DIRECTIONS}, "macro_f1": "f1_macro", "micro_f1": "f1_micro", "auc": "roc_auc"}
    ours |= {"rmse": "root_mean_squared_error", "mae": "mean_absolute_error"}
    assert {name for name, scorer in ours.items() if scorer in scored} <= SCORERS.keys()


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("seed", range(3))
def test_better_predictions_are_better_by_every_metric(problem: str, seed: int) -> None:
    noise, targets = draw(problem, rows=60, classes=3, seed=seed)
    if problem == "regression":
        perfect = targets[:, None].astype(np.float32)
    else:
        hot = np.eye(3, dtype=np.float32)[targets] if problem == "single_label" else targets
        perfect = np.asarray(0.98 * hot + 0.01, np.float32)
    good, bad = values(problem, perfect, targets), values(problem, noise, targets)
    for name, value in good.items():
        assert value < bad[name] if lower_is_better(name) else value > bad[name], name


def test_less_loss_and_perplexity_are_better() -> None:
    assert all(lower_is_better(name) for name in ("loss", "perplexity"))
