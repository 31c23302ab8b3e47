"""Processes that write one output: cases 5, 7, 8, 11 and 26, and the promises P1 to P3 and P9, through `predict`.

Every `predict` runs in a process of its own that is forked from one with torch in it, so it starts in milliseconds; it
scores in that process, and may be killed or stopped there like any other.
"""

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import forked
import misbehaving
import scoring_runs
import tiny
from pids import wait_for
from sweeps import sweep
from torchlake.errors import TorchlakeError
from torchlake.outputs.staging import folders as staging

TEXTS = [f"{word} good film" for word in tiny.OTHER]
CHUNK_ROWS = 6
CHUNKS = -(-len(TEXTS) // CHUNK_ROWS)
DEADLINE_S = 60.0


def _predict(options: dict[str, Any], environment: dict[str, str], max_bytes: int | None, told: str) -> None:
    """In the process: one `predict`, its words in the file `told`, its exit code that of the command line."""
    os.environ.update(environment)
    import torchlake as tl

    if max_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, max_bytes))
    try:
        scored = tl.predict(engine=tiny.Here(), runtime=misbehaving.log_rows, key="id", **options)
    except TorchlakeError as error:
        Path(told).write_text(f"{type(error).__name__}: {error}")
        os._exit(error.exit_code)
    Path(told).write_text(json.dumps({"rows_out": scored.rows_out}))


class Writer:
    """One `predict` in a process of its own."""

    def __init__(self, job: dict[str, Any], *, failpoint: str | None = None, max_bytes: int | None = None) -> None:
        folder = job["output"].parent
        self.told = folder / f"told-{time.monotonic_ns()}"
        self.environment = {"SCORED_LOG": str(folder / "scored"), "TORCHLAKE_PROGRESS": "0"}
        if failpoint is not None:
            self.environment["TORCHLAKE_FAILPOINT"] = failpoint
        variables = {**os.environ, **forked.ALONE, **self.environment}
        # A test module's own name is not that by which its folder's path finds it.
        function = f"{Path(__file__).stem}:{_predict.__name__}"
        path = [str(Path(__file__).parent), *sys.path]
        self.process = forked.start(
            function, job, self.environment, max_bytes, str(self.told), environment=variables, path=path
        )

    def wait(self) -> tuple[int, str]:
        """The exit code, minus the signal's number, and what was said."""
        code = self.process.wait(DEADLINE_S)
        return code, self.told.read_text() if self.told.exists() else ""

    def wait_until_stopped(self) -> None:
        stat = Path(f"/proc/{self.process.pid}/stat")
        wait_for(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")


@pytest.fixture
def job(tiny_model: Path, tmp_path: Path) -> dict[str, Any]:
    source = scoring_runs.write_rows(tmp_path / "in.parquet", [*TEXTS])
    return {"model": tiny_model, "table": source, "output": tmp_path / "out", "chunk_rows": CHUNK_ROWS}


@pytest.fixture
def writers(job: dict[str, Any]) -> Iterator[list[Writer]]:
    """Writers put in here are gone after the test, however it ends."""
    started: list[Writer] = []
    yield started
    for writer in started:
        writer.process.kill()
        writer.process.wait(DEADLINE_S)


def scored_rows(job: dict[str, Any]) -> int:
    return (job["output"].parent / "scored").read_text().count("row\n")


def assert_whole(job: dict[str, Any]) -> None:
    scoring_runs.assert_exactly_once(job["table"], job["output"])
    assert not list(job["output"].parent.glob(".*")), "nothing is left beside the output"


@pytest.mark.parametrize(
    ("site", "kept"),
    sweep(
        [("part.done:2", 2), ("commit.before_publish:1", CHUNKS), ("commit.after_publish:1", CHUNKS)],
        quick=[("commit.before_publish:1", CHUNKS)],
    ),
)
def test_what_was_written_before_a_kill_is_not_scored_again(job: dict[str, Any], site: str, kept: int) -> None:
    """Case 5: killed after the bytes are safe and before anybody was told. The resume scores the rest only."""
    assert Writer(job, failpoint=f"{site}:kill9").wait()[0] == -signal.SIGKILL
    assert scored_rows(job) == min(kept * CHUNK_ROWS, len(TEXTS))
    assert Writer(job).wait()[0] == 0
    assert scored_rows(job) == len(TEXTS)
    assert_whole(job)


def test_the_second_writer_is_told_who_works_and_leaves(job: dict[str, Any], writers: list[Writer]) -> None:
    """Case 7: exit code 75 at once; the first writer goes on undisturbed."""
    first = Writer(job, failpoint="part.done:2:stop")
    writers.append(first)
    first.wait_until_stopped()
    began = time.monotonic()
    code, said = Writer(job).wait()
    assert code == 75
    assert f"pid {first.process.pid} on " in said
    assert " since " in said
    assert time.monotonic() - began < 20
    os.kill(first.process.pid, signal.SIGCONT)
    assert first.wait()[0] == 0
    assert scored_rows(job) == len(TEXTS)
    assert_whole(job)


def let_the_lease_run_out(job: dict[str, Any]) -> None:
    lease = staging.staging_of(job["output"]) / "lease.json"
    os.utime(lease, (0, 0))


@pytest.mark.parametrize("done", sweep([1, CHUNKS], quick={CHUNKS}))
def test_a_writer_that_slept_past_its_lease_publishes_nothing(
    job: dict[str, Any], writers: list[Writer], done: int
) -> None:
    """Case 8 and P9: stopped, overtaken by a second writer that finishes, and woken up again."""
    zombie = Writer(job, failpoint=f"part.done:{done}:stop")
    writers.append(zombie)
    zombie.wait_until_stopped()
    let_the_lease_run_out(job)
    assert Writer(job).wait()[0] == 0
    published = {path: path.stat().st_mtime_ns for path in job["output"].rglob("*")}
    os.kill(zombie.process.pid, signal.SIGCONT)
    code, said = zombie.wait()
    # Woken in the middle it finds the folder of its parts gone; woken before its commit, another's lease.
    assert (code, said.split(":")[0]) == ((76, "LeaseLost") if done == CHUNKS else (74, "StorageError"))
    assert {path: path.stat().st_mtime_ns for path in job["output"].rglob("*")} == published
    assert Writer(job).wait()[0] == 0  # which removes what the zombie left
    assert_whole(job)


def test_a_zombie_that_wakes_while_its_successor_works(job: dict[str, Any], writers: list[Writer]) -> None:
    """Case 8: the commit of the first is refused with exit code 76 although every part is there."""
    last = len(TEXTS) - (CHUNKS - 1) * CHUNK_ROWS
    zombie = Writer(job, failpoint=f"part.done:{CHUNKS - 1}:stop")
    writers.append(zombie)
    zombie.wait_until_stopped()
    let_the_lease_run_out(job)
    successor = Writer(job, failpoint="part.write:1:stop")
    writers.append(successor)
    successor.wait_until_stopped()
    os.kill(zombie.process.pid, signal.SIGCONT)
    code, said = zombie.wait()
    assert code == 76
    assert f"taken over by pid {successor.process.pid} on " in said
    assert not job["output"].exists()
    os.kill(successor.process.pid, signal.SIGCONT)
    assert successor.wait()[0] == 0
    assert scored_rows(job) == len(TEXTS) + last, "both have computed the last chunk"
    assert_whole(job)


def test_two_writers_that_start_together(job: dict[str, Any]) -> None:
    """Case 7: one or both succeed (the later one found it complete); nobody else's end is anything but exit code 75."""
    ends = [writer.wait() for writer in [Writer(job) for _ in range(3)]]
    assert {code for code, _ in ends} <= {0, 75}
    assert 0 in {code for code, _ in ends}
    assert scored_rows(job) == len(TEXTS)
    assert_whole(job)


def test_a_write_that_the_kernel_cuts_short(job: dict[str, Any], tiny_model: Path) -> None:
    """Case 11 without a failpoint: the kernel takes half of a part. Exit code 74, no torn file, then resumed."""
    generator = np.random.default_rng(0)
    notes = [generator.bytes(20_000).hex() for _ in TEXTS]  # parts of more than 60 KB that do not compress
    table = pa.table({"id": range(len(TEXTS)), "text": TEXTS, "note": notes})
    pq.write_table(table, job["table"], row_group_size=CHUNK_ROWS)
    job = {**job, "columns": ["note"]}
    code, said = Writer(job, max_bytes=40_000).wait()
    assert code == 74
    assert "bytes were to be written" in said
    assert "bytes are free" in said
    assert not job["output"].exists()
    assert not list(staging.staging_of(job["output"]).rglob("*.tmp"))
    assert Writer(job).wait()[0] == 0
    assert_whole(job)
