"""The result of `evaluate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchlake.config.task_spec import Label
from torchlake.display import Shown, Table, count, plain, shown
from torchlake.metrics import Metric

MATRIX_SHOWN = 7
"Classes up to which the text of an `Evaluation`, and `torchlake evaluate`, have the confusion matrix."


@shown
@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result of `evaluate`. The metrics are over `rows - failed` rows."""

    rows: int
    failed: int
    "Rows without a label or without a prediction."
    errors: dict[str, int]
    "The number of failed rows for each reason."
    metrics: dict[str, Metric]
    confusion: list[list[int]] | None = None
    "Rows by true class, then by predicted class, in the order of `labels`; None unless each row has one class, and \
with more than 1,000 classes."
    labels: tuple[Label, ...] = ()
    resamples: int
    "Bootstrap resamples behind each interval."
    tokens: int | None = None
    "Tokens that a language model predicted; None for a task with labels."
    report: Path | None = None
    "The folder of the page, if it was asked for."

    def _shown(self) -> Shown:
        rows = [(name, one.value, f"{one.low:.4f} to {one.high:.4f}") for name, one in self.metrics.items()]
        tables: list[Table] = [[("metric", "value", "95 % interval"), *rows], *self.matrices()]
        reasons = ", ".join(f"{reason} {rows:,}" for reason, rows in list(self.errors.items())[:3])
        return f"{count(self.rows, 'row')}, {self.failed:,} left out{f' ({reasons})' if reasons else ''}", tables

    def matrices(self) -> list[Table]:
        """Return the confusion matrix with its labels, alone in a list; nothing without one that fits a terminal."""
        if self.confusion is None or len(self.labels) > MATRIX_SHOWN:
            return []
        rows = [(label, *row) for label, row in zip(self.labels, self.confusion, strict=False)]
        return [[("label \\ predicted", *self.labels), *rows]]

    def to_json(self) -> dict[str, Any]:
        """Return plain values; a metric that is undefined on this table is null."""
        return {name: value for name, value in plain(self).items() if name != "report"}
