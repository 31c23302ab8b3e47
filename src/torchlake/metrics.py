"""Metrics with bootstrap intervals; the formulas are scikit-learn's and scipy's.

Two things are implemented here: the expected calibration error, and the percentile bootstrap, because
`scipy.stats.bootstrap` rejects tables of one row, and gives no interval if one resample is undefined. Cost per
resample: about 5 ms, and 0.3 microseconds for each row and class; 1,000 resamples of 1,000 rows and two classes take a
few seconds on one core.

Rows are sorted first, so the numbers do not depend on the order of the table. A metric is NaN where it is undefined
(AUC of one class); such resamples are left out and counted.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from torchlake.display import Shown, shown
from torchlake.labels.predictions import THRESHOLD

ECE_BINS = 15
MAX_RANKED_CLASSES = 100
"With more classes AUC is not computed, because it sorts the rows once per class."

Direction = Literal["higher", "lower"]
LOWER = ("loss", "log_loss", "ece", "hamming_loss", "rmse", "mae", "perplexity")
OF_CLASSES = ("accuracy", "balanced_accuracy", "macro_f1", "micro_f1", "subset_accuracy", "auc")
OTHERS = ("mean_average_precision", "r2", "pearson", "spearman")
OF_TEXTS = ("exact_match", "token_f1", "chrf", "rouge_l", "json_valid")
DIRECTIONS: dict[str, Direction] = {
    **dict.fromkeys(LOWER, "lower"),
    **dict.fromkeys((*OF_CLASSES, *OTHERS, *OF_TEXTS), "higher"),
}
"Whether higher or lower values of each metric are better."


@shown
@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric and its percentile bootstrap interval, widened to include the value."""

    value: float
    low: float
    high: float
    undefined: int = 0
    "Number of resamples in which the metric is undefined; they are left out of the interval."

    def __float__(self) -> float:
        """Return the value."""
        return self.value

    def _shown(self) -> Shown:
        return f"{self.value:.4f}, {self.low:.4f} to {self.high:.4f}", []


def evaluate_metrics(
    probabilities: np.ndarray,
    targets: np.ndarray,
    problem: str,
    labels: Sequence[Any],
    *,
    resamples: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> tuple[dict[str, Metric], np.ndarray | None]:
    """Return every metric of the problem, and the confusion matrix (C, C) int64 (true class, predicted class) or None.

    `probabilities` (N, C); `targets` (N,) class numbers, (N, C) of 0 and 1, or (N,) numbers; N >= 1.
    """
    from sklearn.metrics import confusion_matrix

    assert len(probabilities) == len(targets) > 0
    order = np.lexsort((*probabilities.T, *np.atleast_2d(targets.T)))
    scores, targets = probabilities[order].astype(np.float64), targets[order]

    def estimate(rows: np.ndarray) -> dict[str, float]:
        return _estimate(scores[rows], targets[rows], problem)

    with _undefined_allowed():
        metrics = bootstrapped(estimate, len(scores), resamples=resamples, confidence=confidence, seed=seed)
        if problem != "single_label":
            return metrics, None
        return metrics, confusion_matrix(targets, scores.argmax(axis=1), labels=range(len(labels)))


def loss_metrics(
    losses: np.ndarray,
    targets: np.ndarray,
    derived: Callable[[float], dict[str, float]],
    *,
    resamples: int,
) -> dict[str, Metric]:
    """Return the mean loss of M pieces with summed `losses` (M,) over `targets` (M,), and metrics `derived` from it."""

    def estimate(pieces: np.ndarray) -> dict[str, float]:
        loss = float(losses[pieces].sum() / targets[pieces].sum())
        return {"loss": loss, **derived(loss)}

    return bootstrapped(estimate, len(losses), resamples=resamples)


def bootstrapped(
    estimate: Callable[[np.ndarray], dict[str, float]],
    rows: int,
    *,
    resamples: int,
    confidence: float = 0.95,
    seed: int = 0,
) -> dict[str, Metric]:
    """Return what `estimate` computes from row numbers (N,), for all `rows`, with intervals from resamples of them."""
    generator = np.random.default_rng(seed)
    values = estimate(np.arange(rows))
    drawn = [estimate(generator.integers(0, rows, rows)) for _ in range(resamples)]
    return {
        name: _interval(value, np.array([each[name] for each in drawn]), confidence) for name, value in values.items()
    }


def lower_is_better(metric: str, directions: Mapping[str, Direction] = DIRECTIONS) -> bool:
    """Return whether lower values of `metric`, in `directions` or DIRECTIONS, are better."""
    return {**DIRECTIONS, **directions}[metric] == "lower"


def validation_metrics(probabilities: np.ndarray, targets: np.ndarray, problem: str) -> dict[str, float]:
    """Return the metrics that need no sorting, without intervals; shapes as in `evaluate_metrics`."""
    assert len(probabilities) == len(targets) > 0
    with _undefined_allowed():
        return _estimate(probabilities.astype(np.float64), targets, problem, ranked=False)


@contextmanager
def _undefined_allowed() -> Iterator[None]:
    """Silence warnings about resamples that lack a class or a spread, and let NaN pass without validating parameters.

    A model that diverges in training gives NaN probabilities; its validation must report that, not fail.
    """
    import sklearn
    from scipy.stats import DegenerateDataWarning

    with sklearn.config_context(assume_finite=True, skip_parameter_validation=True), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", DegenerateDataWarning)
        yield


def _interval(value: float, drawn: np.ndarray, confidence: float) -> Metric:
    defined = drawn[np.isfinite(drawn)]
    undefined = len(drawn) - len(defined)
    if not np.isfinite(value) or len(defined) == 0:
        return Metric(value=value, low=value, high=value, undefined=undefined)
    low, high = np.quantile(defined, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Metric(value=value, low=min(float(low), value), high=max(float(high), value), undefined=undefined)


def _estimate(scores: np.ndarray, targets: np.ndarray, problem: str, *, ranked: bool = True) -> dict[str, float]:
    if problem == "single_label":
        metrics = _single_label(scores, targets.astype(np.int64), ranked)
    elif problem == "multi_label":
        metrics = _multi_label(scores, targets.astype(np.int64), ranked)
    else:
        metrics = _regression(scores[:, 0], targets.astype(np.float64), ranked)
    return {name: float(value) for name, value in metrics.items()}


def _single_label(scores: np.ndarray, targets: np.ndarray, ranked: bool) -> dict[str, Any]:
    from sklearn.metrics import accuracy_score, balanced_accuracy_score, f1_score, log_loss

    predicted = scores.argmax(axis=1)
    metrics = {
        "accuracy": accuracy_score(targets, predicted),
        "balanced_accuracy": balanced_accuracy_score(targets, predicted),
        "macro_f1": f1_score(targets, predicted, average="macro", zero_division=0),
        "log_loss": log_loss(targets, scores, labels=range(scores.shape[1])),
        "ece": _calibration_error(scores.max(axis=1), predicted == targets),
    }
    if ranked and scores.shape[1] <= MAX_RANKED_CLASSES:
        metrics["auc"] = _auc(scores, targets)
    return metrics


def _multi_label(scores: np.ndarray, targets: np.ndarray, ranked: bool) -> dict[str, Any]:
    from sklearn.metrics import accuracy_score, average_precision_score, f1_score, hamming_loss

    chosen = (scores >= THRESHOLD).astype(np.int64)
    # scikit-learn treats one column as two classes, 0 and 1, but only 1 is a label here.
    only = [1] if targets.shape[1] == 1 else None
    metrics = {
        "micro_f1": f1_score(targets, chosen, labels=only, average="micro", zero_division=0),
        "macro_f1": f1_score(targets, chosen, labels=only, average="macro", zero_division=0),
        "subset_accuracy": accuracy_score(targets, chosen),
        "hamming_loss": hamming_loss(targets, chosen),
    }
    if ranked:
        # The score of a label that no row has is undefined; scikit-learn would count it as 0.
        occurs = targets.any(axis=0)
        precision = average_precision_score(targets[:, occurs], scores[:, occurs]) if occurs.any() else np.nan
        metrics["mean_average_precision"] = precision
    return metrics


def _regression(scores: np.ndarray, targets: np.ndarray, ranked: bool) -> dict[str, Any]:
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error

    # These are undefined for constant targets; scikit-learn would return 0 or 1.
    varied = bool((targets != targets[0]).any())
    metrics = {
        "rmse": root_mean_squared_error(targets, scores),
        "mae": mean_absolute_error(targets, scores),
        "r2": r2_score(targets, scores) if varied else np.nan,
        "pearson": pearsonr(scores, targets).statistic if varied else np.nan,
    }
    if ranked:
        metrics["spearman"] = spearmanr(scores, targets).statistic if varied else np.nan
    return metrics


def _auc(scores: np.ndarray, targets: np.ndarray) -> Any:
    """Return the AUC of the second of two classes; of more, the mean AUC of each that occurs against the rest."""
    from sklearn.metrics import roc_auc_score

    classes = np.unique(targets)
    if len(classes) == 1:
        return np.nan
    if scores.shape[1] == 2:
        return roc_auc_score(targets, scores[:, 1])
    # Targets become columns of 0 and 1, because multi_class="ovr" fails when one of the classes does not occur.
    return roc_auc_score(targets[:, None] == classes, scores[:, classes], average="macro")


def _calibration_error(confidence: np.ndarray, correct: np.ndarray) -> float:
    """Return the mean gap between confidence and accuracy in bins (0, 1/15], (1/15, 2/15], ..., weighted by rows."""
    bins = np.digitize(confidence, np.linspace(0, 1, ECE_BINS + 1)[1:-1], right=True)
    gaps = np.bincount(bins, correct - confidence, ECE_BINS)
    return float(np.abs(gaps).sum() / len(confidence))
