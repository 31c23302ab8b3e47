"""The progress bar of a training: steps, loss, the last validation and the best step; on rank 0 only."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torchlake.progress import progress as progress_bar
from torchlake.runs import metrics_log
from torchlake.training.saving import LOSS
from torchlake.training.state import TrainProgress

Show = Callable[[int, metrics_log.Line], None]
"Advances by a number of steps, and shows the metrics line of the step or validation."


@contextmanager
def training_bar(rank: int, progress: TrainProgress, total: int, metric: str) -> Iterator[Show]:
    """A function that shows `progress` (updated in place) up to step `total`; `metric` chooses the best model."""
    if rank != 0:
        yield lambda steps, outcome: None
        return
    validated = speed = ""
    with progress_bar("train", total, "steps", done=progress.step) as advance:

        def show(steps: int, outcome: metrics_log.Line) -> None:
            nonlocal validated, speed
            if "tokens_per_s" in outcome:
                share = f", {outcome['mfu']:.0%} of the matrix rate" if "mfu" in outcome else ""
                speed = f"{outcome['tokens_per_s']:,.0f} tokens/s{share}"
            else:
                name = "validation loss" if metric == LOSS else metric
                validated = f"{name} {_short(outcome[metric])}"
            loss = "" if progress.loss is None else f"loss {_short(progress.loss)}"
            best = "" if progress.best is None else f"best at step {progress.best['step']:,}"
            advance(steps, [note for note in (loss, validated, best, speed) if note])

        yield show


def _short(value: float) -> str:
    """A number in about six characters."""
    return f"{value:.3f}" if value == 0 or 1e-3 <= abs(value) < 1e3 else f"{value:.1e}"
