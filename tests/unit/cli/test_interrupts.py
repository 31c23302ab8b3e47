"""Ctrl-C prints at once what happens, and then does what it did before."""

import json
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import tiny
import torchlake as tl
import training_runs as runs
from terminal import CTRL_C, frames, on_terminal
from torchlake.jobs import table_job
from torchlake.outputs.parts import Part
from torchlake.processes.interrupts import STOPPING, announce_interrupt, restored_interrupt

SCRIPT = """
import threading
from torchlake.processes.interrupts import announce_interrupt
with announce_interrupt("all is kept"):
    try:
        print("working", flush=True)
        threading.Event().wait(60)
    except KeyboardInterrupt:
        try:
            print("asked to stop", flush=True)
            threading.Event().wait(60)
        except KeyboardInterrupt:
            print("aborted", flush=True)
"""


def test_on_a_terminal_the_first_one_is_answered_and_the_second_aborts() -> None:
    # Ctrl-C discards what the terminal has not shown yet, so whole lines are awaited.
    keys = [("working\r\n", CTRL_C), ("asked to stop\r\n", CTRL_C)]
    code, shown = on_terminal([sys.executable, "-c", SCRIPT], columns=80, keys=keys)
    assert code == 0
    lines = [line for line in shown.replace("^C", "").split() if line]
    assert " ".join(lines) == f"working {STOPPING} asked to stop aborted"


def test_what_handled_it_before_handles_it_again() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), announce_interrupt("all is kept"):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_handler_that_a_library_set_meanwhile_stays() -> None:
    def own(number: int, frame: Any) -> None: ...

    before = signal.getsignal(signal.SIGINT)
    try:
        with announce_interrupt("all is kept"):
            signal.signal(signal.SIGINT, own)
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("how", [signal.SIG_IGN, signal.SIG_DFL])
def test_nothing_is_printed_where_python_does_not_handle_it(how: signal.Handlers) -> None:
    before = signal.signal(signal.SIGINT, how)
    try:
        with announce_interrupt("all is kept"):
            assert signal.getsignal(signal.SIGINT) is how
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_thread_changes_no_handler() -> None:
    before, found = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with announce_interrupt("all is kept"):
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [before]


class Interrupting(tiny.Here):
    """An engine whose user presses Ctrl-C while it trains, or while it scores the second chunk."""

    def run_chunks(self, make_worker: Any, chunks: Any, **options: Any) -> Any:
        for done, result in enumerate(super().run_chunks(make_worker, chunks, **options)):
            if done == 1 and not isinstance(result, Part):
                signal.raise_signal(signal.SIGINT)
            yield result

    def launch(self, *args: Any, **options: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("it goes on")


def test_a_training_prints_that_it_stops_and_has_saved_nothing(
    tmp_path: Path, tiny_bert: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyboardInterrupt) as stop:
        tl.train(run=tmp_path / "run", engine=Interrupting(), **runs.job(tmp_path, tiny_bert))
    assert f"\n{STOPPING}\n" in capfd.readouterr().err
    assert stop.value.__notes__ == ["nothing was saved yet"]


def test_a_scoring_prints_that_finished_chunks_are_kept(
    tmp_path: Path, tiny_model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    table, output = tmp_path / "rows.parquet", tmp_path / "scored"
    pq.write_table(tiny.reviews(60), table)
    with pytest.raises(KeyboardInterrupt) as stop:
        tl.predict(tiny_model, table, output, engine=Interrupting(), chunk_rows=10)
    assert stop.value.__notes__ == [table_job.KEPT] == ["finished chunks are kept"]
    assert f"\n{STOPPING}\n" in capfd.readouterr().err
    done = tl.predict(tiny_model, table, output, engine=tiny.Here(), chunk_rows=10)
    assert done.rows_out == 60
    assert done.record["provenance"]["rows_scored"] < 60, "what was finished was kept"


@pytest.mark.slow
def test_a_training_on_a_terminal_saves_at_the_first_and_is_aborted_by_the_second(
    tmp_path: Path, tiny_bert: Path
) -> None:
    """The command itself; it resumes from what the first one saved."""
    sections = runs.job(tmp_path, tiny_bert, epochs=500)
    settings = [
        f"{part}.{name}={value}" for part in ("data", "model", "train") for name, value in flat_of(sections[part])
    ]
    words = [sys.executable, "-m", "torchlake", "train", "--run", str(tmp_path / "run")]
    words += [word for setting in settings for word in ("--set", setting)]
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    code, shown = on_terminal(words, columns=80, keys=[("loss", CTRL_C)], environment=environment)
    assert code == 130
    said = " ".join(shown.partition(STOPPING)[2].split())
    assert re.search(
        r"Stopped by Ctrl-C after step \d+ of 4,500; saved\. To continue, run it again: torchlake train", said
    )
    assert said.count("again") == 1, "one sentence"
    assert any((tmp_path / "run" / "checkpoints").iterdir())
    keys = [("loss", CTRL_C), (STOPPING, CTRL_C)]
    code, shown = on_terminal(words, columns=40, keys=keys, environment=environment)
    assert code == 130
    assert "training on 1 rank from step" in " ".join(shown.split())
    assert re.search(r"Stopped by Ctrl-C; the checkpoint of step \d+ is kept\. To continue", " ".join(shown.split()))
    drawn = [frame for frame in frames(shown.replace("^C", "")) if frame.startswith(("train ", "prepare "))]
    assert max(map(len, drawn)) < 40


def flat_of(section: Any) -> list[tuple[str, Any]]:
    return [(name, json.dumps(value)) for name, value in section.items()]


def test_a_handler_that_a_library_leaves_is_replaced_by_the_one_before() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError, match="failed"), restored_interrupt():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise ValueError("failed")
    assert signal.getsignal(signal.SIGINT) is before
