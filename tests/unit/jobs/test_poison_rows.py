"""Attempt: which rows were running when the process died, and what follows from it."""

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

import reading_crashes
from pids import wait_for
from torchlake.jobs.worker import poison_rows
from torchlake.jobs.worker.poison_rows import Attempt, Step

ROWS = 9


def die(folder: Path, *steps: tuple[Step, list[int] | None] | None, trace: str = "") -> None:
    """An attempt at chunk 0 in a process of its own, which is killed after it has begun the last step (None: none)."""

    def attempt() -> None:
        made = begun(folder)
        for step in steps:
            if step is None:
                made.idle()
            else:
                made.running(*step).__enter__()
        if trace:
            made.trace.write_text(trace)

    ended(attempt)


def begun(folder: Path, limit_s: float = 60.0) -> Attempt:
    return Attempt(folder, 0, ROWS, limit_s)


def scoring(*batches: list[int]) -> list[tuple[Step, list[int]]]:
    return [("score", rows) for rows in batches]


def ended(work: Callable[[], None]) -> int:
    """How a process ended that does this and is then killed: 1, by the watchdog, or -9."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@contextmanager
def elsewhere(folder: Path, rows: list[int]) -> Iterator[Path]:
    """The file of an attempt on another machine, which scores these rows."""
    path = folder / "0-other.json"
    state = {**reading_crashes.DEAD, "machine": "another", "pid": os.getpid(), "started": 0}
    path.write_text("".join(json.dumps(line) + "\n" for line in (state, ["score", rows])))
    yield path


def known(folder: Path, step: Step = "score") -> tuple[list[int], dict[int, str]]:
    made = begun(folder)
    made.close()
    return sorted(made.suspects[step]), made.quarantined


def test_a_first_death_makes_the_running_rows_suspects(tmp_path: Path) -> None:
    die(tmp_path, *scoring([1, 2, 3], [7, 8]))
    assert known(tmp_path) == ([7, 8], {})


def test_a_second_death_alone_quarantines_the_row(tmp_path: Path) -> None:
    die(tmp_path, *scoring([7, 8]))
    die(tmp_path, *scoring([7], [8]))
    assert known(tmp_path) == ([7], {8: "killed_process: twice"})


def test_what_is_known_stays_over_more_deaths(tmp_path: Path) -> None:
    die(tmp_path, *scoring([7, 8]))
    die(tmp_path, *scoring([7], [8]))
    die(tmp_path, *scoring([7]), None, *scoring([1, 2]))
    assert known(tmp_path) == ([1, 2, 7], {8: "killed_process: twice"})


def test_one_death_never_quarantines_a_row_that_happened_to_be_alone(tmp_path: Path) -> None:
    die(tmp_path, *scoring([5]))
    assert known(tmp_path) == ([5], {})


def test_a_death_between_batches_makes_no_suspects(tmp_path: Path) -> None:
    die(tmp_path, *scoring([5]), None)
    assert known(tmp_path) == ([], {})


def test_a_torn_last_line_is_ignored(tmp_path: Path) -> None:
    die(tmp_path, *scoring([4]))
    (path,) = tmp_path.glob("*.json")
    with open(path, "a") as file:
        file.write('["score", [5, 6')
    assert known(tmp_path) == ([4], {})


def test_a_stack_left_by_the_watchdog_is_a_timeout(tmp_path: Path) -> None:
    for _ in range(2):
        die(tmp_path, *scoring([4]), trace="Timeout (0:00:02)!")
    assert known(tmp_path)[1] == {4: "timeout: gave no answer, twice"}


@pytest.mark.parametrize("step", ["read", "tokenize"])
def test_all_rows_of_a_chunk_are_suspects_of_a_step_that_it_takes_as_a_whole(tmp_path: Path, step: Step) -> None:
    die(tmp_path, (step, None))
    made = begun(tmp_path)
    assert {step for step, rows in made.suspects.items() if rows} == {step}
    assert made.suspects[step] == set(range(ROWS))
    assert made.alone
    made.close()


def test_a_row_is_quarantined_that_was_alone_in_the_step_that_it_is_a_suspect_of(tmp_path: Path) -> None:
    die(tmp_path, ("tokenize", None))
    die(tmp_path, *scoring([3]))
    die(tmp_path, ("tokenize", [4]))
    die(tmp_path, ("tokenize", [5]), trace="Timeout (0:00:02)!")
    suspects, quarantined = known(tmp_path, "tokenize")
    assert suspects == [0, 1, 2, 3, 6, 7, 8]
    assert quarantined == {
        4: "killed_process: twice, while it was tokenized",
        5: "timeout: gave no answer, twice, while it was tokenized",
    }


def test_a_quarantined_row_leaves_its_chunk_without_suspects(tmp_path: Path) -> None:
    die(tmp_path, *scoring([5]))
    die(tmp_path, *scoring([5]))
    made = begun(tmp_path)
    assert (made.alone, made.quarantined.keys()) == (False, {5})
    made.close()


@pytest.mark.parametrize(("deaths", "lost"), [(0, 0), (1, 0), (2, 1), (3, 2)])
def test_lost_reads_are_counted_once_nothing_runs_beside_them(tmp_path: Path, deaths: int, lost: int) -> None:
    for _ in range(deaths):
        die(tmp_path, ("read", None))
    made = begun(tmp_path)
    assert (made.lost_reads, made.alone) == (lost, deaths > 0)
    made.close()


@pytest.mark.parametrize("first", ["main", "thread"])
def test_two_threads_have_a_deadline_each(tmp_path: Path, first: str) -> None:
    """Whichever began last: the one that hangs leaves its stack, the other one nothing."""

    def attempt() -> None:
        done, hangs = Attempt(tmp_path, 1, ROWS, 60.0), begun(tmp_path, limit_s=0.5)
        hanging, going_on = threading.Event(), threading.Event()

        def hang() -> None:
            going_on.wait()
            with hangs.running("tokenize", [0]):
                hanging.set()
                threading.Event().wait()

        threading.Thread(target=hang, daemon=True).start()
        if first == "thread":
            going_on.set()
            hanging.wait()
        with done.running("score", [1]):
            going_on.set()
            hanging.wait()
        with done.running("score", [2]):
            threading.Event().wait(30)

    assert ended(attempt) == 1
    stacks = {path.name[0]: path.stat().st_size > 0 for path in tmp_path.glob("*.trace")}
    assert stacks == {"0": True, "1": False}


def test_a_step_that_ends_in_time_ends_no_process(tmp_path: Path) -> None:
    def attempt() -> None:
        made = begun(tmp_path, limit_s=0.1)
        with made.running("score", [1]):
            pass
        threading.Event().wait(0.3)

    assert ended(attempt) == -signal.SIGKILL


def test_a_finished_chunk_leaves_nothing(tmp_path: Path) -> None:
    die(tmp_path, *scoring([4]))
    made = begun(tmp_path)
    with made.running("score", [4]):
        made.close()
    assert list(tmp_path.iterdir()) == []


def test_an_attempt_that_runs_at_the_same_time_has_not_died(tmp_path: Path) -> None:
    """A speculative twin: its running rows are no suspects, and its file stays its own."""
    source = (
        "import sys, threading; from pathlib import Path; from torchlake.jobs.worker.poison_rows import Attempt\n"
        "twin = Attempt(Path(sys.argv[1]), 0, 9, 60.0)\n"
        "with twin.running('score', [1, 2]): print('running', flush=True); sys.stdin.read()\n"
        "twin.close()"
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


def test_an_attempt_that_died_before_it_began_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it may when its process already works on another chunk: nothing would say on which machine it ran."""
    source = (
        "import os, signal, sys; from pathlib import Path; from torchlake.jobs.worker import poison_rows\n"
        "poison_rows.this_process = lambda: os.kill(os.getpid(), signal.SIGKILL)\n"
        "poison_rows.Attempt(Path(sys.argv[1]), 0, 9, 60.0)"
    )
    assert subprocess.run([sys.executable, "-c", source, str(tmp_path)], check=False).returncode == -9
    monkeypatch.setattr(poison_rows, "SILENT_S", 1e9)
    assert known(tmp_path) == ([], {})


def test_an_attempt_on_another_machine_has_died_when_its_heartbeat_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poison_rows, "SILENT_S", 0.5)
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
    monkeypatch.setattr(poison_rows, "BEAT_S", 0.01)
    made = begun(tmp_path)
    os.utime(made.path, (0, 0))
    wait_for(lambda: made.path.stat().st_mtime > 0)
    made.close()
