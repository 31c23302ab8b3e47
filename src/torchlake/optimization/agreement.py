"""Compares a runtime's predictions with eager's: labels, probabilities, and the metric on a labeled sample.

Vectors are compared by their cosines, times the shorter length divided by the longer one: only equal vectors give 1.

Both score the same rows, so the comparison is paired. The interval (95 %, percentile bootstrap over the rows) is that
of the metric's change, which is much narrower than the interval of either metric. Cost: 1,000 resamples of accuracy
take milliseconds; 200 resamples of other metrics take about 2 s.
"""

from dataclasses import dataclass, replace

import numpy as np

from torchlake import plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.labels.predictions import THRESHOLD
from torchlake.metrics import lower_is_better
from torchlake.models.spec import EMBEDS

MIN_AGREEMENT = 0.99
"Share of the labels that must be eager's, by default."
MAX_DROP = 0.005
"Loss of accuracy that is tolerated by default."
CLOSE = 1e-3
"Probabilities that differ by less count as equal; only a label with a near tie can change."
SAME_NUMBER = 0.05
"Predicted numbers agree when they differ by no more than this many standard deviations of the target."
RESAMPLES, RESAMPLES_OF_OTHERS = 1000, 200
MOST_OFF = 10.0
"The lowest cosine may be this many times as far from 1 as the mean one."


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """A runtime's predictions compared with eager's, on the rows that eager could score."""

    rows: int
    failed: int
    "Rows that this runtime could not score."
    agreement: float
    "Share of the rows with eager's label (several labels: all of them; regression: nearly the same number)."
    difference: float
    "The largest difference of a probability (regression: in standard deviations of the target). NaN: rows failed."
    vectors: bool = False
    "Vectors were compared: `agreement` is the mean cosine, `difference` 1 minus the lowest one."
    metric: str | None = None
    "The name of the metric that `change` refers to; None without labels."
    change: float | None = None
    "The metric's value minus its value with eager's answers."
    change_low: float | None = None
    change_high: float | None = None
    drop: float | None = None
    "The change for the worse; in regression in standard deviations of the target."


def compare(ours: np.ndarray, reference: np.ndarray, targets: np.ndarray | None, spec: TaskSpec) -> Agreement:
    """Compare predictions (N, C), NaN where a row failed, with eager's (N, C); `targets` as the task encodes labels."""
    scored = np.isfinite(reference).all(axis=1)
    ours, reference = ours[scored].astype(np.float64), reference[scored].astype(np.float64)
    targets = None if targets is None else targets[scored]
    answered = np.isfinite(ours).all(axis=1)
    if spec.task == EMBEDS:
        cosines = _cosines(ours, reference)
        return Agreement(
            rows=len(ours),
            failed=int((~answered).sum()),
            agreement=float(cosines.mean()),
            difference=float(1 - cosines.min()),
            vectors=True,
        )
    spread = _spread(reference[:, 0] if targets is None else targets) if spec.problem == "regression" else 1.0
    same = np.zeros(len(ours), dtype=bool)
    same[answered] = _same(ours[answered], reference[answered], spec.problem, spread)
    difference = float(np.abs(ours - reference).max(initial=0.0)) / spread
    found = Agreement(
        rows=len(ours),
        failed=int((~answered).sum()),
        agreement=float(same.mean()) if len(same) else float("nan"),
        difference=difference,
    )
    if targets is None or not answered.any():
        return found
    return _with_metric(found, ours[answered], reference[answered], targets[answered], spec, spread)


def outside(found: Agreement, *, min_agreement: float, max_drop: float) -> str | None:
    """Return why these predictions are outside the tolerance, or None. NaN is outside."""
    if found.failed:
        return f"{found.failed:,} of {found.rows:,} rows failed"
    if found.difference <= CLOSE:
        return None
    if found.vectors:
        near = found.agreement >= min_agreement and found.difference <= MOST_OFF * (1 - min_agreement)
        return None if near else f"the mean cosine is {found.agreement:.4f}, the lowest {1 - found.difference:.4f}"
    if not found.agreement >= min_agreement:
        return f"{found.agreement:.2%} of the predictions agree"
    if found.drop is not None and not found.drop <= max_drop:
        return f"{found.metric} is worse by {found.drop:.4f}"
    return None


def _cosines(ours: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Return the cosines (N,) of vectors (N, D), times the shorter length divided by the longer one."""
    longer = np.maximum(*(np.square(each).sum(axis=1) for each in (ours, reference)))
    return np.where(longer == 0, 1.0, (ours * reference).sum(axis=1) / np.where(longer == 0, 1.0, longer))


def _same(ours: np.ndarray, reference: np.ndarray, problem: str, spread: float) -> np.ndarray:
    """Return for each row whether both give the same answer, (N,) bool."""
    if problem == "single_label":
        return np.asarray(ours.argmax(axis=1) == reference.argmax(axis=1))
    if problem == "multi_label":
        return np.asarray(((ours >= THRESHOLD) == (reference >= THRESHOLD)).all(axis=1))
    return np.asarray(np.abs(ours - reference)[:, 0] <= SAME_NUMBER * spread)


def _with_metric(
    found: Agreement, ours: np.ndarray, reference: np.ndarray, targets: np.ndarray, spec: TaskSpec, spread: float
) -> Agreement:
    task = plugins.load("tasks", spec.task)
    # With one class per row, users ask how often it is right; the task's own metric gives rare classes more weight.
    metric = "accuracy" if spec.problem == "single_label" else task.default_metric[spec.problem]
    generator = np.random.default_rng(0)
    number = RESAMPLES if metric == "accuracy" else RESAMPLES_OF_OTHERS
    draws = (generator.integers(0, len(targets), len(targets)) for _ in range(number))
    if metric == "accuracy":
        gained = (ours.argmax(axis=1) == targets).astype(np.float64) - (reference.argmax(axis=1) == targets)
        change = float(gained.mean())
        drawn = np.array([gained[rows].mean() for rows in draws])
    else:

        def changed(rows: np.ndarray) -> float:
            new, old = (task.metrics(one[rows], targets[rows], spec)[metric] for one in (ours, reference))
            return float(new - old)

        change = changed(np.arange(len(targets)))
        drawn = np.array([changed(rows) for rows in draws])
    drawn = drawn[np.isfinite(drawn)]
    low, high = np.quantile(drawn, [0.025, 0.975]) if len(drawn) else (change, change)
    drop = change / spread if lower_is_better(metric, task.directions) else 0.0 - change
    return replace(
        found,
        metric=metric,
        change=change,
        change_low=min(float(low), change),
        change_high=max(float(high), change),
        drop=drop,
    )


def _spread(numbers: np.ndarray) -> float:
    """Return the standard deviation, or 1 where all numbers are the same."""
    return float(numbers.std()) or 1.0
