"""Writing texts under faults: workers and whole jobs are killed between the end of a text and the commit."""

import json
import os
import random
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

import scoring_runs
import tiny
from torchlake.outputs.staging.folders import staging_of

ROWS = 24
OPTIONS = {"max_new_tokens": 10, "temperature": 1.0, "seed": 5, "stop": "o", "chunk_rows": 12, "key": "id"}


@pytest.fixture
def job(tiny_gpt2: Path, tmp_path: Path) -> dict[str, Any]:
    pq.write_table(tiny.reviews(ROWS), tmp_path / "in.parquet")
    return {"model": tiny_gpt2, "table": tmp_path / "in.parquet", "runtime": "log_texts", **OPTIONS}


def succeed(job: dict[str, Any], output: Path, **variables: str) -> list[dict[str, Any]]:
    done = scoring_runs.predict({**job, "output": output}, **variables)
    assert done.returncode == 0, done.stderr
    assert not staging_of(output).exists()
    return pq.read_table(output).to_pylist()


def kill_at(job: dict[str, Any], tmp_path: Path, points: list[str], **options: Any) -> None:
    """Killed at each point, the worker or the whole job: the same texts, and only those in the writer are repeated."""
    whole = succeed(job, tmp_path / "whole", SCORED_LOG=str(tmp_path / "log"))
    for number, point in enumerate(points):
        output, log = tmp_path / f"out-{number}", tmp_path / f"log-{number}"
        once = tmp_path / f"once-{number}"
        scoring_runs.predict(
            {**job, **options, "output": output}, failpoint=f"{point}:kill9", once=once, SCORED_LOG=str(log)
        )
        assert once.exists(), f"{point} was not reached"
        assert succeed({**job, **options}, output, SCORED_LOG=str(log)) == whole, point
        written = len(log.read_text().split())
        assert written <= 2 * ROWS, f"{point}: {written} texts were begun"


def test_killed_while_a_text_is_kept(job: dict[str, Any], tmp_path: Path) -> None:
    """The worker dies; its successor has the seven texts that had ended."""
    kill_at(job, tmp_path, ["journal.write:8"])
    begun = len((tmp_path / "log-0").read_text().split())
    assert ROWS + 12 - 7 <= begun <= ROWS + ROWS - 7, "both chunks may have been in the writer"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_at_every_point(job: dict[str, Any], tmp_path: Path) -> None:
    log = tmp_path / "hits"
    succeed(job, tmp_path / "listed", SCORED_LOG=str(tmp_path / "log"), TORCHLAKE_FAILPOINT_LOG=str(log))
    points = list(dict.fromkeys(log.read_text().splitlines()))
    assert {"journal.write", "journal.done", "journal.remove", "part.done", "commit.publish"} <= {
        point.split(":")[0] for point in points
    }
    kill_at(job, tmp_path, points)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_full_disk_stops_the_job_and_the_same_command_goes_on(job: dict[str, Any], tmp_path: Path) -> None:
    whole = succeed(job, tmp_path / "whole", SCORED_LOG=str(tmp_path / "log"))
    once = tmp_path / "once"
    done = scoring_runs.predict(
        {**job, "output": tmp_path / "out"},
        failpoint="journal.write:5:enospc",
        once=once,
        SCORED_LOG=str(tmp_path / "log"),
    )
    assert (done.returncode, once.exists()) == (74, True), done.stderr
    assert "bytes are free" in done.stderr
    before = len((tmp_path / "log").read_text().split())
    assert succeed(job, tmp_path / "out", SCORED_LOG=str(tmp_path / "log")) == whole
    assert len((tmp_path / "log").read_text().split()) - before <= ROWS - 4


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("engine", ["local", "spark", "ray"])
def test_the_same_texts_on_every_engine_after_a_kill(job: dict[str, Any], tmp_path: Path, engine: str) -> None:
    whole = succeed(job, tmp_path / "whole", SCORED_LOG=str(tmp_path / "log"))
    options = {**job, "engine": engine, "processes": 2, "output": tmp_path / "out"}
    once = tmp_path / "once"
    scoring_runs.predict(options, failpoint="journal.done:5:kill9", once=once, SCORED_LOG=str(tmp_path / "log"))
    assert once.exists()
    assert succeed(options, tmp_path / "out", SCORED_LOG=str(tmp_path / "log")) == whole


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_kills_at_random_times(job: dict[str, Any], tmp_path: Path) -> None:
    """The whole job, by the clock; all small chunks, which share batches."""
    job |= {"chunk_rows": 3, "runtime": "slow_texts", "max_new_tokens": 20}
    whole = succeed(job, tmp_path / "whole", SCORED_LOG=str(tmp_path / "log"))
    chance = random.Random(3)
    for _ in range(20):
        process = scoring_runs.start_predict({**job, "output": tmp_path / "out"}, SCORED_LOG=str(tmp_path / "log"))
        try:
            process.wait(chance.uniform(5.0, 14.0))
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate()
    assert succeed(job, tmp_path / "out", SCORED_LOG=str(tmp_path / "log")) == whole


def writing_workers(output: Path) -> list[int]:
    """The processes with several rows in their writer; one whose only row may be what killed another would be proof."""
    found = set()
    for log in (staging_of(output) / "journal").glob("*.json"):
        with suppress(OSError, LookupError):  # removed, or not written to its end
            lines = log.read_text().split("\n")[:-1]
            last = json.loads(lines[-1])
            if last and last[0] == "score" and len(last[1]) > 1:
                found.add(json.loads(lines[0])["pid"])
    return [pid for pid in found if psutil.pid_exists(pid)]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("engine", "kills"), [("local", 7), ("spark", 7), ("ray", 6)])
def test_workers_are_killed_at_random_times(job: dict[str, Any], tmp_path: Path, engine: str, kills: int) -> None:
    """Twenty times over the engines: each of hundreds of prompts has one row, as without a kill."""
    pq.write_table(tiny.reviews(300), tmp_path / "in.parquet")
    job |= {"max_new_tokens": 20, "batch_tokens": 400}
    whole = succeed(job, tmp_path / "whole", SCORED_LOG=str(tmp_path / "log"))
    slow = {**job, "runtime": "slow_texts", "engine": engine, "processes": 2, "output": tmp_path / "out"}
    chance, done = random.Random(kills), 0
    while done < kills:
        assert not (tmp_path / "out").exists(), f"the job has ended after {done} kills"
        process = scoring_runs.start_predict(slow, STEP_S="0.02")
        try:
            while done < kills and process.poll() is None:
                time.sleep(chance.uniform(0.0, 0.5))  # the time of the kill, not a wait for it
                for pid in writing_workers(tmp_path / "out")[:1]:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                        done += 1
        finally:
            process.communicate()
    assert succeed(slow, tmp_path / "out", STEP_S="0.0") == whole


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_structured_answers_are_continued(job: dict[str, Any], tmp_path: Path) -> None:
    """With typed columns: the matcher follows what the journal kept."""
    del job["stop"]
    word = {"type": "object", "properties": {"word": {"type": "string", "maxLength": 3}}, "required": ["word"]}
    own = {"json_schema": word, "json_columns": True, "max_new_tokens": 24, "max_error_rate": 1.0}
    kill_at({**job, **own}, tmp_path, ["journal.write:8"])
