"""All sections of an evaluation's page, from rows.parquet.

rows.parquet -> columns without texts -> sections; then the texts of the few rows that the page shows
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchlake.evaluation.sections import classes, spans
from torchlake.evaluation.sections.judged import JudgedRows
from torchlake.evaluation.sections.slices import by_slice, hinted, histogram, pick, trained


def sections_of(rows: JudgedRows, slices: Sequence[str], hints: str | None = None) -> dict[str, Any]:
    """Return the sections of the page, each by name; those without data are missing."""
    if not len(rows.table):
        return {}
    found: dict[str, Any] = {}
    for name, (kinds, section) in SECTIONS.items():
        if rows.kind in kinds.split():
            found[name] = section(rows)
    found["slices"] = by_slice(rows, slices)
    found |= pick(rows)
    if hints is not None:
        found["hints"] = {"by": hints, **hinted(rows)}
    found["histograms"] = {name: histogram(rows.numbers(name)) for name in ("tokens", "score", "loss")}
    return {name: one for name, one in found.items() if one}


Section = Callable[[JudgedRows], Any]
SECTIONS: Mapping[str, tuple[str, Section]] = {
    "baseline": ("classes labels number spans", classes.baseline),
    "trained": ("classes labels number spans answers language", trained),
    "classes": ("classes", classes.per_class),
    "labels": ("labels", classes.per_label),
    "confusion": ("classes", classes.confusion),
    "confused": ("labels", classes.confused_labels),
    "residuals": ("number", classes.residuals),
    "hints": ("number", classes.outliers),
    "calibration": ("classes labels", classes.calibration),
    "threshold": ("classes labels", classes.threshold),
    "entities": ("spans", spans.entities),
    "answerable": ("answers", spans.answerable),
    "retrieval": ("vectors", spans.retrieval),
    "cosines": ("vectors", spans.cosines),
    "coverage": ("classes labels answers spans texts", classes.coverage),
}
"For each section the kinds of predictions that have it, and its function."
