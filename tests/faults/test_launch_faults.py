"""Launched groups under fire: whoever is killed, stopped or deaf, no process is left and nobody waits for ever.

Each test starts a launcher of its own, in which ranks leave their pids in files; only those pids are signalled.
"""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from pids import gone, pid, wait_for
from sweeps import sweep

ROOT = Path(__file__).parents[2]
NO_ORPHAN_S = 5.0

PREAMBLE = """
import os, signal, subprocess, sys, threading, time
from pathlib import Path
from pids import note, wait_for
from torchlake.engines.local import Local
from torchlake.errors import Interrupted, TorchlakeError

folder = Path(sys.argv[1])
rank = lambda: os.environ["RANK"]
forever = lambda: threading.Event().wait()
"""
EPILOGUE = """
try:
    job()
except TorchlakeError as error:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
"""


class Launcher:
    """A script that launches, in a process of its own; killed at the end of the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, source: str) -> subprocess.Popen[bytes]:
        """Start the script (it defines `job`), with its output in files: a pipe would be held open by orphans."""
        script = self.folder / "script.py"
        script.write_text(PREAMBLE + textwrap.dedent(source) + EPILOGUE)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])}
        with open(self.folder / "stdout", "wb") as out, open(self.folder / "stderr", "wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, str(script), str(self.folder)], stdout=out, stderr=err, env=environment
            )
        return self.process

    def pids(self, *names: str) -> list[int]:
        return [pid(self.folder, name) for name in names]

    def status(self, *, seconds: float = 30.0) -> int:
        return self.process.wait(timeout=seconds)

    def said(self) -> str:
        return (self.folder / "stderr").read_text(errors="replace")


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    made = Launcher(tmp_path)
    yield made
    made.process.kill()
    made.process.wait()
    numbers = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    try:
        wait_for(lambda: all(gone(number) for number in numbers), seconds=NO_ORPHAN_S)
    finally:
        for number in numbers:
            if not gone(number):
                os.kill(number, signal.SIGKILL)


def assert_gone(numbers: list[int]) -> None:
    wait_for(lambda: all(map(gone, numbers)), seconds=NO_ORPHAN_S)


SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
GROUP = """
def train():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if rank() == "1":
        grandchild = "import sys; sys.path[:] = sys.argv[2:]\\n" \\
            "from pathlib import Path; from pids import note; import threading, signal\\n" \\
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\\n" \\
            "note(Path(sys.argv[1]), 'grandchild'); threading.Event().wait()"
        subprocess.Popen([sys.executable, "-c", grandchild, str(folder), *sys.path])
    note(folder, "rank" + rank())
    forever()

note(folder, "launcher")
job = lambda: Local(processes=2).launch(train)
"""


def test_a_killed_launcher_leaves_no_rank_and_no_grandchild(launcher: Launcher) -> None:
    launcher.start(GROUP)
    numbers = launcher.pids("rank0", "rank1", "grandchild")
    launcher.process.kill()
    assert_gone(numbers)


def test_a_killed_launcher_leaves_no_stopped_rank(launcher: Launcher) -> None:
    launcher.start(GROUP)
    numbers = launcher.pids("rank0", "rank1", "grandchild")
    os.kill(numbers[1], signal.SIGSTOP)
    launcher.process.kill()
    assert_gone(numbers)


def test_a_killed_launcher_leaves_no_rank_in_a_collective(launcher: Launcher) -> None:
    launcher.start(
        """
        def train():
            import torch
            import torch.distributed as dist
            dist.init_process_group("gloo")
            note(folder, "rank" + rank())
            if rank() == "0":
                dist.all_reduce(torch.ones(1))  # rank 1 never joins
            forever()

        job = lambda: Local(processes=2).launch(train)
        """
    )
    numbers = launcher.pids("rank0", "rank1")
    launcher.process.kill()
    assert_gone(numbers)


@pytest.mark.parametrize("after_s", sweep([0.0, 0.02, 0.05, 0.1, 0.2], quick={0.0, 0.1}))
def test_a_launcher_killed_while_it_starts_leaves_nothing(launcher: Launcher, after_s: float) -> None:
    launcher.start(GROUP)
    launcher.pids("launcher")
    time.sleep(after_s)  # the moment of the fault, not a wait for anything
    launcher.process.kill()
    launcher.process.wait()
    wait_for(lambda: not _mentioning(launcher.folder), seconds=NO_ORPHAN_S)


def _mentioning(folder: Path) -> list[str]:
    """The processes whose command line names `folder`, as that of every rank does: it is on its sys.path."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if str(folder).encode() in path.read_bytes():
                found.append(path.parent.name)
    return found


def test_a_launcher_killed_beside_its_watchdog_leaves_no_rank(launcher: Launcher) -> None:
    launcher.start(
        """
        def train():
            note(folder, "rank" + rank())
            forever()

        job = lambda: Local(processes=2).launch(train)
        """
    )
    numbers = launcher.pids("rank0", "rank1")
    children = subprocess.run(
        ["pgrep", "-P", str(launcher.process.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    (watchdog,) = {int(number) for number in children} - set(numbers)
    os.kill(watchdog, signal.SIGKILL)
    launcher.process.kill()
    assert_gone(numbers)


def test_a_killed_chunk_job_leaves_no_worker(launcher: Launcher) -> None:
    launcher.start(
        """
        def make():
            def worker(chunks):
                for chunk in chunks:
                    note(folder, f"worker{chunk}")
                    forever()
                    yield chunk
            return worker

        job = lambda: list(Local(processes=2).run_chunks(make, range(2)))
        """
    )
    numbers = launcher.pids("worker0", "worker1")
    launcher.process.kill()
    assert_gone(numbers)


@pytest.mark.parametrize(("signum", "status"), sweep(SIGNALS, quick=[(signal.SIGINT, 130)]))
def test_a_signal_stops_a_chunk_job_within_five_seconds(launcher: Launcher, signum: int, status: int) -> None:
    launcher.start(
        """
        def make():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            def worker(chunks):
                for chunk in chunks:
                    note(folder, f"worker{chunk}")
                    forever()
                    yield chunk
            return worker

        def stopped(signum, frame):
            raise Interrupted("stopped", signum=signum)

        signal.signal(signal.SIGINT, stopped)
        signal.signal(signal.SIGTERM, stopped)
        job = lambda: list(Local(processes=2).run_chunks(make, range(2)))
        """
    )
    numbers = launcher.pids("worker0", "worker1")
    os.kill(launcher.process.pid, signum)
    assert launcher.status(seconds=5) == status
    assert_gone(numbers)


def test_a_killed_rank_is_named_and_the_others_end(launcher: Launcher) -> None:
    launcher.start(GROUP)
    numbers = launcher.pids("rank0", "rank1", "grandchild")
    os.kill(numbers[1], signal.SIGKILL)
    assert launcher.status() == 70
    assert "RankFailed: rank 1 was killed by SIGKILL (out of memory? see the kernel log)" in launcher.said()
    assert_gone(numbers)


@pytest.mark.slow
def test_a_killed_rank_is_the_cause_not_its_peers_broken_connection(launcher: Launcher) -> None:
    launcher.start(
        """
        def train():
            import torch
            import torch.distributed as dist
            dist.init_process_group("gloo")
            note(folder, "rank" + rank())
            if rank() == "0":
                dist.all_reduce(torch.ones(1))
            forever()

        job = lambda: Local(processes=2).launch(train)
        """
    )
    numbers = launcher.pids("rank0", "rank1")
    os.kill(numbers[1], signal.SIGKILL)
    assert launcher.status() == 70
    assert "RankFailed: rank 1 was killed by SIGKILL" in launcher.said()


@pytest.mark.slow
def test_a_stopped_rank_is_killed_with_the_rest(launcher: Launcher) -> None:
    launcher.start(GROUP)
    numbers = launcher.pids("rank0", "rank1", "grandchild")
    os.kill(numbers[0], signal.SIGSTOP)
    os.kill(numbers[1], signal.SIGKILL)
    assert launcher.status() == 70
    assert_gone(numbers)


def test_the_stacks_of_the_other_ranks_are_shown(launcher: Launcher) -> None:
    launcher.start(
        """
        def stuck_in_the_third_layer():
            note(folder, "rank0")
            forever()

        def train():
            if rank() == "0":
                stuck_in_the_third_layer()
            wait_for((folder / "rank0.pid").exists)
            raise ValueError("the cause")

        job = lambda: Local(processes=2).launch(train)
        """
    )
    assert launcher.status() == 70
    assert "in stuck_in_the_third_layer" in launcher.said()
    assert "rank 1 failed with ValueError: the cause" in launcher.said()


@pytest.mark.parametrize(("signum", "status"), sweep(SIGNALS, quick=[(signal.SIGTERM, 143)]))
def test_ranks_may_finish_after_a_signal(launcher: Launcher, signum: int, status: int) -> None:
    launcher.start(
        """
        def train():
            asked = threading.Event()
            signal.signal(signal.SIGTERM, lambda signum, frame: asked.set())
            note(folder, "rank" + rank())
            asked.wait()
            (folder / f"saved{rank()}").touch()
            raise Interrupted("saved at step 7; run the same command again", signum=signal.SIGTERM)

        def stopped(signum, frame):
            raise Interrupted("stopped", signum=signum)

        signal.signal(signal.SIGTERM, stopped)  # SIGINT stays Python's: KeyboardInterrupt
        job = lambda: Local(processes=2).launch(train)
        """
    )
    numbers = launcher.pids("rank0", "rank1")
    os.kill(launcher.process.pid, signum)
    assert launcher.status() == status
    assert (launcher.folder / "saved0").exists()
    assert (launcher.folder / "saved1").exists()
    assert "Interrupted: saved at step 7; run the same command again" in launcher.said()
    assert_gone(numbers)


def test_ranks_that_ignore_the_signal_die_after_the_grace(launcher: Launcher) -> None:
    launcher.start(GROUP.replace("launch(train)", "launch(train, grace_s=0.5)"))
    numbers = launcher.pids("rank0", "rank1", "grandchild")
    began = time.monotonic()
    os.kill(launcher.process.pid, signal.SIGINT)
    assert launcher.status(seconds=10) == 130
    assert time.monotonic() - began >= 0.5
    assert_gone(numbers)


def test_a_second_signal_ends_the_grace(launcher: Launcher) -> None:
    launcher.start(
        """
        def train():
            signal.signal(signal.SIGTERM, lambda signum, frame: note(folder, "asked" + rank()))
            note(folder, "rank" + rank())
            while True:
                forever()

        job = lambda: Local(processes=2).launch(train, grace_s=600)
        """
    )
    numbers = launcher.pids("rank0", "rank1")
    os.kill(launcher.process.pid, signal.SIGINT)
    launcher.pids("asked0", "asked1")
    os.kill(launcher.process.pid, signal.SIGINT)
    assert launcher.status(seconds=10) != 0
    assert_gone(numbers)


def test_undecodable_output_is_harmless(launcher: Launcher) -> None:
    launcher.start(
        """
        def train():
            os.write(1, b"\\xff\\xfe broken \\x80\\n")
            os.write(2, b"\\xff\\xfe broken \\x80\\n")
            return "fine"

        def job():
            assert Local(processes=2).launch(train) == "fine"
        """
    )
    assert launcher.status() == 0, launcher.said()
    assert (launcher.folder / "stdout").read_bytes() == b"\xff\xfe broken \x80\n" * 2


def test_a_launch_from_a_thread_outlives_no_killed_launcher(launcher: Launcher) -> None:
    launcher.start(
        GROUP
        + """
def job():
    thread = threading.Thread(target=lambda: Local(processes=2).launch(train))
    thread.start()
    thread.join()
"""
    )
    numbers = launcher.pids("rank0", "rank1", "grandchild")
    launcher.process.kill()
    assert_gone(numbers)
