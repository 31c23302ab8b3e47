"""Metrics with bootstrap intervals; the formulas are scikit-learn's and scipy's.

Implemented here: the expected calibration error; scores that are computed from counts, because scikit-learn makes a
matrix of all classes for each resample; AUC, because it sorts each resample; and the percentile bootstrap, because
`scipy.stats.bootstrap` rejects tables of one row, and gives no interval if one resample is undefined.

Rows are sorted first, so the numbers do not depend on the order of the table. A metric is NaN where it is undefined
(AUC of one class); such resamples are left out and counted.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from torchlake.display import Shown, shown
from torchlake.labels.predictions import THRESHOLD

ECE_BINS = 15
MAX_RANKED_CLASSES = 100
"With more classes AUC is not computed, because it ranks the rows once per class, and not all probabilities are kept."
MAX_MATRIX_CLASSES = 1000
"With more classes there is no confusion matrix."

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


@dataclass(frozen=True)
class ClassAnswers:
    """What the metrics of one class a row need of the answers to N rows."""

    truth: np.ndarray
    said: np.ndarray
    "Class numbers, (N,) int64."
    given: np.ndarray
    "The probability of the true class, (N,) float64."
    confidence: np.ndarray
    "The highest probability, (N,) float64."
    chances: np.ndarray | None
    "All probabilities (N, C), for AUC; None with too many classes."

    @classmethod
    def of(cls, probabilities: np.ndarray, truth: np.ndarray, *, ranked: bool = True) -> "ClassAnswers":
        """Return the answers in probabilities (N, C)."""
        said, every = probabilities.argmax(axis=1), np.arange(len(truth))
        given, confidence = (probabilities[every, one].astype(np.float64) for one in (truth, said))
        kept = ranked and probabilities.shape[1] <= MAX_RANKED_CLASSES
        return cls(truth, said, given, confidence, probabilities if kept else None)

    @classmethod
    def joined(cls, parts: "Sequence[ClassAnswers]") -> "ClassAnswers":
        """Return the answers of several parts of the rows, in a row order that does not depend on the table's."""
        kept = [part.chances for part in parts if part.chances is not None]
        chances = np.concatenate(kept) if kept else None
        names = ("truth", "said", "given", "confidence")
        columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        others = [columns[name] for name in reversed(names[1:])]
        order = np.lexsort((*others, *(() if chances is None else chances.T), columns["truth"]))
        made = {name: column[order] for name, column in columns.items()}
        return cls(**made, chances=None if chances is None else chances[order])

    @cached_property
    def ranks(self) -> np.ndarray:
        """The place of each probability among the different ones of its class, (N, C); of two classes, of the second.

        Sorted once for all resamples.
        """
        assert self.chances is not None
        columns = self.chances.T[1:] if self.chances.shape[1] == 2 else self.chances.T
        return np.stack([np.unique(one, return_inverse=True)[1].astype(np.int32) for one in columns], axis=1)

    def metrics(self, classes: int, rows: Any = slice(None)) -> dict[str, float]:
        """Return the metrics of some rows."""
        truth, said, confidence = self.truth[rows], self.said[rows], self.confidence[rows]
        right = truth == said
        counts = [np.bincount(one, minlength=classes) for one in (truth, said, truth[right])]
        least = np.finfo(np.float64).eps  # as scikit-learn's log_loss
        found = class_scores(*counts)
        found["log_loss"] = float(-np.log(np.clip(self.given[rows], least, 1 - least)).mean())
        found["ece"] = calibration(*confidence_bins(confidence, right))
        if self.chances is not None:
            found["auc"] = _auc(self.ranks[rows], truth)
        return found


def class_scores(true: np.ndarray, said: np.ndarray, right: np.ndarray) -> dict[str, float]:
    """Return the metrics in the numbers of rows (C,) of each class: true ones, predicted ones and right ones."""
    some, both = true > 0, true + said
    return {
        "accuracy": float(right.sum() / true.sum()),
        "balanced_accuracy": float((right[some] / true[some]).mean()),
        "macro_f1": float((2 * right[both > 0] / both[both > 0]).mean()),
    }


def label_scores(true: np.ndarray, said: np.ndarray, right: np.ndarray) -> dict[str, float]:
    """Return the F1 scores in the numbers of rows (C,) of each of several labels, as `class_scores`."""
    both = true + said
    f1 = np.divide(2 * right, both, out=np.zeros(len(both)), where=both > 0)
    return {"micro_f1": float(2 * right.sum() / both.sum()) if both.any() else 0.0, "macro_f1": float(f1.mean())}


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
    assert len(probabilities) == len(targets) > 0
    drawing: dict[str, Any] = {"resamples": resamples, "confidence": confidence, "seed": seed}
    if problem == "single_label":
        return evaluate_classes([ClassAnswers.of(probabilities, targets.astype(np.int64))], len(labels), **drawing)
    order = np.lexsort((*probabilities.T, *np.atleast_2d(targets.T)))
    scores, targets = probabilities[order].astype(np.float64), targets[order]
    with _undefined_allowed():
        return bootstrapped(lambda rows: _estimate(scores[rows], targets[rows], problem), len(scores), **drawing), None


def evaluate_classes(
    parts: Sequence[ClassAnswers], classes: int, **drawing: Any
) -> tuple[dict[str, Metric], np.ndarray | None]:
    """Return the same of the answers to the rows of each part."""
    answers = ClassAnswers.joined(parts)
    with _undefined_allowed():
        metrics = bootstrapped(lambda rows: answers.metrics(classes, rows), len(answers.truth), **drawing)
    return metrics, confusion_counts(answers.truth, answers.said, classes)


def confusion_counts(truth: np.ndarray, said: np.ndarray, classes: int) -> np.ndarray | None:
    """Return the rows (C, C) int64 by true class, then by predicted class; None with too many classes."""
    if classes > MAX_MATRIX_CLASSES:
        return None
    return np.bincount(truth * classes + said, minlength=classes * classes).reshape(classes, classes)


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
        return ClassAnswers.of(scores, targets.astype(np.int64), ranked=ranked).metrics(scores.shape[1])
    if problem == "multi_label":
        metrics = _multi_label(scores, targets.astype(np.int64), ranked)
    else:
        metrics = _regression(scores[:, 0], targets.astype(np.float64), ranked)
    return {name: float(value) for name, value in metrics.items()}


def _multi_label(scores: np.ndarray, targets: np.ndarray, ranked: bool) -> dict[str, Any]:
    from sklearn.metrics import average_precision_score

    chosen, truth = scores >= THRESHOLD, targets > 0
    metrics: dict[str, Any] = label_scores(*(one.sum(axis=0) for one in (truth, chosen, truth & chosen)))
    metrics["subset_accuracy"] = (chosen == truth).all(axis=1).mean()
    metrics["hamming_loss"] = (chosen != truth).mean()
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


def _auc(ranks: np.ndarray, targets: np.ndarray) -> float:
    """Return the AUC of the second of two classes; of more, the mean AUC of each that occurs against the rest.

    `ranks` (N, 1) of the second class, or (N, C). AUC is the share of pairs of a row of the class and another one in
    which the first has the higher rank; pairs of one rank count half.
    """
    present = np.unique(targets)
    if len(present) == 1:
        return float("nan")
    of_two, found = ranks.shape[1] == 1, []
    for number in [1] if of_two else present:
        rank, mine = ranks[:, 0 if of_two else number], targets == number
        here, others = (np.bincount(rank[some], minlength=int(rank.max()) + 1) for some in (mine, ~mine))
        found.append(here @ (others.cumsum() - others / 2) / (mine.sum() * (~mine).sum()))
    return float(np.mean(found))


def confidence_bins(confidence: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rows, summed confidence and right rows in bins (0, 1/15], (1/15, 2/15], ..., each (15,)."""
    bins = np.digitize(confidence, np.linspace(0, 1, ECE_BINS + 1)[1:-1], right=True)
    rows = np.bincount(bins, minlength=ECE_BINS)
    return rows, np.bincount(bins, confidence, ECE_BINS), np.bincount(bins, right, ECE_BINS)


def calibration(rows: np.ndarray, confidence: np.ndarray, right: np.ndarray) -> float:
    """Return the expected calibration error: the mean gap between confidence and accuracy in bins, weighted by rows."""
    return float(np.abs(right - confidence).sum() / rows.sum())
