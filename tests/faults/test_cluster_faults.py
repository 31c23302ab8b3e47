"""Scoring on Spark and Ray under faults: cases 30-36 of the reliability contract, with real kills of real executors.

Every job runs in a process of its own, with a session or cluster of its own on this machine.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

import forked
import scoring_runs
import tiny
import training_runs as runs
from misbehaving import KILLER
from pids import wait_for
from torchlake.errors import TooManyErrors

TEXTS = [f"{tiny.OTHER[i % len(tiny.OTHER)]} good film {i % 7} bad" for i in range(60)]
CLUSTER = {
    "master": "local-cluster[2,1,1024]",
    "conf": {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.executor.memory": "512m",
    },
}
ENGINES = pytest.mark.parametrize("engine", ["spark", pytest.param("ray", marks=pytest.mark.slow)])
"Each job starts a cluster of its own, which takes seconds: what both do in the same way is tried on one, and on the "
"other in `make faults`."


@pytest.fixture(autouse=True)
def _java(request: pytest.FixtureRequest) -> None:
    if "[ray" not in request.node.name and "-ray" not in request.node.name and shutil.which("java") is None:
        pytest.skip("Spark needs Java")


@pytest.fixture
def job(tiny_model: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "model": tiny_model,
        "table": scoring_runs.write_rows(tmp_path / "in.parquet", TEXTS),
        "output": tmp_path / "out",
        "key": "id",
        "chunk_rows": 5,
        "runtime": "log_rows",
        "processes": 2,
    }


def assert_done(job: dict[str, Any], returncode: int, out: str, error: str, scored: Path) -> dict[str, Any]:
    """Exactly once, no debris, and no more than two chunks' rows scored for nothing."""
    assert returncode == 0, error
    scoring_runs.assert_exactly_once(job["table"], job["output"])
    assert [path.name for path in job["output"].parent.glob(".*")] == []
    assert scored.read_text().count("row\n") <= len(TEXTS) + 2 * job["chunk_rows"]
    told: dict[str, Any] = json.loads(out.splitlines()[-1])
    return told


def killed_midway(job: dict[str, Any], scored: Path, victim: str) -> tuple[int, str, str]:
    """Run the job, and kill a process of it whose command line holds `victim` once two chunks' rows are scored."""
    scored.touch()
    running = scoring_runs.start_predict(job, SCORED_LOG=str(scored), SLOW_FORWARD_S="0.3")
    wait_for(lambda: scored.read_text().count("row\n") >= 2 * job["chunk_rows"] or running.poll(), seconds=120)
    assert running.poll() is None, running.stderr.read()
    candidates = [process for process in psutil.Process(running.pid).children(recursive=True) if _is(process, victim)]
    assert candidates, f"no process of {victim}"
    candidates[0].send_signal(signal.SIGKILL)
    out, error = running.communicate(timeout=200)
    return running.returncode, out, error


def _is(process: psutil.Process, victim: str) -> bool:
    """Whether it is the process meant; the engine's worker is the one that has a child of ours below it."""
    try:
        words = " ".join(process.cmdline())
        ours = any("torchlake.processes.child" in " ".join(child.cmdline()) for child in process.children())
    except psutil.NoSuchProcess:
        return False
    return ours if victim == "worker" else victim in words


@pytest.mark.slow
def test_an_executor_is_killed_while_it_writes(job: dict[str, Any], tmp_path: Path) -> None:
    job |= {"engine": "spark", "engine_options": CLUSTER}
    done = killed_midway(job, tmp_path / "scored", "CoarseGrainedExecutorBackend")
    assert assert_done(job, *done, tmp_path / "scored")["rows_scored"] == len(TEXTS)


@pytest.mark.slow
@ENGINES
def test_the_process_that_an_engine_gave_is_killed(job: dict[str, Any], tmp_path: Path, engine: str) -> None:
    done = killed_midway({**job, "engine": engine}, tmp_path / "scored", "worker")
    assert assert_done(job, *done, tmp_path / "scored")["rows_scored"] == len(TEXTS)


@pytest.mark.slow
@ENGINES
def test_a_process_is_killed_while_it_loads_the_model(job: dict[str, Any], tmp_path: Path, engine: str) -> None:
    log, once = tmp_path / "scored", tmp_path / "once"
    job |= {"engine": engine, "runtime": "killed_while_it_loads"}
    done = scoring_runs.predict(job, SCORED_LOG=str(log), KILLED_ONCE=str(once))
    assert once.exists()
    assert assert_done(job, done.returncode, done.stdout, done.stderr, log)["rows_scored"] == len(TEXTS)


@pytest.mark.slow
@ENGINES
def test_a_row_that_kills_is_set_aside_after_two_strikes(job: dict[str, Any], tmp_path: Path, engine: str) -> None:
    scoring_runs.write_rows(job["table"], [*TEXTS[:30], f"a {KILLER} film", *TEXTS[30:]])
    log = tmp_path / "scored"
    done = scoring_runs.predict({**job, "engine": engine}, SCORED_LOG=str(log))
    assert done.returncode == 0, done.stderr
    scoring_runs.assert_exactly_once(job["table"], job["output"])
    assert scoring_runs.errors(job["output"]) == {30: "killed_process: twice"}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["spark", "ray"])
@pytest.mark.parametrize("when", ["while workers score", "in the commit"])
def test_the_driver_is_killed_and_the_same_command_goes_on(
    job: dict[str, Any], tmp_path: Path, engine: str, when: str
) -> None:
    job["engine"] = engine
    log, once = tmp_path / "scored", tmp_path / "once"
    if when == "in the commit":
        scoring_runs.predict(job, failpoint="commit.publish:1:kill9", once=once, SCORED_LOG=str(log))
        assert once.exists()
        assert not job["output"].exists() or pq.read_table(job["output"]).num_rows == len(TEXTS)
    else:
        log.touch()
        running = scoring_runs.start_predict(job, SCORED_LOG=str(log), SLOW_FORWARD_S="0.3")
        wait_for(lambda: log.read_text().count("row\n") >= 2 * job["chunk_rows"], seconds=120)
        os.kill(running.pid, signal.SIGKILL)
        running.communicate()
        assert not job["output"].exists(), "nothing is visible before the commit"
    done = scoring_runs.predict(job, SCORED_LOG=str(log))
    assert_done(job, done.returncode, done.stdout, done.stderr, log)


@pytest.mark.slow
@ENGINES
def test_too_many_bad_rows_end_the_job_in_words(job: dict[str, Any], tmp_path: Path, engine: str) -> None:
    scoring_runs.write_rows(job["table"], [None] * 40 + TEXTS[:20])
    done = scoring_runs.predict({**job, "engine": engine}, SCORED_LOG=str(tmp_path / "scored"))
    assert done.returncode == TooManyErrors.exit_code, done.stderr
    assert "TooManyErrors" in done.stderr
    assert not job["output"].exists()


TRAIN = """
import json, sys
import torchlake as tl

options = json.loads(sys.argv[1])
engine = getattr(tl, options.pop("engine").title())(processes=2)
run = tl.train(run=options.pop("run"), engine=engine, **options)
print(json.dumps({"steps": run.steps}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["spark", "ray"])
def test_a_rank_that_is_killed_in_training_starts_again_from_its_checkpoint(
    tmp_path: Path, tiny_bert: Path, engine: str
) -> None:
    """P4: the steps after the kill are those of a run that nobody disturbed, byte for byte."""
    sections = runs.job(tmp_path, tiny_bert, batch_size=16, max_steps=10, strategy="ddp", max_restarts=1)
    done = {}
    for name, failpoint in (("whole", None), ("killed", "rank1.step:7:kill9")):
        options = {**sections, "run": str(tmp_path / name), "engine": engine}
        environment = scoring_runs.environment(failpoint, tmp_path / "once", {**forked.ALONE})
        done[name] = subprocess.run(
            [sys.executable, "-c", TRAIN, json.dumps(options)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done[name].returncode == 0, done[name].stderr
    assert (tmp_path / "once").exists()
    assert "rank 1 was killed by SIGKILL" in done["killed"].stderr
    assert runs.losses(tmp_path / "killed") == runs.losses(tmp_path / "whole")
    assert runs.weights_sha256(tmp_path / "killed") == runs.weights_sha256(tmp_path / "whole")
