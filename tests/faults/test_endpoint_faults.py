"""An endpoint's answers under faults: workers and whole jobs are killed, and only open requests are paid again."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import scoring_runs
from fake_endpoint import FakeEndpoint, serving
from torchlake.outputs.staging.folders import staging_of

ROWS, OPEN = 60, 4
EACH = 6
"Tokens that the endpoint takes for a row."
PREDICT = """
import json, sys
import torchlake as tl
from torchlake.errors import TorchlakeError

options = json.loads(sys.argv[1])
engine = getattr(tl, options.pop("engine", "local").title())(processes=options.pop("processes", 1))
try:
    tl.predict(None, engine=engine, **options)
except TorchlakeError as error:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
"""


def options_of(endpoint: FakeEndpoint, tmp_path: Path, **more: Any) -> dict[str, Any]:
    table = tmp_path / "in.parquet"
    pq.write_table(pa.table({"id": range(ROWS), "text": [f"row {row} of it" for row in range(ROWS)]}), table)
    fixed = {"model_name": "small", "key": "id", "concurrency": OPEN, "max_retries": 20}
    return {"table": str(table), "output": str(tmp_path / "out"), "endpoint": endpoint.url, **fixed, **more}


def assert_complete(options: dict[str, Any]) -> None:
    output = Path(options["output"])
    assert not staging_of(output).exists()
    found = pq.read_table(output).sort_by("id").to_pylist()
    assert [(row["id"], row["generated_text"]) for row in found] == [(r, f"echo row {r} of it") for r in range(ROWS)]


def run(options: dict[str, Any], **broken: Any) -> subprocess.CompletedProcess[str]:
    return scoring_runs.run(PREDICT, [json.dumps(options)], **broken)


@pytest.mark.parametrize("point", ["journal.done:20", "commit.before_publish:1"])
def test_after_a_kill_only_open_requests_are_paid_again(point: str, tmp_path: Path) -> None:
    with serving(latency_s=0.005) as endpoint:
        options = options_of(endpoint, tmp_path)
        once = tmp_path / "once"
        first = run(options, failpoint=f"{point}:kill9", once=once)
        assert once.exists(), first.stderr
        if first.returncode:  # the whole job was killed, not its worker
            done = run(options)
            assert done.returncode == 0, done.stderr
        assert_complete(options)
        assert len(endpoint.requests) <= ROWS + OPEN


@pytest.mark.parametrize(
    ("point", "engine"),
    [
        ("account.set_aside:9", "local"),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in [("journal.write:5", "local"), ("journal.done:5", "spark"), ("journal.done:5", "ray")]
        ),
    ],
)
def test_a_limit_holds_after_a_kill_and_in_the_next_call(point: str, engine: str, tmp_path: Path) -> None:
    limit = 40 * EACH
    with serving(latency_s=0.005) as endpoint:
        options = options_of(endpoint, tmp_path, max_tokens_total=limit, max_new_tokens=2, engine=engine)
        options |= {"chunk_rows": 10, "processes": 1 if engine == "local" else 2}
        once = tmp_path / "once"
        for broken in ({"failpoint": f"{point}:kill9", "once": once}, {}):
            stopped = run(options, **broken)
            assert stopped.returncode == 6, stopped.stderr
            assert once.exists()
            assert 0.5 * limit < len(endpoint.requests) * EACH <= limit


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_limit_holds_under_kills_at_random_times(tmp_path: Path) -> None:
    """The whole job, as soon as the endpoint has more requests; lost answers are paid."""
    limit, chance = 45 * EACH, random.Random(5)
    with serving(latency_s=0.05, faults={"row 3 ": ["reset", "cut"], "row 20 ": ["cut"]}) as endpoint:
        options = options_of(endpoint, tmp_path, max_tokens_total=limit, max_new_tokens=2, chunk_rows=7, processes=2)
        for _ in range(8):
            process = subprocess.Popen(
                [sys.executable, "-c", PREDICT, json.dumps(options)],
                env=scoring_runs.environment(None, None, {}),
                stderr=subprocess.PIPE,
            )
            enough = len(endpoint.requests) + chance.randint(1, 5)
            while process.poll() is None and len(endpoint.requests) < enough:
                time.sleep(0.001)
            process.kill()
            process.communicate()
            assert len(endpoint.requests) * EACH <= limit
        stopped = run(options)
        assert stopped.returncode == 6, stopped.stderr
        assert len(endpoint.requests) * EACH <= limit
        done = run({**options, "max_tokens_total": 100 * limit})
        assert done.returncode == 0, done.stderr
        assert_complete(options)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("engine", ["local", "spark", "ray"])
def test_a_killed_worker_on_every_engine(engine: str, tmp_path: Path) -> None:
    with serving(latency_s=0.005, faults={"row 3 ": ["503", "reset"], "row 9 ": ["429"]}) as endpoint:
        options = options_of(endpoint, tmp_path, engine=engine, processes=2)
        once = tmp_path / "once"
        first = run(options, failpoint="journal.done:9:kill9", once=once)
        assert once.exists(), first.stderr
        done = run(options)
        assert done.returncode == 0, done.stderr
        assert_complete(options)
        assert len(endpoint.requests) <= ROWS + 3 + 2 * OPEN


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_kills_at_random_times(tmp_path: Path) -> None:
    """The whole job, by the clock, while the endpoint breaks; no row is paid more often than it was open at a kill."""
    faults = {f"row {row} ": ["503", "reset", "cut"][row % 3 :] for row in range(0, ROWS, 7)}
    with serving(latency_s=0.3, faults=faults) as endpoint:
        options, chance, kills = options_of(endpoint, tmp_path, chunk_rows=7), random.Random(3), 0
        while kills < 50:
            process = subprocess.Popen(
                [sys.executable, "-c", PREDICT, json.dumps(options)],
                env=scoring_runs.environment(None, None, {}),
                stderr=subprocess.PIPE,
            )
            try:
                process.wait(chance.uniform(1.0, 4.0))
            except subprocess.TimeoutExpired:
                process.kill()
            process.communicate()
            kills += 1
        done = run(options)
        assert done.returncode == 0, done.stderr
        assert_complete(options)
        assert endpoint.answered <= ROWS + 50 * OPEN


@pytest.mark.slow
def test_two_jobs_on_one_endpoint(tmp_path: Path) -> None:
    with serving(latency_s=0.01) as endpoint:
        options = options_of(endpoint, tmp_path)
        started = [
            subprocess.Popen(
                [sys.executable, "-c", PREDICT, json.dumps({**options, "output": str(tmp_path / name)})],
                env=scoring_runs.environment(None, None, {}),
            )
            for name in ("a", "b")
        ]
        assert [one.wait() for one in started] == [0, 0]
        for name in ("a", "b"):
            assert_complete({**options, "output": str(tmp_path / name)})
        assert len(endpoint.requests) == 2 * ROWS
