"""Progress goes to standard error: lines in a log, a bar on a terminal, nothing when told so."""

import os
import pty
import subprocess
import sys

import pytest

from torchlake import progress as module
from torchlake.progress import progress

SCRIPT = """
from torchlake.progress import progress
with progress("predict", 4) as advance:
    advance(1); advance(3)
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
        advance(1)
        advance(2)
    assert [line.split(" in ")[0] for line in capsys.readouterr().err.splitlines()] == [
        "train: 1/3 steps (33%)",
        "train: 3/3 steps (100%)",
    ]


@pytest.mark.parametrize(
    ("done", "seconds", "words"), [(500, 2.0, "250 rows/s"), (1, 4.0, "0.25 rows/s"), (0, 0.0, "0 rows/s")]
)
def test_a_slow_rate_keeps_its_digits(
    done: int, seconds: float, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    module._line("predict", done, 1000, "rows", seconds)
    assert capsys.readouterr().err.strip().endswith(words)


def test_an_empty_table_divides_by_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("predict", 0):
        pass
    assert capsys.readouterr().err.startswith("predict: 0/0 rows in")


def test_an_error_inside_comes_out(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), progress("predict", 10) as advance:
        advance(1)
        raise KeyError("row")
    assert capsys.readouterr().err == ""


def test_it_can_be_silenced(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHLAKE_PROGRESS", "0")
    with progress("predict", 10) as advance:
        advance(10)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_bar_and_standard_output_none_of_it() -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=theirs, env=environment, check=True
        )
        shown = os.read(ours, 1 << 16).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.stdout == b"result\n"
    assert "predict" in shown
    assert "4/4 rows" in shown
