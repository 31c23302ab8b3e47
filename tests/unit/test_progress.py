"""Progress goes to standard error: lines in a log, one line that fits on a terminal, nothing when switched off."""

import io
import os
import re
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.live import Live

from terminal import frames, on_terminal
from torchlake import progress as module
from torchlake.processes import environment
from torchlake.progress import progress

STEPS = """
import time
from torchlake.progress import progress
with progress("train", 4000, "steps", done=1000) as advance:
    for step in range(1001, 4001, 500):
        advance(500, ["loss 0.412", "macro_f1 0.913", f"best at step {step:,}"])
        time.sleep(0.2)
print("result")
"""


@pytest.fixture(autouse=True)
def _not_silenced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHLAKE_PROGRESS", raising=False)


def test_a_log_gets_the_last_line_at_least(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("predict", 10) as advance:
        advance(4)
        advance(6)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("predict: 10/10 rows (100%) in ")
    assert len(err.splitlines()) == 1


def test_a_log_gets_a_line_per_interval(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINE_EVERY_S", 0.0)
    with progress("train", 3, "steps") as advance:
        advance(1, ["loss 0.412"])
        advance(2, ["loss 0.314", "accuracy 0.9"])
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("train: 1/3 steps (33%) in ")
    assert first.endswith(" steps/s, loss 0.412")
    assert last.startswith("train: 3/3 steps (100%) in ")
    assert last.endswith(" steps/s, loss 0.314, accuracy 0.9")


def test_units_that_were_not_counted_yet_are_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LINE_EVERY_S", 0.01)
    asked = threading.Event()

    def ahead() -> int:
        asked.set()
        return 30

    with progress("predict", 100, done=20, ahead=ahead) as advance:
        assert asked.wait(30), "a log is written to while nothing advances"
        advance(40)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("predict: 50/100 rows (50%)")
    assert lines[-1].startswith("predict: 60/100 rows (60%)"), "at the end only what was counted is"


@pytest.mark.parametrize(
    ("done", "seconds", "words"), [(500, 2.0, "250 rows/s"), (1, 4.0, "0.25 rows/s"), (0, 0.0, "0 rows/s")]
)
def test_a_slow_rate_keeps_its_digits(done: int, seconds: float, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "monotonic", lambda: 100.0 + seconds)
    shown = module._State(label="predict", total=1000, unit="rows", done=done, before=0, ahead=None, began=100.0)
    assert shown.line().endswith(words)


def test_what_was_done_before_is_in_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "monotonic", lambda: 102.0)
    shown = module._State(label="predict", total=1000, unit="rows", done=900, before=800, ahead=None, began=100.0)
    assert shown.line() == "predict: 900/1,000 rows (90%) in 2.0 s, 50 rows/s"


@pytest.mark.parametrize(
    ("rows", "words"), [(40, "1 s left"), (960, "24 s left"), (9_000, "4 min left"), (800_000, "5.6 h left")]
)
def test_a_log_line_has_the_time_left(rows: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    shown = module._State(label="predict", total=20 + rows, unit="rows", done=0, before=0, ahead=None, began=0.0)
    shown.advance(10, ["loss 0.4"])  # the first 10 rows took 100 s, of which most was loading
    assert "left" not in shown.line(), "nothing is known yet"
    now[0] = 100.25
    shown.advance(10)
    assert shown.line().endswith(f" rows/s, {words}, loss 0.4")
    shown.ended = True
    assert "left" not in shown.line()


def test_a_line_to_a_closed_pipe_does_not_stop_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    closed = os.fdopen(theirs, "w")
    monkeypatch.setattr(sys, "stderr", closed)
    with progress("predict", 1) as advance:
        advance(1)
    with pytest.raises(BrokenPipeError):
        closed.close()  # the line is still in its buffer


def test_an_empty_table_divides_by_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("predict", 0):
        pass
    assert capsys.readouterr().err.startswith("predict: 0/0 rows in")


def test_an_error_inside_comes_out(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), progress("predict", 10) as advance:
        advance(1)
        raise KeyError("row")
    assert capsys.readouterr().err == ""


def test_a_notebook_gets_one_bar_that_is_drawn_over(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHLAKE_PROGRESS", "notebook")
    monkeypatch.setattr(module, "REFRESHES_PER_S", float("inf"))
    with progress("train", 3, "steps") as advance:
        advance(1, ["loss 0.412345"])
        advance(2, ["loss 0.3"])
    first, last = capsys.readouterr().err.split("\r")
    assert last.endswith("\n")
    assert re.fullmatch("train ━+ +1/3 steps loss 0.412345 *", first)
    assert re.fullmatch(r"train ━+ 3/3 steps in 0:\d\d loss 0.3 *\n", last)
    assert len(last) == len(first) + 1, "a shorter bar covers a longer one"


def test_a_bar_that_is_interrupted_while_it_starts_gives_standard_error_back(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []

    def refresh(live: Live) -> None:
        drawn.append(sys.stderr)
        if len(drawn) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(Live, "refresh", refresh)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    before = sys.stderr
    with pytest.raises(KeyboardInterrupt), progress("score", 10):
        raise AssertionError("it started")
    assert sys.stderr is before is not drawn[0]


def test_a_notebook_is_known_by_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not module.in_notebook()
    in_terminal = ModuleType("IPython")
    in_terminal.get_ipython = lambda: object()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", in_terminal)
    assert not module.in_notebook()
    in_terminal.get_ipython = lambda: SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    assert module.in_notebook()
    assert environment.local_environment(1, None)["TORCHLAKE_PROGRESS"] == "notebook", "ranks write there, too"
    monkeypatch.setenv("TORCHLAKE_PROGRESS", "0")
    assert environment.local_environment(1, None)["TORCHLAKE_PROGRESS"] == "0"


def test_it_can_be_silenced(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHLAKE_PROGRESS", "0")
    with progress("predict", 10) as advance:
        advance(10, ["loss 1"])
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("columns", "last"),
    [
        (120, r"4,000/4,000 steps in 0:\d\d loss 0.412 macro_f1 0.913 best at step 3,501"),
        pytest.param(
            80, r"4,000/4,000 steps in 0:\d\d loss 0.412 macro_f1 0.913 best at step 3,501", marks=pytest.mark.slow
        ),
        (40, r"train 4,000/4,000 in 0:\d\d loss 0.412"),
    ],
)
def test_a_terminal_of_any_width_gets_one_line_that_fits(columns: int, last: str) -> None:
    code, shown = on_terminal([sys.executable, "-c", STEPS], columns=columns)
    assert code == 0
    drawn = [frame for frame in frames(shown) if frame and frame != "result"]
    assert len(drawn) > 3
    assert all(frame.startswith("train ") for frame in drawn), "nothing wraps"
    assert max(map(len, drawn)) < columns
    assert not any("…" in frame for frame in drawn)
    assert re.search(f"{last}$", drawn[-1])
    assert any("left loss 0.412" in frame for frame in drawn)
    if columns == 120:
        assert "━" in drawn[-1]


def test_standard_output_gets_none_of_it(tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    code, shown = on_terminal(["sh", "-c", f'exec "$0" -c "$1" > {out}', sys.executable, STEPS], columns=80)
    assert code == 0
    assert out.read_text() == "result\n"
    assert "4,000/4,000 steps" in shown


@given(
    label=st.sampled_from(["train", "predict", "prepare", "evaluate"]),
    total=st.integers(0, 10**12),
    share=st.floats(0, 1),
    notes=st.lists(st.from_regex("[a-z0-9 .]{1,30}[a-z]", fullmatch=True), max_size=4),
    width=st.integers(1, 300),
    seconds=st.floats(0, 1e6),
)
def test_the_line_always_fits(
    label: str, total: int, share: float, notes: list[str], width: int, seconds: float
) -> None:
    """And the count is always there, where it fits at all."""
    done = int(share * total)
    shown = module._State(label=label, total=total, unit="rows", done=0, before=0, ahead=None)
    shown.advance(done // 2)
    shown.began -= seconds
    shown.advance(done - done // 2, notes)
    count = f"{done:,}/{total:,}"
    parts = shown.parts(width)
    assert count in parts
    assert len(parts) == 1 or sum(len(part) or module.NARROWEST_BAR for part in parts) + len(parts) - 1 <= width
    if len(count) < width:
        console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, legacy_windows=False)
        console.print(shown)
        (line,) = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        assert count in line
        assert len(line.rstrip()) < max(width, 2)


def test_it_never_goes_back() -> None:
    """A chunk whose worker died begins again: what it had scored is not taken back."""
    ahead = iter([10, 40, 0, 5, 90])
    shown = module._State(label="predict", total=100, unit="rows", done=20, before=20, ahead=lambda: next(ahead))
    assert [shown.count() for _ in range(5)] == [30, 60, 60, 60, 100]


@pytest.mark.parametrize(("seconds", "words"), [(0.4, "0:00"), (59.6, "1:00"), (3599, "59:59"), (7325, "2:02:05")])
def test_the_clock(seconds: float, words: str) -> None:
    assert module._clock(seconds) == words
