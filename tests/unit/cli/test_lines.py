"""`predict MODEL -`: each line of standard input is a text, and its answer a line of JSON."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import tiny
import torchlake as tl
from torchlake.cli.commands import lines
from torchlake.cli.main import main
from torchlake.tables.record import committed_files

MIXED = b"\xef\xbb\xbfa good film\r\na bore\n\n\xff\xfe odd\nlast"
TEXTS = ["a good film", "a bore", "", "\udcff odd", "last"]
ERRORS = [None, None, "null_input", "bad_utf8", None]


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`given(content)` makes these bytes the standard input, as a file."""
    with ExitStack() as files:

        def arm(content: bytes) -> None:
            path = tmp_path / "input.txt"
            path.write_bytes(content)
            monkeypatch.setattr(sys, "stdin", files.enter_context(open(path, encoding="utf-8")))

        yield arm


def test_every_line_is_answered_in_its_place(
    given: Any, tiny_model: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    given(MIXED)
    assert main(["predict", str(tiny_model), "-"]) == 0
    out = capfd.readouterr().out
    answers = [json.loads(line) for line in out.splitlines()]
    assert [answer["error"] for answer in answers] == ERRORS
    with tl.load(tiny_model) as model:
        expected = model(TEXTS)
    assert answers == [{**answer, "score": answer["score"] and pytest.approx(answer["score"])} for answer in expected]
    assert caplog.messages[-1] == "5 rows, of which 2 with an error (null_input 1, bad_utf8 1)"


@pytest.mark.parametrize(
    ("content", "words", "code", "rows"),
    [
        (b"", [], 0, 0),
        (b"\n", [], 4, 1),
        (b"\na good film\n", [], 0, 2),
        (b"\na good film\n", ["--max-error-rate", "0.4"], 4, 2),
        (b"a good film", ["--all-probabilities"], 0, 1),
    ],
)
def test_the_exit_status_follows_the_share_of_failed_rows(
    given: Any,
    tiny_model: Path,
    capfd: pytest.CaptureFixture[str],
    content: bytes,
    words: list[str],
    code: int,
    rows: int,
) -> None:
    given(content)
    assert main(["predict", str(tiny_model), "-", "--quiet", *words]) == code
    out, err = capfd.readouterr()
    assert len(out.splitlines()) == rows
    assert ("prob_good" in out) == ("--all-probabilities" in words)
    assert ("lines failed" in err) == (code == 4)
    assert code == 4 or err == "", "quiet shows errors and results only"


def test_with_an_output_lines_are_a_table(given: Any, tiny_model: Path, tmp_path: Path) -> None:
    given(MIXED)
    assert main(["predict", str(tiny_model), "-", str(tmp_path / "scored"), "--quiet"]) == 0
    scored = pq.read_table(committed_files(tmp_path / "scored"))
    assert scored["error"].to_pylist() == ERRORS
    with tl.load(tiny_model) as model:
        assert scored["label"].to_pylist() == [answer["label"] for answer in model(TEXTS)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-", "--key", "id"], "--key needs an OUTPUT"),
        (["-", "--processes", "2"], "--processes needs an OUTPUT"),
        (["-", "--input", "more.csv"], "--input needs an OUTPUT"),
        (["-", "out", "--input", "more.csv"], "Standard input (-) is scored alone"),
        (["-", "out", "--text", "review"], "--text: a line of standard input has no columns"),
        (["rows.csv"], "Name an OUTPUT for the rows of rows.csv"),
        (["-", "--json"], "--json prints one object"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_line_is_read(
    tiny_model: Path, words: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", str(tiny_model), *words]) == 64
    assert message in capfd.readouterr().err


@pytest.mark.parametrize("output", [[], ["out"]])
def test_a_model_of_two_columns_is_refused(
    given: Any, tiny_bert: Path, tmp_path: Path, output: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    pairs = tiny.build_model(tmp_path / "pairs", encoder=tiny_bert, spec=replace(tiny.SPEC, text_pair="answer"))
    given(b"a\n")
    assert main(["predict", str(pairs), "-", *output]) == 64
    assert "reads the columns text, answer, and a line of standard input is one text" in capfd.readouterr().err


def test_lines_are_read_in_bounded_pieces(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "READ_BYTES", 7)
    texts = [b"w" * length for length in (0, 1, 5, 6, 7, 8, 20, 0, 3)]
    given(b"\r\n".join(texts) + b"\r\n")
    pieces = list(lines.read_lines())
    assert [line for piece in pieces for line in piece] == texts
    assert max(sum(map(len, piece)) for piece in pieces) <= 20 + 7
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 10)
    given(b"short\n" + b"w" * 30)
    with pytest.raises(tl.errors.DataError, match="standard input, line 2: longer than 10 bytes"):
        list(lines.read_lines())


def test_answers_come_as_soon_as_their_lines_and_a_closed_pipe_ends_it(tiny_model: Path) -> None:
    words = [sys.executable, "-m", "torchlake", "predict", str(tiny_model), "-"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, env=environment, bufsize=0, **pipes) as process:  # type: ignore[call-overload]
        for text in (b"great film\n", b"a bore\n"):
            process.stdin.write(text)
            assert json.loads(process.stdout.readline())["label"] in ("good", "bad")
        process.stdout.close()
        process.stdin.write(b"one more\n")
        assert process.wait(60) == 141
        assert b"Traceback" not in process.stderr.read()


def test_a_ctrl_c_that_does_not_interrupt_the_read_stops_it_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one in the moment before the read blocks: the system gives this one to another thread."""
    ours, theirs = os.pipe()
    main_thread = Path(f"/proc/self/task/{threading.main_thread().native_id}/stat")

    def press() -> None:
        asleep = 0
        while asleep < 200:  # in the read: it would have taken the interpreter lock, which each look gives up
            asleep = asleep + 1 if main_thread.read_text().rpartition(")")[2].split()[0] == "S" else 0
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    with os.fdopen(theirs, "wb"), os.fdopen(ours) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        pressing = threading.Thread(target=press)
        pressing.start()
        with pytest.raises(KeyboardInterrupt):
            next(lines.read_lines())
        pressing.join()


def test_one_line_is_one_row(given: Any, tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    given(b"great film\n")
    assert main(["predict", str(tiny_model), "-"]) == 0
    assert caplog.messages[-1] == "1 row"
