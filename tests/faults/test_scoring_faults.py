"""Scoring under faults: cases 1-29 of the reliability contract that concern `predict`, with real kills.

The model is a stand-in that misbehaves on command (misbehaving.py); plan, workers, parts, commit and resume are real.
"""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import scoring_runs
import tiny
from misbehaving import GLUTTON, KILLER, POISON, RAISER, SLEEPER
from sweeps import sweep

TEXTS = [f"{tiny.OTHER[i % len(tiny.OTHER)]} good film {i % 7} bad" for i in range(60)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return tiny.build_model(folder / "model", encoder=tiny.build_encoder(folder / "encoder"))


@pytest.fixture
def job(model: Path, tmp_path: Path) -> dict:
    source = scoring_runs.write_rows(tmp_path / "in.parquet", TEXTS)
    return {
        "model": model,
        "table": source,
        "output": tmp_path / "out",
        "key": "id",
        "chunk_rows": 15,
        "runtime": "log_rows",
    }


def succeed(job: dict, **options) -> dict:
    done = scoring_runs.predict(job, **options)
    assert done.returncode == 0, done.stderr
    scoring_runs.assert_exactly_once(job["table"], job["output"])
    assert [path.name for path in job["output"].parent.glob(".*")] == []  # P6: no debris beside the output
    return json.loads(done.stdout.splitlines()[-1])


def hits(job: dict, tmp_path: Path) -> list[str]:
    """Every failpoint that an undisturbed job passes, as site:nth."""
    log = tmp_path / "hits"
    succeed(job, SCORED_LOG=str(tmp_path / "scored"), TORCHLAKE_FAILPOINT_LOG=str(log))
    pq.read_table(job["output"])
    return list(dict.fromkeys(log.read_text().splitlines()))


def kill_at(job: dict, tmp_path: Path, points: list[str]) -> None:
    """Case 1: killed at each point, the same command run again completes; rework is bounded (P1, P2, P3, P6)."""
    for number, point in enumerate(points):
        job["output"] = tmp_path / f"out-{number}"
        log = tmp_path / f"scored-{number}"
        once = tmp_path / f"once-{number}"
        scoring_runs.predict(job, failpoint=f"{point}:kill9", once=once, SCORED_LOG=str(log))
        assert once.exists(), f"{point} was not reached"
        if job["output"].exists():
            scoring_runs.assert_exactly_once(job["table"], job["output"])
        succeed(job, SCORED_LOG=str(log))
        assert log.read_text().count("row\n") <= len(TEXTS) + job["chunk_rows"], point


def test_killed_at_the_decisive_points(job: dict, tmp_path: Path) -> None:
    points = hits({**job, "output": tmp_path / "whole"}, tmp_path)
    decisive = [point for point in points if point.split(":")[0] in ("part.rename", "commit.publish")]
    assert len(decisive) >= 2, points
    kill_at(job, tmp_path, [decisive[0], decisive[-1]])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_at_every_point(job: dict, tmp_path: Path) -> None:
    points = hits({**job, "output": tmp_path / "whole"}, tmp_path)
    assert len(points) >= 10, points
    kill_at(job, tmp_path, points)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_at_random_times_and_again_while_resuming(job: dict, tmp_path: Path) -> None:
    """Cases 2 and 3: the whole process group is killed by the clock, three times in a row, with a printed seed."""
    seed = 7
    print(f"seed {seed}")
    chance = random.Random(seed)
    for number in range(6):
        job["output"] = tmp_path / f"out-{number}"
        for _ in range(3):
            process = scoring_runs.start_predict(job, SCORED_LOG=str(tmp_path / "scored"))
            try:
                process.wait(chance.uniform(0.5, 9.0))
            except subprocess.TimeoutExpired:
                process.kill()
            process.communicate()
        succeed(job, SCORED_LOG=str(tmp_path / "scored"))


def test_a_second_run_scores_nothing(job: dict, tmp_path: Path) -> None:
    """Case 5: what is committed is not scored again."""
    log = tmp_path / "scored"
    succeed(job, SCORED_LOG=str(log))
    assert log.read_text().count("row\n") == len(TEXTS)
    succeed(job, SCORED_LOG=str(log))
    assert log.read_text().count("row\n") == len(TEXTS)


@pytest.mark.parametrize(
    ("signum", "code"), sweep([(signal.SIGINT, 130), (signal.SIGTERM, 143)], quick=[(signal.SIGTERM, 143)])
)
def test_a_signal_ends_it_and_the_same_command_resumes(model: Path, tmp_path: Path, signum: int, code: int) -> None:
    """Case 4, by the command line: exit code, within seconds, with the command that resumes; no orphans."""
    source = scoring_runs.write_rows(tmp_path / "in.parquet", [f"good film bad {row}" for row in range(100_000)])
    arguments = ["predict", str(model), str(source), str(tmp_path / "out"), "--key", "id", "--chunk-rows", "2000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "torchlake", *arguments, "--processes", "1"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TORCHLAKE_PROGRESS": "0"},
        stderr=subprocess.PIPE,
        text=True,
    )
    parts = tmp_path / ".out.staging" / "table"
    try:
        scoring_runs.wait_for(lambda: len(list(parts.glob("part-*.parquet"))) >= 2, deadline_s=150)
        process.send_signal(signum)
        _, words = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code, words
    assert "run it again" in words
    assert not (tmp_path / "out").exists()
    assert len(list(parts.glob("part-*.parquet"))) >= 2


def test_rows_that_raise_or_give_nan_cost_themselves_only(job: dict, tmp_path: Path) -> None:
    """Cases 14, 18 and 21."""
    texts = [*TEXTS, f"a {RAISER} here", POISON, None, "", "   ", "emoji 🙂 and \u202e rtl \x00 nul"]
    scoring_runs.write_rows(job["table"], texts)
    result = succeed(job, SCORED_LOG=str(tmp_path / "scored"))
    found = scoring_runs.errors(job["output"])
    first = len(TEXTS)
    assert found.keys() == {first, first + 1, first + 2, first + 3, first + 4}
    assert "this text raises" in found[first]
    assert found[first + 1].startswith("non_finite")
    assert [found[first + i] for i in (2, 3, 4)] == ["null_input"] * 3
    assert result["rows_failed"] == 5


def test_a_row_that_kills_the_process_is_set_aside_after_two_strikes(job: dict, tmp_path: Path) -> None:
    """Case 15."""
    texts = [*TEXTS[:20], f"a {KILLER} here", *TEXTS[20:]]
    scoring_runs.write_rows(job["table"], texts)
    succeed(job, SCORED_LOG=str(tmp_path / "scored"))
    assert scoring_runs.errors(job["output"]) == {20: "killed_process: twice"}


def test_a_row_that_hangs_is_given_up(job: dict, tmp_path: Path) -> None:
    """Case 16."""
    scoring_runs.write_rows(job["table"], [SLEEPER, *TEXTS])
    succeed({**job, "row_timeout_s": 1.0}, SCORED_LOG=str(tmp_path / "scored"))
    assert scoring_runs.errors(job["output"]) == {0: "timeout: gave no answer, twice"}


def test_too_many_bad_rows_stop_the_job(job: dict, tmp_path: Path) -> None:
    """Case 17: exit 4, nothing published, and a higher limit goes on from there."""
    scoring_runs.write_rows(job["table"], [RAISER] * 60)
    done = scoring_runs.predict(job, SCORED_LOG=str(tmp_path / "scored"))
    assert done.returncode == 4, done.stderr
    assert "this text raises" in done.stderr
    assert not job["output"].exists()
    assert scoring_runs.predict(job, SCORED_LOG=str(tmp_path / "scored")).returncode == 4  # nothing was left to score
    assert not job["output"].exists()
    succeed({**job, "max_error_rate": 1.0}, SCORED_LOG=str(tmp_path / "scored"))


def test_out_of_memory_halves_the_batch_and_changes_no_answer(job: dict, tmp_path: Path) -> None:
    """Case 22."""
    scoring_runs.write_rows(job["table"], [*TEXTS, GLUTTON])
    succeed({**job, "runtime": "small_memory"})
    small = pq.read_table(job["output"]).drop_columns(["error"]).slice(0, len(TEXTS))
    assert scoring_runs.errors(job["output"]) == {len(TEXTS): "out_of_memory"}
    succeed({**job, "runtime": "misbehave", "output": tmp_path / "whole"})
    assert small.equals(pq.read_table(tmp_path / "whole").drop_columns(["error"]).slice(0, len(TEXTS)))


@pytest.mark.parametrize("site", sweep(["part.write:2", "commit.write:1"], quick=["commit.write:1"]))
def test_disk_full_while_writing_leaves_the_finished_chunks(job: dict, tmp_path: Path, site: str) -> None:
    """Cases 11 and 12: exit 74 with the bytes; the same command completes once there is room."""
    once = tmp_path / "once"
    done = scoring_runs.predict(job, failpoint=f"{site}:enospc", once=once, SCORED_LOG=str(tmp_path / "scored"))
    assert once.exists(), f"{site} was not reached"
    assert done.returncode == 74, done.stderr
    assert "bytes are free" in done.stderr
    assert not job["output"].exists()
    succeed(job, SCORED_LOG=str(tmp_path / "scored"))


def test_one_row_and_none_and_fewer_than_workers(job: dict, tmp_path: Path) -> None:
    """Case 28."""
    for count in (0, 1):
        job["output"] = tmp_path / f"out-{count}"
        scoring_runs.write_rows(job["table"], TEXTS[:count])
        succeed({**job, "processes": 2}, SCORED_LOG=str(tmp_path / "scored"))
        assert pq.read_table(job["output"]).column_names == ["id", "label", "score", "truncated", "error"]


def test_rows_not_divisible_by_processes(job: dict, tmp_path: Path) -> None:
    """Case 29: 1,001 rows over two workers, no padding copies."""
    scoring_runs.write_rows(job["table"], [f"good {i % 5} film" for i in range(1001)])
    result = succeed({**job, "processes": 2, "chunk_rows": 97}, SCORED_LOG=str(tmp_path / "scored"))
    assert result["rows_out"] == 1001
