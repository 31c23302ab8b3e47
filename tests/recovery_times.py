"""How long a training takes to recover: measured by the tests that break one (`recovery`), told by faults/conftest.py.

The clock starts when the fault happens (a failpoint leaves a file at that moment, others call `mark`) and is read when
the command that it broke has ended, with all its ranks, and when steps appear in metrics.jsonl. Where a test runs the
command again by itself, it does so at once.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torchlake.runs import metrics_log

POLL_S = 0.005

Watch = Callable[[Path, int], None]
"Called with the run folder that a failpoint is about to break, and the number of the case in docs/explanation/."


@dataclass(frozen=True)
class Recovery:
    """From a fault, in seconds; None when that did not happen while the test ran."""

    case: int
    test: str
    ended: float | None
    "To the end of the command that was broken, saved or not; one that starts its ranks again ends much later."
    first: float | None
    "To the first step that was trained after it."
    beyond: float | None
    "To the first step beyond those finished before."
    again: int
    "Steps that had been finished and were trained again."


class Seen(NamedTuple):
    """A state of metrics.jsonl."""

    moment: float
    "When it was written."
    file: int
    "Its inode: another one after the file was written anew."
    step: int
    "The last one in it."


@contextmanager
def measuring(test: str, measured: list[Recovery]) -> Iterator[Watch]:
    """A function that measures a run until the block is left; then its Recovery is appended, if it was broken."""
    over = threading.Event()
    watched: list[tuple[Path, int, list[Seen], threading.Thread]] = []

    def watch(run: Path, case: int) -> None:
        seen: list[Seen] = []
        thread = threading.Thread(target=_follow, args=(run / metrics_log.METRICS, seen, over))
        watched.append((run, case, seen, thread))
        thread.start()

    try:
        yield watch
    finally:
        over.set()
        for run, case, seen, thread in watched:
            thread.join()
            marks = {path.name: path.stat().st_mtime for path in run.parent.glob(f"{run.name}.*.once")}
            ended = marks.pop(f"{run.name}.ended.once", None)
            if marks:
                measured.append(_measured(case, test, min(marks.values()), ended, seen))


def table(measured: list[Recovery]) -> list[str]:
    """A line for each, the cases in order."""
    lines = ["case  ended, s  first step, s  beyond, s  steps again  test"]
    for one in sorted(measured, key=lambda one: (one.case, one.test)):
        told = ("-" if value is None else f"{value:.2f}" for value in (one.ended, one.first, one.beyond))
        ended, first, beyond = told
        lines.append(f"{one.case:>4}  {ended:>8}  {first:>13}  {beyond:>9}  {one.again:>11}  {one.test}")
    return lines


def mark(run: Path, what: str) -> None:
    """Note that something ("fault", "ended") happens to a run now; the first time counts."""
    with suppress(FileExistsError):
        run.with_name(f"{run.name}.{what}.once").touch(exist_ok=False)


def _follow(path: Path, seen: list[Seen], over: threading.Event) -> None:
    """Note when the last step in `path` becomes another one."""
    size = -1
    while not over.wait(POLL_S):
        try:
            status = path.stat()
            if status.st_size != size:
                size = status.st_size
                steps = [line["step"] for line in metrics_log.read_metrics(path) if not metrics_log.is_validation(line)]
                seen.append(Seen(status.st_mtime, status.st_ino, max(steps, default=0)))
        except FileNotFoundError:
            continue


def _measured(case: int, test: str, broken: float, ended: float | None, seen: list[Seen]) -> Recovery:
    """What was `seen` of a run that broke at the moment `broken`; who starts again writes the file anew."""
    before = [one for one in seen if one.moment <= broken]
    after = [one for one in seen if one.moment > broken]
    finished = max((one.step for one in before), default=0)
    anew = [one for one in after if before and one.file not in {one.file for one in before}]
    kept = anew[0].step if anew else finished
    first = next((one for one in anew or after if one.step > kept), None)
    beyond = next((one for one in after if one.step > finished), None)
    return Recovery(
        case=case,
        test=test,
        ended=None if ended is None else ended - broken,
        first=None if first is None else first.moment - broken,
        beyond=None if beyond is None else beyond.moment - broken,
        again=max(0, finished - kept),
    )
