"""Strikes: which rows were running when the process died, and what follows from it."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pids import wait_for
from torchlake import strikes
from torchlake.strikes import Strikes


def die(folder: Path, *running: list[int], trace: str = "") -> None:
    """An attempt at chunk 0 in a process of its own, which is killed after it has begun to run the rows."""

    def attempt() -> None:
        made = Strikes(folder, 0)
        for rows in running:
            made.running(rows)
        if trace:
            made.trace.write_text(trace)

    _killed(attempt)


def _killed(work: Callable[[], None]) -> None:
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


@contextmanager
def elsewhere(folder: Path, *running: list[int]) -> Iterator[Path]:
    """The file of an attempt on another machine."""
    path = folder / "0-other.json"
    state = {"suspects": [], "quarantined": {}, "machine": "another", "pid": os.getpid(), "started": 0}
    path.write_text("".join(json.dumps(line) + "\n" for line in (state, *running)))
    yield path


def known(folder: Path) -> tuple[list[int], dict[int, str]]:
    made = Strikes(folder, 0)
    made.close()
    return made.suspects, made.quarantined


def test_a_first_death_makes_the_running_rows_suspects(tmp_path: Path) -> None:
    die(tmp_path, [1, 2, 3], [7, 8])
    assert known(tmp_path) == ([7, 8], {})


def test_a_second_death_alone_quarantines_the_row(tmp_path: Path) -> None:
    die(tmp_path, [7, 8])
    die(tmp_path, [7], [8])
    assert known(tmp_path) == ([7], {8: "killed_process: twice"})


def test_what_is_known_stays_over_more_deaths(tmp_path: Path) -> None:
    die(tmp_path, [7, 8])
    die(tmp_path, [7], [8])
    die(tmp_path, [7], [], [1, 2])
    assert known(tmp_path) == ([1, 2, 7], {8: "killed_process: twice"})


def test_one_death_never_quarantines_a_row_that_happened_to_be_alone(tmp_path: Path) -> None:
    die(tmp_path, [5])
    assert known(tmp_path) == ([5], {})


def test_a_death_between_batches_makes_no_suspects(tmp_path: Path) -> None:
    die(tmp_path, [5], [])
    assert known(tmp_path) == ([], {})


def test_a_torn_last_line_is_ignored(tmp_path: Path) -> None:
    die(tmp_path, [4])
    (path,) = tmp_path.glob("*.json")
    with open(path, "a") as file:
        file.write("[5, 6")
    assert known(tmp_path) == ([4], {})


def test_a_stack_left_by_the_watchdog_is_a_timeout(tmp_path: Path) -> None:
    for _ in range(2):
        die(tmp_path, [4], trace="Timeout (0:00:02)!")
    assert known(tmp_path)[1] == {4: "timeout: gave no answer, twice"}


def test_a_finished_chunk_leaves_nothing(tmp_path: Path) -> None:
    die(tmp_path, [4])
    made = Strikes(tmp_path, 0)
    made.running([4])
    made.close()
    assert list(tmp_path.iterdir()) == []


def test_an_attempt_that_runs_at_the_same_time_has_not_died(tmp_path: Path) -> None:
    """A speculative twin: its running rows are no suspects, and its file stays its own."""
    source = (
        "import sys, threading; from pathlib import Path; from torchlake.strikes import Strikes\n"
        "twin = Strikes(Path(sys.argv[1]), 0); twin.running([1, 2]); print('running', flush=True)\n"
        "sys.stdin.read(); twin.close()"
    )
    twin = subprocess.Popen(
        [sys.executable, "-c", source, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert twin.stdout is not None
    assert twin.stdout.readline() == "running\n"
    assert known(tmp_path) == ([], {})
    assert len(list(tmp_path.glob("*.json"))) == 1
    twin.communicate("")
    assert twin.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_an_attempt_on_another_machine_has_died_when_its_heartbeat_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strikes, "SILENT_S", 0.5)
    with elsewhere(tmp_path, [3, 4]):
        assert known(tmp_path) == ([3, 4], {})


def test_an_attempt_on_another_machine_whose_heart_beats_has_not_died(tmp_path: Path) -> None:
    with elsewhere(tmp_path, [3, 4]) as path:
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(0.05):
                os.utime(path)

        beating = threading.Thread(target=beat)
        beating.start()
        try:
            assert known(tmp_path) == ([], {})
        finally:
            ended.set()
            beating.join()
        assert path.exists()


def test_the_heart_beats_while_rows_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strikes, "BEAT_S", 0.01)
    made = Strikes(tmp_path, 0)
    os.utime(made.path, (0, 0))
    wait_for(lambda: made.path.stat().st_mtime > 0)
    made.close()
