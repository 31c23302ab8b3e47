"""Calibration, thresholds, and the score against the share of the rows that are answered."""

from collections.abc import Mapping, Sequence
from typing import Any

from torchlake.reporting import figures
from torchlake.reporting.page import folded, number


def calibration(found: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
    """Return the reliability curve with its bins."""
    if not found:
        return []
    seen = f"expected calibration error {found['ece']:.4f}; below the dotted line the model is too sure"
    drawn = figures.picture("Reliability", seen, figures.reliability(found["bins"]))
    table = [
        {"confidence": f"{one['from']:.2f} to {one['to']:.2f}", "rows": one["rows"]}
        | {"mean confidence": number(one["confidence"]), "share right": number(one["right"])}
        for one in found["bins"]
    ]
    return [("figures", [drawn]), folded("The numbers", "grid", table)]


def threshold(curves: Sequence[Mapping[str, Any]]) -> list[tuple[str, Any]]:
    """Return precision-recall curves, and thresholds for a wanted precision."""
    if not curves:
        return []
    wanted = [
        {"label": one["label"], "wanted precision": least, "threshold": number(at)}
        | {"precision": number(precision), "recall": number(recall)}
        for one in curves
        for least, at, precision, recall in one["wanted"]
    ]
    seen = ", ".join(f"average precision of {one['label']} {one['average_precision']:.3f}" for one in curves[:6])
    drawn = figures.picture("Precision and recall", seen, figures.precision_recall(curves))
    points = [
        {"label": one["label"], "threshold": number(at), "precision": number(a), "recall": number(b)}
        for one in curves[:6]
        for at, a, b in one["points"][:: max(1, len(one["points"]) // 12)]
    ]
    return [("figures", [drawn]), ("grid", wanted), folded("Some points of the curve", "grid", points)]


def coverage(found: Sequence[Mapping[str, Any]]) -> list[tuple[str, Any]]:
    """Return the share of right rows by the share that is answered."""
    if not found:
        return []
    points = [(one["answered"], one["right"]) for one in found]
    seen = f"{found[0]['right']:.1%} right if all are answered, {found[-1]['right']:.1%} of the surest quarter"
    draw = figures.lines({"right": points}, x="share answered", y="share right")
    table = [
        {"answered": f"{one['answered']:.0%}", "rows": one["rows"], "share right": number(one["right"])}
        | {"with a score of at least": number(one["score"])}
        for one in found
    ]
    return [("figures", [figures.picture("Score against coverage", seen, draw)]), ("grid", table)]
