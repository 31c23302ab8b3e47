"""What Spark's users see of torchlake's jobs: tasks in its UI, history, pools and tags, retries, cancellation."""

import json
import shutil
import signal
from pathlib import Path

import pytest

import scoring_runs
import spark_jobs
from pids import gone, pid, wait_for

pytestmark = pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs Java")


@pytest.mark.slow
def test_a_job_of_50_chunks_is_50_tasks_with_the_callers_pool_tags_and_description(tmp_path: Path) -> None:
    events = tmp_path / "events"
    events.mkdir()
    said = spark_jobs.answer("watched", events=events, looked=tmp_path / "looked")
    assert said["results"] == [number * number for number in range(50)]
    job, tasks = said["job"], said["tasks"]
    assert said["during"]["jobId"] == job["jobId"]
    assert said["during"]["numTasks"] == job["numCompletedTasks"] == len(tasks) == 50
    assert job["description"] == said["during"]["description"] == "nightly: torchlake predict reviews"
    assert {"team-a"} < set(job["jobTags"])
    assert job["jobGroup"].startswith("torchlake-")
    assert min(task["duration"] for task in tasks) >= 20, "each of them slept that long"
    (log,) = events.iterdir()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    starts = [event for event in lines if event["Event"] == "SparkListenerJobStart"]
    ends = [event for event in lines if event["Event"] == "SparkListenerTaskEnd"]
    assert starts[0]["Properties"]["spark.scheduler.pool"] == "low-priority"
    assert sum(event["Stage ID"] == starts[0]["Stage IDs"][0] for event in ends) == 50
    assert starts[1]["Properties"]["spark.job.description"] == "of the caller", "the caller's thread is as it was"
    assert starts[1]["Properties"].get("spark.jobGroup.id") is None


@pytest.mark.slow
def test_what_spark_gives_up_is_submitted_again(tmp_path: Path) -> None:
    assert spark_jobs.answer("resubmitted", folder=tmp_path) == list(range(12))


@pytest.mark.slow
def test_workers_that_are_preempted_while_models_load_are_replaced(tmp_path: Path) -> None:
    assert spark_jobs.answer("preempted", folder=tmp_path) == list(range(8))


@pytest.mark.slow
def test_a_chunk_that_ends_every_worker_ends_the_job_with_sparks_reason(tmp_path: Path) -> None:
    said = spark_jobs.answer("hopeless", folder=tmp_path)
    assert "1 of 3 tasks of chunks did not end" in said
    assert "Python worker exited unexpectedly" in said


@pytest.mark.slow
def test_a_closed_iterator_cancels_the_job_and_leaves_no_child(tmp_path: Path) -> None:
    assert spark_jobs.answer("stuck", folder=tmp_path, close=True) == "closed"
    numbers = [pid(tmp_path, "stuck1")]
    wait_for(lambda: all(map(gone, numbers)))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_driver_that_is_stopped_or_killed_leaves_no_child(tmp_path: Path, number: int) -> None:
    job = spark_jobs.start("stuck", folder=tmp_path)
    numbers = [pid(tmp_path, "stuck1", seconds=120)]
    job.send_signal(number)
    out, _ = job.communicate(timeout=120)
    assert ("interrupted" in out) == (number == signal.SIGINT)
    wait_for(lambda: all(map(gone, numbers)))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ranks_of_a_driver_that_is_stopped_save_and_those_of_a_killed_one_end(tmp_path: Path, number: int) -> None:
    job = spark_jobs.start("ranks", folder=tmp_path)
    numbers = [pid(tmp_path, f"rank{rank}", seconds=120) for rank in range(2)]
    job.send_signal(number)
    out, _ = job.communicate(timeout=120)
    wait_for(lambda: all(map(gone, numbers)))
    if number == signal.SIGINT:
        assert "interrupted: saved at step 7" in out
        assert (tmp_path / "saved0").exists()
        assert (tmp_path / "saved1").exists()


@pytest.mark.slow
def test_spark_connect_predicts_tables_and_frames_and_launches(tmp_path: Path, tiny_model: Path) -> None:
    pytest.importorskip("grpc")
    table = scoring_runs.write_rows(tmp_path / "in.parquet", ["good film", "a bad plot"] * 10)
    said = spark_jobs.answer("connected", folder=tmp_path, model=tiny_model, table=table)
    scoring_runs.assert_exactly_once(table, tmp_path / "out")
    assert said["rows"] == [20, 20]
    assert said["value"] == [None, "0", "2"]
    assert said["error"] == "rank 1 failed with KeyError: 'the cause'"
    assert said["frame"] == 2
    assert said["odd"] == ["2024-01-02T03:04:05", 3, None]


@pytest.mark.slow
def test_a_machine_that_is_lost_at_the_tail_costs_only_its_chunk(tmp_path: Path) -> None:
    assert spark_jobs.answer("tail", folder=tmp_path) == {"results": list(range(6))}


@pytest.mark.slow
def test_a_machine_that_is_decommissioned_ends_its_chunk_and_gets_no_other(tmp_path: Path) -> None:
    said = spark_jobs.answer("decommissioned", folder=tmp_path)
    assert said == {"results": list(range(6)), "before": 1, "by_it": [0]}


@pytest.mark.slow
def test_chunks_and_ranks_run_where_spark_encrypts() -> None:
    assert spark_jobs.answer("encrypted") == {"results": [0, 1, 4, 9, 16, 25], "value": 3.0}


@pytest.mark.slow
def test_ranks_of_two_executors_find_each_other(tmp_path: Path) -> None:
    assert spark_jobs.answer("two_machines", folder=tmp_path) == 3.0


@pytest.mark.slow
def test_a_cluster_without_executors_adds_them(tmp_path: Path) -> None:
    said = spark_jobs.answer("grown", folder=tmp_path)
    assert said == {"executors": 0, "results": [number * number for number in range(20)]}


@pytest.mark.slow
def test_a_speculative_twin_may_win(tmp_path: Path) -> None:
    assert spark_jobs.answer("twins", folder=tmp_path) == {"results": list(range(6)), "attempts": 2}


@pytest.fixture
def discovery(tmp_path: Path) -> Path:
    """A script that finds two GPUs where there are none."""
    script = tmp_path / "gpus.sh"
    script.write_text('#!/bin/bash\necho \'{"name": "gpu", "addresses": ["0", "1"]}\'\n')
    script.chmod(0o755)
    return script


@pytest.mark.slow
@pytest.mark.parametrize(
    ("amount", "asked", "expected"),
    [
        # Whole GPUs: each process its own; ranks see those of all, LOCAL_RANK numbers them.
        ("1", None, {"chunks": {"0", "1"}, "frame": {"0", "1"}, "launch": "0,1", "one rank": {"0", "1"}}),
        # The executors have GPUs that tasks are not granted: torchlake asks for one each, or for several.
        (
            "",
            None,
            {"chunks": {"0", "1"}, "several": {"0,1"}, "frame": {"0", "1"}, "launch": "0,1", "one rank": {"0", "1"}},
        ),
        # Two for one process.
        ("", 2, {"chunks": {"0,1"}, "frame": {"0", "1"}, "launch": "refused", "one rank": "0,1"}),
        # A part of one: fine for scoring, not for ranks that would share it.
        ("0.5", None, {"chunks": {"0"}, "frame": {"0"}, "launch": "granted to several ranks", "one rank": {"0"}}),
    ],
)
def test_every_job_uses_what_spark_granted(
    discovery: Path, amount: str, asked: int | None, expected: dict[str, object]
) -> None:
    seen = spark_jobs.answer("gpus", discovery=discovery, amount=amount, chunk_gpus=asked, rank_gpus=asked)
    for name, wanted in expected.items():
        found = seen[name] if name in ("chunks", "several", "frame") or isinstance(seen[name], str) else seen[name][0]
        if isinstance(wanted, set):
            assert set(found if isinstance(found, list) else [found]) <= wanted, name
        elif isinstance(found, str) and found != wanted:
            assert wanted in found, name
        else:
            assert found == wanted, name
