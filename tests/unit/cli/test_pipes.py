"""A pipe whose reader is gone ends a command quietly with 141, as it ends other tools."""

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from sweeps import sweep

RUN = [sys.executable, "-m", "torchlake"]
WORK = """
import sys, threading
from types import ModuleType
from torchlake.cli.main import main
from torchlake.processes.interrupts import announce_interrupt

def predict(*args, **options):
    with announce_interrupt("finished chunks are kept"):
        try:
            print("working", file=sys.stderr, flush=True)
            threading.Event().wait(60)
        finally:
            open(sys.argv[1], "w").close()  # what it saves

sys.modules["torchlake.scoring.predict"] = ModuleType("torchlake.scoring.predict")
sys.modules["torchlake.scoring.predict"].predict = predict
sys.exit(main(["predict", "m", "i", "o", *sys.argv[2:]]))
"""


@pytest.fixture
def closed() -> Iterator[int]:
    """The end of a pipe to write to, which has no reader."""
    ours, theirs = os.pipe()
    os.close(ours)
    yield theirs
    os.close(theirs)


@pytest.mark.parametrize(
    ("stream", "words"),
    sweep(
        product(["stdout", "stderr"], ["--help", "version --json", "schema"]),
        quick={("stdout", "--help"), ("stdout", "schema"), ("stderr", "version --json")},
    ),
)
def test_a_closed_pipe_ends_with_141_and_without_a_word(words: str, stream: str, closed: int) -> None:
    other = "stderr" if stream == "stdout" else "stdout"
    done = subprocess.run([*RUN, *words.split()], check=False, **{stream: closed, other: subprocess.PIPE})  # type: ignore[call-overload]
    assert done.returncode == 141
    assert b"rror" not in (done.stderr or b"")
    assert b"Traceback" not in (done.stderr or b"")


def test_an_error_is_still_shown_if_only_results_have_no_reader(closed: int) -> None:
    done = subprocess.run([*RUN, "verify", "none"], stdout=closed, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 65
    assert b"error: " in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_work_stops_and_saves_when_nothing_reads_what_it_reports(tmp_path: Path) -> None:
    words = [sys.executable, "-c", WORK, str(tmp_path / "saved")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        while process.stderr.readline() != b"working\n":
            assert process.poll() is None, "it ended before it worked"
        process.stderr.close()
        assert process.wait(60) == 141
        assert process.stdout.read() == b""
    assert (tmp_path / "saved").exists()


def test_a_closed_descriptor_is_not_a_pipe() -> None:
    done = subprocess.run(["sh", "-c", 'exec "$@" 2>&-', "sh", *RUN, "version"], capture_output=True, check=False)
    assert done.returncode == 0
    assert done.stdout.count(b"\n") == 1
