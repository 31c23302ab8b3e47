"""Show progress of a long step on standard error: a bar on a terminal and in a notebook, else a line every 10 s.

The bar is one line, because other processes write to the same terminal; parts that do not fit are left out, the least
important first. In a notebook each bar replaces the one before, after a carriage return: this needs no widgets, works
from child processes, and leaves one line in the stored notebook. TORCHLAKE_PROGRESS=0 turns progress off.
"""

import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

LINE_EVERY_S = 10.0
REFRESHES_PER_S = 4
NARROWEST_BAR = 6
NOTEBOOK = "notebook"
"Value of TORCHLAKE_PROGRESS in child processes of a notebook."
NOTEBOOK_COLUMNS = 90


class Advance(Protocol):
    """The function that `progress` yields; call it from one thread only."""

    def __call__(self, n: int, notes: Sequence[str] | None = None) -> None:
        """Count `n` more units as done and replace the notes shown, the most important first."""


@contextmanager
def progress(
    label: str,
    total: int,
    unit: str = "rows",
    *,
    done: int = 0,
    ahead: Callable[[], int] | None = None,
    measured: Callable[[], Sequence[str]] | None = None,
) -> Iterator[Advance]:
    """Show how many of `total` units are done while the block runs.

    `done` are the units that were done before. `ahead` returns the units that are done but not counted yet, and
    `measured`, which is called after it, notes; both are called in a thread.
    """
    state = _State(label=label, total=total, unit=unit, done=done, before=done, ahead=ahead, measured=measured)
    if os.environ.get("TORCHLAKE_PROGRESS") == "0" or sys.stderr is None:
        yield lambda n, notes=None: None
    elif sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"):
        yield from _bar(state)
    else:
        yield from _lines(state, redraw=in_notebook())


def in_notebook() -> bool:
    """Return whether this process is a notebook's kernel, or a child that writes to a notebook's standard error."""
    module = sys.modules.get("IPython")
    kernel = module is not None and hasattr(module.get_ipython(), "kernel")
    return kernel or os.environ.get("TORCHLAKE_PROGRESS") == NOTEBOOK


@dataclass(kw_only=True)
class _State:
    """The state of a step; Rich renders the bar from it in a thread."""

    label: str
    total: int
    unit: str
    done: int
    before: int
    "Number of units that were done when the step began."
    ahead: Callable[[], int] | None
    measured: Callable[[], Sequence[str]] | None = None
    notes: tuple[str, ...] = ()
    began: float = field(default_factory=time.monotonic)
    first: tuple[float, int] | None = None
    "Time and number of the first units; the time before, such as loading a model, is not part of the estimate."
    most: int = 0
    ended: bool = False

    def advance(self, n: int, notes: Sequence[str] | None = None) -> None:
        self.done += n
        if notes is not None:
            self.notes = tuple(notes)
        self.count()

    def count(self) -> int:
        """Return the units done, including those not counted yet until the step ends; the result never decreases."""
        ahead = 0 if self.ahead is None else self.ahead()
        if self.measured is not None:
            self.notes = tuple(self.measured()) or self.notes
        self.most = self.done if self.ended else max(self.most, self.done, min(self.total, self.done + ahead))
        if self.first is None and self.most > self.before:
            self.first = time.monotonic(), self.most
        return self.most

    def left_s(self) -> float | None:
        """Return the estimated seconds to the end; None before there is an estimate."""
        if self.first is None or self.most == self.first[1]:
            return None
        rate = (self.most - self.first[1]) / max(time.monotonic() - self.first[0], 1e-6)
        return (self.total - self.most) / rate

    def line(self) -> str:
        """Return the line for a log."""
        count, seconds = self.count(), time.monotonic() - self.began
        share = f" ({count / self.total:.0%})" if self.total else ""
        rate = (count - self.before) / seconds if seconds > 0 else 0.0
        speed = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
        parts = [f"{count:,}/{self.total:,} {self.unit}{share} in {seconds:.1f} s", f"{speed} {self.unit}/s"]
        left = None if self.ended else self.left_s()
        parts += [] if left is None else [f"{_in_words(left)} left"]
        return f"{self.label}: {', '.join([*parts, *self.notes])}"

    def bar(self) -> str:
        """Return the bar as text, with blanks up to a fixed width that cover a longer bar before it."""
        from rich.console import Console

        drawn = io.StringIO()
        Console(file=drawn, width=NOTEBOOK_COLUMNS, color_system=None, force_jupyter=False, legacy_windows=False).print(
            self
        )
        return drawn.getvalue().rstrip("\n").ljust(NOTEBOOK_COLUMNS)

    def parts(self, width: int) -> list[str]:
        """Return the parts of the line that fit into `width` columns; the empty part is the bar."""
        count, left = self.count(), self.left_s()
        clock = f"in {_clock(time.monotonic() - self.began)}" if self.ended else f"{_clock(left)} left" if left else ""
        # The parts are in the order of the line; those with the largest number are left out first.
        parts = [
            (2, self.label),
            (8, " " * NARROWEST_BAR),
            (0, f"{count:,}/{self.total:,}"),
            (7, self.unit),
            (3, clock),
            *((rank, note) for rank, note in zip((1, 4, 5, 9), self.notes, strict=False)),
        ]
        kept = [part for part in parts if part[1]]
        while sum(len(text) + 1 for _, text in kept) - 1 > width and len(kept) > 1:
            kept.remove(max(kept))
        return [text.strip() for _, text in kept]

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        width = options.max_width - 1  # a full line would wrap on some terminals
        parts = self.parts(width)
        room = width - sum(len(part) + 1 for part in parts)
        bar = ProgressBar(total=max(self.total, 1), completed=self.most if self.total else 1, width=min(40, room + 1))
        grid = Table.grid(padding=(0, 1, 0, 0), pad_edge=False)
        for _ in parts:
            grid.add_column(no_wrap=True, overflow="crop")
        grid.add_row(*(part or bar for part in parts))
        yield grid


def _bar(state: _State) -> Iterator[Advance]:
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True, highlight=False)
    live = Live(state, console=console, refresh_per_second=REFRESHES_PER_S, redirect_stdout=False)
    try:  # `with` would not stop what Ctrl-C interrupts while it starts
        live.start(refresh=True)
        yield state.advance
        state.ended = True
    finally:
        live.stop()


def _lines(state: _State, *, redraw: bool) -> Iterator[Advance]:
    """Print the state every few seconds; with `redraw` as a bar that replaces the one before."""
    last, every_s, end = state.began, LINE_EVERY_S, "\n"
    if redraw:
        every_s, end = 1 / REFRESHES_PER_S, "\r"
    printing, ended = threading.Lock(), threading.Event()

    def write(end: str) -> None:
        with suppress(OSError):  # a full disk stops no job; if the reader is gone, the command line does
            print(state.bar() if redraw else state.line(), end=end, file=sys.stderr, flush=True)

    def print_when_due() -> None:
        nonlocal last
        with printing:
            if time.monotonic() - last >= every_s and state.done < state.total and not state.ended:
                last = time.monotonic()
                write(end)

    def advance(n: int, notes: Sequence[str] | None = None) -> None:
        state.advance(n, notes)
        print_when_due()

    def watch() -> None:
        while not ended.wait(every_s):
            print_when_due()

    watching = threading.Thread(target=watch, name="progress", daemon=True)
    if state.ahead is not None:
        watching.start()
    try:
        yield advance
        with printing:
            state.ended = True
            write("\n")
    finally:
        ended.set()
        if state.ahead is not None:
            watching.join()


def _in_words(seconds: float) -> str:
    """Return seconds in their largest unit: 40 s, 12 min or 2.5 h."""
    if seconds < 60:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def _clock(seconds: float) -> str:
    """Return seconds as 1:02:03, or 2:03 below an hour."""
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{second:02}" if minutes >= 60 else f"{minutes}:{second:02}"
