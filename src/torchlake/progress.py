"""How far a long step is, on standard error: a bar on a terminal, a plain line now and then in a log.

Standard output stays free for results. TORCHLAKE_PROGRESS=0 silences both.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LINE_EVERY_S = 10.0


@contextmanager
def progress(label: str, total: int, unit: str = "rows") -> Iterator[Callable[[int], None]]:
    """Yield `advance(n)`, to be called from one thread with the number of units just done, of `total` altogether."""
    if os.environ.get("TORCHLAKE_PROGRESS") == "0":
        yield lambda n: None
    elif sys.stderr.isatty():
        yield from _bar(label, total, unit)
    else:
        yield from _lines(label, total, unit)


def _bar(label: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} {task.fields[unit]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total, unit=unit)
        yield lambda n: bar.advance(task, n)


def _lines(label: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    started = last = time.monotonic()
    done = 0

    def advance(n: int) -> None:
        nonlocal done, last
        done += n
        now = time.monotonic()
        if now - last >= LINE_EVERY_S and done < total:
            last = now
            _line(label, done, total, unit, now - started)

    yield advance
    _line(label, done, total, unit, time.monotonic() - started)


def _line(label: str, done: int, total: int, unit: str, seconds: float) -> None:
    share = f" ({done / total:.0%})" if total else ""
    rate = done / seconds if seconds > 0 else 0.0
    speed = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
    print(
        f"{label}: {done:,}/{total:,} {unit}{share} in {seconds:.1f} s, {speed} {unit}/s", file=sys.stderr, flush=True
    )
